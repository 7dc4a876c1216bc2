"""A server whose every byte the test decides, on a unix socket, on TCP or inside TLS."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tests import certificates

GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class Peer:
    """One accepted connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = b""

    def _more(self) -> bool:
        data = self.sock.recv(65536)
        self._buffer += data
        return bool(data)

    def take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            if not self._more():
                raise EOFError
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        return data

    def take_line(self) -> bytes:
        while b"\r\n" not in self._buffer:
            if not self._more():
                raise EOFError
        line, _, self._buffer = self._buffer.partition(b"\r\n")
        return line

    def coming(self) -> str:
        """The target of the next request, which stays to be read. Raises EOFError when there is none."""
        line = self.take_line()
        self._buffer = line + b"\r\n" + self._buffer
        return line.decode().split(" ")[1]

    def request(self) -> tuple[str, str, dict[str, str], bytes]:
        """(method, target, headers, body) of the next request. Raises EOFError when there is none."""
        method, target, _ = self.take_line().decode().split(" ")
        headers: dict[str, str] = {}
        while line := self.take_line().decode():
            name, _, value = line.partition(": ")
            headers[name] = value
        body = self.take(int(headers.get("content-length", 0)))
        if headers.get("transfer-encoding") == "chunked":
            while size := int(self.take_line(), 16):
                body += self.take(size)
                self.take(2)
            self.take(2)
        return method, target, headers, body

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def end_with(self, data: bytes) -> None:
        """Send this and, inside TLS, the end of the session, as one piece; the connection stays."""
        with socket.socket(fileno=os.dup(self.sock.fileno())) as plain:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
            self.send(data)
            self.sock.setblocking(False)
            with suppress(ssl.SSLWantReadError):
                assert isinstance(self.sock, ssl.SSLSocket)
                self.sock.unwrap()
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 0)

    def respond(self, value: Any, status: int = 200) -> None:
        """A response; bytes as they are, anything else as JSON."""
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send(b"HTTP/1.1 %d OK\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))

    def upgrade(self) -> str:
        """Accept a WebSocket; returns the target."""
        _, target, headers, _ = self.request()
        digest = hashlib.sha1((headers["sec-websocket-key"] + GUID).encode()).digest()
        accept = base64.b64encode(digest)
        self.send(b"HTTP/1.1 101 X\r\nupgrade: websocket\r\nsec-websocket-accept: %b\r\n\r\n" % accept)
        return target

    def send_frame(self, opcode: int, payload: bytes, *, final: bool = True) -> None:
        self.send(server_frame(opcode, payload, final=final))

    def send_event(self, **event: Any) -> None:
        self.send_frame(1, json.dumps(event).encode())

    def take_frame(self) -> tuple[int, bytes]:
        """(opcode, payload) of the client's next frame, which must be masked."""
        first, second = self.take(2)
        assert second & 0x80, "a client must mask"
        size = second & 0x7F
        if size >= 126:
            size = int.from_bytes(self.take(2 if size == 126 else 8), "big")
        mask = self.take(4)
        return first & 0x0F, bytes(byte ^ mask[i % 4] for i, byte in enumerate(self.take(size)))


def server_frame(opcode: int, payload: bytes, *, final: bool = True) -> bytes:
    size = len(payload)
    if size < 126:
        head = bytes([size])
    elif size < 1 << 16:
        head = b"\x7e" + size.to_bytes(2, "big")
    else:
        head = b"\x7f" + size.to_bytes(8, "big")
    return bytes([(0x80 if final else 0) | opcode]) + head + payload


DOOR = "unix"
"""Where servers listen: `unix`, `tcp` or `tls`. Fixtures change it."""


class ScriptedServer:
    """Runs `script` for every connection, in a thread each. `variables` make clients find it."""

    def __init__(self, script: Callable[[Peer], object]) -> None:
        self.script = script
        self.home = tempfile.mkdtemp(prefix="skerry-test-")
        self.connections = 0
        self.ended = threading.Semaphore(0)
        """Released for every connection that the server has closed."""
        self.failures: list[BaseException] = []
        self.variables = {"SKERRY_HOME": self.home}
        self._context: ssl.SSLContext | None = None
        if DOOR == "unix":
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(f"{self.home}/daemon.sock")
        else:
            self._listener = socket.create_server(("127.0.0.1", 0))
            scheme = {"tcp": "http", "tls": "https"}[DOOR]
            self.variables["SKERRY_URL"] = f"{scheme}://127.0.0.1:{self._listener.getsockname()[1]}"
        if DOOR == "tls":
            made = certificates.make()
            self.variables["SKERRY_CA"] = made.ca
            self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._context.load_cert_chain(made.cert, made.key)
        self._listener.listen(64)
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            thread = threading.Thread(target=self._serve, args=(sock,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            if DOOR != "unix":
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._context is not None:
                sock = self._context.wrap_socket(sock, server_side=True)
            self.script(Peer(sock))
            if isinstance(sock, ssl.SSLSocket):
                sock.setblocking(False)
                sock.unwrap()  # says that this is the end, and does not wait for an answer
        except (EOFError, ConnectionError, ssl.SSLError):
            pass
        except BaseException as error:
            self.failures.append(error)
        finally:
            sock.close()
        self.ended.release()

    def close(self) -> None:
        """Stop, and raise what went wrong in a script. Clients must have closed their connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(timeout=10)
            assert not thread.is_alive(), "a script is stuck"
        shutil.rmtree(self.home)
        if self.failures:
            raise self.failures[0]


@contextmanager
def serving(script: Callable[[Peer], object]) -> Iterator[ScriptedServer]:
    server = ScriptedServer(script)
    os.environ |= server.variables
    try:
        yield server
    finally:
        for name in server.variables:
            del os.environ[name]
        server.close()


def every_request(
    answer: Callable[[str, str, bytes], Any], but: str = "\0", script: Callable[[Peer], object] | None = None
) -> Callable[[Peer], None]:
    """A script that answers (method, target, body) with JSON, or with raw bytes, for ever.

    A target with `but` in it is left to another script, and is the last on its connection.
    """

    def run(peer: Peer) -> None:
        while True:
            if but in peer.coming() and script is not None:
                script(peer)
                return
            method, target, _, body = peer.request()
            value = answer(method, target, body)
            peer.respond(*value) if isinstance(value, tuple) else peer.respond(value)

    return run
