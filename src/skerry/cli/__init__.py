"""The `skerry` command: finds the verb, parses its options, runs it, and turns errors into exit codes.

Exit codes: the command's own; 124 after its time limit; 128+n after signal n (137: killed, out of memory
included); 126 and 127 as shells use them; 2 for a mistake in the call; 125 when Skerry itself failed.

Every start pays for what is imported here and by the verb, so a verb's module is loaded only when it is used.
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
    "run": ("run", "Run a command in a fresh environment and remove it afterwards"),
    "code run": ("code", "Run a program once, in an environment of its own"),
    "languages": ("code", "List the languages that programs can be written in"),
    "create": ("environments", "Create an environment and print its id"),
    "exec": ("run", "Run a command in an environment"),
    "shell": ("run", "Open a terminal in an environment, or in a throw-away one"),
    "ls": ("environments", "List environments"),
    "info": ("environments", "Show what an environment is, uses and enforces"),
    "cp": ("copy", "Copy files and directories into and out of an environment"),
    "logs": ("logs", "Show the recent output of an environment"),
    "rm": ("environments", "Delete environments"),
    "session run": ("sessions", "Run code in an interpreter that keeps its state"),
    "session ls": ("sessions", "List the sessions of an environment"),
    "session rm": ("sessions", "Close sessions"),
    "net show": ("network", "Show what an environment may reach, and what it was refused"),
    "net allow": ("network", "Let an environment reach something"),
    "net deny": ("network", "Do not let it any more"),
    "net set": ("network", "Change the kind of its network"),
    "image ls": ("images", "List images"),
    "image build": ("images", "Build an image from its definition"),
    "image import": ("images", "Make an image from an archive"),
    "image inspect": ("images", "Show an image"),
    "image rm": ("images", "Delete images"),
    "pool stats": ("pools", "Show how many environments are ready before anybody asks"),
    "pool warmup": ("pools", "Have so many ready"),
    "pool shrink": ("pools", "Keep fewer ready"),
    "pool health": ("pools", "Check that a pool can start environments"),
    "context ls": ("contexts", "List the daemons that have a name here"),
    "context add": ("contexts", "Give a daemon elsewhere a name"),
    "context use": ("contexts", "Choose the daemon that commands talk to"),
    "context show": ("contexts", "Show the daemon that commands talk to"),
    "context rm": ("contexts", "Forget named daemons"),
    "token create": ("tenants", "Make a token that lets others in"),
    "token ls": ("tenants", "List tokens"),
    "token revoke": ("tenants", "Revoke tokens, and cut what is under way with them"),
    "quota show": ("tenants", "Show what a tenant may have, and has"),
    "quota set": ("tenants", "Set what a tenant may have"),
    "audit tail": ("audit", "Show the last rows of the audit"),
    "audit search": ("audit", "Find rows of the audit"),
    "audit export": ("audit", "Print the whole audit, one JSON object a line"),
    "audit verify": ("audit", "Check that no row of the audit was changed, removed or moved"),
    "audit prune": ("audit", "Remove the oldest rows of the audit"),
    "tools schema": ("tools", "Print the tools in the format of a model's API"),
    "mcp": ("tools", "Serve the tools by the Model Context Protocol"),
    "doctor": ("service", "Check what the daemon's machine can do, and what to fix"),
    "serve": ("service", "Run the daemon in the foreground"),
    "stop": ("service", "Stop the daemon"),
    "version": ("service", "Show the versions of this program and of the daemon"),
    "completion": ("completion", "Print the completion script of a shell"),
    "__complete": ("completion", ""),
}
"""Verb: the module it is in, and what `skerry --help` says of it. Hidden without words."""

USAGE = "skerry [--context NAME] [--tenant NAME] VERB [OPTIONS] [ARGUMENTS]"


def main(argv: list[str] | None = None) -> int:
    """Run one command line; returns the exit code. As a program (without `argv`) it ends here."""
    code = _run(sys.argv[1:] if argv is None else argv)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = _nobody_reads()
    if argv is None:
        sys.stderr.flush()
        os._exit(code)  # taking the interpreter apart would be another 2 ms
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
        return _nobody_reads()
    except OSError as error:  # a local file: everything about the daemon is a SkerryError
        mistake = InvalidRequest(f"{error.filename or 'input/output'}: {error.strerror or error}")
        show_error(mistake, _wants_json(words, args))
        return 2
    except KeyboardInterrupt:
        return 128 + 2
    except SystemExit as leaving:
        return int(leaving.code or 0)


def _nobody_reads() -> int:
    """Whoever read our output has left: no reason to complain, now or when what is buffered gets flushed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 128 + 13


def _wants_json(words: list[str], args: SimpleNamespace | None) -> bool:
    return bool(getattr(args, "json", False)) if args is not None else "--json" in words


def _parse(words: list[str]) -> tuple[Verb, SimpleNamespace]:
    """The verb and its arguments. Raises InvalidRequest; SystemExit after having printed help."""
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
    """The words behind `--context NAME` and `--tenant NAME`, which from here on count more than what the environment
    says."""
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
    """The verb that the words begin with, and the other words. Raises InvalidRequest."""
    if words[0] in VERBS:
        return words[0], words[1:]
    group = [name for name in VERBS if name.startswith(f"{words[0]} ")]
    if group and (len(words) == 1 or words[1] in ("-h", "--help")):
        print(_help(words[0]))
        raise SystemExit(0)
    name = " ".join(words[:2]) if group else words[0]
    if name in VERBS:
        return name, words[2:]
    raise InvalidRequest(f"skerry has no verb {name!r}", hint=suggest(name, VERBS) or "see skerry --help")


def _help(group: str) -> str:
    """What `skerry --help` prints, or the part of it that is about one group of verbs."""
    rows = [(name, words) for name, (_, words) in VERBS.items() if words and group in ("", name.split()[0])]
    width = max((len(name) for name, _ in rows), default=0)
    lines = [f"  {name:{width}}  {words}" for name, words in rows]
    return "\n".join(
        [
            f"usage: {USAGE}",
            "",
            "Isolated environments for code that you did not write.",
            "",
            *lines,
            "",
            "skerry VERB --help says more. Example: skerry run -- python3 -c 'print(6*7)'",
        ]
    )
