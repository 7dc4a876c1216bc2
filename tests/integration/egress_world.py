"""A small internet, a host and environments, each in network namespaces of its own, and proxies on the host.

    environment ──our sockets──> proxy, on the host ──veth──> the internet, where every address answers

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
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import uvloop

from skerry.egress.addresses import Address, Ranges
from skerry.egress.limits import Meter, Traffic
from skerry.egress.proxy import Connection, Denial, Proxy, Witness
from skerry.egress.resolver import Resolve
from skerry.egress.rules import Rules
from skerry.fairness import budget
from skerry.host.interfaces import own_addresses
from skerry.host.launcher import Helper
from skerry.host.network import catch_all, network_of
from skerry.policy import Limits

API = 7443
"""Where a daemon listens for others."""
PORTS = (22, 25, 53, 80, 443, 2375, 5000, API, 8080, 8443)
"""At which every address of the internet, the host, and a neighbour listens."""
HOST = ("192.168.77.2", "93.184.200.2", "2a00:77::2")
"""Addresses of the host, private and public."""
GATEWAY = ("192.168.77.1", "2a00:77::1")
SILENT = "93.184.99.1"
"""Never answers."""
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok"
ROOTLESS = Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]
"""The tests run as a user, who is root in a namespace only: then the proxy has no capabilities there either."""

_NEW_NET = 0x40000000
_DROP_FROM_BOUNDING_SET = 24
_MAP_ROOT = 31  # CAP_SETFCAP
_AGENT = """
import json, os, socket, ssl, struct, sys, time
control = socket.socket(fileno=0)
lines = control.makefile("rw")
kept = {}
print("up", file=lines, flush=True)

def ask(host, port, say=b"", timeout=10, read=1 << 20):
    try:
        with socket.create_connection((host, port), timeout=timeout) as s:
            s.sendall(say)
            heard = b""
            while len(heard) < read:
                data = s.recv(65536)
                if not data:
                    break
                heard += data
            return {"heard": heard.hex()}
    except OSError as error:
        return {"error": f"{type(error).__name__}: {error}"}

def query(packet, server="9.9.9.9", timeout=5):
    with socket.socket(socket.AF_INET6 if ":" in server else socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.settimeout(timeout)
        s.sendto(packet, (server, 53))
        try:
            return s.recv(65536).hex()
        except OSError:
            return None

def listen(ports):
    for port in ports:
        for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
            s = kept[family, port] = socket.socket(family)
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            s.bind((host, port))
            s.listen(1024)
            s.setblocking(False)

def arrived():
    found = []
    for s in kept.values():
        try:
            while True:
                found.append(s.accept()[0].getsockname()[:2])
        except BlockingIOError:
            pass
    return found

for line in lines:
    known = dict(globals())
    exec(json.loads(line), known)
    print(json.dumps(known.get("answer")), file=lines, flush=True)
"""

_here = threading.local()


def in_a_network_of_its_own(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine in a thread that has its own network, with an internet; raise what it raises."""
    failure: list[BaseException] = []

    def body() -> None:
        try:
            with _internet() as listening:
                _here.listening = listening
                if ROOTLESS:
                    _drop_capabilities()
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    runner.run(main())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]


@contextlib.contextmanager
def _internet() -> Any:
    """The sockets at which it listens. This thread is on the host afterwards."""
    with contextlib.ExitStack() as stack:
        new_network()
        ip("link set lo up", "route add local 0.0.0.0/0 dev lo", "-6 route add local ::/0 dev lo table main")
        listening = [stack.enter_context(one) for one in _listen()]
        keeper = stack.enter_context(subprocess.Popen(["sleep", "infinity"]))
        stack.callback(keeper.kill)
        new_network()
        there = f"netns {keeper.pid}"
        ip("link set lo up", f"link add host0 type veth peer name net0 {there}", "link set host0 up")
        for address in HOST:
            ip(f"addr add {address}/{64 if ':' in address else 24} dev host0 {_at_once(address)}")
        inside = ["nsenter", "-t", str(keeper.pid), "-n"]
        ip("link set net0 up", "addr add 192.168.77.1/24 dev net0", prefix=inside)
        ip("addr add 2a00:77::1/64 dev net0 nodad", prefix=inside)
        ip(f"route add default via {GATEWAY[0]}", f"-6 route add default via {GATEWAY[1]}")
        ip(f"route add {SILENT} via 192.168.77.99")
        listening += [stack.enter_context(one) for one in _listen()]
        yield listening


