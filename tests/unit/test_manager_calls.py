"""What a call in a session holds until it has ended."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from skerry.manager.caller import Caller
from skerry.manager.sessions import calls
from skerry.manager.sessions.calls import SessionCall
from skerry.manager.sessions.registry import Sessions


def test_whoever_takes_all_that_there_is_leaves_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls hold what they show for as long as they run; all calls of all tenants together have so much room."""
    monkeypatch.setattr(calls, "HELD_MAX", 1000)
    monkeypatch.setattr(calls, "USUAL_MAX", 100)
    session: Any = SimpleNamespace(runtime=None)

    async def main() -> None:
        greedy, modest = [SessionCall(session, {}) for _ in range(9)], SessionCall(session, {})
        for call in greedy:
            for number in range(1, 30):
                _show(call, number, bytes(50))
        assert SessionCall._held == 1000
        assert sum(call._size for call in greedy) == 1000 + 9 * 100
        _show(modest, 1, bytes(80))
        _show(modest, 2, bytes(80))
        assert [(len(value.data), value.truncated) for value in modest._values.values()] == [
            (1, []),
            (0, ["text/plain"]),
        ]
        for call in (*greedy, modest):
            call._leave()
        assert SessionCall._held == 0

    asyncio.run(main())


def test_a_close_that_takes_long_leaves_a_new_session_of_the_same_id_alone() -> None:
    async def main() -> None:
        closing = asyncio.Event()

        async def close(_: Caller) -> None:
            await closing.wait()

        anything: Any = SimpleNamespace(close=close, runtime=None)
        new: Any = SimpleNamespace()
        sessions = Sessions(anything)
        sessions._all["one"] = anything
        close_one = asyncio.create_task(sessions.close(Caller(), "one"))
        await asyncio.sleep(0)
        sessions._all["one"] = new
        closing.set()
        await close_one
        assert sessions.find("one") is new

    asyncio.run(main())


def _show(call: SessionCall, number: int, data: bytes) -> None:
    head = {"token": call.id, "value": number, "kind": "display", "type": "text/plain", "size": len(data)}
    call.on_reply(head, data)
