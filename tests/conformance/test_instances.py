"""Instances: how they come, what they tell of themselves, and how they go."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
from pathlib import Path

import pytest

from skerry.errors import EnvironmentNotFound, GuestFailed, LaunchFailed, LimitReached
from skerry.guest import frames
from skerry.guest.channel import Channel
from skerry.guest.frames import Type
from skerry.guest.start import Start
from skerry.ids import new_id
from skerry.policy import ISOLATIONS, MIB
from tests.conformance.harness import ENV, LIMITS, Box, Site, eventually, expect, finish, needs


def on_host(marker: str) -> list[int]:
    """Pids, as the host has them, of processes with `marker` among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if marker.encode() in arguments:
            found.append(int(path.parts[2]))
    return found


async def test_a_backend_says_what_it_gives(site: Site) -> None:
    capabilities = await site.backend.capabilities()
    assert capabilities.available
    assert site.backend.isolation in ("none", *ISOLATIONS)
    assert capabilities.rootless == (os.geteuid() != 0)


async def test_a_started_instance_is_listed_and_a_stopped_one_is_not(site: Site) -> None:
    async with site.box() as box:
        assert box.id in await site.backend.list()
    assert box.id not in await site.backend.list()


async def test_a_started_instance_accepts_a_connection_at_once(site: Site) -> None:
    spec = site.spec()
    await site.backend.start(spec)
    try:
        sock = await site.backend.connect(spec.environment_id)
        assert not sock.getblocking()
        sock.close()
    finally:
        await site.backend.stop(spec.environment_id)


async def test_an_instance_tells_where_its_workspace_is(box: Box) -> None:
    result = await box.run("pwd")
    assert result.stdout.decode() == f"{box.instance.workspace_path}\n"
    assert box.instance.workspace in ("disk", "memory")


@pytest.mark.requirement("R37")
@needs("own_root")
async def test_with_a_root_of_its_own_the_workspace_is_at_the_usual_place(box: Box) -> None:
    assert box.instance.workspace_path == "/workspace"


async def test_every_limit_is_said_to_be_enforced_or_not_and_why(box: Box) -> None:
    rows = box.backend.enforced(box.id)
    assert {"cpu", "memory", "pids", "disk", "inodes", "network", "seccomp"} <= {row.name for row in rows}
    assert len({row.name for row in rows}) == len(rows)
    assert all(row.by for row in rows)
    assert all(row.value for row in rows if row.enforced)


@pytest.mark.requirement("R35", "R37", "R38")
async def test_two_instances_share_no_files(site: Site) -> None:
    async with site.box() as one, site.box() as two:
        await one.channel.write("name", b"one")
        await two.channel.write("name", b"two")
        assert await one.channel.read("name") == b"one"
        assert await two.channel.read("name") == b"two"


async def test_many_instances_start_at_once(site: Site) -> None:
    opened = await asyncio.gather(*(site.open() for _ in range(8 if site.kind.slowness == 1 else 3)))
    try:
        results = await asyncio.gather(*(box.run("echo", box.id) for box in opened))
        assert [result.stdout.decode().strip() for result in results] == [box.id for box in opened]
        assert {box.id for box in opened} <= set(await site.backend.list())
    finally:
        await asyncio.gather(*(box.channel.close() for box in opened))
        await asyncio.gather(*(site.backend.stop(box.id) for box in opened))
    assert not {box.id for box in opened} & set(await site.backend.list())


async def test_an_id_that_is_taken_is_refused_and_its_instance_lives_on(site: Site) -> None:
    async with site.box() as box:
        await box.channel.write("kept", b"")
        with pytest.raises(LaunchFailed):
            await site.backend.start(site.spec(box.id))
        await box.channel.ping()
        await box.channel.stat("kept")
        assert box.id in await site.backend.list()


async def test_an_instance_that_no_daemon_connects_to_ends_by_itself(site: Site) -> None:
    watched, alone = site.spec(orphan=1), site.spec(orphan=1)
    try:
        await site.backend.start(watched)
        channel = await Channel.open(await site.backend.connect(watched.environment_id))
        await site.backend.start(alone)
        left = await Channel.open(await site.backend.connect(alone.environment_id))
        nap = f"1000.{os.getpid()}"
        await left.start(Start(argv=["sleep", nap], env=ENV))

        async def sleeps() -> bool:
            return bool(on_host(nap))

        if "host_processes" in site.kind.gives:
            await eventually(sleeps)
        await left.close()
        await site.backend.wait(alone.environment_id)
        await channel.ping()
        await channel.close()
        await site.backend.wait(watched.environment_id)
    finally:
        for spec in (watched, alone):
            await site.backend.stop(spec.environment_id)

    async def gone() -> bool:
        return on_host(nap) == []

    await eventually(gone)


