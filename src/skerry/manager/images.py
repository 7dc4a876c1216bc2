"""Images by name: those of our store, and those of an engine."""

from __future__ import annotations

from skerry.backends.base import Backend
from skerry.errors import ImageNotFound
from skerry.images.progress import silent
from skerry.images.references import is_reference
from skerry.images.store import Image, ImageStore


async def find_image(images: ImageStore, backend: Backend, name: str) -> Image:
    """The image for an environment of this backend. One that its engine lacks is pulled, which takes long.

    Raises ImageNotFound, InvalidRequest, and what `ImageSource.pull` does.
    """
    if backend.images is None or not is_reference(name):
        return images.get(name)
    try:
        return await backend.images.find(name)
    except ImageNotFound:
        return await backend.images.pull(name, silent)
