"""The daemon's socket on a port of the loopback, for clients that know no unix sockets."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def relayed(path: str) -> Iterator[str]:
    """The URL under which the unix socket can be reached until the block ends, which ends all connections."""
    clients: list[socket.socket] = []

    class Relay(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            clients.append(self.request)
            with socket.socket(socket.AF_UNIX) as daemon:
                daemon.connect(path)
                back = threading.Thread(target=copy, args=(daemon, self.request))
                back.start()
                copy(self.request, daemon)
                back.join()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Relay) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.05,))
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            serving.join()
            for client in clients:
                with suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)


def copy(source: socket.socket, target: socket.socket) -> None:
    """Everything, and then the end; a target that has gone away takes the source along."""
    try:
        while data := source.recv(65536):
            target.sendall(data)
    except OSError:
        with suppress(OSError):
            source.shutdown(socket.SHUT_RDWR)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
