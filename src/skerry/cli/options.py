"""Options that several verbs share, and what they mean for the daemon."""

from __future__ import annotations

import os

from skerry.errors import InvalidRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import SimpleNamespace
    from typing import Any

    from skerry.cli.parser import Parser


def add_json(parser: Parser) -> None:
    parser.option("--json", help="print JSON, errors too")


def add_environment(parser: Parser) -> None:
    """An existing environment, by position."""
    parser.argument("environment", "ENV", "id, beginning of an id, or name", completes="environment")


def add_variables(parser: Parser) -> None:
    parser.option(
        "-e",
        "--env",
        takes="NAME=VALUE",
        repeated=True,
        help="set a variable (others can see it in `ps`); NAME alone: as it is here",
    )
    parser.option(
        "--env-file",
        takes="FILE",
        repeated=True,
        help="set the variables of this file: lines NAME=VALUE, # for comments",
    )


def add_secrets(parser: Parser) -> None:
    parser.option(
        "--secret",
        takes="NAME",
        repeated=True,
        help="a variable as it is here, of which nothing is written down",
    )


def parse_secrets(names: list[str]) -> dict[str, str]:
    """Raises InvalidRequest."""
    for name in names:
        if name not in os.environ:
            raise InvalidRequest(
                f"--secret {name}: there is no such variable here",
                hint="give its name; the value is taken from the environment of this command",
            )
    return {name: os.environ[name] for name in names}


def add_limits(parser: Parser) -> None:
    """What a new environment is made with."""
    option = parser.option
    option("--image", takes="IMAGE", completes="image", help="image to start from (default: host)")
    option("--name", takes="NAME", help="a name for the environment")
    option("-m", "--memory", takes="SIZE", help="memory limit, e.g. 512m")
    option("--cpus", takes="NUMBER", convert=float, help="cores, e.g. 0.5")
    option("--pids", takes="NUMBER", convert=int, help="most processes at once")
    option("--fds", takes="NUMBER", convert=int, help="most open files of a process")
    option("--disk", takes="SIZE", help="size of /workspace, e.g. 2g")
    option("--inodes", takes="NUMBER", convert=int, help="most files in /workspace")
    option("--connections", takes="NUMBER", convert=int, help="most connections out of it at once")
    option("--traffic", takes="SIZE", help="most bytes that it sends and receives, e.g. 10g")
    option("--lifetime", takes="SECONDS", convert=float, help="delete it after this long")
    option("--idle", takes="SECONDS", convert=float, help="delete it after this long without activity")
    option("--isolation", takes="KIND", help="at least this: namespace, gvisor, microvm")
    option("--profile", takes="NAME", help="system call profile: default, strict, debug, filters")
    option("--network", takes="KIND", help="none (default), allowlist or public")
    option("--allow", takes="RULE", repeated=True, help="let it reach api.example.com, *.example.com, ...")
    option("--workspace", takes="KIND", help="where /workspace is kept: auto, disk, memory")


_LIMITS = (
    "image",
    "name",
    "memory",
    "cpus",
    "pids",
    "fds",
    "disk",
    "inodes",
    "connections",
    "traffic",
    "lifetime",
    "idle",
    "isolation",
    "profile",
    "network",
    "workspace",
)


def environment_request(args: SimpleNamespace) -> dict[str, Any]:
    """The body of POST /environments for these arguments. Raises InvalidRequest."""
    given = {name: getattr(args, name) for name in _LIMITS}
    request = {name: value for name, value in given.items() if value is not None}
    if variables := parse_variables(args.env, args.env_file):
        request["env"] = variables
    if args.allow:
        request["allow"] = args.allow
        request.setdefault("network", "allowlist")
    return request


def parse_variables(pairs: list[str], files: list[str]) -> dict[str, str]:
    """Variables of files, then those from `NAME=VALUE`, or `NAME` for the value that it has here.

    Raises InvalidRequest.
    """
    variables: dict[str, str] = {}
    for file in files:
        variables |= _variables_of(file)
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name:
            raise InvalidRequest(f"-e {pair!r} has no name", hint="write -e NAME=VALUE")
        if equals:
            variables[name] = value
        elif name in os.environ:
            variables[name] = os.environ[name]
    return variables


def _variables_of(path: str) -> dict[str, str]:
    """The lines NAME=VALUE of a file, values as they are. Raises InvalidRequest, and names no value."""
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
        raise InvalidRequest("an environment needs an id or a name")
    if "/" in ref:
        raise InvalidRequest(f"{ref!r} is neither an id nor a name", hint="`skerry ls` lists what runs")
    return f"/environments/{quote(ref)}"
