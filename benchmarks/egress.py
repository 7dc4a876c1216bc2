"""`python -m benchmarks.egress`: egress of an environment, compared with a direct connection to the same server.

Client, proxy and server share this machine and a network namespace that leads nowhere else. Needs root. The proxy runs
in this process, so that its memory can be measured.
"""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import report
from skerry.egress.addresses import Ranges
from tests.integration.egress_world import HOST, World, in_a_network_of_its_own, world

PORT = 9000
BYTES = 1 << 30
TRIPS = 2000
CONNECTIONS = 1000
ATTEMPTS = 10_000

SERVER = """
import socket, sys, threading
def serve(s):
    piece = bytes(1 << 20)
    try:
        order = s.recv(1)
        if order == b"d":
            for _ in range({bytes} >> 20): s.sendall(piece)
        elif order == b"u":
            while s.recv(1 << 20): pass
            s.sendall(b"k")
        else:
            while data := s.recv(100): s.sendall(data)
    except OSError:
        pass
    s.close()
listener = socket.create_server(({host!r}, {port}), backlog=4096)
print("up", flush=True)
while True:
    s, _ = listener.accept()
    s.setsockopt(6, 1, 1)
    threading.Thread(target=serve, args=(s,), daemon=True).start()
"""
CLIENT = """
import resource, socket, statistics, time
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
def go(order):
    s = socket.create_connection(({host!r}, {port}), 60)
    s.setsockopt(6, 1, 1)
    s.sendall(order)
    return s
def timed(action):
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
def down():
    with go(b"d") as s:
        buffer = bytearray(1 << 20)
        while s.recv_into(buffer): pass
def up():
    with go(b"u") as s:
        piece = bytes(1 << 20)
        for _ in range({bytes} >> 20): s.sendall(piece)
        s.shutdown(1)
        s.recv(1)
def connect():
    with go(b"e") as s:
        s.sendall(b"x")
        s.recv(1)
def trips():
    with go(b"e") as s:
        def trip():
            s.sendall(b"x")
            s.recv(1)
        return statistics.median(timed(trip) for _ in range({trips}))
def together():
    held = [go(b"e") for _ in range({connections})]
    for s in held: s.sendall(b"x")
    for s in held: s.recv(1)
    for s in held: s.close()
answer = {{
    "download": {bytes} / timed(down), "upload": {bytes} / timed(up), "trip": trips(),
    "connect": statistics.median(timed(connect) for _ in range(300)),
    "together": timed(together),
}}
"""


HOLD = """
held, answer = [], 0
for _ in range({count}):
    try: held.append(go(b"e"))
    except OSError: pass
for s in held:
    try:
        s.sendall(b"x")
        answer += s.recv(1) == b"x"
    except OSError: pass
kept["held"] = held
"""
RELEASE = "for s in kept.pop('held'): s.close()"


async def _hold(it: World, client: str, count: int) -> dict[str, float]:
    """Opens up to `count` connections at once. Returns how many succeeded and the memory they took."""
    before = _resident()
    opened = await it.run(client + HOLD.format(count=count))
    held = _resident()
    await it.run(RELEASE)
    while it.proxy.connections:
        await asyncio.wait([each.task for each in it.proxy.connections if each.task])
    it.ledger.opened.clear()
    it.ledger.finished.clear()
    gc.collect()
    return {"tried": count, "open": opened, "bytes": held - before}


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Medians for `direct` and `proxy`, and the cost of many connections.

    `first` and `again` open the same number, `attempts` more than the limit. Raises OSError without namespaces.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # as the daemon does
    values = {"host": HOST[1], "port": PORT, "bytes": BYTES, "trips": TRIPS, "connections": CONNECTIONS}
    client = CLIENT.format(**values)
    functions, _ = client.split("answer = ")
    crowds: dict[str, dict[str, float]] = {}
    found: dict[str, list[dict[str, float]]] = {"direct": [], "proxy": []}

    async def direct() -> dict[str, float]:
        code = client + "\nimport json; print(json.dumps(answer))"
        done = await asyncio.to_thread(_python, code)
        return dict(json.loads(done))

    def _python(code: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
        ).stdout

    async def proxied(it: World) -> dict[str, float]:
        return dict(await it.run(client))

    async def main() -> None:
        # Empty ranges: the server's address must not count as the machine's own.
        async with world("public", ranges=Ranges()) as it:
            server: Any = await asyncio.to_thread(
                subprocess.Popen, [sys.executable, "-c", SERVER.format(**values)], stdout=subprocess.PIPE
            )
            try:
                await asyncio.to_thread(server.stdout.readline)
                crowds["first"] = await _hold(it, functions, CONNECTIONS)
                for _ in range(rounds):
                    found["direct"].append(await direct())
                    found["proxy"].append(await proxied(it))
                crowds["again"] = await _hold(it, functions, CONNECTIONS)
                crowds["attempts"] = await _hold(it, functions, ATTEMPTS)
            finally:
                server.kill()
                server.communicate()

    in_a_network_of_its_own(main)
    medians = {
        way: {key: statistics.median(one[key] for one in all_) for key in all_[0]}
        for way, all_ in found.items()
    }
    return {**medians, **crowds}


if __name__ == "__main__":
    print(*report.facts({"missing": {}, "egress": measure(3)}))