async def test_instance_obeys_a_daemon_that_died_with_answers_unread(site: Site) -> None:
    """The guest learns of the reset when it sends, before it has read what the daemon said last."""
    spec = site.spec()
    await site.backend.start(spec)
    try:
        live = site.backend._live[spec.environment_id]  # type: ignore[attr-defined]
        guest = getattr(live, "running", live).handle.pid
        connection = await site.backend.connect(spec.environment_id)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, frames.encode(Type.HELLO, 0, struct.pack("<I", frames.VERSION)))
        for _ in range(20):  # many times what fits into the socket on the way back
            await loop.sock_sendall(connection, frames.encode(Type.PING, 1, bytes(100_000)))
        os.kill(guest, signal.SIGSTOP)
        try:
            await eventually(lambda: stopped(guest))
            connection.send(frames.encode(Type.STAY, 0, struct.pack("<Q", 1)))
            connection.close()
        finally:
            os.kill(guest, signal.SIGCONT)
        await site.backend.wait(spec.environment_id)  # else it would stay for an hour
    finally:
        await site.backend.stop(spec.environment_id)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


async def stopped(pid: int) -> bool:
    return state(pid) == "T"


async def test_an_instance_is_taken_over_by_another_backend_object(site: Site) -> None:
    """As by the next daemon of the same home."""
    async with site.box() as box:
        await box.channel.write("file", b"text")
        adopted = site.kind.make(str(site.home))
        try:
            spec = site.spec(box.id)
            assert await adopted.adopt(spec) == box.instance
            channel = await Channel.open(await adopted.connect(box.id))
            assert await channel.read("file") == b"text"
            assert {row.name for row in adopted.enforced(box.id)} == {
                row.name for row in box.backend.enforced(box.id)
            }
            await channel.close()
            await adopted.stop(box.id)
        finally:
            await adopted.close()


async def test_what_is_gone_is_not_taken_over(site: Site) -> None:
    async with site.box() as box:
        await site.backend.stop(box.id)
        with pytest.raises((EnvironmentNotFound, LaunchFailed)):
            await site.backend.adopt(site.spec(box.id))
    with pytest.raises((EnvironmentNotFound, LaunchFailed)):
        await site.backend.adopt(site.spec(new_id()))


async def test_stopping_twice_is_fine(site: Site) -> None:
    async with site.box() as box:
        await site.backend.stop(box.id)
        await site.backend.stop(box.id)


async def test_stopping_twice_at_once_is_fine(site: Site) -> None:
    async with site.box() as box:
        await asyncio.gather(site.backend.stop(box.id), site.backend.stop(box.id))
        assert box.id not in await site.backend.list()


async def test_stopping_what_never_was_is_fine(site: Site) -> None:
    await site.backend.stop(new_id())


async def test_an_id_can_be_used_again_after_its_end(site: Site) -> None:
    spec = site.spec()
    for _ in range(2):
        await site.backend.start(spec)
        await site.backend.stop(spec.environment_id)


async def test_stopping_ends_everything_that_runs(site: Site, nap: str) -> None:
    async with site.box() as box:
        await expect(await box.start("sh", "-c", f"setsid sleep {nap} & sleep {nap} & echo up; wait"), b"up")
        await expect(await box.start_shell(f"setsid sleep {nap} & echo up"), b"up")
        await box.there(nap)
        assert bool(on_host(nap)) == ("host_processes" in site.kind.gives)
    assert on_host(nap) == []


async def test_connecting_to_what_never_was_fails(site: Site) -> None:
    with pytest.raises(GuestFailed):
        await site.backend.connect(new_id())


async def test_connecting_after_the_end_fails(site: Site) -> None:
    async with site.box() as box:
        pass
    with pytest.raises(GuestFailed):
        await site.backend.connect(box.id)


async def test_waiting_ends_when_the_guest_does(site: Site) -> None:
    async with site.box() as box:
        waiting = asyncio.ensure_future(site.backend.wait(box.id))
        await box.channel.ping()
        assert not waiting.done()
        box.channel.send(Type.SHUTDOWN, 0)
        await waiting


async def test_waiting_ends_when_the_instance_is_stopped(site: Site) -> None:
    async with site.box() as box:
        waiting = [asyncio.ensure_future(site.backend.wait(box.id)) for _ in range(3)]
        await box.channel.ping()
        await site.backend.stop(box.id)
        await asyncio.gather(*waiting)


async def test_an_instance_whose_guest_died_is_listed_until_it_is_stopped(site: Site) -> None:
    async with site.box() as box:
        box.channel.send(Type.SHUTDOWN, 0)
        await site.backend.wait(box.id)
        assert box.id in await site.backend.list()
    assert box.id not in await site.backend.list()


async def test_what_was_never_started_has_no_usage(site: Site) -> None:
    with pytest.raises(EnvironmentNotFound):
        await site.backend.usage(new_id())


async def test_usage_and_samples_are_there_for_the_asking(box: Box) -> None:
    usage, sample = await box.backend.usage(box.id), box.backend.sample(box.id)
    box.backend.reset_peak(box.id)
    assert usage.oom_kills in (None, 0)
    assert sample.oom_kills == 0


