"""The `skerry` command: finds the verb, parses its options, runs it, and turns errors into exit codes.

Exit codes: that of the command; 124 after its timeout; 128+n after signal n (137: killed, also when out of
memory); 126 and 127 as in shells; 2 for a wrong command line or request; 125 when Skerry itself failed.

A verb's module is imported only when it is used: every start pays for what it imports.
"""

from __future__ import annotations

import os
import sys

from skerry.cli.parser import Parser, suggest
from skerry.cli.terminal import show_error
from skerry.errors import InvalidRequest, SkerryError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import SimpleNamespace

    from skerry.cli.parser import Verb

VERBS = {
    "run": ("run", "Run a command in a new environment and delete it afterwards"),
    "code run": ("code", "Run a program once, in an environment of its own"),
    "languages": ("code", "List the languages of code run"),
    "create": ("environments", "Create an environment and print its id"),
    "exec": ("run", "Run a command in an environment"),
    "shell": ("run", "Open a terminal in an environment, or in a temporary one"),
    "ls": ("environments", "List environments"),
    "info": ("environments", "Show the state, usage and enforced limits of an environment"),
    "cp": ("copy", "Copy files and directories into and out of an environment"),
    "logs": ("logs", "Show the recent output of an environment"),
    "rm": ("environments", "Delete environments"),
    "session run": ("sessions", "Run code in an interpreter that keeps its state"),
    "session ls": ("sessions", "List the sessions of an environment"),
    "session rm": ("sessions", "Close sessions"),
    "net show": ("network", "Show the network rules, traffic and denied connections of an environment"),
    "net allow": ("network", "Add rules to the allowlist of an environment"),
    "net deny": ("network", "Remove rules from the allowlist of an environment"),
    "net set": ("network", "Change the kind or limits of an environment's network"),
    "image ls": ("images", "List images"),
    "image build": ("images", "Build an image from its definition"),
    "image import": ("images", "Create an image from an archive"),
    "image pull": ("images", "Pull an image that the Docker Engine lacks"),
    "image inspect": ("images", "Show an image"),
    "image rm": ("images", "Delete images"),
    "pool stats": ("pools", "Show the pools and their ready environments"),
    "pool warmup": ("pools", "Warm a pool up to a number of environments"),
    "pool shrink": ("pools", "Shrink a pool to a number of environments"),
    "pool health": ("pools", "Check that a pool can start environments"),
    "context ls": ("contexts", "List the contexts: named daemons"),
    "context add": ("contexts", "Add a context for a remote daemon"),
    "context use": ("contexts", "Choose the daemon that commands use"),
    "context show": ("contexts", "Show the daemon that commands use"),
    "context rm": ("contexts", "Remove contexts"),
    "token create": ("tenants", "Create an access token"),
    "token ls": ("tenants", "List tokens"),
    "token revoke": ("tenants", "Revoke tokens and close their open requests"),
    "quota show": ("tenants", "Show the quota and usage of a tenant"),
    "quota set": ("tenants", "Set the quota of a tenant"),
    "audit tail": ("audit", "Show the last rows of the audit log"),
    "audit search": ("audit", "Search the audit log"),
    "audit export": ("audit", "Print the audit log, one JSON object per line"),
    "audit verify": ("audit", "Verify that no row of the audit log was changed, removed or moved"),
    "audit prune": ("audit", "Remove the oldest rows of the audit log"),
    "tools schema": ("tools", "Print the tool definitions in the format of a model API"),
    "mcp": ("tools", "Serve the tools over the Model Context Protocol"),
    "doctor": ("service", "Check what the daemon's machine supports, and how to fix it"),
    "serve": ("service", "Run the daemon in the foreground"),
    "stop": ("service", "Stop the daemon"),
    "version": ("service", "Show the versions of this program and of the daemon"),
    "completion": ("completion", "Print the completion script of a shell"),
    "__complete": ("completion", ""),
}
"""Verb: its module, and its line in `skerry --help`, which hides verbs without one."""

