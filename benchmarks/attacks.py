"""The attacks of the noisy-neighbour table. An attacker is one environment, or one client process of its own.

`PROGRAMS` run inside an attacker's environment, in the background, and nobody reads their output. `CLIENTS` run on the
host, `python -m benchmarks.attacks NAME TARGET`, and send requests about an attacker's environment.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

BODY = 15 << 20
"""Bytes of a large request; the daemon reads JSON of up to 16 MiB."""
NAMES = 100_000
"""Files in the directory that is listed."""


@dataclass(frozen=True)
class Program:
    """A program that runs inside, and the environment it needs."""

    argv: list[str]
    copies: int = 1
    """Executions in each environment."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the create."""


@dataclass(frozen=True)
class Target:
    """Addresses of the daemon, and the attacker's token and environment."""

    host: str
    port: int
    grpc_port: int
    token: str
    environment: str


def _python(code: str) -> list[str]:
    return ["/usr/bin/python3", "-c", code]


BURNER = Program(_python("while True: pass"))
"""The baseline: uses CPU and nothing else."""

_BYTES = """
import fcntl, os
for fd in (1, 2):
    try: fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError: pass
while True:
    os.write(1, b"x")
    os.write(2, b"y")
"""
_DNS = """
import random, socket
server = next(l.split()[1] for l in open("/etc/resolv.conf") if l.startswith("nameserver"))
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setblocking(False)
number = 0
while True:
    number = (number + 1) % 65536
    label = b"n%x" % random.getrandbits(40)
    name = b"".join(bytes([len(l)]) + l for l in (label, b"example", b"com")) + b"\\0"
    head = number.to_bytes(2, "big") + b"\\1\\0\\0\\1\\0\\0\\0\\0\\0\\0"
    try: s.sendto(head + name + b"\\0\\1\\0\\1", (server, 53))
    except OSError: pass
    try:
        while s.recv(4096): pass
    except OSError: pass
"""
_CONNECT = """
import socket
while True:
    try:
        with socket.create_connection(("{address}", 80), 10) as s: s.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
    except OSError: pass
"""
_MEMORY = """
import os
while True:
    pid = os.fork()
    if pid == 0:
        kept = []
        while True: kept.append(bytearray(b"x" * (8 << 20)))
    os.waitpid(pid, 0)
"""
_FORKS = """
import os
while True:
    try: os.fork()
    except OSError: pass
"""
_OPEN_FILES = """
import os, time
while True:
    pids = []
    for _ in range(200):
        pid = os.fork()
        if pid == 0:
            held = []
            try:
                while True: held += os.pipe()
            except OSError: time.sleep(0.2)
            os._exit(0)
        pids.append(pid)
    for pid in pids: os.waitpid(pid, 0)
"""
_INODES = """
import itertools, os, shutil
while True:
    os.makedirs("many", exist_ok=True)
    try:
        for n in itertools.count(): os.close(os.open(f"many/{n}", os.O_CREAT | os.O_WRONLY))
    except OSError: pass
    shutil.rmtree("many", ignore_errors=True)
"""
_DISK = """
import os
block = os.urandom(1 << 20)
while True:
    f = os.open("large", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    try:
        while True: os.write(f, block)
    except OSError: os.close(f)
"""
_FSYNC = """
import os
f = os.open("synced", os.O_CREAT | os.O_WRONLY)
while True:
    os.pwrite(f, os.urandom(4096), 0)
    os.fsync(f)
"""
_METADATA = """
import os
os.makedirs("meta", exist_ok=True)
n = 0
while True:
    n += 1
    os.mkdir(f"meta/{n}")
    os.rename(f"meta/{n}", "meta/moved")
    os.chmod("meta/moved", 0o700)
    os.rmdir("meta/moved")
    if n % 1000 == 0: os.sync()
"""
TOUCH = """
import os
os.makedirs("watched", exist_ok=True)
while True:
    with open("watched/a", "w"): pass
    os.rename("watched/a", "watched/b")
    os.unlink("watched/b")
"""
"""Produces the file events for `file_events`."""


def programs(address: str) -> dict[str, Program]:
    """Attack programs by name. `address` is reachable from an environment with an allowlist."""
    online = {"allow": ["*.example.com", address]}
    return {
        "frames": Program(["/bin/sh", "-c", "while :; do echo x; done"], copies=8),
        "output": Program(["/bin/cat", "/dev/zero"]),
        "single bytes on both streams": Program(_python(_BYTES)),
        "DNS queries": Program(_python(_DNS), options=online),
        "connections": Program(_python(_CONNECT.format(address=address)), options=online),
        "out of memory": Program(_python(_MEMORY)),
        "fork bomb": Program(_python(_FORKS)),
        "open files": Program(_python(_OPEN_FILES)),
        "inodes": Program(_python(_INODES)),
        "disk writes": Program(_python(_DISK)),
        "fsync": Program(_python(_FSYNC)),
        "metadata": Program(_python(_METADATA)),
    }


