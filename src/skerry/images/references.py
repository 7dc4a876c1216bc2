"""Names of images that a container engine has, and which of them may be used.

They begin with `docker://`, which no image of our store can. The rest is read as Docker reads it: `python:3.12` is
`docker.io/library/python:3.12`. What is asked of an engine is always the complete name: a short one could also be the
beginning of an image's id.

    SKERRY_DOCKER_IMAGES = "python, python:3.*, ghcr.io/acme/*, *"

A pattern is a registry (Docker Hub's, if it has none), a repository, and a tag or digest, or none for all of them. `*`
stands for any characters of the repository, or of the tag. The pattern `*` alone allows everything.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from skerry.errors import Denied, InvalidRequest

PREFIX = "docker://"
VARIABLE = "SKERRY_DOCKER_IMAGES"
_HUB = "docker.io"
_LABEL = "[a-z0-9]+(?:-+[a-z0-9]+)*"
_REGISTRY = re.compile(rf"{_LABEL}(?:\.{_LABEL})*(?::[0-9]{{1,5}})?")
_PART = "[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"(?=.{{1,255}}$){_PART}(?:/{_PART})*")
_TAG = re.compile("[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile("sha256:[0-9a-f]{64}")
_OURS = "docker.io/skerry/"
"""What an engine has of our own store: such an image could be put in the place of one of ours."""


def is_reference(image: str) -> bool:
    """True if the image is not one of our store, but one of an engine."""
    return image.startswith(PREFIX)


@dataclass(frozen=True, slots=True)
class Reference:
    registry: str
    repository: str
    tag: str
    """Or the digest."""

    @classmethod
    def parse(cls, image: str) -> Reference:
        """Raises InvalidRequest."""
        registry, repository, tag = _split(image.removeprefix(PREFIX))
        found = cls(registry, repository, "latest" if tag is None else tag)
        if (
            not _REGISTRY.fullmatch(registry)
            or not _REPOSITORY.fullmatch(repository)
            or not (_TAG.fullmatch(found.tag) or _DIGEST.fullmatch(found.tag))
            or found.full.startswith(_OURS)
        ):
            raise InvalidRequest(
                f"{image!r} cannot be an image of a Docker Engine",
                hint=f"as in {PREFIX}python:3.12-slim or {PREFIX}ghcr.io/owner/name@sha256:...",
            )
        return found

    @property
    def source(self) -> str:
        """The registry and the repository."""
        return f"{self.registry}/{self.repository}"

    @property
    def full(self) -> str:
        return f"{self.source}{'@' if ':' in self.tag else ':'}{self.tag}"

    @property
    def name(self) -> str:
        """As an environment tells it."""
        return PREFIX + self.full.removeprefix(f"{_HUB}/").removeprefix("library/")


class Allowed:
    """The references that an operator allows."""

    def __init__(self, patterns: str) -> None:
        """Patterns with commas or spaces between them. Raises InvalidRequest."""
        self._patterns = [_compiled(word) for word in patterns.replace(",", " ").split()]

    @classmethod
    def from_environment(cls) -> Allowed:
        """Raises InvalidRequest."""
        return cls(os.environ.get(VARIABLE, ""))

    def check(self, reference: Reference) -> None:
        """Raises Denied."""
        for source, tag in self._patterns:
            if source.fullmatch(reference.source) and tag.fullmatch(reference.tag):
                return
        raise Denied(
            f"the operator does not allow the image {reference.name}",
            hint=f"the operator can list it in {VARIABLE} of the daemon, as "
            f"{reference.name.removeprefix(PREFIX)}; or use an image of `skerry image ls`",
        )


def _split(text: str) -> tuple[str, str, str | None]:
    """(registry, repository, tag or digest or None)."""
    name, at, digest = text.partition("@")
    registry, slash, path = name.partition("/")
    if not slash or not (set(".:") & set(registry) or registry == "localhost"):
        registry, path = _HUB, name
    repository, colon, tag = path.partition(":")
    if registry in (_HUB, f"index.{_HUB}"):
        registry = _HUB
        if "/" not in repository:
            repository = f"library/{repository}"
    # With a digest the tag says nothing.
    return registry, repository, digest if at else tag if colon else None


def _compiled(pattern: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    if pattern == "*":
        return re.compile(".*"), re.compile(".*")
    registry, repository, tag = _split(pattern)
    wanted = "*" if tag is None else tag
    if (
        not _REGISTRY.fullmatch(registry)
        or not _REPOSITORY.fullmatch(repository.replace("*", "x"))
        or not _TAG.fullmatch(wanted.replace("*", "x").removeprefix("sha256:"))
    ):
        raise InvalidRequest(
            f"{VARIABLE} has {pattern!r}, which is not a pattern of images",
            hint="for example: python, python:3.*, ghcr.io/owner/*",
        )
    return _glob(f"{registry}/{repository}"), _glob(wanted)


def _glob(pattern: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, pattern.split("*"))))
