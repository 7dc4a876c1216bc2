"""Faults of the platform are errors: they never look like an outcome or like output, and nobody waits for ever."""

from __future__ import annotations

import asyncio

import pytest

from skerry.errors import GuestFailed
from skerry.guest.frames import Type
from tests.conformance.harness import Site, expect


async def test_stopping_ends_the_executions_with_an_error_and_not_with_an_outcome(site: Site) -> None:
    async with site.box() as box:
        process = await box.start("sh", "-c", "echo begun; exec sleep 1000")
        await expect(process, b"begun")
        await site.backend.stop(box.id)
        assert [data async for _, data in process.output()] == []
        with pytest.raises(GuestFailed):
            await process.wait()
        assert await box.channel.closed


async def test_a_guest_that_ends_ends_the_executions_with_an_error(site: Site) -> None:
    async with site.box() as box:
        process = await box.start("sh", "-c", "read x", stdin=True)
        command = await box.start_shell("read x", stdin=True)
        box.channel.send(Type.SHUTDOWN, 0)
        for execution in (process, command):
            assert [data async for _, data in execution.output()] == []
            with pytest.raises(GuestFailed):
                await execution.wait()


async def test_a_caller_that_gives_up_a_start_leaves_nothing_running(site: Site, nap: str) -> None:
    async with site.box() as box:
        for _ in range(10):
            starting = asyncio.ensure_future(box.start("sleep", nap))
            await asyncio.sleep(0)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
        await box.gone(nap)


async def test_nothing_can_be_asked_of_a_guest_that_is_gone(site: Site) -> None:
    async with site.box() as box:
        process = await box.start("sleep", "1000")
        await site.backend.stop(box.id)
        await box.channel.closed
        for call in (
            box.channel.ping(),
            box.channel.read("x"),
            box.channel.processes(),
            box.start("true"),
            box.shell("true"),
            box.channel.attach(process.id),
            process.kill(),
        ):
            with pytest.raises(GuestFailed):
                await asyncio.wait_for(call, 10)


async def test_a_closed_channel_refuses_everything(site: Site) -> None:
    async with site.box() as box:
        await box.channel.close()
        for call in (box.channel.ping(), box.start("true"), box.channel.attach(1)):
            with pytest.raises(GuestFailed):
                await asyncio.wait_for(call, 10)