def _at_once(address: str) -> str:
    return "nodad" if ":" in address else ""


def new_network() -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NET):
        raise OSError(ctypes.get_errno(), "unshare")


def ip(*commands: str, prefix: Iterable[str] = ()) -> None:
    for command in commands:
        subprocess.run([*prefix, "ip", *shlex.split(command)], check=True)


def _listen() -> list[socket.socket]:
    made = []
    for family, any_address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        for kind, port in [*((socket.SOCK_STREAM, port) for port in PORTS), (socket.SOCK_DGRAM, 53)]:
            one = socket.socket(family, kind)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind((any_address, port))
            if kind == socket.SOCK_STREAM:
                one.listen(1024)
            one.setblocking(False)
            made.append(one)
    return made


def _drop_capabilities() -> None:
    """Of this thread, and of what it starts; but one, without which root cannot give itself to a new namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    for number in set(range(41)) - {_MAP_ROOT}:
        libc.prctl(_DROP_FROM_BOUNDING_SET, number, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    kept = (ctypes.c_uint32 * 6)(1 << _MAP_ROOT, 1 << _MAP_ROOT)
    if libc.capset(header, kept):
        raise OSError(ctypes.get_errno(), "capset")


class Ledger(Witness):
    """Writes down every decision."""

    def __init__(self) -> None:
        self.opened: list[tuple[str, int, str]] = []
        self.finished: list[Connection] = []
        self.refused: list[Denial] = []
        self.changed = asyncio.Event()

    async def opening(self, connection: Connection) -> None:
        self.opened.append((connection.host, connection.port, str(connection.address)))

    def closed(self, connection: Connection) -> None:
        self.finished.append(connection)
        self.changed.set()

    def denied(self, denial: Denial) -> None:
        self.refused.append(denial)
        self.changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()


Server = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


class Agent:
    """A process in namespaces of its own, as an environment's are, that does what it is told."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid = pid
        self.control = control
        """On which it answers."""
        self._lines: tuple[asyncio.StreamReader, asyncio.StreamWriter]

    async def run(self, code: str) -> Any:
        """Run a program in the environment; what it has as `answer` afterwards. In `kept` it may keep things."""
        reader, writer = self._lines
        writer.write(json.dumps(code).encode() + b"\n")
        return json.loads(await reader.readline())

    async def open(self) -> None:
        self._lines = await asyncio.open_connection(sock=self.control, limit=1 << 24)
        assert await self._lines[0].readline() == b"up\n"

    def close(self) -> None:
        self._lines[1].close()


class World:
    """The internet, an environment, and what happened."""

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {}
        self.asked: list[str] = []
        """Names that the proxy has looked up."""
        self.arrived: list[tuple[str, int]] = []
        """Where connections came out, on the internet or the host."""
        self.datagrams: list[bytes] = []
        """Those that came out."""
        self.heard: list[bytes] = []
        """The first words of each connection that came out, for the usual server."""
        self.server: Server = self.usual_server
        self.ledger = Ledger()
        self.traffic = Traffic()
        self.proxy: Proxy
        self.agent: Agent

    async def resolve(self, name: str) -> list[Address]:
        self.asked.append(name)
        return [ipaddress.ip_address(text) for text in self.names.get(name, [])]

    async def usual_server(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if heard := await reader.read(65536):
            self.heard.append(heard)
            writer.write(OK)

    async def run(self, code: str) -> Any:
        return await self.agent.run(code)

    async def ask(self, host: str, port: int, say: bytes = b"", **more: Any) -> tuple[str, bytes]:
        """("", what was heard), or (the error, b"")."""
        answer = await self.run(f"answer = ask({host!r}, {port}, {say!r}, **{more!r})")
        return answer.get("error", ""), bytes.fromhex(answer.get("heard", ""))

    async def query(self, packet: bytes, server: str = "9.9.9.9", timeout: float = 5) -> bytes | None:
        answer = await self.run(f"answer = query({packet!r}, {server!r}, {timeout})")
        return None if answer is None else bytes.fromhex(answer)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port, *_ = writer.get_extra_info("sockname")
        self.arrived.append((host, port))
        try:
            with contextlib.suppress(OSError):
                await self.server(reader, writer)
                await writer.drain()
        finally:
            writer.close()


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, seen: list[bytes]) -> None:
        self._seen = seen

    def datagram_received(self, data: bytes, addr: object) -> None:
        self._seen.append(data)


