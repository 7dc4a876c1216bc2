"""Environments for the tests of this folder, kept by a process of its own: root's, or another user's.

Run as a script, it reads requests and writes answers, each a line of JSON; bytes travel as base64. What makes it
different from the daemon is that it can leave out a defence: `create` takes a list of things to do without, and
changes the plan (never the product) before the helper gets to see it. It also takes another helper, and another
program for seccomp.

    <step>       every step of this name is left out of the plan: confine, drop, mask, readonly, seal, ...
    landlock     Landlock with a rule that allows everything
    seccomp      a filter that allows everything
    own-proc     the host's /proc in place of one of its own
    own-root     the stored tree that its / is, but writable
    sealed       the helper runs from a memfd that can be written to

With the name of another backend as a further argument it keeps environments of that, whole ones alone.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skerry.backends import blanks
from skerry.backends.base import Backend, InstanceSpec
from skerry.backends.machine import Machine
from skerry.backends.namespace import NamespaceBackend
from skerry.daemon.app import BACKENDS
from skerry.errors import SkerryError
from skerry.guest import files
from skerry.guest.channel import Channel
from skerry.guest.process import GuestProcess
from skerry.guest.start import Restrictions, Start
from skerry.host import launcher, mounts, plan
from skerry.host.launcher import Step
from skerry.ids import new_id
from skerry.images.store import ImageStore
from skerry.manager.executions.profiles import ExecutionProfile, Profiles
from skerry.policy import MIB, Limits, Policy

ALLOW_ALL = struct.pack("<HBBI", 0x06, 0, 0, 0x7FFF0000)
ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "LANG": "C.UTF-8", "HOME": "/workspace"}
OUTPUT_MAX = 4 * MIB
OTHERS = frozenset({"landlock", "seccomp", "own-proc", "own-root", "sealed"})


def decode_steps(data: bytes) -> list[Step]:
    """The reverse of launcher.encode_steps."""
    steps: list[Step] = []
    at = 0
    while at < len(data):
        (count,) = struct.unpack_from("<H", data, at)
        at += 2
        words = []
        for _ in range(count):
            end = data.index(b"\0", at)
            words.append(data[at:end].decode("utf-8", "surrogateescape"))
            at = end + 1
        steps.append(tuple(words))
    return steps


def weaken_blank(steps: list[Step], without: set[str], binds: list[list[str]]) -> list[Step]:
    """The first list without some of its defences, and with parts of the host (source, name below /dev, flags)."""
    sources: list[Step] = []
    places: list[Step] = []
    if "own-proc" in without:
        sources.append(("tree", "61", "/proc", "rec"))
        steps = [("place", "61", "proc") if step[0] == "proc" else step for step in steps]
    for slot, (source, name, *flags) in enumerate(binds, 50):
        sources.append(("tree", str(slot), source, *(flags or ["rec"])))
        places += [("dir", f"dev/{name}", "0755"), ("place", str(slot), f"dev/{name}")]
    first = next(i for i, step in enumerate(steps) if step[0] == "stage")
    sealed = next(i for i, step in enumerate(steps) if step[0] == "seal")
    steps = [*steps[:first], *sources, *steps[first:sealed], *places, *steps[sealed:]]
    return [step for step in steps if step[0] not in without]


def weaken_image(steps: list[Step], without: set[str]) -> list[Step]:
    """The second list without some of its defences."""
    if "own-root" in without:
        steps = [(*step[:3], "") if step[:2] == ("tree", "0") else step for step in steps]
        steps.remove(("own", "."))
    return [step for step in steps if step[0] not in without]


def weaken(steps: list[Step], without: set[str]) -> list[Step]:
    """The third list without some of its defences."""
    if "landlock" in without:
        at = next(i for i, step in enumerate(steps) if step[0] == "confine")
        steps = [*steps[:at], ("allow", "/", "rw"), *steps[at:]]
    return [step for step in steps if step[0] not in without]


class _Unsealed(launcher.Helper):
    """One file for all environments, which whoever gets hold of it can change."""

    def _copy(self) -> int:
        low = os.memfd_create("skerry-guest", os.MFD_CLOEXEC)
        os.write(low, self._program)
        # For reading: a file that somebody has open for writing is not executed.
        fd = os.open(f"/proc/self/fd/{low}", os.O_RDONLY | os.O_CLOEXEC)
        os.close(low)
        return fd


class Keeper:
    def __init__(self, home: str, rung: str = "") -> None:
        self._home = home
        self._machine = None if rung else Machine(home)
        self._backend: Backend = (
            NamespaceBackend(self._machine) if self._machine else BACKENDS[rung](Machine(home))
        )
        self._image = ImageStore(Path(home, "images")).get("host")
        self._channels: dict[str, Channel] = {}
        self._processes: dict[str, GuestProcess] = {}
        self._creating = asyncio.Lock()
        blanks.READY = 0  # each is made for its own weaknesses

    async def unavailable(self) -> str:
        """Why its backend does not work here; empty if it does."""
        found = await self._backend.capabilities()
        return "" if found.available else found.reason

    async def create(
        self,
        without: list[str],
        binds: list[list[str]],
        helper: str | None,
        program: str | None,
        profile: str,
        limits: dict[str, Any],
        workspace: str,
    ) -> dict[str, Any]:
        """A new environment: its id, and the host's pid of its process 1 (0 if there is none)."""
        id_ = new_id()
        policy = Policy(profile=profile, limits=Limits(**limits), workspace=workspace)
        async with self._creating:
            other = None if program is None else base64.b64decode(program)
            filter = ALLOW_ALL if "seccomp" in without else other
            restore = self._weaken(self._machine, set(without), binds, helper, filter)
            try:
                await self._backend.start(InstanceSpec(id_, self._image, policy))
            finally:
                restore()
        self._channels[id_] = await Channel.open(await self._backend.connect(id_))
        live = getattr(self._backend, "_live", {}).get(id_)
        return {"id": id_, "pid": 0 if live is None else live.running.handle.pid}

    def _weaken(
        self,
        machine: Machine | None,
        without: set[str],
        binds: list[list[str]],
        helper: str | None,
        program: bytes | None,
    ) -> Callable[[], None]:
        if machine is None:
            assert not without, "another backend is taken whole"
            return lambda: None
        copy_tree = mounts.copy_tree
        encode, blank_steps, image_steps = plan.Plan.encode, plan.blank_steps, plan.image_steps
        own_helper, own_filter = machine.helper, machine.filter
        extra: list[int] = []
        known: set[str] = set()

        def decoded(data: bytes) -> list[Step]:
            steps = decode_steps(data)
            known.update(step[0] for step in steps)
            return steps

        def blank(*arguments: Any) -> bytes:
            return launcher.encode_steps(weaken_blank(decoded(blank_steps(*arguments)), without, binds))

        def image(*arguments: Any) -> bytes:
            return launcher.encode_steps(weaken_image(decoded(image_steps(*arguments)), without))

        def weaker(self: plan.Plan) -> bytes:
            steps = decoded(encode(self))
            unknown = without - OTHERS - known
            assert not unknown, f"no such steps: {unknown}"
            return launcher.encode_steps(weaken(steps, without))

        def writable(path: str, attributes: int, *, recursive: bool) -> int:
            if path.startswith(self._home):
                attributes &= ~mounts.RDONLY
            return copy_tree(path, attributes, recursive=recursive)

        def restore() -> None:
            plan.Plan.encode = encode  # type: ignore[method-assign]
            plan.blank_steps, plan.image_steps = blank_steps, image_steps
            mounts.copy_tree = copy_tree
            if machine.helper is not own_helper:
                machine.helper.close()
            machine.helper = own_helper
            machine.filter = own_filter  # type: ignore[method-assign]
            for fd in extra:
                os.close(fd)

        if without or binds:
            plan.Plan.encode = weaker  # type: ignore[method-assign]
            plan.blank_steps, plan.image_steps = blank, image  # type: ignore[assignment]
        if "own-root" in without:
            mounts.copy_tree = writable
        if helper is not None or "sealed" in without:
            kind = _Unsealed if "sealed" in without else launcher.Helper
            machine.helper = kind(Path(helper) if helper else launcher.HELPER)
        if program is not None:
            fd = os.memfd_create("skerry-other", os.MFD_CLOEXEC)
            os.write(fd, program)
            extra.append(fd)
            machine.filter = lambda profile: fd  # type: ignore[method-assign]
        return restore

    async def stop(self, id: str) -> None:
        channel = self._channels.pop(id, None)
        if channel is not None:
            await channel.close()
        await self._backend.stop(id)

    async def begin(self, id: str, name: str, stdin: str | None, **options: Any) -> dict[str, Any]:
        """Start something, to be known as `name`."""
        options["env"] = {**ENV, **options.get("env", {})}
        if options.get("pty") is not None:
            options["pty"] = tuple(options["pty"])
        if (profile := options.pop("profile", None)) is not None:
            options["restrictions"] = self._restrictions(profile)
        process = await self._channels[id].start(Start(stdin=stdin is not None, **options))
        if stdin is not None:
            await process.write(base64.b64decode(stdin))
            await process.close_stdin()
        self._processes[name] = process
        return {"pid": process.pid}

    def _restrictions(self, profile: str | dict[str, Any]) -> Restrictions:
        if isinstance(profile, str):
            return Profiles().restrictions(profile, self._backend)
        profile = {key: tuple(value) if isinstance(value, list) else value for key, value in profile.items()}
        own = ExecutionProfile("own", **profile)
        return Profiles({"own": own}).restrictions("own", self._backend)

    async def until(self, name: str, text: str) -> None:
        """Return when it has written `text`, which is the last that it writes before it is finished."""
        wanted, seen = base64.b64decode(text), b""
        async for _, data in self._processes[name].output():
            seen += data
            if wanted in seen:
                return
        raise AssertionError(f"it ended after {seen!r}")

    async def finish(self, name: str, seconds: float) -> dict[str, Any]:
        """How it ended and what it wrote; what does not end in time is killed with all that it started."""
        process = self._processes.pop(name)
        streams = {1: bytearray(), 2: bytearray()}

        async def collect() -> None:
            async for stream, data in process.output():
                streams[stream] += data[: max(0, OUTPUT_MAX - len(streams[stream]))]

        reading = asyncio.ensure_future(collect())
        late = False
        try:
            await asyncio.wait_for(asyncio.shield(reading), seconds)
        except TimeoutError:
            late = True
            await process.kill()
            await reading
        end = await process.wait()
        return {
            "code": end.code,
            "signal": end.signal,
            "late": late,
            "stdout": base64.b64encode(streams[1]).decode(),
            "stderr": base64.b64encode(streams[2]).decode(),
        }

    async def kill(self, name: str) -> None:
        await self._processes[name].kill()

    async def write(self, id: str, path: str, data: str) -> None:
        await self._channels[id].write(path, base64.b64decode(data))

    async def read(self, id: str, path: str) -> str:
        return base64.b64encode(await self._channels[id].read(path)).decode()

    async def ping(self, id: str) -> None:
        await self._channels[id].ping()

    async def processes(self, id: str) -> list[dict[str, Any]]:
        return [info._asdict() for info in await self._channels[id].processes()]

    async def watch(self, id: str, name: str, path: str) -> None:
        """Leave a watching applet running, to be known as `name`; returns when it watches."""
        process = (await files._Applet.start(self._channels[id], "watch", path)).process
        self._processes[name] = process
        await anext(aiter(process.output()))

    async def usage(self, id: str) -> dict[str, Any]:
        sample = self._backend.sample(id)
        usage = await self._backend.usage(id)
        return {"oom_kills": sample.oom_kills, "pids": usage.pids, "memory": usage.memory_bytes}

    async def close(self) -> None:
        for id_ in list(self._channels):
            await self.stop(id_)
        await self._backend.close()


async def _serve(home: str, rung: str = "") -> None:
    loop = asyncio.get_running_loop()
    requests = asyncio.StreamReader(limit=64 * MIB)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), sys.stdin)
    keeper = Keeper(home, rung)
    tasks: set[asyncio.Task[None]] = set()

    async def answer(request: dict[str, Any]) -> None:
        try:
            result = await getattr(keeper, request["call"])(**request["arguments"])
            reply: dict[str, Any] = {"number": request["number"], "result": result}
        except SkerryError as error:
            reply = {"number": request["number"], "error": error.to_dict()}
        except Exception as error:
            reply = {"number": request["number"], "failure": repr(error)}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()

    while line := await requests.readline():
        task = asyncio.ensure_future(answer(json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await keeper.close()


if __name__ == "__main__":
    asyncio.run(_serve(*sys.argv[1:]))
