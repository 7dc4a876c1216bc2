"""`python -m tests.integration.silent_machine`, in a network namespace of its own: its loopback dies under a stream."""

from __future__ import annotations

import asyncio

import uvloop

from skerry.daemon.http1.protocol import Timeouts
from tests.integration.test_doors import house


async def turn(where: str) -> None:
    process = await asyncio.create_subprocess_exec("ip", "link", "set", "lo", where)
    assert await process.wait() == 0


async def main() -> None:
    await turn("up")
    async with house("tcp", Timeouts(silence=2)) as there:
        reader, _ = await there.say("GET /stream HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await reader.readexactly(1 << 20)
        assert there.server.busy
        await turn("down")
        while there.server.busy:  # noqa: ASYNC110 (what ends it is what is tested)
            await asyncio.sleep(0.1)
    print("given up")


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
