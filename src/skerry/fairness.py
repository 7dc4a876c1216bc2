"""A budget of event-loop time for untrusted peers, shared fairly between them.

One event loop serves all tenants. Guests, connections of the egress proxy and requests can make work for it at any
rate, so their work is metered in seconds of loop time. A flow that needs little is never delayed. Those that want more
than a fair share, and those of a group (tenant) that does, wait for turns, which go round by group, and inside a group
by flow. While others are at work who need little, all that wait get `SHARE` of the loop together; if all want much,
`CROWDED`; and a group that is alone gets all of it.

How to use it, for a reader of a transport:

    flow = budget().flow(group)        # one for each environment or connection
    began = perf_counter()
    ...                                # work for at most SLICE, then look at the clock
    if not flow.spend(perf_counter() - began):
        transport.pause_reading()
        flow.wait(go_on)               # go_on() is called once, when it is the flow's turn
    ...
    flow.close()                       # a flow that waits is forgotten

A coroutine says `await flow.turn()` instead of the pause. Work that is not done in `go_on` (what a task does later with
the bytes that were read) is charged with `spend()` as well; what it returns may then be ignored: the flow pays before
it is let in again. Requests of one tenant are one flow, and wait for it in a `Line`.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from time import perf_counter
from typing import Any, Generic, TypeVar

SHARE = 0.25
"""Of the loop's time, for all flows that wait, while others are at work."""
CROWDED = 0.8
"""The same, while all that are at work wait."""
FAIR = 0.6
"""Of the loop's time, divided by the groups that are at work: who needs less than that does not wait."""
SLICE = 0.001
"""Seconds of work of one flow, after which the loop serves others; also what a flow may use without waiting."""
BURST = 0.004
"""Seconds of work that all flows may do at once after a pause."""
DEBT_MAX = 1.0
"""Seconds. One long piece of work does not shut a flow out for longer than paying this takes."""
STRANGERS = "(strangers)"
"""A group that is no tenant."""
COUNT_EVERY = 0.01
LINES_MAX = 1000
"""Tenants whose lines are kept while nobody waits in them."""
ACTIVE = 0.05
"""Seconds after its last work for which a flow that needs little counts as at work."""

T = TypeVar("T")


class Group:
    """What all flows of one tenant do together."""

    __slots__ = ("__weakref__", "_allowance", "name", "seen")

    def __init__(self, name: str) -> None:
        self.name = name
        self._allowance = SLICE
        self.seen = 0.0

    def spend(self, now: float, seconds: float, share: float) -> bool:
        """Whether it is within its share of the time that goes by."""
        allowance = min(SLICE, self._allowance + (now - self.seen) * share)
        self._allowance = max(-SLICE, allowance - seconds)
        self.seen = now
        return self._allowance > 0


