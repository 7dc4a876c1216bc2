"""An actor with environments of its own, who knows what must be true of each."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from skerry import AsyncClient, AsyncEnvironment
from tests.soak import model, plan
from tests.soak.model import Model, Op
from tests.soak.world import GONE, REFUSED, Refusal, Unanswered, World, create, delete

COUNT = "N=$((N+1)); echo $N"
LOG = "log"
"""To which commands append a word that only they have."""
SESSION = "s"
SESSION_COUNT = "n = globals().get('n', 0) + 1\nn"
INTERPRETERS = (
    "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline 2>/dev/null; echo; done | grep -c '^python3 '"
)
SLEEPER = "sleep 1000"
TRACE = 40
"""How many calls about an environment are told with what is broken."""
PENDING_MAX = 4
"""More calls than this without an answer, and the environment is given up: too much could be true of it."""
T = TypeVar("T")


class Broken(Exception):
    """A promise, and that has been told."""


@dataclass
class Owned:
    """What is known of one environment."""

    id: str
    env: AsyncEnvironment
    model: Model = field(default_factory=Model)
    words: set[str] = field(default_factory=set)
    """In the log, because that was acknowledged."""
    maybe: set[str] = field(default_factory=set)
    """Perhaps in the log."""
    background: set[str] = field(default_factory=set)
    killed: set[str] = field(default_factory=set)
    """Background executions that were killed, or perhaps were."""
    session: set[int] = field(default_factory=lambda: {0})
    """What its session's counter may be."""
    session_epoch: int = 0
    """The daemon that the session was last used with; sessions end with their daemon."""
    deleting: bool = False
    """Somebody has asked for its end, and was not answered."""
    trace: deque[str] = field(default_factory=lambda: deque(maxlen=TRACE))


CANCELED = "canceled"


