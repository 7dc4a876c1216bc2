"""`code run`, `languages`: programs that run once, in an environment of their own."""

from __future__ import annotations

import sys

from skerry.cli.options import add_json
from skerry.cli.parser import Verb
from skerry.cli.terminal import Sink, say, show_json, show_table
from skerry.client.sync.client import Client
from skerry.errors import InvalidRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import SimpleNamespace

    from skerry.cli.parser import Parser


def _run_arguments(parser: Parser) -> None:
    option = parser.option
    option("-l", "--language", takes="LANGUAGE", help="what it is written in: see skerry languages")
    option("-i", "--interactive", help="pass stdin on (else it is empty)")
    option(
        "--file",
        takes="PATH",
        repeated=True,
        help="another file, which can only be read; PATH=HERE if it is elsewhere",
    )
    option(
        "--timeout", takes="SECONDS", convert=float, help="kill it after this long (default: 30, at most 300)"
    )
    option("--cpu-limit", takes="MILLICORES", convert=int, help="1000 is one core (default)")
    option("--mem-limit", takes="MB", convert=int, help="memory (default: 512)")
    option("--network", takes="KIND", help="none (default), allowlist or public")
    option("--allow", takes="RULE", repeated=True, help="let it reach api.example.com, *.example.com, ...")
    option("--package", takes="NAME", repeated=True, help="install it first: 'pandas==2.*', 'lodash@^4'")
    option("--isolation", takes="KIND", help="at least this: namespace, gvisor, microvm")
    option("--image", takes="IMAGE", completes="image", help="instead of the one that the language has")
    add_json(parser)
    parser.argument("file_", "FILE", "the program; - for stdin")


def _run(args: SimpleNamespace) -> int:
    if not args.language:
        raise InvalidRequest("no language given", hint="write --language; skerry languages lists them")
    if args.file_ == "-" and args.interactive:
        raise InvalidRequest(
            "stdin cannot be both the program and its input", hint="write FILE, or leave out -i"
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
            say("skerry: the output was cut: it is longer than 1 MiB")
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
        path, _, here = text.partition("=")
        found[path] = _read(here or path)
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
        "Run a program once, in an environment of its own, and pass its output and exit code on.",
        "skerry code run -l python --file data.json main.py",
        _run_arguments,
        _run,
    ),
    "languages": Verb(
        "skerry languages [--json]",
        "List the languages that programs can be written in, and whether they can be run here.",
        "skerry languages",
        add_json,
        _languages,
    ),
}