@needs("counters")
async def test_usage_counts_what_was_used(box: Box) -> None:
    before = box.backend.sample(box.id)
    await box.sh("i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done")
    after, usage = box.backend.sample(box.id), await box.backend.usage(box.id)
    assert before.cpu_seconds is not None
    assert after.cpu_seconds is not None
    assert after.cpu_seconds - before.cpu_seconds > 0.01
    assert usage.cpu_seconds is not None
    assert usage.cpu_seconds >= after.cpu_seconds
    assert usage.memory_bytes
    assert usage.memory_peak_bytes
    assert usage.memory_peak_bytes >= usage.memory_bytes > 0


@needs("counters", "host_processes")
async def test_usage_counts_processes(box: Box) -> None:
    async def only_the_guest() -> bool:
        return (await box.backend.usage(box.id)).pids == 1

    await eventually(only_the_guest)
    await box.start("sleep", "1000")
    usage = await box.backend.usage(box.id)
    assert usage.pids is not None
    assert usage.pids > 1


@needs("counters")
async def test_the_peak_of_memory_can_be_measured_anew(box: Box) -> None:
    await box.sh("head -c 200000000 /dev/zero | tail -c 200000000 | wc -c")
    high = (await box.backend.usage(box.id)).memory_peak_bytes
    assert high is not None

    async def low() -> bool:  # gVisor gives memory back a little later
        box.backend.reset_peak(box.id)
        again = (await box.backend.usage(box.id)).memory_peak_bytes
        return again is not None and high - again > 100 * MIB

    await eventually(low)


async def test_a_restarted_daemon_finds_and_ends_what_the_first_one_left(site: Site, nap: str) -> None:
    box = await site.open()
    await box.channel.close()
    second = site.kind.make(str(site.home))
    try:
        assert box.id in await second.list()
        again = await Box(second, box.instance, box.channel).reconnect()
        again_box = Box(second, box.instance, again)
        await again_box.start("sleep", nap)
        await again_box.there(nap)
        assert bool(on_host(nap)) == ("host_processes" in site.kind.gives)
        await again.close()
        await second.stop(box.id)
        assert on_host(nap) == []
        assert box.id not in await second.list()
    finally:
        await second.close()
        await site.backend.stop(box.id)


@pytest.mark.requirement("R35")
@needs("isolated")
async def test_an_isolated_instance_sees_only_its_own_processes(site: Site) -> None:
    async with site.box() as box:
        listing = await box.sh("exec grep -h ^Name /proc/[0-9]*/status")
        names = sorted(line.split()[1] for line in listing.stdout.decode().splitlines())
        # An engine connects the daemon to a guest of gVisor's by a relay inside.
        assert [name for name in names if name != "skerry-relay"] == ["grep", "skerry-init", "skerry-watch"]


@pytest.mark.requirement("R35")
@needs("isolated")
async def test_an_isolated_instance_has_no_network_but_loopback(box: Box) -> None:
    devices = await box.sh("sed 1,2d /proc/net/dev | cut -d: -f1")
    assert devices.stdout.split() == [b"lo"]


@needs("isolated")
async def test_instances_do_not_see_each_other(site: Site, nap: str) -> None:
    async with site.box() as one, site.box() as two:
        await one.start("sleep", nap)
        await one.there(nap)
        assert await two.alive(nap) == []


@pytest.mark.requirement("R56")
@needs("own_root")
async def test_the_root_cannot_be_written_to(box: Box) -> None:
    result = await box.sh(
        "for d in / /usr /etc /bin /dev /proc; do touch $d/x 2>/dev/null && echo $d; done; true"
    )
    assert result.stdout == b""


@needs("own_root")
async def test_temporary_files_are_not_shared(site: Site) -> None:
    async with site.box() as one, site.box() as two:
        await one.channel.write("/tmp/mine", b"")
        await one.sh("touch /dev/shm/mine")
        found = await two.sh("ls /tmp /dev/shm | grep -c mine")
        assert found.stdout == b"0\n"


@needs("counters", "pids")
async def test_a_start_beyond_the_limit_of_processes_is_refused_and_the_instance_lives_on(site: Site) -> None:
    limits = type(LIMITS)(memory=LIMITS.memory, disk=LIMITS.disk, pids=16)
    async with site.box(limits) as box:

        async def fill() -> None:
            for _ in range(limits.pids):
                await box.start("sleep", "1000")

        for call in (fill(), box.run("true"), box.shell("true")):
            with pytest.raises(LimitReached):
                await call
        await box.channel.write("file", b"still served")
        await box.calm()
        assert (await box.shell("echo alive")).stdout == b"alive\n"


@needs("pids")
async def test_more_processes_than_allowed_are_refused_and_the_instance_lives_on(site: Site) -> None:
    limits = type(LIMITS)(memory=LIMITS.memory, disk=LIMITS.disk, pids=16)
    async with site.box(limits) as box:
        result = await box.sh(
            "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do sleep 100 & done; echo all"
        )
        assert b"all" not in result.stdout
        assert result.code != 0
        await box.calm()
        assert (await finish(await box.start("echo", "alive", env=ENV))).stdout == b"alive\n"
