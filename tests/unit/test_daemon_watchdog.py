"""The watchdog of the event loop: what it measures of a stall, and whom it names."""

from __future__ import annotations

import asyncio
import time

from skerry.daemon import watchdog as module
from skerry.daemon.watchdog import STALL, TICK, Watchdog
from skerry.policy import format_size
from tests.unit.stubs import asynchronous, until


@asynchronous
async def test_stall_is_measured_and_its_function_named() -> None:
    watchdog = Watchdog()
    try:
        until_seen = time.monotonic() + 10 * STALL
        while time.monotonic() < until_seen:
            format_size(1 << 30)
        await until(lambda: bool(watchdog.stalls)) if watchdog.stalls else await asyncio.sleep(2 * TICK)
    finally:
        watchdog.close()
    assert watchdog.stalls == 1
    assert watchdog.longest > 5 * STALL
    text = "\n".join(watchdog.lines())
    assert "skerry_loop_stalls_total 1" in text
    assert f'skerry_loop_longest_stall_seconds{{where="{watchdog.where}"}}' in text


def test_innermost_function_of_ours_is_named() -> None:
    found: list[str] = []

    class Probe:
        def __format__(self, spec: str) -> str:
            import sys

            found.append(module.where(sys._getframe()))
            return ""

    def work() -> None:
        format(Probe(), "")

    # A module of the package, as it looks on a stack.
    code = compile("def step():\n    work()\n", "<test>", "exec")
    scope = {"__name__": "skerry.some.module", "work": work}
    exec(code, scope)
    scope["step"]()  # type: ignore[operator]
    assert found == [f"skerry.some.module.step ({__name__}.{Probe.__qualname__}.__format__)"]
