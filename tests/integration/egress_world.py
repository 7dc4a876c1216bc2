"""A small internet in a network namespace of its own, an environment's namespaces beside it, and a proxy between.

Everything happens in one thread, which has left the network of the machine: nothing that it sends can leave, whatever
address it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import ipaddress
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

from skerry.egress.addresses import Address, Ranges
from skerry.egress.proxy import Connection, Denial, Proxy, Witness
from skerry.egress.rules import Rules
from skerry.host.launcher import Helper
from skerry.host.network import Namespaces, catch_all

_NEW_NET = 0x40000000
AGENT = """
import json, socket, sys
print("up", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    try:
        with socket.create_connection((asked["host"], asked["port"]), timeout=asked.get("timeout", 10)) as s:
            s.sendall(bytes.fromhex(asked.get("say", "")))
            heard = b""
            while len(heard) < asked.get("read", 1 << 20):
                data = s.recv(65536)
                if not data:
                    break
                heard += data
            answer = {"heard": heard.hex()}
    except OSError as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), flush=True)
"""


def in_a_network_of_its_own(main: Callable[[], Awaitable[None]]) -> None:
    """Run a coroutine in a thread that has its own network; raise what it raises."""
    failure: list[BaseException] = []

    def body() -> None:
        try:
            if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NET):
                raise OSError(ctypes.get_errno(), "unshare")
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            asyncio.run(main())  # type: ignore[arg-type]
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]


class Ledger(Witness):
    """Writes down every decision."""

    def __init__(self) -> None:
        self.opened: list[tuple[str, int, str]] = []
        self.finished: list[Connection] = []
        self.refused: list[Denial] = []

    async def opening(self, connection: Connection) -> None:
        self.opened.append((connection.host, connection.port, str(connection.address)))

    def closed(self, connection: Connection) -> None:
        self.finished.append(connection)

    def denied(self, denial: Denial) -> None:
        self.refused.append(denial)


class World:
    """The internet, an environment, and what happened."""

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {}
        self.asked: list[str] = []
        """Names that the proxy has looked up."""
        self.arrived: list[tuple[str, int]] = []
        """Where connections came out."""
        self.ledger = Ledger()
        self.proxy: Proxy
        self._agent: asyncio.subprocess.Process

    async def resolve(self, name: str) -> list[Address]:
        self.asked.append(name)
        return [ipaddress.ip_address(text) for text in self.names.get(name, [])]

    async def ask(self, host: str, port: int, say: bytes = b"", **more: Any) -> tuple[str, bytes]:
        """("", what was heard), or (the error, b"")."""
        assert self._agent.stdin is not None
        assert self._agent.stdout is not None
        request = {"host": host, "port": port, "say": say.hex(), **more}
        self._agent.stdin.write(json.dumps(request).encode() + b"\n")
        answer = json.loads(await self._agent.stdout.readline())
        return answer.get("error", ""), bytes.fromhex(answer.get("heard", ""))


@contextlib.asynccontextmanager
async def world(
    kind: str,
    allow: Iterable[str] = (),
    *,
    addresses: Iterable[str] = ("93.184.216.34",),
    ports: Iterable[int] = (80, 443),
    names: dict[str, list[str]] | None = None,
    ranges: Ranges | None = None,
) -> AsyncIterator[World]:
    """To be used in a network of its own."""
    made = World()
    made.names = names or {}
    for address in addresses:
        subprocess.run(["ip", "addr", "add", address, "dev", "lo"], check=True)
    servers = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port, *_ = writer.get_extra_info("sockname")
        made.arrived.append((host, port))
        with contextlib.suppress(OSError):
            heard = await reader.read(65536)
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok" if heard else b""
            )
            await writer.drain()
        writer.close()

    for port in ports:
        servers.append(await asyncio.start_server(serve, "0.0.0.0", port))
        servers.append(await asyncio.start_server(serve, "::", port))
    made._agent = await asyncio.create_subprocess_exec(
        *("unshare", "--map-root-user", "--user", "--net", "--", "sh", "-c"),
        *('ip link set lo up && exec "$0" -u -c "$1"', sys.executable, AGENT),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    helper = Helper()
    try:
        assert made._agent.stdout is not None
        assert await made._agent.stdout.readline() == b"up\n"
        namespaces = Namespaces.of(made._agent.pid, rootful=os.geteuid() == 0)
        try:
            sockets = catch_all(helper, namespaces)
        finally:
            namespaces.close()
        rules = Rules.parse(kind, allow, ranges or Ranges())
        made.proxy = Proxy(rules, sockets.tcp, sockets.udp, made.ledger, made.resolve)
        try:
            yield made
        finally:
            await made.proxy.close()
    finally:
        helper.close()
        made._agent.kill()
        await made._agent.wait()
        for server in servers:
            server.close()
