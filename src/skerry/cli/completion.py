"""`completion`: scripts for shells, and `__complete`, which the scripts call for candidates."""

from __future__ import annotations

from skerry.cli.parser import Parser, Verb
from skerry.cli.terminal import clean
from skerry.errors import InvalidRequest, SkerryError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import SimpleNamespace

    from skerry.cli.parser import Argument

_BASH = """\
_skerry() {
    mapfile -t COMPREPLY < <(skerry __complete -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -o default -F _skerry skerry
"""
_ZSH = """\
#compdef skerry
_skerry() {
    local -a found
    found=("${(@f)$(skerry __complete -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -n "${found[1]}" ]]; then compadd -a found; else _files; fi
}
compdef _skerry skerry
"""
_FISH = """\
function __skerry_found
    set -l words (commandline -opc) (commandline -ct)
    set -g __skerry_words (skerry __complete -- $words[2..-1] 2>/dev/null)
    test (count $__skerry_words) -gt 0
end
complete -c skerry -f -n __skerry_found -a '$__skerry_words'
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def _completion_arguments(parser: Parser) -> None:
    parser.argument("shell", "SHELL", "bash, zsh or fish", completes="shell")


def _completion(args: SimpleNamespace) -> int:
    if args.shell not in SCRIPTS:
        raise InvalidRequest(f"no completion for shell {args.shell!r}", hint=f"known: {', '.join(SCRIPTS)}")
    print(SCRIPTS[args.shell], end="")
    return 0


def _complete_arguments(parser: Parser) -> None:
    parser.argument("words", "WORD", "the words typed so far", count="...")


def _complete(args: SimpleNamespace) -> int:
    *before, current = args.words or [""]
    for word in candidates(before, current):
        if word.startswith(current):
            print(clean(word))
    return 0


def candidates(before: list[str], current: str) -> list[str]:
    """Candidates for the next word; the caller filters them by the beginning of the current one."""
    from skerry.cli import VERBS, load

    visible = [name for name, (_, words) in VERBS.items() if words]
    while before and before[0] in ("--context", "--tenant"):
        if len(before) == 1:
            return _named("context") if before[0] == "--context" else []
        before = before[2:]
    if not before:
        return list(dict.fromkeys(name.split()[0] for name in visible))
    name, rest = before[0], before[1:]
    group = [verb.split()[1] for verb in visible if verb.startswith(f"{name} ")]
    if group and not rest:
        return group
    if group:
        name, rest = f"{name} {rest[0]}", rest[1:]
    if name not in VERBS:
        return []
    parser = Parser(name, load(name))
    option, arguments = _place(parser, rest)
    if option is not None:
        return _named(option.completes)
    if current.startswith("-") and not (arguments and parser.has_command):
        return [string for argument in parser.options for string in argument.names]
    if not parser.positional:
        return []
    last = len(parser.positional) - 1
    argument = parser.positional[min(arguments, last)]
    if arguments > last and argument.count not in ("*", "+"):
        return []
    found = _named(argument.completes)
    return [f"{word}:" for word in found] if name == "cp" else found


def _place(parser: Parser, words: list[str]) -> tuple[Argument | None, int]:
    """The option whose value comes next, if any, and the number of arguments so far."""
    waiting: Argument | None = None
    arguments = 0
    for word in words:
        if waiting is not None:
            waiting = None
        elif word.startswith("-") and not (arguments and parser.has_command):
            option = parser.find(word)
            waiting = option if option is not None and option.takes else None
        else:
            arguments += 1
    return waiting, arguments


def _named(kind: str) -> list[str]:
    """Existing names of this kind. Does not start the daemon."""
    if kind in ("", "shell"):
        return list(SCRIPTS) if kind else []
    if kind == "context":
        from skerry.client.contexts import DEFAULT, Contexts

        return [DEFAULT, *Contexts.load().entries]
    from skerry.client.sync.transport import Transport

    try:
        if kind == "environment":
            found = Transport().call("GET", "/environments", start=False)["environments"]
            return [word for info in found for word in (info["environment_id"], info["name"]) if word]
        answer = Transport().call("GET", "/images", start=False)
    except SkerryError:
        return []
    if kind == "definition":
        return list(answer.get("definitions", ()))
    return [image["name"] for image in answer["images"]]


VERBS = {
    "completion": Verb(
        "skerry completion bash|zsh|fish",
        "Print the script that teaches a shell to complete verbs, options, environments and images.",
        'eval "$(skerry completion bash)"',
        _completion_arguments,
        _completion,
    ),
    "__complete": Verb("skerry __complete WORD...", "", "", _complete_arguments, _complete),
}
