"""`cp`: files and directories into and out of an environment."""

from __future__ import annotations

import os
import posixpath
import sys

from skerry.cli.options import path_of
from skerry.cli.parser import Verb
from skerry.cli.terminal import clean, say
from skerry.client.archive import BLOCK, is_contents
from skerry.client.sync.files import Files
from skerry.client.sync.transport import Transport
from skerry.errors import FileMissing, InvalidRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import SimpleNamespace

    from skerry.cli.parser import Parser


def _cp_arguments(parser: Parser) -> None:
    parser.argument("source", "SOURCE", "ENV:PATH, or a local path, or -", completes="environment")
    parser.argument("target", "TARGET", "ENV:PATH, or a local path, or -", completes="environment")


def _cp(args: SimpleNamespace) -> int:
    source, target = _split(args.source), _split(args.target)
    if (source is None) == (target is None):
        raise InvalidRequest("one of the two must be in an environment", hint="write ENV:PATH for that one")
    if source is not None:
        _download(*source, args.target)
    elif target is not None:
        _upload(args.source, *target)
    return 0


def _split(place: str) -> tuple[str, str] | None:
    """(environment, path), or None for a local path: no colon, or a slash or a dot before it."""
    ref, colon, path = place.partition(":")
    if not colon or not ref or "/" in ref or ref.startswith("."):
        return None
    return ref, path or "."


def _download(ref: str, path: str, local: str) -> None:
    transport, base = Transport(), path_of(ref)
    if local == "-":
        contents = is_contents(path) or None
        for data in transport.send(
            "GET", f"{base}/files/archive", query={"path": path, "contents": contents}
        ):
            sys.stdout.buffer.write(data)
        return
    if os.path.isdir(local) and not is_contents(path):
        local = os.path.join(local, posixpath.basename(path.rstrip("/")))
    for name in Files(transport, base).download(path, local):
        say(f"skerry: left out {clean(name)}: a device, or a link that leads elsewhere")


def _upload(local: str, ref: str, path: str) -> None:
    transport, base = Transport(), path_of(ref)
    if local == "-":
        transport.call("PUT", f"{base}/files/archive", query={"path": path}, body=_stdin())
        return
    files = Files(transport, base)
    name = os.path.basename(local.rstrip("/"))
    if name not in ("", ".", "..") and (path.endswith("/") or _is_directory(files, path)):
        path = posixpath.join(path, name)
    files.upload(local, path)


def _is_directory(files: Files, path: str) -> bool:
    try:
        return files.stat(path).type == "directory"
    except FileMissing:
        return False


def _stdin() -> Iterator[bytes]:
    while data := os.read(0, BLOCK):
        yield data


VERBS = {
    "cp": Verb(
        "skerry cp ENV:PATH TARGET | skerry cp SOURCE ENV:PATH",
        "Copy a file or directory into an environment or out of it. Into a directory that exists it keeps\n"
        "its name; a source that ends in /. means the content of the directory. With - a tar stream is\n"
        "read from stdin or written to stdout. Paths inside begin at /workspace.",
        "skerry cp ./src web:src",
        _cp_arguments,
        _cp,
    ),
}
