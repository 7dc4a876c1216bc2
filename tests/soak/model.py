"""What may be true of an environment after calls of which some were never answered.

A *world* is one possible state: its files, the counter in its shell, and the calls that were not answered and have not
taken effect yet. An answer leaves only the worlds in which it could have been given; if none is left, the answer breaks
a promise. A call without an answer may take effect at any later moment, once, or never.
"""

from __future__ import annotations

from dataclasses import dataclass

Op = tuple[str, ...]
"""`("write", path, content)`, `("read", path)`, `("rename", old, new)`, `("delete", path)`, `("count",)`."""
PENDING_SECONDS = 20.0
"""After this long, a call that was not answered no longer takes effect."""
MISSING = "file_missing"


@dataclass(frozen=True)
class World:
    files: frozenset[tuple[str, str]] = frozenset()
    counter: int = 0
    pending: frozenset[int] = frozenset()


def apply(op: Op, world: World) -> tuple[str, World]:
    """What the call answers in this world, and the world after it."""
    files = dict(world.files)
    if op[0] == "count":
        return str(world.counter + 1), World(world.files, world.counter + 1, world.pending)
    if op[0] == "write":
        files[op[1]] = op[2]
    elif op[1] not in files:
        return MISSING, world
    elif op[0] == "read":
        return files[op[1]], world
    elif op[0] == "rename":
        files[op[2]] = files.pop(op[1])
    else:
        del files[op[1]]
    return "ok", World(frozenset(files.items()), world.counter, world.pending)


class Model:
    """All worlds that agree with the answers so far."""

    def __init__(self) -> None:
        self.worlds = {World()}
        self._pending: dict[int, tuple[Op, float]] = {}
        self._next = 0

    @property
    def pending(self) -> int:
        return len(self._pending)

    def unanswered(self, op: Op, now: float) -> None:
        """Nobody knows whether this has taken effect, or will."""
        number, self._next = self._next, self._next + 1
        self._pending[number] = op, now
        self.worlds = {World(world.files, world.counter, world.pending | {number}) for world in self.worlds}

    def answered(self, op: Op, answer: str, now: float) -> str:
        """What the answer breaks, in words; empty when it breaks nothing."""
        before = self._closed(now)
        after = {then for told, then in (apply(op, world) for world in before) if told == answer}
        if not after:
            expected = sorted({_short(apply(op, world)[0]) for world in before})
            self.worlds = {World()}
            return f"{_short(' '.join(op))}: answered {_short(answer)}, expected one of {expected}"
        self.worlds = after
        return ""

    def answered_together(self, first: tuple[Op, str], second: tuple[Op, str], now: float) -> str:
        """The same for two calls at once: some order of them must explain both answers."""
        broken, after = [], set()
        before = self._closed(now)
        for order in ((first, second), (second, first)):
            self.worlds = set(before)
            why = self.answered(*order[0], now) or self.answered(*order[1], now)
            if why:
                broken.append(why)
            else:
                after |= self.worlds
        self.worlds = after or {World()}
        return "" if after else "; ".join(broken)

    def _closed(self, now: float) -> set[World]:
        """All worlds that calls without an answer can have led to by now."""
        found, new = set(self.worlds), set(self.worlds)
        while new:
            then = set()
            for world in new:
                for number in world.pending:
                    left = World(world.files, world.counter, world.pending - {number})
                    then.add(apply(self._pending[number][0], left)[1])
            new = then - found
            found |= new
        old = {number for number, (_, at) in self._pending.items() if at + PENDING_SECONDS < now}
        for number in old:
            del self._pending[number]
        return {World(world.files, world.counter, world.pending - old) for world in found}


def _short(text: str) -> str:
    return text if len(text) < 80 else f"{text[:40]}… ({len(text)} characters)"