@contextlib.asynccontextmanager
async def world(
    kind: str,
    allow: Iterable[str] = (),
    *,
    names: dict[str, list[str]] | None = None,
    ranges: Ranges | None = None,
    limits: Limits | None = None,
    before: str = "",
) -> AsyncIterator[World]:
    """To be used in a network of its own. `before` is run in the environment while it has no network yet."""
    made = World()
    made.names = names or {}
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        for one in _here.listening:
            copy = one.dup()
            if one.type == socket.SOCK_STREAM:
                server = await asyncio.start_server(made.serve, sock=copy)
                stack.callback(server.close)
            else:
                transport, _ = await loop.create_datagram_endpoint(
                    lambda: _Datagrams(made.datagrams), sock=copy
                )
                stack.callback(transport.close)
        made.agent = await stack.enter_async_context(_environment())
        await made.run(before)
        rules = Rules.parse(kind, allow, ranges or Ranges(own=own_addresses))
        meter = Meter(limits or Limits(), made.traffic)
        made.proxy = _proxy(made.agent, rules, made.ledger, made.resolve, meter)
        try:
            yield made
        finally:
            await made.proxy.close()


@contextlib.asynccontextmanager
async def neighbour(it: World) -> AsyncIterator[Agent]:
    """Another environment, with a network of the same kind, that listens at every address it has."""
    async with _environment() as agent:
        meter = Meter(Limits(), Traffic())
        proxy = _proxy(agent, it.proxy.rules, Ledger(), it.resolve, meter)
        try:
            await agent.run(f"listen({PORTS!r})")
            yield agent
        finally:
            await proxy.close()


def _proxy(agent: Agent, rules: Rules, witness: Witness, resolve: Resolve, meter: Meter) -> Proxy:
    helper = Helper()
    network = network_of(agent.pid)
    try:
        sockets = catch_all(helper, network, rootful=os.geteuid() == 0 and not ROOTLESS)
    finally:
        os.close(network)
        helper.close()
    return Proxy(rules, sockets.tcp, sockets.udp, witness, resolve, meter, budget().flow())


@contextlib.asynccontextmanager
async def _environment() -> AsyncIterator[Agent]:
    ours, theirs = socket.socketpair()
    with tempfile.NamedTemporaryFile("w", prefix="skerry-test-") as names, theirs:
        names.write("nameserver 9.9.9.9\noptions timeout:5 attempts:1\n")
        names.flush()
        os.chmod(names.name, 0o644)
        script = (
            'ip link set lo up && mount --bind "$1" "$(readlink -f /etc/resolv.conf)" && exec "$2" -u -c "$3"'
        )
        process: subprocess.Popen[bytes] = subprocess.Popen(  # noqa: ASYNC220
            [
                *("unshare", "--map-root-user", "--user", "--net", "--mount", "--", "sh", "-c", script, "sh"),
                *(names.name, sys.executable, _AGENT),
            ],
            stdin=theirs.fileno(),
        )
        agent = Agent(process.pid, ours)
        theirs.close()
        try:
            await agent.open()
            yield agent
        finally:
            agent.close()
            process.kill()
            process.wait()