USAGE = "skerry [--context NAME] [--tenant NAME] VERB [OPTIONS] [ARGUMENTS]"


def main(argv: list[str] | None = None) -> int:
    """Run one command line; returns the exit code. As a program (without `argv`) it ends here."""
    code = _run(sys.argv[1:] if argv is None else argv)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = _output_closed()
    if argv is None:
        sys.stderr.flush()
        os._exit(code)  # tearing the interpreter down takes another 2 ms
    return code


def _run(words: list[str]) -> int:
    args: SimpleNamespace | None = None
    try:
        verb, args = _parse(words)
        return verb.main(args)
    except SkerryError as error:
        show_error(error, _wants_json(words, args))
        return error.exit_code
    except BrokenPipeError:
        return _output_closed()
    except OSError as error:  # a local file: everything about the daemon is a SkerryError
        mistake = InvalidRequest(f"{error.filename or 'input/output'}: {error.strerror or error}")
        show_error(mistake, _wants_json(words, args))
        return 2
    except KeyboardInterrupt:
        return 128 + 2
    except SystemExit as leaving:
        return int(leaving.code or 0)


def _output_closed() -> int:
    """The reader of our output is gone: ends silently, also when buffered output is flushed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 128 + 13


def _wants_json(words: list[str], args: SimpleNamespace | None) -> bool:
    return bool(getattr(args, "json", False)) if args is not None else "--json" in words


def _parse(words: list[str]) -> tuple[Verb, SimpleNamespace]:
    """The verb and its arguments. Raises InvalidRequest, and SystemExit after printing help."""
    words = _take_globals(words)
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if not words or words[0] in ("-h", "--help"):
        print(_help(""))
        raise SystemExit(0)
    name, rest = ("version", words[1:]) if words[0] in ("-V", "--version") else _find(words)
    verb = load(name)
    return verb, Parser(name, verb).parse(rest)


def _take_globals(words: list[str]) -> list[str]:
    """Apply `--context NAME` and `--tenant NAME`, which override the environment; returns the words after them."""
    while words:
        option, equals, name = words[0].partition("=")
        if option not in ("--context", "--tenant"):
            return words
        name = name if equals else "".join(words[1:2])
        words = words[1:] if equals else words[2:]
        if not name:
            raise InvalidRequest(f"{option} needs a value: NAME")
        if option == "--tenant":
            os.environ["SKERRY_TENANT"] = name
            continue
        os.environ["SKERRY_CONTEXT"] = name
        for other in ("SKERRY_URL", "SKERRY_TOKEN", "SKERRY_CA"):
            os.environ.pop(other, None)
    return words


def load(name: str) -> Verb:
    """The verb of this name, from its module."""
    from importlib import import_module

    module = import_module(f"skerry.cli.{VERBS[name][0]}")
    verb: Verb = module.VERBS[name]
    return verb


def _find(words: list[str]) -> tuple[str, list[str]]:
    """The verb at the start of the words, and the words after it. Raises InvalidRequest."""
    if words[0] in VERBS:
        return words[0], words[1:]
    group = [name for name in VERBS if name.startswith(f"{words[0]} ")]
    if group and (len(words) == 1 or words[1] in ("-h", "--help")):
        print(_help(words[0]))
        raise SystemExit(0)
    name = " ".join(words[:2]) if group else words[0]
    if name in VERBS:
        return name, words[2:]
    raise InvalidRequest(f"unknown verb {name!r}", hint=suggest(name, VERBS) or "see skerry --help")


def _help(group: str) -> str:
    """The text of `skerry --help`, or its part for one group of verbs."""
    rows = [(name, words) for name, (_, words) in VERBS.items() if words and group in ("", name.split()[0])]
    width = max((len(name) for name, _ in rows), default=0)
    lines = [f"  {name:{width}}  {words}" for name, words in rows]
    return "\n".join(
        [
            f"usage: {USAGE}",
            "",
            "Isolated environments for untrusted code.",
            "",
            *lines,
            "",
            "Details: skerry VERB --help. Example: skerry run -- python3 -c 'print(6*7)'",
        ]
    )
