"""Options that several verbs share, and the requests they become."""

from __future__ import annotations

import os

from skerry.errors import InvalidRequest
from skerry.parameters import CREATE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import SimpleNamespace
    from typing import Any

    from skerry.cli.parser import Parser
    from skerry.client.sync.transport import Transport
    from skerry.parameters import ParameterSpec

ENV = CREATE["env"]
_CONVERT: dict[str, type] = {"number": float, "seconds": float, "count": int}


def add_json(parser: Parser) -> None:
    parser.option("--json", help="print JSON, also for errors")


def add_environment(parser: Parser) -> None:
    """An existing environment, by position."""
    parser.argument("environment", "ENV", "id, unique beginning of an id, or name", completes="environment")


def add_parameters(parser: Parser, *rows: ParameterSpec) -> None:
    """The options of these parameters."""
    for row in rows:
        parser.option(
            *row.option,
            takes=row.takes,
            help=row.help,
            convert=_CONVERT.get(row.kind, str),
            repeated=row.kind in ("texts", "variables"),
            completes=row.completes,
        )


def add_variables(parser: Parser) -> None:
    parser.option(
        *ENV.option,
        takes=ENV.takes,
        repeated=True,
        help="set a variable (visible in `ps` here); NAME alone copies its value from here",
    )
    parser.option(
        "--env-file",
        takes="FILE",
        repeated=True,
        help="set the variables in this file: lines NAME=VALUE, # for comments",
    )


def parse_secrets(names: list[str]) -> dict[str, str]:
    """Raises InvalidRequest."""
    for name in names:
        if name not in os.environ:
            raise InvalidRequest(
                f"--secret {name}: variable not set",
                hint="set it in the environment of this command; only its name is given as an option",
            )
    return {name: os.environ[name] for name in names}


def add_create_options(parser: Parser) -> None:
    """What a new environment is made with, except its variables."""
    add_parameters(parser, *(row for row in CREATE.values() if row is not ENV))


def environment_request(args: SimpleNamespace) -> dict[str, Any]:
    """The body of POST /environments for these arguments. Raises InvalidRequest."""
    given = {
        **{name: getattr(args, name) for name in CREATE},
        "env": parse_variables(args.env, args.env_file),
    }
    request = {name: value for name, value in given.items() if value is not None and value not in ([], {})}
    if args.allow:
        request.setdefault("network", "allowlist")
    return request


def create(transport: Transport, request: dict[str, Any]) -> dict[str, Any]:
    """The new environment. An image that is pulled first shows its progress on stderr."""
    # Of another backend the create says why it cannot be.
    engine = str(request.get("backend") or "docker").startswith("docker")
    if engine and str(request.get("image", "")).startswith("docker://"):
        from skerry.cli.images import pull

        pull(request["image"])
    info: dict[str, Any] = transport.call("POST", "/environments", json=request)
    return info


def parse_variables(pairs: list[str], files: list[str]) -> dict[str, str]:
    """Variables from files, then from `NAME=VALUE`, or from `NAME` with its value in this process.

    Raises InvalidRequest.
    """
    variables: dict[str, str] = {}
    for file in files:
        variables |= _variables_of(file)
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name:
            raise InvalidRequest(f"-e {pair!r}: missing name", hint="write -e NAME=VALUE")
        if equals:
            variables[name] = value
        elif name in os.environ:
            variables[name] = os.environ[name]
    return variables


def _variables_of(path: str) -> dict[str, str]:
    """The lines NAME=VALUE of a file, values taken literally. Raises InvalidRequest, which never shows a value."""
    variables: dict[str, str] = {}
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise InvalidRequest(f"--env-file {path}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        name, equals, value = line.strip().partition("=")
        if not name or name.startswith("#"):
            continue
        if not equals:
            raise InvalidRequest(f"--env-file {path}: line {number} is not NAME=VALUE")
        variables[name.strip()] = value
    return variables


def path_of(ref: str) -> str:
    """The URL path of an environment. Raises InvalidRequest."""
    from skerry.client.http1 import quote

    if not ref:
        raise InvalidRequest("empty environment id or name", hint="`skerry ls` lists environments")
    if "/" in ref:
        raise InvalidRequest(
            f"{ref!r} is not an environment id or name", hint="`skerry ls` lists environments"
        )
    return f"/environments/{quote(ref)}"
