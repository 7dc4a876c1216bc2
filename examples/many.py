"""Many environments at once, with the asynchronous client.

python examples/many.py
"""

from __future__ import annotations

import asyncio
import time

import skerry


async def square(client: skerry.AsyncClient, number: int) -> int:
    async with skerry.AsyncEnvironment(memory="64m", client=client) as env:
        result = await env.run(["python3", "-c", f"print({number} ** 2)"])
        return int(result.stdout)


async def main() -> None:
    async with skerry.AsyncClient() as client:
        await client.version()  # starts the daemon, so that its start is not in the figure below
        begun = time.monotonic()
        squares = await asyncio.gather(*(square(client, number) for number in range(20)))
        print(squares)
        print(f"20 environments in {time.monotonic() - begun:.2f} s")


asyncio.run(main())
