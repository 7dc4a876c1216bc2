"""A guest that was taken over, asked for its network by a daemon that did not start it.

Whatever it hands over: only the namespace that was noted is used, nothing stays open, and nobody has to wait for it.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from skerry.backends import handover
from skerry.backends.handover import handed_over
from skerry.backends.instances import PASS_RIGHTS, InstanceDirectory
from skerry.guest import frames
from skerry.guest.channel import REQUESTS
from skerry.guest.frames import Type
from skerry.host.network import identity

pytestmark = pytest.mark.timeout(60)

HELLO = frames.encode(Type.HELLO_REPLY, 0, struct.pack("<I", frames.VERSION))
RESULT = frames.encode(Type.RESULT, REQUESTS)
QUESTION = frames.encode(Type.HELLO, 0, struct.pack("<I", frames.VERSION)) + frames.encode(
    Type.NETWORK, REQUESTS
)

Script = Callable[[socket.socket, int, int], None]
"""What it does with the stream, when it has two descriptors: of its network, and of another."""


@contextmanager
def playing(folder: Path, script: Script) -> Iterator[tuple[InstanceDirectory, list[int]]]:
    """A guest that does this when it is asked, and the numbers of its network."""
    directory = InstanceDirectory(str(folder), "skerry-test")
    directory.make()
    with ExitStack() as stack:
        listener = stack.enter_context(directory.listen())
        its = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        stack.callback(os.close, its)
        other = stack.enter_context(
            subprocess.Popen(["unshare", "--user", "--net", "cat"], stdin=-1, stdout=-1)
        )
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdin.write(b"it has left\n")
        other.stdin.flush()
        other.stdout.readline()
        another = os.open(f"/proc/{other.pid}/ns/net", os.O_RDONLY)
        stack.callback(os.close, another)

        def play() -> None:
            with listener.accept()[0] as stream, suppress(OSError):
                assert stream.recv(len(QUESTION), socket.MSG_WAITALL) == QUESTION
                script(stream, its, another)

        thread = threading.Thread(target=play)
        thread.start()
        stack.callback(thread.join)
        yield directory, identity(its)


def refused(folder: Path, script: Script) -> bool:
    """Whether the daemon has nothing then, and no descriptor more than before."""
    gc.collect()  # closes what others have left open
    before, threads = set(os.listdir("/proc/self/fd")), set(threading.enumerate())

    async def ask() -> bool:
        with playing(folder, script) as (directory, noted):
            return await handed_over(directory, noted) is None

    refused = asyncio.run(ask())
    for thread in set(threading.enumerate()) - threads:
        thread.join()
    return refused and set(os.listdir("/proc/self/fd")) <= before


def test_the_one_that_was_noted(tmp_path: Path) -> None:
    def script(stream: socket.socket, its: int, another: int) -> None:
        stream.sendall(HELLO)
        socket.send_fds(stream, [RESULT], [its])

    async def ask() -> None:
        with playing(tmp_path, script) as (directory, noted):
            found = await handed_over(directory, noted)
            assert found is not None
            assert identity(found) == noted
            assert not os.get_inheritable(found)
            os.close(found)

    asyncio.run(ask())


def another(stream: socket.socket, its: int, another: int) -> None:
    stream.sendall(HELLO)
    socket.send_fds(stream, [RESULT], [another])


def nothing(stream: socket.socket, its: int, another: int) -> None:
    stream.sendall(HELLO + RESULT)


def something_else(stream: socket.socket, its: int, another: int) -> None:
    stream.sendall(HELLO)
    with open("/dev/null") as null:
        socket.send_fds(stream, [RESULT], [null.fileno()])


def one_after_the_other(stream: socket.socket, its: int, another: int) -> None:
    socket.send_fds(stream, [HELLO], [another])
    socket.send_fds(stream, [RESULT], [its])


def one_for_each_byte(stream: socket.socket, its: int, another: int) -> None:
    for byte in HELLO + RESULT:
        socket.send_fds(stream, [bytes((byte,))], [its])


def the_wrong_words(stream: socket.socket, its: int, another: int) -> None:
    socket.send_fds(stream, [HELLO + frames.encode(Type.PONG, REQUESTS)], [its])


def too_few_words(stream: socket.socket, its: int, another: int) -> None:
    socket.send_fds(stream, [HELLO], [its])


def no_word(stream: socket.socket, its: int, another: int) -> None:
    pass


def many_at_once(stream: socket.socket, its: int, another: int) -> None:
    socket.send_fds(stream, [HELLO + RESULT], [another, *[its] * 100])


HOSTILE = (
    *(many_at_once, another, nothing, something_else, one_after_the_other, one_for_each_byte),
    *(the_wrong_words, too_few_words, no_word),
)


@pytest.mark.parametrize("script", HOSTILE)
def test_anything_else(script: Script, tmp_path: Path) -> None:
    assert refused(tmp_path, script)


def test_a_guest_that_is_not_there(tmp_path: Path) -> None:
    assert asyncio.run(handed_over(InstanceDirectory(str(tmp_path), "skerry-test"), [0, 0])) is None


def test_a_guest_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "HANDSHAKE_SECONDS", 0.1)

    def script(stream: socket.socket, its: int, another: int) -> None:
        assert stream.recv(1) == b"", "it hangs up"

    assert refused(tmp_path, script)


def test_a_descriptor_that_does_not_want_to_end(tmp_path: Path) -> None:
    """Whoever closes a socket that lingers, with bytes that nobody reads, waits for as long as its sender said."""
    peers: list[socket.socket] = []
    sent = threading.Event()

    def script(stream: socket.socket, its: int, another: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            lingering = socket.create_connection(listener.getsockname())
            peers.append(listener.accept()[0])
        lingering.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                lingering.send(bytes(65536))
        lingering.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
        socket.send_fds(stream, [HELLO], [lingering.fileno()])
        lingering.close()
        stream.sendall(RESULT)
        sent.set()

    async def ask() -> None:
        with playing(tmp_path, script) as (directory, noted):
            asking = asyncio.create_task(handed_over(directory, noted))
            await asyncio.to_thread(sent.wait)
            peers[0].close()  # to which the loop would not come if it waited itself
            assert await asking is None

    asyncio.run(ask())


def test_other_streams_take_no_descriptors(tmp_path: Path) -> None:
    """Or the daemon would close such a socket in the midst of its work."""
    directory = InstanceDirectory(str(tmp_path), "skerry-test")
    directory.make()
    with directory.listen() as listener, directory.connect() as ours, listener.accept()[0] as guest:
        guest.sendall(b"words")
        assert ours.recv(5) == b"words"
        try:
            listener.getsockopt(socket.SOL_SOCKET, PASS_RIGHTS)
        except OSError:
            pytest.skip("needs Linux 6.16, which can refuse descriptors")
        with pytest.raises(PermissionError):
            socket.send_fds(guest, [b"more"], [0])