class Owner:
    def __init__(self, world: World, tenant: str, number: int, client: AsyncClient) -> None:
        self._world = world
        self._tenant = tenant
        self._number = number
        self._client = client
        self._slots: list[Owned | None] = [None, None]
        self._actions: dict[str, Callable[[Owned, plan.Action], Awaitable[None]]] = {
            kind: getattr(self, f"_{kind}") for kind in plan.WEIGHTS
        }

    async def act(self, action: plan.Action) -> None:
        owned = self._slots[action.slot]
        try:
            if owned is None:
                self._slots[action.slot] = await self._create(action)
                return
            if owned.model.pending > PENDING_MAX:
                action = plan.Action(**{**vars(action), "kind": "delete", "gives_up": None})
            await self._actions[action.kind](owned, action)
        except Unanswered:
            pass
        except Broken:
            self._slots[action.slot] = None  # nothing more is known of it
        except Refusal as refusal:
            self._refused(owned, action, refusal)

    def _refused(self, owned: Owned | None, action: plan.Action, refusal: Refusal) -> None:
        if refusal.code in REFUSED:
            return
        if owned is not None and refusal.code in GONE and owned.deleting:
            self._world.ended.setdefault(owned.id, time.monotonic())
            self._slots[action.slot] = None
            return
        if owned is not None and refusal.code == CANCELED and owned.deleting:
            self._slots[action.slot] = None  # it is being deleted by the call that nobody waited for
            return
        self._world.fail(f"{action.kind}: {refusal}", [] if owned is None else [owned.id, *owned.trace])
        self._slots[action.slot] = None  # one report of it is enough

    async def _ask(self, owned: Owned, what: str, call: Awaitable[T], gives_up: float | None) -> T:
        begun = time.monotonic()
        told = "unanswered"
        try:
            answer = await self._world.ask(what, call, gives_up)
            told = repr(answer)[:160]
        except Refusal as refusal:
            told = str(refusal)
            raise
        finally:
            owned.trace.append(
                f"[{begun:.3f}, {time.monotonic():.3f}] daemon {self._world.epoch} {what} -> {told}"
            )
        return answer

    async def _op(self, owned: Owned, op: Op, call: Awaitable[Any], gives_up: float | None) -> str:
        """Make a call that the model knows of, and check its answer."""
        answer = await self._answer(owned, op, call, gives_up)
        self._check(owned, owned.model.answered(op, answer, time.monotonic()))
        return answer

    async def _answer(self, owned: Owned, op: Op, call: Awaitable[Any], gives_up: float | None) -> str:
        try:
            answer = await self._ask(owned, " ".join(op)[:60], call, gives_up)
        except Unanswered:
            if op[0] != "read":
                owned.model.unanswered(op, time.monotonic())
            raise
        except Refusal as refusal:
            if refusal.code != model.MISSING:
                raise
            return model.MISSING
        if op[0] == "count":
            if answer.outcome != "completed":
                raise _ended_as("a command", answer)
            return str(answer.stdout).strip()
        return answer if op[0] == "read" else "ok"

    def _check(self, owned: Owned, broken: str) -> None:
        """Raises Broken, if something is."""
        if broken:
            self._world.fail(broken, [owned.id, *owned.trace])
            raise Broken

    async def _create(self, action: plan.Action) -> Owned:
        workspace = "disk" if action.chance < 0.15 else "memory"
        made = await create(self._world, self._client, self._tenant, action, workspace=workspace)
        return Owned(made, _at(made, self._client))

    async def _count(self, owned: Owned, action: plan.Action) -> None:
        await self._op(owned, ("count",), owned.env.execute(COUNT), action.gives_up)

    async def _run(self, owned: Owned, action: plan.Action) -> None:
        await self._append_with(owned, action, lambda line: owned.env.run(["sh", "-c", line]))

    async def _append(self, owned: Owned, action: plan.Action) -> None:
        await self._append_with(owned, action, owned.env.execute)

    async def _append_with(
        self, owned: Owned, action: plan.Action, start: Callable[[str], Awaitable[Any]]
    ) -> None:
        word = f"w{self._number}x{action.number}"
        owned.maybe.add(word)
        result = await self._ask(owned, f"append {word}", start(f"echo {word} >> {LOG}"), action.gives_up)
        if result.outcome != "completed":
            raise _ended_as(f"appending {word}", result)
        owned.maybe.discard(word)
        owned.words.add(word)
        self._world.acknowledged(self._tenant, "execution", owned.id, word)

    def _content(self, action: plan.Action, mark: str = "") -> str:
        word = f"{mark}c{self._number}x{action.number}."
        return word * (plan.LARGE // len(word)) if action.large else word

    async def _write(self, owned: Owned, action: plan.Action) -> None:
        content = self._content(action)
        call = owned.env.files.write(action.path, content)
        await self._op(owned, ("write", action.path, content), call, action.gives_up)
        self._world.acknowledged(self._tenant, "file.write", owned.id)

    async def _two_writes(self, owned: Owned, action: plan.Action) -> None:
        contents = [self._content(action, mark) for mark in "yz"]
        ops: list[Op] = [("write", action.path, content) for content in contents]
        calls = [
            self._answer(owned, op, owned.env.files.write(action.path, op[2]), action.gives_up) for op in ops
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        now = time.monotonic()
        done = [(op, answer) for op, answer in zip(ops, answers, strict=True) if isinstance(answer, str)]
        if len(done) == 2:
            self._check(owned, owned.model.answered_together(done[0], done[1], now))
        elif done:
            self._check(owned, owned.model.answered(*done[0], now))
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer

    async def _read(self, owned: Owned, action: plan.Action) -> None:
        await self._op(owned, ("read", action.path), owned.env.files.read(action.path), action.gives_up)

    async def _rename(self, owned: Owned, action: plan.Action) -> None:
        op = ("rename", action.path, action.other)
        await self._op(owned, op, owned.env.files.rename(action.path, action.other), action.gives_up)

    async def _remove(self, owned: Owned, action: plan.Action) -> None:
        await self._op(owned, ("delete", action.path), owned.env.files.remove(action.path), action.gives_up)

    async def _time_out(self, owned: Owned, action: plan.Action) -> None:
        """A timeout that meets the command's end: the shell keeps its state either way."""
        seconds = 0.02 + action.chance * 0.03
        call = owned.env.execute(f"sleep {seconds:.4f}", timeout=seconds + 0.004 * (action.chance - 0.5))
        result = await self._ask(owned, "time_out", call, action.gives_up)
        if result.outcome not in ("completed", "timed_out"):
            raise _ended_as("a command that met its timeout", result)
        await self._op(owned, ("count",), owned.env.execute(COUNT), None)

    async def _background(self, owned: Owned, action: plan.Action) -> None:
        if len(owned.background) > 3:
            return
        path, body = f"/environments/{owned.id}/executions", {"argv": SLEEPER.split()}
        call = self._client.transport.call("POST", path, json=body)
        answer: dict[str, Any] = await self._ask(owned, "background", call, action.gives_up)
        owned.background.add(answer["execution_id"])

    async def _kill(self, owned: Owned, action: plan.Action) -> None:
        if not owned.background:
            return
        execution = sorted(owned.background)[0]
        owned.background.discard(execution)
        owned.killed.add(execution)
        path = f"/environments/{owned.id}/executions/{execution}"
        await self._ask(
            owned, f"kill {execution}", self._client.transport.call("DELETE", path), action.gives_up
        )
        told = await self._ask(owned, f"look at {execution}", self._client.transport.call("GET", path), None)
        if told["state"] == "running":
            self._check(owned, f"{execution} still runs after its kill: {told}")

    async def _attach(self, owned: Owned, action: plan.Action) -> None:
        if not owned.background:
            return
        execution = sorted(owned.background)[0]

        async def look() -> str:
            async with await owned.env.attach(execution) as process:
                return process.id

        await self._ask(owned, f"attach {execution}", look(), action.gives_up)

    def _session_may_be(self, owned: Owned) -> None:
        if owned.session_epoch != self._world.epoch:
            owned.session |= {0}

    async def _session(self, owned: Owned, action: plan.Action) -> None:
        epoch = self._world.epoch
        session = await self._ask(owned, "session", owned.env.session("python", id=SESSION), None)
        self._session_may_be(owned)
        try:
            result = await self._ask(owned, "session.run", session.run(SESSION_COUNT), action.gives_up)
        except Unanswered:
            owned.session |= {value + 1 for value in owned.session} | {0}
            raise
        except Refusal as refusal:
            if refusal.code == "session_not_found" and epoch != self._world.epoch:
                return
            raise
        self._session_may_be(owned)
        if result.outcome != "completed" or result.value is None:
            if epoch != self._world.epoch:
                return
            raise _ended_as("a call in a session", result)
        value = int(result.value)
        if value - 1 not in owned.session:
            self._check(owned, f"the session counts {value} after {sorted(owned.session)}")
        owned.session, owned.session_epoch = {value}, epoch

    async def _interrupt(self, owned: Owned, action: plan.Action) -> None:
        session = await self._ask(owned, "session", owned.env.session("python", id=SESSION), None)

        async def interrupt() -> None:
            await asyncio.sleep(action.chance * 0.1)
            await session.interrupt()

        run = self._ask(owned, "session.run", session.run("import time; time.sleep(0.05)"), action.gives_up)
        told = await asyncio.gather(
            run, self._ask(owned, "session.interrupt", interrupt(), None), return_exceptions=True
        )
        for answer in told:
            if isinstance(answer, Refusal) and answer.code not in ("session_not_found", "conflict"):
                raise answer
        if any(isinstance(answer, Exception) for answer in told):
            owned.session |= {0}

    async def _restart_sessions(self, owned: Owned, action: plan.Action) -> None:
        """Three at once: one interpreter is left."""
        epoch = self._world.epoch
        session = await self._ask(owned, "session", owned.env.session("python", id=SESSION), None)
        owned.session |= {0}
        told = await asyncio.gather(
            *(self._ask(owned, "session.restart", session.restart(), None) for _ in range(3)),
            return_exceptions=True,
        )
        for answer in told:
            if isinstance(answer, Refusal) and answer.code not in ("session_not_found", "conflict", "busy"):
                raise answer
        if any(isinstance(answer, Exception) for answer in told):
            return
        owned.session, owned.session_epoch = {0}, epoch
        deadline = time.monotonic() + 10
        while True:
            result = await self._ask(owned, "interpreters", owned.env.run(["sh", "-c", INTERPRETERS]), None)
            if epoch != self._world.epoch or int(result.stdout.strip() or 0) <= 1:
                return
            if time.monotonic() > deadline:
                self._check(owned, f"{result.stdout.strip()} interpreters run, and one session is open")
                return
            await asyncio.sleep(0.2)

    async def _network(self, owned: Owned, action: plan.Action) -> None:
        wanted = "allowlist" if action.chance < 0.7 else "none"
        allow = [f"h{action.number}.example.com"] if wanted == "allowlist" else None
        await self._ask(owned, f"network {wanted}", owned.env.network.set(wanted, allow), action.gives_up)
        if action.gives_up is None:
            told = await self._ask(owned, "network.show", owned.env.network.show(), None)
            if told["network"] != wanted or (allow and told["allow"] != allow):
                self._check(owned, f"the network is {told}, {wanted} {allow} was acknowledged")

    async def _heartbeat(self, owned: Owned, action: plan.Action) -> None:
        await self._ask(owned, "heartbeat", owned.env.heartbeat(3600), action.gives_up)

    async def _look(self, owned: Owned, action: plan.Action) -> None:
        info = await self._ask(owned, "look", owned.env.info(), action.gives_up)
        if info.state == "running":
            return
        if not owned.deleting:
            self._check(owned, f"{owned.id} is {info.state}, and nobody asked for it: {info.ended_reason}")
        if info.state == "ended":
            self._world.ended.setdefault(owned.id, time.monotonic())
            self._slots[self._slots.index(owned)] = None

    async def _list(self, owned: Owned, action: plan.Action) -> None:
        before = {one.id for one in self._slots if one is not None and not one.deleting}
        ended = set(self._world.ended)
        listed = await self._ask(owned, "list", self._client.environments(), action.gives_up)
        found = {info.environment_id for info in listed}
        if before - found:
            self._check(owned, f"{before - found} are not listed")
        # An end is told once it cannot be undone; what is being removed is listed as `deleting` until it is gone.
        back = ended & {info.environment_id for info in listed if info.state != "deleting"}
        if back:
            self._check(owned, f"{back} are back, though their end was told")
        others = {each for each in found if self._world.known.get(each, self._tenant) != self._tenant}
        if others:
            self._check(owned, f"{others} are another tenant's")

    async def _verify(self, owned: Owned, action: plan.Action) -> None:
        """Compare everything that is known with what is there."""
        for path in plan.PATHS:
            await self._op(owned, ("read", path), owned.env.files.read(path), None)
        await self._op(owned, ("count",), owned.env.execute(COUNT), None)
        try:
            log = await self._ask(owned, "read log", owned.env.files.read(LOG), None)
        except Refusal as refusal:
            if refusal.code != model.MISSING:
                raise
            log = ""
        counts = Counter(log.split())
        wrong = {word: counts[word] for word in owned.words if counts[word] != 1}
        wrong |= {
            word: count
            for word, count in counts.items()
            if count > 1 or word not in owned.words | owned.maybe
        }
        if wrong:
            self._check(owned, f"in the log {wrong}, where acknowledged words are once, others at most once")
        runs = await self._ask(owned, "executions", owned.env.executions(), None)
        running = {run.execution_id for run in runs if run.state == "running"}
        if owned.background - running:
            self._check(owned, f"background executions are lost: {owned.background - running}")

    async def _delete(self, owned: Owned, action: plan.Action) -> None:
        await self._verify(owned, action)
        owned.deleting = True
        await delete(self._world, self._client, owned.id, action.gives_up)
        self._slots[action.slot] = None

    async def _delete_and_run(self, owned: Owned, action: plan.Action) -> None:
        await self._delete_beside(owned, action, self._append(owned, action))

    async def _delete_and_network(self, owned: Owned, action: plan.Action) -> None:
        call = self._ask(owned, "network", owned.env.network.set("allowlist", ["a.example.com"]), None)
        await self._delete_beside(owned, action, call)

    async def _delete_beside(self, owned: Owned, action: plan.Action, other: Awaitable[Any]) -> None:
        """A call that meets a delete: both are answered, and afterwards it is gone."""
        owned.deleting = True
        told = await asyncio.gather(
            other, delete(self._world, self._client, owned.id, action.gives_up), return_exceptions=True
        )
        if isinstance(told[0], Refusal) and told[0].code not in (*GONE, CANCELED, "strange"):
            self._check(owned, f"beside a delete: {told[0]}")
        if isinstance(told[1], Exception):
            raise told[1]
        self._slots[action.slot] = None


def _ended_as(what: str, result: Any) -> Refusal:
    words = f"{what} ended as {result.outcome}: {result.message} {result.stderr}"
    return Refusal(words, CANCELED if result.outcome == CANCELED else "strange")


def _at(environment: str, client: AsyncClient) -> AsyncEnvironment:
    """One whose id is known, without asking for it."""
    env = AsyncEnvironment(client=client)
    env._id = environment
    return env


async def owner(world: World, tenant: str, number: int) -> None:
    async with world.client(tenant) as client:
        one = Owner(world, tenant, number, client)
        for action in plan.actions(world.seed, f"owner{number}"):
            await world.up.wait()
            if not world.running:
                break
            await one.act(action)
        for slot in (0, 1):
            last = plan.Action("verify", slot, 0, "a", "b", False, None, 0.0)
            await one.act(last)
