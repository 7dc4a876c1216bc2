"""`code run`, `languages`: run a program once, in an environment of its own."""

from __future__ import annotations

import sys

from skerry.cli.options import add_json, add_parameters
from skerry.cli.parser import Verb
from skerry.cli.terminal import Sink, say, show_json, show_table
from skerry.client.sync.client import Client
from skerry.errors import InvalidRequest
from skerry.parameters import PROGRAM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import SimpleNamespace

    from skerry.cli.parser import Parser


def _run_arguments(parser: Parser) -> None:
    add_parameters(parser, *(row for row in PROGRAM.values() if row.name != "code" and "cli" in row.where))
    add_json(parser)
    parser.argument("file_", PROGRAM["code"].takes, PROGRAM["code"].help)


def _run(args: SimpleNamespace) -> int:
    if not args.language:
        raise InvalidRequest("no language given", hint="give --language; skerry languages lists them")
    if args.file_ == "-" and args.interactive:
        raise InvalidRequest(
            "stdin cannot be both the program and its input", hint="give FILE, or leave out -i"
        )
    code = _read(args.file_)
    result = Client().execute_code(
        args.language,
        code.decode(errors="surrogateescape"),
        stdin=sys.stdin.buffer.read() if args.interactive else None,
        files=_files(args.file),
        timeout=args.timeout,
        cpu_limit=args.cpu_limit,
        mem_limit=args.mem_limit,
        network=args.network,
        allow=args.allow,
        isolation=args.isolation,
        image=args.image,
        packages=args.package,
    )
    if args.json:
        show_json(result.to_dict())
    else:
        Sink(1).write(result.stdout_bytes)
        Sink(2).write(result.stderr_bytes)
        if result.stdout_truncated or result.stderr_truncated:
            say("skerry: output truncated to 1 MiB per stream")
        if result.message:
            say(f"skerry: {result.message}")
    return 125 if result.outcome == "internal" else result.exit_code


def _read(path: str) -> bytes:
    if path == "-":
        return sys.stdin.buffer.read()
    with open(path, "rb") as file:
        return file.read()


def _files(given: list[str]) -> dict[str, str | bytes]:
    found: dict[str, str | bytes] = {}
    for text in given:
        path, _, local = text.partition("=")
        found[path] = _read(local or path)
    return found


def _languages(args: SimpleNamespace) -> int:
    found = Client().languages()
    if args.json:
        show_json({"languages": [language.to_dict() for language in found]})
        return 0
    rows = [
        (
            language.name,
            language.version or "not available",
            language.image,
            ", ".join(language.aliases),
            language.reason,
        )
        for language in found
    ]
    show_table(("NAME", "VERSION", "IMAGE", "ALSO", ""), rows)
    return 0


VERBS = {
    "code run": Verb(
        "skerry code run --language LANGUAGE [OPTIONS] FILE",
        "Run a program once, in an environment of its own, with its output and exit code.",
        "skerry code run -l python --file data.json main.py",
        _run_arguments,
        _run,
    ),
    "languages": Verb(
        "skerry languages [--json]",
        "List the languages of skerry code run, and which of them are available here.",
        "skerry languages",
        add_json,
        _languages,
    ),
}