class Flow:
    """The work that one peer makes. `group` may be changed when its tenant becomes known."""

    __slots__ = ("_allowance", "_budget", "_go_on", "_granted", "_group", "_seen", "heavy")

    def __init__(self, budget: Budget, group: str) -> None:
        self._budget = budget
        self._group = budget.group(group)
        self._allowance = SLICE
        self._seen = 0.0
        self._granted = False
        """Whether it has had its turn, and not used it up."""
        self.heavy = False
        """Whether it has waited, and not been idle since for long enough to earn a slice."""
        self._go_on: Callable[[], None] | None = None

    @property
    def group(self) -> str:
        return self._group.name

    @group.setter
    def group(self, name: str) -> None:
        self._group = self._budget.group(name)

    def spend(self, seconds: float) -> bool:
        """Charge work that was done. False: stop, and `wait()` for the next turn."""
        budget = self._budget
        now = budget.clock()
        shared, own = budget.fair_shares(self.group, now)
        earned = max(0.0, now - self._seen - seconds) * own
        if earned >= SLICE:
            self.heavy = False
        allowance = min(SLICE, self._allowance + earned)
        self._allowance = max(-DEBT_MAX, allowance - seconds)
        self._seen = now
        within = self._group.spend(now, seconds, shared)
        if seconds:
            budget.charge(self, now, seconds)
        if self._allowance <= 0:
            self._granted = False
        return self._allowance > 0 and (within or self._granted)

    def wait(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` when the flow may work for another SLICE; at most one call is pending."""
        waits = self._go_on is not None
        self._go_on = go_on
        self.heavy = True
        if not waits:
            self._budget.enqueue(self)

    async def turn(self) -> None:
        """Return at once while the flow is within its allowance, else when it is its turn."""
        if self.spend(0.0):
            return
        turn = asyncio.Event()
        self.wait(turn.set)
        try:
            await turn.wait()
        except asyncio.CancelledError:
            self.close()
            raise

    def close(self) -> None:
        """Give up a pending turn."""
        if self._go_on is not None:
            self._go_on = None
            self._budget.dequeue(self)

    # ---- for the budget ----

    def renew(self, now: float) -> bool:
        """Add one slice, instead of what the time of waiting would have. True: it has paid its debt and may work."""
        self._allowance = min(SLICE, self._allowance + SLICE)
        self._seen = now
        self._granted = self._allowance > 0
        return self._granted

    def run(self) -> None:
        go_on, self._go_on = self._go_on, None
        if go_on is not None:
            go_on()


class Timed(Generic[T]):
    """Awaits a coroutine, and charges a flow for the time of each of its steps."""

    __slots__ = ("_flow", "_work")

    def __init__(self, work: Coroutine[Any, Any, T], flow: Flow) -> None:
        self._work = work
        self._flow = flow

    def __await__(self) -> Generator[Any, Any, T]:
        work, flow = self._work, self._flow
        value: Any = None
        error: BaseException | None = None
        while True:
            began = perf_counter()
            try:
                waits = work.send(value) if error is None else work.throw(error)
            except StopIteration as done:
                answer: T = done.value
                return answer
            finally:
                flow.spend(perf_counter() - began)
            try:
                value, error = (yield waits), None
            except BaseException as thrown:  # the task is canceled: the work has to know
                value, error = None, thrown


async def timed(work: Coroutine[Any, Any, T], flow: Flow) -> T:
    """The same, for a task of its own."""
    return await Timed(work, flow)


class Line:
    """A queue of callbacks and coroutines that share one flow: first come, first served.

    One turn of the flow resumes `at_a_turn` of them.
    """

    def __init__(self, flow: Flow, at_a_turn: int = 1) -> None:
        self.flow = flow
        self._at_a_turn = at_a_turn
        self._waiting: deque[Callable[[], None]] = deque()

    @property
    def busy(self) -> bool:
        """True while somebody waits."""
        return bool(self._waiting)

    def spend(self, seconds: float) -> bool:
        """Charge work that was done. False: stop, and continue with `later()`."""
        return self.flow.spend(seconds) and not self._waiting

    def later(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` at the flow's turn, after those already waiting."""
        self._waiting.append(go_on)
        self.flow.wait(self._next)

    async def turn(self) -> bool:
        """Return at once if the queue is empty and the flow within its allowance, else in turn. True: it waited."""
        if self.spend(0.0):
            return False
        turn = asyncio.Event()
        go_on = turn.set
        self.later(go_on)
        try:
            await turn.wait()
        except asyncio.CancelledError:
            if go_on in self._waiting:
                self._waiting.remove(go_on)
            raise
        return True

    async def pause(self) -> None:
        """Between two pieces of long work: let everybody else work, then wait for the next turn."""
        await asyncio.sleep(0)
        await self.turn()

    def close(self) -> None:
        """Drop all that wait; they are never called."""
        self._waiting.clear()
        self.flow.close()

    def _next(self) -> None:
        for _ in range(min(self._at_a_turn, len(self._waiting))):
            self._waiting.popleft()()
        if self._waiting:
            self.flow.wait(self._next)


class Lines:
    """The line of each tenant, for its requests. All take part in the running loop's budget."""

    def __init__(self) -> None:
        self._lines: dict[str, Line] = {}

    def of(self, tenant: str) -> Line:
        return self._line(tenant, tenant)

    def of_stranger(self, address: str) -> Line:
        """For requests without a tenant: those of an address are one flow, and all strangers one group."""
        return self._line(f"{STRANGERS} {address}", STRANGERS)

    def _line(self, name: str, group: str) -> Line:
        found = self._lines.get(name)
        if found is None:
            if len(self._lines) >= LINES_MAX:
                self._lines = {name: line for name, line in self._lines.items() if line.busy}
            found = self._lines[name] = Line(budget().flow(group))
        return found


class Budget:
    """Deficit round robin over groups, then over the flows of a group, with one token bucket for all of them.

    What a flow is given when it waits comes out of the bucket, a slice at a time. So a debt delays those who made it,
    and others for a slice at most. To be used in the event loop's thread only.
    """

    def __init__(
        self,
        share: float = SHARE,
        *,
        clock: Callable[[], float] = perf_counter,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.clock = clock
        self._loop = loop
        self.charged: Callable[[str, float], None] = lambda group, seconds: None
        """Told of all work: its group, and the seconds that it took."""
        self._share = share
        self._level = BURST
        self._filled = clock()
        self._known: weakref.WeakValueDictionary[str, Group] = weakref.WeakValueDictionary()
        self._groups: dict[str, deque[Flow]] = {}
        """Flows that wait, by group, in the order in which groups have their turns."""
        self._waiting = 0
        self._pump: asyncio.Handle | None = None
        self._light = self._shared = float("-inf")
        """When a flow worked that needs little, and when one worked that is not of the group before it."""
        self._last = ""
        self._at_work = 0
        """Groups, when they were counted last."""
        self._counted = float("-inf")

    def flow(self, group: str = "") -> Flow:
        return Flow(self, group)

    def group(self, name: str) -> Group:
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = Group(name)
        return found

    def fair_shares(self, group: str, now: float) -> tuple[float, float]:
        """What this group would get, and what one flow more of it, as parts of the loop's time."""
        if now - self._counted > COUNT_EVERY:
            self._counted = now
            self._at_work = sum(now - each.seen <= ACTIVE for each in list(self._known.values()))
        share = FAIR / max(1, self._at_work, len(self._groups))
        own = self._groups.get(group)
        return share, share if own is None else share / (1 + len(own))

    @property
    def waiting(self) -> int:
        """Flows that wait for their turn."""
        return self._waiting

    # ---- for flows ----

    def charge(self, flow: Flow, now: float, seconds: float) -> None:
        if not flow.heavy:
            self._light = now
        if flow.group != self._last:
            self._last, self._shared = flow.group, now
        self.charged(flow.group, seconds)

    def enqueue(self, flow: Flow) -> None:
        self._groups.setdefault(flow.group, deque()).append(flow)
        self._waiting += 1
        if self._pump is None:
            self._pump = (self._loop or asyncio.get_running_loop()).call_soon(self._next)

    def dequeue(self, flow: Flow) -> None:
        for group, flows in self._groups.items():
            if flow in flows:
                flows.remove(flow)
                self._waiting -= 1
                if not flows:
                    del self._groups[group]
                return

    # ---- whose turn it is ----

    def _next(self) -> None:
        """Let one flow work for a slice; the loop serves everybody else before the next one."""
        self._pump = None
        now = self.clock()
        share = self._share if now - self._light <= ACTIVE else CROWDED
        self._level = min(BURST, self._level + (now - self._filled) * share)
        self._filled = now
        loop = self._loop or asyncio.get_running_loop()
        flow = self._turn(now, alone=now - max(self._light, self._shared) > ACTIVE)
        if flow is not None:
            flow.run()
        if self._waiting and self._pump is None:
            wait = -self._level / share + SLICE
            self._pump = loop.call_soon(self._next) if self._level > 0 else loop.call_later(wait, self._next)

    def _turn(self, now: float, alone: bool) -> Flow | None:
        """The next one that has no debt left, if the bucket lasts until then.

        Its group goes to the end of the line, and it to the end of its group.
        """
        while self._groups and (alone or self._level > 0):
            group, flows = next(iter(self._groups.items()))
            del self._groups[group]
            flow = flows.popleft()
            may = flow.renew(now)
            if not alone:
                self._level -= SLICE
            if not may:
                flows.append(flow)
            else:
                self._waiting -= 1
            if flows:
                self._groups[group] = flows
            if may:
                return flow
        return None


_lines: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Lines] = weakref.WeakKeyDictionary()
_budgets: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Budget] = weakref.WeakKeyDictionary()


def budget(loop: asyncio.AbstractEventLoop | None = None) -> Budget:
    """The one of this loop, or of the running one."""
    loop = loop or asyncio.get_running_loop()
    found = _budgets.get(loop)
    if found is None:
        found = _budgets[loop] = Budget()
    return found


def lines() -> Lines:
    """Of the running loop."""
    loop = asyncio.get_running_loop()
    found = _lines.get(loop)
    if found is None:
        found = _lines[loop] = Lines()
    return found
