"""Parses command lines as Docker does: in verbs that take a command, options end at the first other word.

Not argparse: importing it and declaring thirty options takes a tenth of the time of `skerry run`, and it would look
for options in the words of the command.
"""

from __future__ import annotations

from types import SimpleNamespace

from skerry.errors import InvalidRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    Convert = Callable[[str], Any]


class Verb:
    """One verb: usage, description, example, arguments, and the function that runs it."""

    __slots__ = ("arguments", "example", "main", "text", "usage")

    def __init__(
        self,
        usage: str,
        text: str,
        example: str,
        arguments: Callable[[Parser], None],
        main: Callable[[SimpleNamespace], int],
    ) -> None:
        self.usage = usage
        self.text = text
        self.example = example
        self.arguments = arguments
        self.main = main


class Argument:
    """An option (its names begin with dashes) or an argument by position.

    `takes` is the placeholder of its value, "" for a flag. `completes` is what shells complete its value with:
    `environment`, `image`, `definition` or `context`. `count` is how often a positional argument occurs: "1", "?", "*",
    "+", or "...", which takes all following words, options included.
    """

    __slots__ = ("completes", "convert", "count", "help", "key", "names", "repeated", "takes")

    def __init__(
        self,
        names: tuple[str, ...],
        takes: str,
        help: str,
        convert: Convert,
        repeated: bool,
        count: str,
        completes: str,
    ) -> None:
        self.names = names
        self.takes = takes
        self.help = help
        self.convert = convert
        self.repeated = repeated
        self.count = count
        self.completes = completes
        self.key = names[-1].lstrip("-").replace("-", "_")

    @property
    def default(self) -> Any:
        if self.repeated or self.count in ("*", "+", "..."):
            return []
        return None if self.takes else False


class Parser:
    """The arguments of one verb. Mistakes raise InvalidRequest."""

    __slots__ = ("_by_name", "fixed", "name", "options", "positional", "verb")

    def __init__(self, name: str, verb: Verb) -> None:
        self.name = name
        self.verb = verb
        self.options: list[Argument] = []
        self.positional: list[Argument] = []
        self.fixed: dict[str, Any] = {}
        """Values that the verb sets itself, for arguments that it does not offer."""
        self._by_name: dict[str, Argument] = {}
        verb.arguments(self)

    def option(
        self,
        *names: str,
        help: str,
        takes: str = "",
        convert: Convert = str,
        repeated: bool = False,
        completes: str = "",
    ) -> None:
        argument = Argument(names, takes, help, convert, repeated, "", completes)
        self.options.append(argument)
        self._by_name |= dict.fromkeys(names, argument)

    def argument(
        self,
        name: str,
        takes: str,
        help: str,
        *,
        convert: Convert = str,
        count: str = "1",
        completes: str = "",
    ) -> None:
        """Declare a positional argument. `convert` applies to counts "1" and "?" alone."""
        self.positional.append(Argument((name,), takes, help, convert, False, count, completes))

    @property
    def has_command(self) -> bool:
        return bool(self.positional) and self.positional[-1].count == "..."

    def find(self, name: str) -> Argument | None:
        """The option of this name."""
        return self._by_name.get(name)

    def parse(self, words: list[str]) -> SimpleNamespace:
        """Return the values by name. With --help, prints help and raises SystemExit."""
        values = {argument.key: argument.default for argument in (*self.options, *self.positional)}
        others: list[str] = []
        marked = False
        todo = words[::-1]
        while todo:
            word = todo.pop()
            if word == "--":
                others += todo[::-1]
                marked = True
                break
            if not word.startswith("-") or word == "-":
                others.append(word)
                if self.has_command:
                    others += todo[::-1]
                    break
            elif word in ("-h", "--help"):
                print(self.help())
                raise SystemExit(0)
            else:
                self._take_option(word, todo, values)
        self._take_positional(others, values, marked)
        return SimpleNamespace(**values, **self.fixed)

    def _take_option(self, word: str, todo: list[str], values: dict[str, Any]) -> None:
        """Parse one option and its value, from this word or the next. Short options combine: -it."""
        value: str | None
        if word.startswith("--"):
            name, equals, text = word.partition("=")
            value = text if equals else None
        else:
            name, value = word[:2], word[2:] or None
        argument = self.find(name)
        if argument is None:
            raise self._mistake(f"unknown option {name}", suggest(name, self._by_name))
        if not argument.takes:
            if value is not None and word.startswith("--"):
                raise self._mistake(f"{name} takes no value")
            if value is not None:
                todo.append(f"-{value}")
            values[argument.key] = True
            return
        if value is None:
            if not todo:
                raise self._mistake(f"{name} needs a value: {argument.takes}")
            value = todo.pop()
        converted = self._convert(argument, f"{name} takes {argument.takes}", value)
        if argument.repeated:
            values[argument.key].append(converted)
        else:
            values[argument.key] = converted

    def _convert(self, argument: Argument, wanted: str, value: str) -> Any:
        try:
            return argument.convert(value)
        except ValueError:
            raise self._mistake(f"{wanted}, not {value!r}") from None

    def _take_positional(self, words: list[str], values: dict[str, Any], marked: bool) -> None:
        """Assign the remaining words. `marked`: `--` came before them, so a second `--` is a word."""
        for argument in self.positional:
            if argument.count in ("*", "+", "..."):
                if argument.count == "..." and words[:1] == ["--"] and not marked:
                    words = words[1:]
                if argument.count == "+" and not words:
                    raise self._mistake(f"{argument.takes} is missing")
                values[argument.key], words = words, []
            elif words:
                values[argument.key], words = (
                    self._convert(argument, f"{argument.takes} must be a number", words[0]),
                    words[1:],
                )
            elif argument.count == "1":
                raise self._mistake(f"{argument.takes} is missing")
        if words:
            raise self._mistake(f"unexpected argument {words[0]!r}")

    def _mistake(self, message: str, hint: str = "") -> InvalidRequest:
        return InvalidRequest(message, hint=hint or f"see skerry {self.name} --help")

    def help(self) -> str:
        rows = [
            (", ".join(argument.names) + (f" {argument.takes}" if argument.takes else ""), argument.help)
            for argument in self.options
        ]
        arguments = [(argument.takes, argument.help) for argument in self.positional]
        lines = [f"usage: {self.verb.usage}", "", self.verb.text, ""]
        lines += [f"  {left:28} {right}" for left, right in [*arguments, *rows, ("-h, --help", "show this")]]
        return "\n".join([*lines, "", f"example: {self.verb.example}"])


def suggest(word: str, known: Iterable[str]) -> str:
    """A hint that names the closest known word, or ""."""
    from difflib import get_close_matches

    close = get_close_matches(word, [name for name in known if not name.startswith("__")], n=1)
    return f"did you mean {close[0]!r}?" if close else ""
