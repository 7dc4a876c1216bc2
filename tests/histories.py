"""Histories: what was asked, what was answered, and when; and the rules that every history must keep.

A call is known by two moments: when it began and when it was done. What it did happened at some moment in between,
so that a rule may only be called broken when no choice of these moments keeps it. Each rule returns what breaks it, in
words.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass(eq=False)
class Call:
    """`error` is the code of the problem that was answered, `done` is infinite while nothing was."""

    what: str
    about: dict[str, Any]
    begun: float
    done: float = math.inf
    error: str = ""
    answer: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.done < math.inf and not self.error

    def __str__(self) -> str:
        told = self.error or self.answer
        return f"{self.what} {self.about} [{self.begun:.4f}, {self.done:.4f}] -> {told}"


class History:
    """`now` is the clock of all its calls. May be added to from any thread."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.calls: list[Call] = []

    @contextmanager
    def call(self, what: str, **about: Any) -> Iterator[Call]:
        """One call; the block leaves its answer or the code of its error. If it raises, nobody knows what happened."""
        call = Call(what, about, self._now())
        self.calls.append(call)
        yield call
        call.done = self._now()

    def of(self, what: str, **about: Any) -> list[Call]:
        return [
            call
            for call in self.calls
            if call.what == what and all(call.about.get(key) == value for key, value in about.items())
        ]

    def __str__(self) -> str:
        return "\n".join(map(str, sorted(self.calls, key=lambda call: call.begun)))


def names(history: History) -> list[str]:
    """A name is one environment's at a time, and taken only while one can have it."""
    lives: dict[str, list[tuple[Call, Call | None]]] = defaultdict(list)
    for create in history.of("create"):
        if create.about.get("name") and not create.error:
            deletes = history.of("delete", environment=create.answer.get("environment_id"))
            lives[create.about["name"]].append(
                (create, min(deletes, key=lambda call: call.begun, default=None))
            )
    broken = []
    for name, held in lives.items():
        sure = sorted(
            (
                (create.done, math.inf if delete is None else delete.begun, create.answer["environment_id"])
                for create, delete in held
                if create.ok
            ),
            key=lambda life: life[0],
        )
        for (_, first_end, first), (start, _, second) in pairwise(sure):
            if start < first_end and first != second:
                broken.append(f"{first} and {second} both had the name {name}")
    for create in history.of("create"):
        # With a key it may be the key that is taken.
        if create.error == "conflict" and create.about.get("name") and not create.about.get("key"):
            others = lives[create.about["name"]]
            if not any(
                other.begun < create.done and (delete is None or _latest(history, delete) > create.begun)
                for other, delete in others
            ) and not _half_made(history, create):
                broken.append(f"nobody had the name: {create}")
    return broken


def _latest(history: History, delete: Call) -> float:
    """When the environment was surely gone: as soon as anybody was told so."""
    deletes = history.of("delete", environment=delete.about["environment"])
    return min((call.done for call in deletes if call.ok), default=math.inf)


def _half_made(history: History, create: Call) -> bool:
    """Whether another create may have the name although it failed: its removal may have failed, too."""
    return any(
        other is not create
        and other.about.get("name") == create.about["name"]
        and not other.ok
        and other.error != "conflict"
        and other.begun < create.done
        for other in history.of("create")
    )


def keys(history: History) -> list[str]:
    """One key, one environment; and whoever asks for something else with it is refused."""
    broken = []
    made: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for create in history.of("create"):
        if create.about.get("key") and create.ok:
            made[create.about["key"]].add((create.answer["environment_id"], create.about["body"]))
    for key, found in made.items():
        if len(found) > 1:
            broken.append(f"the key {key} has made {sorted(found)}")
    return broken


def deletes(history: History) -> list[str]:
    """Everybody who deletes is told of success, and afterwards nobody finds it alive."""
    broken = [f"a delete failed: {call}" for call in history.of("delete") if call.error]
    for call in history.of("delete"):
        for look in history.of("look", environment=call.about["environment"]):
            if call.ok and look.ok and look.begun > call.done and look.answer["state"] != "ended":
                broken.append(f"{look} after {call}")
    return broken


def executions(history: History) -> list[str]:
    """What is executed has a true result, or was canceled by the end of its environment, or is refused after it."""
    broken = []
    for call in history.of("execute"):
        ends = history.of("delete", environment=call.about["environment"])
        begun = min((end.begun for end in ends), default=math.inf)
        done = min((end.done for end in ends if end.ok), default=math.inf)
        if call.error:
            if call.error not in ("environment_ended", "environment_not_found"):
                broken.append(f"a strange refusal: {call}")
            elif begun > call.done:
                broken.append(f"refused although nobody had deleted it: {call}")
        elif call.ok:
            outcome, stdout = call.answer["outcome"], call.answer["stdout"]
            if call.begun > done:
                broken.append(f"executed after it was deleted: {call}")
            if outcome == "completed" and stdout != call.about["word"]:
                broken.append(f"completed without its output: {call}")
            if outcome == "canceled" and begun > call.done:
                broken.append(f"canceled although nobody had deleted it: {call}")
            if outcome not in ("completed", "canceled"):
                broken.append(f"a strange outcome: {call}")
    return broken


def leases(history: History, *, slack: float = 0.0) -> list[str]:
    """Nothing expires before the end that a heartbeat has promised, or while it is used, and reasons are true.

    Calls here have moments of the lease's own clock. No heartbeat of such a history shortens a life. `slack` is how
    exactly both sides read the same clock.
    """
    broken = []
    for create in history.of("create"):
        if not create.ok:
            continue
        environment = create.answer["environment_id"]
        beats = [call for call in history.of("heartbeat", environment=environment) if call.ok]
        for look in history.of("look", environment=environment):
            if not look.ok or look.answer["state"] == "running":
                continue
            reason = look.answer["reason"]
            promised = [(create, create.about["lifetime"])]
            promised += [(beat, beat.about["lifetime"]) for beat in beats if beat.done <= look.begun]
            for call, lifetime in promised:
                early = look.done + slack < call.begun + lifetime
                if reason.startswith("expired: lifetime") and early:
                    broken.append(f"{look} before the end that was promised by {call}")
            for use in (
                create,
                *history.of("heartbeat", environment=environment),
                *history.of("use", environment=environment),
            ):
                since = use.done if use.what == "use" else use.begun
                early = use.begun < look.begun and look.done + slack < since + create.about["idle"]
                if reason.startswith("expired: idle") and early and not use.error:
                    broken.append(f"{look}, but it was in use: {use}")
            if reason == "deleted" and not any(
                call.begun <= look.done for call in history.of("delete", environment=environment)
            ):
                broken.append(f"nobody deleted it: {look}")
        for beat in history.of("heartbeat", environment=environment):
            ended = history.of("delete", environment=environment)
            if beat.error == "environment_ended" and not any(call.begun < beat.done for call in ended):
                last = max(
                    (
                        call.begun + call.about["lifetime"]
                        for call in (create, *beats)
                        if call.done < beat.begun
                    ),
                    default=0.0,
                )
                used = max(
                    (call.begun for call in (create, *beats) if call.done < beat.begun), default=create.begun
                )
                idle = used + create.about["idle"]
                if beat.done + slack < min(last, idle):
                    broken.append(f"refused while it had time left: {beat}")
    return broken


def check(history: History, *rules: Callable[[History], Iterable[str]], seed: object) -> None:
    """Fails with what is broken, the seed and the whole history."""
    broken = [f"{rule.__name__}: {why}" for rule in rules for why in rule(history)]
    assert not broken, f"seed {seed}\n" + "\n".join(broken) + f"\n\n{history}"
