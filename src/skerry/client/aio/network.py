"""The network of one environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.client.aio.transport import AsyncTransport


class AsyncNetwork:
    """What an environment may reach. Changes count at once, also for connections that are open.

    A rule is a name (`api.example.com`), everything below one (`*.example.com`), or a range of addresses, each with a
    port behind a colon, or with `*` for all; without one it is for 80 and 443. Internal addresses are never reached.
    Every method raises InvalidRequest for what is no rule.
    """

    def __init__(self, transport: AsyncTransport, path: str) -> None:
        self._transport = transport
        self._path = f"{path}/network"

    async def show(self) -> dict[str, Any]:
        """`network`, `allow`, `limits`, `connections`, `sent_bytes`, `received_bytes` and `denials`."""
        answer: dict[str, Any] = await self._transport.call("GET", self._path)
        return answer

    async def set(
        self,
        network: str | None = None,
        allow: Sequence[str] | None = None,
        *,
        connections: int | None = None,
        traffic: str | int | None = None,
    ) -> None:
        """`none`, `allowlist` or `public`, the rules of an allowlist, most connections at once, most bytes that it
        sends and receives as long as it lives; None leaves each as it is."""
        wanted = {
            "network": network,
            "allow": None if allow is None else list(allow),
            "connections": connections,
            "traffic": traffic,
        }
        await self._transport.call("PUT", self._path, json=wanted)

    async def allow(self, *rules: str) -> None:
        """Add rules to its allowlist; one without a network gets an allowlist."""
        await self._transport.call("POST", f"{self._path}/allow", json={"rules": rules})

    async def deny(self, *rules: str) -> None:
        """Take rules out of its allowlist."""
        await self._transport.call("POST", f"{self._path}/deny", json={"rules": rules})

    async def denials(self) -> list[dict[str, Any]]:
        """What it was refused, each with `host`, `port` (0: only its name was asked for), `reason` and `count`."""
        found: list[dict[str, Any]] = (await self.show())["denials"]
        return found
