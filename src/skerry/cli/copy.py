"""`cp`: files and directories into and out of an environment."""

from __future__ import annotations

import os
import posixpath
import sys

from skerry.cli.options import add_json, path_of
from skerry.cli.parser import Verb
from skerry.cli.terminal import clean, say, show_json
from skerry.client.archive import BLOCK, DOWNLOAD_MAX, Notes, is_contents, too_large
from skerry.client.sync.files import Files
from skerry.client.sync.transport import Transport
from skerry.errors import FileMissing, InvalidRequest
from skerry.policy import parse_size
from skerry.tarstream import TarReader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import SimpleNamespace

    from skerry.cli.parser import Parser
    from skerry.models import LeftOut

INCOMPLETE = 1
"""The exit code when something was left out."""


def _cp_arguments(parser: Parser) -> None:
    parser.argument("source", "SOURCE", "ENV:PATH, or a local path, or -", completes="environment")
    parser.argument("target", "TARGET", "ENV:PATH, or a local path, or -", completes="environment")
    parser.option(
        "--max-size", takes="SIZE", help="maximum size to copy out, holes not counted (default: 64g)"
    )
    add_json(parser)


def _cp(args: SimpleNamespace) -> int:
    source, target = _split(args.source), _split(args.target)
    if (source is None) == (target is None):
        raise InvalidRequest(
            "exactly one of SOURCE and TARGET must be in an environment", hint="write it as ENV:PATH"
        )
    if source is not None:
        most = parse_size(args.max_size) if args.max_size else DOWNLOAD_MAX
        left_out = _download(*source, args.target, most)
    else:
        assert target is not None
        left_out = _upload(args.source, *target)
    _report(left_out, args.json, to_stdout=args.target != "-")
    return INCOMPLETE if left_out else 0


def _report(left_out: list[LeftOut], as_json: bool, to_stdout: bool) -> None:
    """Report what was left out. With --json this goes to stderr if stdout holds the archive."""
    if as_json:
        show_json(
            {"left_out": [each.to_dict() for each in left_out]}, sys.stdout if to_stdout else sys.stderr
        )
        return
    for each in left_out:
        say(
            f"skerry: left out {clean(each.path)}: {each.reason}"
            if each.path
            else f"skerry: and {each.reason}"
        )


def _split(place: str) -> tuple[str, str] | None:
    """(environment, path), or None for a local path: no colon, or a slash or a dot before it."""
    ref, colon, path = place.partition(":")
    if not colon or not ref or "/" in ref or ref.startswith("."):
        return None
    return ref, path or "."


def _download(ref: str, path: str, local: str, most: int) -> list[LeftOut]:
    transport, base = Transport(), path_of(ref)
    if local == "-":
        contents = is_contents(path) or None
        query = {"path": path, "contents": contents}
        return _passed_on(transport.send("GET", f"{base}/files/archive", query=query), path, most)
    if os.path.isdir(local) and not is_contents(path):
        local = os.path.join(local, posixpath.basename(path.rstrip("/")))
    return Files(transport, base).download(path, local, most)


def _passed_on(archive: Iterator[bytes], path: str, most: int) -> list[LeftOut]:
    """Write an archive to stdout; returns what the archive reports as left out."""
    tee = _Tee(archive, path, most)
    tar = TarReader(tee)
    left_out = Notes()
    try:
        for _ in tar:
            pass
    except InvalidRequest as error:  # the reader of the archive reports it as well
        left_out.add(path, f"the archive is damaged: {error.message}")
    while tee.read(BLOCK):
        pass
    sys.stdout.buffer.flush()
    left_out.add_skipped(tar)
    return left_out.finished()


class _Tee:
    """An archive whose bytes are written to stdout as they are read."""

    def __init__(self, archive: Iterator[bytes], path: str, most: int) -> None:
        self._archive = archive
        self._path = path
        self._left = most
        self._data = memoryview(b"")

    def read(self, size: int) -> bytes:
        if not self._data:
            data = next(self._archive, b"")
            self._left -= len(data)
            if self._left < 0:
                raise too_large(self._path)
            sys.stdout.buffer.write(data)
            self._data = memoryview(data)
        found, self._data = self._data[:size], self._data[size:]
        return bytes(found)


def _upload(local: str, ref: str, path: str) -> list[LeftOut]:
    transport, base = Transport(), path_of(ref)
    if local == "-":
        transport.call("PUT", f"{base}/files/archive", query={"path": path}, body=_stdin())
        return []
    files = Files(transport, base)
    name = os.path.basename(local.rstrip("/"))
    if name not in ("", ".", "..") and (path.endswith("/") or _is_directory(files, path)):
        path = posixpath.join(path, name)
    return files.upload(local, path)


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
        "skerry cp [OPTIONS] ENV:PATH TARGET | skerry cp [OPTIONS] SOURCE ENV:PATH",
        "Copy a file or directory into or out of an environment. Copied into an existing directory it keeps\n"
        "its name; a source that ends in /. stands for the directory's contents. - reads a tar stream from\n"
        "stdin or writes one to stdout. Paths in the environment are relative to /workspace. What cannot be\n"
        "copied is left out and listed with the reason; the exit code is then 1.",
        "skerry cp ./src web:src",
        _cp_arguments,
        _cp,
    ),
}
