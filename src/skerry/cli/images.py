"""`image`: the root filesystems of environments."""

from __future__ import annotations

import os
import sys
import time

from skerry.cli.options import add_json
from skerry.cli.parser import Verb
from skerry.cli.terminal import ago, clean, say, show_json, show_table
from skerry.client.http1 import quote
from skerry.client.sync.client import Client
from skerry.errors import ImageBuildFailed
from skerry.policy import format_size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import SimpleNamespace

    from skerry.cli.parser import Parser
    from skerry.models import ImageInfo


def _ls_arguments(parser: Parser) -> None:
    parser.option("-q", "--quiet", help="print only names")
    add_json(parser)


def _ls(args: SimpleNamespace) -> int:
    answer = Client().transport.call("GET", "/images")
    if args.json:
        show_json(answer)
        return 0
    if args.quiet:
        for image in answer["images"]:
            print(clean(image["name"]))
        return 0
    rows: list[tuple[object, ...]] = [
        (
            image["name"],
            image["digest"].removeprefix("sha256:")[:12],
            format_size(image["size"]) if image["size"] else "",
            f"{ago(time.time() - image['created_at'])} ago" if image["created_at"] else "",
            image["description"],
        )
        for image in answer["images"]
    ]
    built = {image["name"] for image in answer["images"]}
    rows += [
        (name, "", "", "", f"not built yet: skerry image build {name}")
        for name in answer.get("definitions", ())
        if name not in built
    ]
    show_table(("NAME", "DIGEST", "SIZE", "BUILT", "DESCRIPTION"), rows)
    return 0


def _build_arguments(parser: Parser) -> None:
    parser.argument("name", "NAME", "name of a definition", completes="definition")
    add_json(parser)


def _build(args: SimpleNamespace) -> int:
    began = time.monotonic()
    try:
        with _Progress() as progress:
            image = Client().build_image(args.name, progress.show)
    except ImageBuildFailed as error:
        for line in error.detail.get("output", ()) if not args.json else ():
            say(f"  {line}")
        raise
    return _show_image(image, args.json, f"built in {ago(time.monotonic() - began)}")


def _import_arguments(parser: Parser) -> None:
    parser.argument("archive", "ARCHIVE", "a root filesystem tar, an OCI layout, or a docker save archive")
    parser.argument("name", "NAME", "name for the image")
    add_json(parser)


def _import(args: SimpleNamespace) -> int:
    with _Progress() as progress:
        image = Client().import_image(args.archive, args.name, progress.show)
    return _show_image(image, args.json, "imported")


def _pull_arguments(parser: Parser) -> None:
    parser.argument("image", "IMAGE", "docker:// and what `docker pull` takes")
    add_json(parser)


def _pull(args: SimpleNamespace) -> int:
    image = pull(args.image)
    if args.json:
        show_json(image.to_dict())
    else:
        print(clean(f"{image.name} {image.digest}"))
    return 0


def pull(image: str) -> ImageInfo:
    """Pull an image that the engine lacks, with its progress on stderr. Raises what `Client.pull_image` does."""
    with _Progress() as progress:
        return Client().pull_image(image, progress.show)


def _show_image(image: ImageInfo, as_json: bool, how: str) -> int:
    if as_json:
        show_json(image.to_dict())
    else:
        print(clean(f"{image.name} {image.digest}"))
        say(f"{how}, {format_size(image.size)}; use it: skerry run --image {clean(image.name)} -it -- sh")
    return 0


def _inspect_arguments(parser: Parser) -> None:
    parser.argument("name", "NAME", "name or digest", completes="image")
    add_json(parser)


def _inspect(args: SimpleNamespace) -> int:
    show_json(Client().transport.call("GET", f"/images/{quote(args.name)}"))
    return 0


def _rm_arguments(parser: Parser) -> None:
    parser.argument("names", "NAME", "names or digests", count="+", completes="image")


def _rm(args: SimpleNamespace) -> int:
    client = Client()
    for name in args.names:
        client.remove_image(name)
        print(clean(name))
    return 0


class _Progress:
    """The progress of a build: a bar on a terminal, else a line per step."""

    def __init__(self) -> None:
        self._bar = os.isatty(2)
        self._step = ""

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar and self._step:
            print(file=sys.stderr)

    def show(self, step: str, fraction: float) -> None:
        if self._bar:
            done = round(max(0.0, min(1.0, fraction)) * 30)
            text = f"[{'#' * done}{'.' * (30 - done)}] {fraction:4.0%} {clean(step)}"
            width = os.get_terminal_size(2).columns or 80
            print(f"\r\x1b[K{text[: width - 1]}", end="", file=sys.stderr, flush=True)
        elif step != self._step:
            print(f"{fraction:4.0%} {clean(step)}", file=sys.stderr, flush=True)
        self._step = step


VERBS = {
    "image ls": Verb("skerry image ls [OPTIONS]", "List images.", "skerry image ls", _ls_arguments, _ls),
    "image build": Verb(
        "skerry image build [--json] NAME",
        "Build an image from its definition.",
        "skerry image build dev",
        _build_arguments,
        _build,
    ),
    "image import": Verb(
        "skerry image import [--json] ARCHIVE NAME",
        "Create an image from a local archive.",
        "skerry image import rootfs.tar mine",
        _import_arguments,
        _import,
    ),
    "image pull": Verb(
        "skerry image pull [--json] IMAGE",
        "Pull an image that the Docker Engine lacks.",
        "skerry image pull docker://python:3.12-slim",
        _pull_arguments,
        _pull,
    ),
    "image inspect": Verb(
        "skerry image inspect NAME",
        "Show an image as JSON.",
        "skerry image inspect dev",
        _inspect_arguments,
        _inspect,
    ),
    "image rm": Verb("skerry image rm NAME...", "Delete images.", "skerry image rm dev", _rm_arguments, _rm),
}