def _connection(target: Target) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(target.host, target.port, timeout=120)


def _headers(target: Target) -> dict[str, str]:
    return {"authorization": f"Bearer {target.token}", "content-type": "application/json"}


def _repeat(target: Target, method: str, path: str, body: str | None = None) -> None:
    """Sends the same request in a loop and reads every answer, errors included."""
    connection = _connection(target)
    while True:
        try:
            connection.request(method, path, body, _headers(target))
            connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            connection.close()
            time.sleep(0.01)


def _at_once(count: int, work: Callable[[], None]) -> None:
    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _hold(target: Target, count: int, request: bytes) -> None:
    """Keeps `count` connections open that sent `request` and read nothing. Reopens closed ones."""
    held: list[socket.socket] = []
    while True:
        try:
            sock = socket.create_connection((target.host, target.port), timeout=10)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(request)
            held.append(sock)
        except OSError:
            time.sleep(0.05)
        if len(held) >= count:
            time.sleep(0.5)
            held = [sock for sock in held if not _closed(sock)]


def _closed(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return sock.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def exec_flood(target: Target) -> None:
    body = json.dumps({"argv": ["true"]})
    _at_once(8, lambda: _repeat(target, "POST", f"/environments/{target.environment}/execute", body))


def file_events(target: Target) -> None:
    connection = _connection(target)
    path = f"/environments/{target.environment}"
    connection.request("POST", f"{path}/executions", json.dumps({"argv": _python(TOUCH)}), _headers(target))
    connection.getresponse().read()
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", f"{path}/files/watch?path=.&recursive=1", headers=_headers(target))
            answer = connection.getresponse()
            while answer.read1(1 << 16):
                pass
        connection.close()
        time.sleep(0.01)


def large_bodies(target: Target) -> None:
    body = json.dumps({"argv": ["true"], "stdin": "x" * BODY})
    _repeat(target, "POST", f"/environments/{target.environment}/execute", body)


def wrong_elements(target: Target) -> None:
    body = '{"argv":[' + "1," * (BODY // 2) + "1]}"
    _repeat(target, "POST", f"/environments/{target.environment}/execute", body)


def many_rules(target: Target) -> None:
    rules = ",".join(f'"h{n}.example.com"' for n in range(BODY // 22))
    body = '{"network":"allowlist","allow":[' + rules + "]}"
    _repeat(target, "PUT", f"/environments/{target.environment}/network", body)


def unread_answers(target: Target) -> None:
    path = f"/environments/{target.environment}/files/read?path=large"
    _hold(target, 50, _request("GET", path, target))


def slow_clients(target: Target) -> None:
    _hold(target, 200, b"POST /environments HTTP/1.1\r\nhost: skerry\r\ncontent-le")


def listings(target: Target) -> None:
    _repeat(target, "GET", f"/environments/{target.environment}/files/list?path=many")


def unauthenticated_grpc(target: Target) -> None:
    """Calls without a token: small on the wire, large when decompressed."""
    import grpc

    message = b"\x7a\x00" * (7 << 20)  # empty entries of the map `env`
    with grpc.insecure_channel(f"{target.host}:{target.grpc_port}") as channel:
        call: Any = channel.unary_unary("/skerry.v1.Environments/CreateEnvironment")
        while True:
            with contextlib.suppress(grpc.RpcError):
                call(message, compression=grpc.Compression.Gzip, timeout=60)


def _request(method: str, path: str, target: Target) -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nhost: skerry\r\nauthorization: Bearer {target.token}\r\n\r\n".encode()
    )


@dataclass(frozen=True)
class Client:
    """A hostile client process, and the shell command that prepares its environment."""

    attack: Callable[[Target], None]
    prepare: str = ""
    options: dict[str, Any] = field(default_factory=dict)


CLIENTS = {
    "exec flood": Client(exec_flood),
    "file events": Client(file_events),
    "large bodies": Client(large_bodies),
    "wrong elements": Client(wrong_elements),
    "many rules": Client(many_rules),
    "unread answers": Client(unread_answers, "head -c 4194304 /dev/zero > large"),
    "slow clients": Client(slow_clients),
    "listings of 100,000 names": Client(
        listings,
        f"mkdir -p many && cd many && seq {NAMES} | xargs touch",
        {"workspace": "memory"},
    ),
    "unauthenticated gRPC": Client(unauthenticated_grpc),
}


def argv(name: str, target: Target) -> list[str]:
    return [sys.executable, "-m", "benchmarks.attacks", name, json.dumps(asdict(target))]


if __name__ == "__main__":
    print("ready", flush=True)
    sys.stdin.readline()
    CLIENTS[sys.argv[1]].attack(Target(**json.loads(sys.argv[2])))
