"""The network of a guest that an earlier daemon started, for a daemon without root.

No process of the same user may look into a guest, so the kernel shows its namespaces to nobody; the guest itself hands
its network over when it is asked. Whatever it sends is looked at before it is used: it must be the namespace whose
number was noted when nothing but our own steps had run there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
import time

from skerry.backends.instances import InstanceDirectory
from skerry.errors import GuestFailed
from skerry.guest import frames
from skerry.guest.channel import HANDSHAKE_SECONDS, REQUESTS
from skerry.guest.frames import Type
from skerry.host.network import identity

_VERSION = struct.pack("<I", frames.VERSION)
_QUESTION = frames.encode(Type.HELLO, 0, _VERSION) + frames.encode(Type.NETWORK, REQUESTS)
_ANSWER = frames.encode(Type.HELLO_REPLY, 0, _VERSION) + frames.encode(Type.RESULT, REQUESTS)


async def handed_over(directory: InstanceDirectory, noted: list[int] | None) -> int | None:
    """A descriptor of what the guest hands over, in a conversation that ends an earlier one.

    None: nothing, or not what was noted.
    """
    try:
        sock = directory.connect(descriptors=True)
    except GuestFailed:
        return None
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[int | None] = loop.create_future()

    def deliver(found: int | None) -> None:
        if not answer.done():
            answer.set_result(found)
        elif found is not None:
            os.close(found)

    def work() -> None:
        found = _ask(sock, noted)
        with contextlib.suppress(RuntimeError):  # the loop has ended, and so does the daemon
            loop.call_soon_threadsafe(deliver, found)

    # A socket that lingers holds up whoever closes it, for as long as its sender wished: nobody waits for this thread.
    threading.Thread(target=work, daemon=True).start()
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            return await answer
    except TimeoutError:
        return None


def _ask(sock: socket.socket, noted: list[int] | None) -> int | None:
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    found: list[int] = []
    heard = b""
    try:
        with sock:
            sock.sendall(_QUESTION)
            while len(heard) < len(_ANSWER):
                sock.settimeout(max(0.0, deadline - time.monotonic()))
                # With room for one descriptor: the kernel drops what else comes with it.
                data, ancillary, _, _ = sock.recvmsg(
                    len(_ANSWER) - len(heard), socket.CMSG_LEN(4), socket.MSG_CMSG_CLOEXEC
                )
                found += [
                    struct.unpack("=i", fd)[0] for _, kind, fd in ancillary if kind == socket.SCM_RIGHTS
                ]
                heard += data
                if not data:
                    return None
        if heard == _ANSWER and len(found) == 1 and identity(found[0]) == noted:
            return found.pop()
        return None
    except OSError:
        return None
    finally:
        for fd in found:
            os.close(fd)
