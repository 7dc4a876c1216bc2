"""Options, as argparse reads them, with Docker's habits: they end at the first argument that is not one."""

from __future__ import annotations

import argparse
import os

from skerry.errors import InvalidRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any


class Verb:
    """One verb: its usage, what it does, an example, its arguments, and the function that runs it."""

    __slots__ = ("arguments", "example", "main", "text", "usage")

    def __init__(
        self,
        usage: str,
        text: str,
        example: str,
        arguments: Callable[[Parser], None],
        main: Callable[[argparse.Namespace], int],
    ) -> None:
        self.usage = usage
        self.text = text
        self.example = example
        self.arguments = arguments
        self.main = main


class Parser(argparse.ArgumentParser):
    """The parser of one verb. Mistakes raise InvalidRequest.

    `listed` are its arguments, for documentation and completion; `completes` says what an argument names:
    `environment`, `image` or `definition`.
    """

    def __init__(self, name: str, verb: Verb) -> None:
        self.listed: list[argparse.Action] = []
        self.completes: dict[str, str] = {}
        super().__init__(
            prog=f"skerry {name}",
            usage=verb.usage,
            description=verb.text,
            epilog=f"example: {verb.example}",
            formatter_class=_Formatter,
            allow_abbrev=False,
        )
        verb.arguments(self)

    def add(self, *names: str, completes: str = "", **options: Any) -> None:
        """`add_argument`, and a note of it."""
        action = self.add_argument(*names, **options)
        self.listed.append(action)
        if completes:
            self.completes[action.dest] = completes

    def command(self) -> None:
        """The command to run: everything from the first argument that is no option, or after `--`."""
        self.add("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the program and its arguments")

    def error(self, message: str) -> Any:
        raise InvalidRequest(message, hint=f"see {self.prog} --help")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """argparse makes one for every argument it is told of, and would import shutil to learn the width."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=_width())


def _width() -> int:
    try:
        return min(os.get_terminal_size(1).columns, 110)
    except OSError:
        return 100


def suggest(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """A hint for a word that is none of the known ones."""
    from difflib import get_close_matches

    close = get_close_matches(word, [name for name in known if not name.startswith("_")], n=1)
    return f"did you mean {close[0]!r}?" if close else otherwise


def add_json(parser: Parser) -> None:
    parser.add("--json", action="store_true", help="print JSON, errors too")


def add_environment_options(parser: Parser) -> None:
    """What a new environment is made with."""
    parser.add("--image", metavar="IMAGE", completes="image", help="image to start from (default: host)")
    parser.add("--name", metavar="NAME", help="a name for the environment")
    parser.add("-m", "--memory", metavar="SIZE", help="memory limit, e.g. 512m")
    parser.add("--cpus", metavar="N", type=float, help="cores, e.g. 0.5")
    parser.add("--pids", metavar="N", type=int, help="most processes at once")
    parser.add("--fds", metavar="N", type=int, help="most open files of a process")
    parser.add("--disk", metavar="SIZE", help="size of /workspace, e.g. 2g")
    parser.add("--inodes", metavar="N", type=int, help="most files in /workspace")
    parser.add("--lifetime", metavar="SECONDS", type=float, help="delete it after this long")
    parser.add("--idle", metavar="SECONDS", type=float, help="delete it after this long without activity")
    parser.add("--isolation", metavar="KIND", help="at least this isolation: namespace, gvisor, microvm")
    parser.add("--profile", metavar="NAME", help="system call profile: default, strict, debug")
    parser.add("--network", metavar="KIND", help="network access (default: none)")
    parser.add("--workspace", metavar="KIND", help="where /workspace is kept: auto, disk, memory")


_ENVIRONMENT = (
    "image",
    "name",
    "memory",
    "cpus",
    "pids",
    "fds",
    "disk",
    "inodes",
    "lifetime",
    "idle",
    "isolation",
    "profile",
    "network",
    "workspace",
)


def environment_request(args: argparse.Namespace) -> dict[str, Any]:
    """The body of POST /environments for these arguments."""
    given = {name: getattr(args, name) for name in _ENVIRONMENT}
    request = {name: value for name, value in given.items() if value is not None}
    if variables := parse_variables(args.env):
        request["env"] = variables
    return request


def parse_variables(pairs: list[str]) -> dict[str, str]:
    """Variables from `NAME=VALUE`, or `NAME` for the value that it has here. Raises InvalidRequest."""
    variables: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name:
            raise InvalidRequest(f"-e {pair!r} has no name", hint="write -e NAME=VALUE")
        if equals:
            variables[name] = value
        elif name in os.environ:
            variables[name] = os.environ[name]
    return variables


def path_of(ref: str) -> str:
    """The URL path of an environment. Raises InvalidRequest."""
    from skerry.client.http1 import quote

    if not ref:
        raise InvalidRequest("an environment needs an id or a name")
    return f"/environments/{quote(ref)}"
