"""System call profiles, and their compiler to the classic BPF program that the kernel runs on each call.

A profile is data (`profiles/*.toml`; the top of `default.toml` tells the format): calls by name, and rules on
their arguments. So are the numbers of the names (`profiles/syscalls/*.tbl`). The program answers

    a foreign architecture, an x32 number    the process is killed
    a number that no table knows             ENOSYS
    a known call                             what the profile says of it; EPERM if it says nothing

and finds the call by binary search over its number. Where a call passes whatever its arguments are the kernel
sees that the program looks at none of them and, from 5.11 on, does not even run it.
"""

from __future__ import annotations

import errno
import os
import struct
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from skerry.errors import InvalidRequest, IsolationUnavailable

_DATA = Path(__file__).parent / "profiles"
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_KILL_PROCESS, _ERRNO, _ASK, _ALLOW = 0x80000000, 0x00050000, 0x7FC00000, 0x7FFF0000
_LOAD, _AND, _JUMP, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x54, 0x05, 0x15, 0x35, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_WORD = 0xFFFFFFFF
_MAX_INSTRUCTIONS = 4096

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Condition:
    """The low word of argument `arg` (or its high one), and-ed with `mask`, is one of `values`."""

    arg: int
    mask: int
    values: tuple[int, ...]
    high: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """The kernel's return value when all conditions hold."""

    conditions: tuple[Condition, ...]
    action: int


def _always(action: int) -> tuple[Rule, ...]:
    return (Rule((), action),)


_PASS, _DENY, _ABSENT, _KILL = map(
    _always, (_ALLOW, _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS, _KILL_PROCESS)
)


@dataclass(frozen=True, slots=True)
class Profile:
    """The rules of each call: the first that holds decides, the last always holds. No rules: EPERM."""

    calls: Mapping[str, tuple[Rule, ...]]
    on_top: bool = False
    """It is put on top of another profile: what it does not name is left to that one."""

    def compile(self, arch: str | None = None) -> bytes:
        """The program for `arch` (this machine's if None) as an array of struct sock_filter.

        Raises IsolationUnavailable for an architecture whose numbers are not known, InvalidRequest if the
        rules make a program that is longer than the kernel takes.
        """
        arch = arch or os.uname().machine
        if arch not in _AUDIT_ARCH:
            raise IsolationUnavailable(
                f"no system call profile can be compiled for {arch!r}",
                hint=f"there are tables for {', '.join(_AUDIT_ARCH)}",
            )
        other, unknown = (_PASS, _PASS) if self.on_top else (_DENY, _ABSENT)
        table = {number: self.calls.get(name, other) for name, number in _numbers(arch).items()}
        ranges = _ranges(table, unknown)
        if arch == "x86_64":
            # Negative numbers are no x32 calls: -1 is what a tracer writes to skip one.
            ranges += [(0x4000_0000, _KILL), (0x8000_0000, unknown)]
        program = _Program()
        program.search(ranges, program.rules)
        native = program.emit(_LOAD, _NUMBER)
        program.branch(_IF_EQUAL, _AUDIT_ARCH[arch], native, program.rules(_KILL))
        program.emit(_LOAD, _ARCH)
        return program.assemble()


def profile_names() -> list[str]:
    """The names that `compile_profile` takes."""
    return sorted(path.stem for path in _DATA.glob("*.toml"))


@cache
def compile_profile(name: str, arch: str | None = None) -> bytes:
    """The program of a built-in profile: see `Profile.compile`.

    Raises InvalidRequest for a name that is not known, IsolationUnavailable for such an architecture.
    """
    return _built_in(name).compile(arch)


def _built_in(name: str) -> Profile:
    if name not in profile_names():
        raise InvalidRequest(
            f"unknown system call profile {name!r}", hint=f"known: {', '.join(profile_names())}"
        )
    return parse_profile((_DATA / f"{name}.toml").read_text())


@cache
def _numbers(arch: str) -> dict[str, int]:
    lines = (_DATA / "syscalls" / f"{arch}.tbl").read_text().splitlines()
    return {name: int(number) for number, name in (line.split() for line in lines if line[0] != "#")}


def call_names() -> frozenset[str]:
    """Every system call of the tables."""
    return frozenset(name for arch in _AUDIT_ARCH for name in _numbers(arch))


def parse_profile(text: str, *, on_top: bool = False) -> Profile:
    """A profile from TOML, which may extend a built-in one. Raises ValueError for a mistake in it."""
    raw = tomllib.loads(text)
    _check_keys(raw, "extends", "allow", "enosys", "deny", "calls")
    own = [(name, _PASS) for name in raw.get("allow", ())]
    own += [(name, _ABSENT) for name in raw.get("enosys", ())]
    own += [(name, _DENY) for name in raw.get("deny", ())]
    own += [(name, tuple(map(_rule, rules))) for name, rules in raw.get("calls", {}).items()]
    known = call_names()
    calls = dict(_built_in(raw["extends"]).calls) if "extends" in raw else {}
    seen = set()
    for name, rules in own:
        if name not in known:
            raise ValueError(f"unknown system call {name!r}")
        if name in seen:
            raise ValueError(f"{name} is there twice")
        if not all(rule.conditions for rule in rules[:-1]):
            raise ValueError(f"{name} has rules that are never reached")
        seen.add(name)
        calls[name] = rules + _DENY if rules[-1].conditions else rules
    return Profile(calls, on_top)


