"""What callers without a token can cost a daemon that serves gRPC: next to nothing."""

from __future__ import annotations

import gzip
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import support
from tests.integration.daemon import Daemon, started
from tests.integration.http2 import Connection, message

MIB = 1 << 20
GROWTH_MAX = 20 * MIB
MESSAGE = 4 * MIB
"""The largest that the daemon takes."""
EXECUTE = "/skerry.v1.Executions/Execute"
CALLS = [
    EXECUTE,
    "/skerry.v1.Files/WriteFile",
    "/skerry.v1.Executions/Attach",
    "/skerry.v1.Daemon/Health",
    "/grpc.health.v1.Health/Check",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/no.such/Method",
]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Daemon, str]]:
    address = f"127.0.0.1:{support.free_port()}"
    options = ("--backend", "fake", "--grpc", address)
    with support.temporary_home() as home, started(home, *options) as daemon:
        with Connection(address) as warm:  # what the first calls need once is no growth
            for path in CALLS:
                stream = warm.call(path)
                warm.send(stream, message(0), last=True)
                warm.wait(stream)
        yield daemon, address


def resident(daemon: Daemon) -> int:
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def pushed(connection: Connection, streams: list[int], data: bytes) -> int:
    """Sends `data` on all of them, as far as the server takes it; returns the bytes that it took."""
    left = dict.fromkeys(streams, 0)
    quiet = time.monotonic() + 1.0
    while left and time.monotonic() < quiet:
        moved = 0
        for stream, at in tuple(left.items()):
            sent = connection.send(stream, data[at : at + 65536])
            left[stream] += sent
            moved += sent
            if stream in connection.ended:
                del left[stream]
        if connection.pump(0.05) or moved:
            quiet = time.monotonic() + 1.0
    return sum(left.values())


def test_compressed_messages_are_refused_unread(served: tuple[Daemon, str]) -> None:
    daemon, address = served
    bomb = gzip.compress(b"\x12\x00" * (MESSAGE // 2))
    before = resident(daemon)
    with Connection(address) as connection:
        for path in CALLS:
            stream = connection.call(path, grpc_encoding="gzip")
            connection.send(stream, message(len(bomb), bomb, compressed=True), last=True)
            connection.wait(stream)
    assert resident(daemon) - before < GROWTH_MAX


@pytest.mark.parametrize("path", CALLS)
def test_half_sent_messages_of_strangers_are_not_buffered(served: tuple[Daemon, str], path: str) -> None:
    daemon, address = served
    half = message(MESSAGE, bytes(MESSAGE - 1))
    before = resident(daemon)
    with Connection(address) as connection:
        streams = [connection.call(path) for _ in range(100)]
        pushed(connection, streams, half)
        assert connection.ended.issuperset(streams), "a stranger's call is answered at once"
        assert resident(daemon) - before < GROWTH_MAX


@pytest.mark.parametrize("path", CALLS)
def test_a_thousand_calls_of_strangers_leave_nothing(served: tuple[Daemon, str], path: str) -> None:
    daemon, address = served
    before = resident(daemon)
    body = message(8192, bytes(8192))
    with Connection(address) as connection:
        for _ in range(10):
            streams = [connection.call(path, padding="x" * 4000) for _ in range(100)]
            for stream in streams:
                connection.send(stream, body, last=True)
            connection.wait(*streams)
            daemon.call("GET", "/healthz")
    assert resident(daemon) - before < GROWTH_MAX
