"""The network of one environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.client.aio.transport import AsyncTransport


class AsyncNetwork:
    """The network rules and limits of an environment. Changes apply at once, also to open connections.

    A rule is a name (`api.example.com`), all names below one (`*.example.com`), or an address range, each with an
    optional `:PORT` (`:*` for all ports; default: 80 and 443). Internal addresses are never reachable. Every method
    raises InvalidRequest for an invalid rule.
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
        """Change the kind (`none`, `allowlist`, `public`), the rules, or the limits; None leaves a value unchanged.

        `connections` are open connections, `traffic` the bytes sent and received over the environment's life.
        """
        wanted = {
            "network": network,
            "allow": None if allow is None else list(allow),
            "connections": connections,
            "traffic": traffic,
        }
        await self._transport.call("PUT", self._path, json=wanted)

    async def allow(self, *rules: str) -> None:
        """Add rules to its allowlist. A network of kind `none` becomes an allowlist."""
        await self._transport.call("POST", f"{self._path}/allow", json={"rules": rules})

    async def deny(self, *rules: str) -> None:
        """Remove rules from its allowlist."""
        await self._transport.call("POST", f"{self._path}/deny", json={"rules": rules})

    async def denials(self) -> list[dict[str, Any]]:
        """Denied connections, each with `host`, `port` (0: a DNS query), `reason` and `count`."""
        found: list[dict[str, Any]] = (await self.show())["denials"]
        return found