def _rule(raw: dict[str, Any]) -> Rule:
    _check_keys(raw, "when", "then")
    then = raw["then"]
    number = getattr(errno, then, None) if isinstance(then, str) else None
    if then not in ("allow", "ignore", "ask") and not isinstance(number, int):
        raise ValueError(f"{then!r} is neither 'allow' nor 'ignore' nor 'ask' nor an errno")
    action = {"allow": _ALLOW, "ignore": _ERRNO, "ask": _ASK}.get(then) or _ERRNO | (number or 0)
    return Rule(tuple(condition for each in raw.get("when", ()) for condition in _conditions(each)), action)


def _conditions(raw: dict[str, Any]) -> list[Condition]:
    if raw.get("null") is True:
        _check_keys(raw, "arg", "null")
        low = _condition({"arg": raw["arg"], "is": [0]})
        return [low, replace(low, high=True)]
    return [_condition(raw)]


def _condition(raw: dict[str, Any]) -> Condition:
    _check_keys(raw, "arg", "mask", "is")
    condition = Condition(raw["arg"], raw.get("mask", _WORD), tuple(raw["is"]))
    if condition.arg not in range(6) or not 0 <= condition.mask <= _WORD or not condition.values:
        raise ValueError(f"{raw} needs an argument from 0 to 5, a mask of 32 bits and a value")
    if any(value & ~condition.mask for value in condition.values):
        raise ValueError(f"{raw} has a value outside of its mask")
    return condition


def _check_keys(raw: dict[str, Any], *known: str) -> None:
    unknown = sorted(set(raw) - set(known))
    if unknown:
        raise ValueError(f"unknown key {', '.join(unknown)}")


class _Program:
    """Instructions from the last to the first, since jumps only go forward.

    A label is how many instructions there are from the one it stands for to the end.
    """

    def __init__(self) -> None:
        self._code: list[bytes] = []

    def emit(self, op: int, operand: int, if_true: int = 0, if_false: int = 0) -> int:
        self._code.append(struct.pack("<HBBI", op, if_true, if_false, operand))
        return len(self._code)

    def assemble(self) -> bytes:
        if len(self._code) > _MAX_INSTRUCTIONS:
            raise InvalidRequest(
                f"a system call profile makes a program of {len(self._code)} instructions",
                hint=f"the kernel takes {_MAX_INSTRUCTIONS}: list fewer values in its rules",
            )
        return b"".join(reversed(self._code))

    def branch(self, op: int, operand: int, if_true: int, if_false: int) -> int:
        if_true, if_false = self._near(if_true), self._near(if_false)
        here = len(self._code)
        return self.emit(op, operand, here - if_true, here - if_false)

    def _near(self, label: int) -> int:
        """`label`, or a jump to it if it is too far for the 8 bits of a branch (less one for such a jump)."""
        distance = len(self._code) - label
        return label if distance < 255 else self.emit(_JUMP, distance)

    def search(self, ranges: Sequence[tuple[int, _T]], leaf: Callable[[_T], int]) -> int:
        """Go to the leaf of the last range that starts at or below the accumulator."""
        if len(ranges) == 1:
            return leaf(ranges[0][1])
        middle = len(ranges) // 2
        upper = self.search(ranges[middle:], leaf)
        lower = self.search(ranges[:middle], leaf)
        return self.branch(_IF_AT_LEAST, ranges[middle][0], upper, lower)

    def rules(self, rules: tuple[Rule, ...]) -> int:
        label = 0
        for rule in reversed(rules):
            otherwise = label
            label = self.emit(_RETURN, rule.action)
            for condition in reversed(rule.conditions):
                label = self._condition(condition, label, otherwise)
        return label

    def _condition(self, condition: Condition, then: int, otherwise: int) -> int:
        ranges = _ranges(dict.fromkeys(condition.values, then), otherwise)
        self.search(ranges, lambda label: label)
        if condition.mask != _WORD:
            self.emit(_AND, condition.mask)
        return self.emit(_LOAD, _ARGUMENTS + 8 * condition.arg + 4 * condition.high)


def _ranges(points: Mapping[int, _T], default: _T) -> list[tuple[int, _T]]:
    """`points` and `default` for all other numbers, as starts of ranges in ascending order."""
    ranges = [(0, points.get(0, default))]
    for start in sorted({edge for point in points for edge in (point, point + 1) if edge <= _WORD}):
        value = points.get(start, default)
        if value != ranges[-1][1]:
            ranges.append((start, value))
    return ranges
