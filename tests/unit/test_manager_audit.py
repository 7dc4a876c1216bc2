"""What the audit keeps of what was broken off."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

from skerry.egress.proxy import Connection
from skerry.manager.audit.acts import Act
from skerry.manager.caller import Caller
from skerry.manager.network.network import _Audited
from skerry.store.audit import Entry

CALLER = Caller(tenant="one", peer="test")


class Slow:
    """A store that takes what it is given, and never says so."""

    def __init__(self) -> None:
        self.written: list[Entry] = []

    def audit(self, tenant: str, entry: Entry, *, later: bool = False) -> asyncio.Future[None]:
        self.written.append(entry)
        return asyncio.get_running_loop().create_future()

    @property
    def told(self) -> list[tuple[str, str]]:
        return [(entry.kind, entry.outcome) for entry in self.written]


async def broken_off(work: Coroutine[Any, Any, Any]) -> None:
    task = asyncio.create_task(work)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_an_intent_that_is_being_written_has_its_result() -> None:
    store: Any = Slow()

    async def main() -> None:
        async def act() -> None:
            async with Act(store, CALLER, "test", None, {}):
                raise AssertionError("not before it is written")

        await broken_off(act())
        assert store.told == [("intent", ""), ("result", "canceled")]

    asyncio.run(main())


def test_a_connection_that_is_cut_while_its_intent_is_written() -> None:
    store: Any = Slow()
    subject: Any = SimpleNamespace(environment_id="", backend="", isolation="", image_digest="")

    async def main() -> None:
        witness = _Audited(store, CALLER, subject)
        connection = Connection("a.example", 443)
        await broken_off(witness.opening(connection))
        connection.verdict = "cut: not allowed any more"
        witness.closed(connection)
        assert store.told == [("intent", ""), ("result", "failed")]
        assert store.written[0].request_id == store.written[1].request_id

    asyncio.run(main())
