"""A daemon whose internet is ours: in a network namespace of its own, with a name server and listeners there.

Nothing that it sends can leave the machine, whatever address it has.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from skerry.egress import dns

_NEW_NET = 0x40000000


def in_a_network_of_its_own(body: Callable[[], None]) -> None:
    """Run something in a thread that has left the machine's network; raise what it raises."""
    failure: list[BaseException] = []

    def run() -> None:
        try:
            if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NET):
                raise OSError(ctypes.get_errno(), "unshare")
            body()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]


class Internet:
    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.asked: list[str] = []
        self.arrived: list[tuple[str, int]] = []


@contextmanager
def internet(addresses: Iterable[str], ports: Iterable[int] = (80,)) -> Iterator[Internet]:
    """These addresses, with a web server behind each port; and the machine's name servers, which know `names`."""
    made = Internet()
    servers = [
        words[1]
        for line in Path("/etc/resolv.conf").read_text().splitlines()
        if (words := line.split()) and words[0] == "nameserver" and not words[1].startswith("127.")
    ] or ["127.0.0.1"]
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for address in {*addresses, *(server for server in servers if not server.startswith("127."))}:
        subprocess.run(["ip", "addr", "add", address, "dev", "lo"], check=True)
    with ExitStack() as stack:
        for server in servers:
            family = socket.AF_INET6 if ":" in server else socket.AF_INET
            asked = stack.enter_context(socket.socket(family, socket.SOCK_DGRAM))
            asked.bind((server, 53))
            threading.Thread(target=_answer, args=(made, asked), daemon=True).start()
        for port in ports:
            listener = stack.enter_context(socket.create_server(("0.0.0.0", port)))
            threading.Thread(target=_serve, args=(made, listener), daemon=True).start()
        yield made


def _answer(made: Internet, asked: socket.socket) -> None:
    while True:
        try:
            packet, sender = asked.recvfrom(4096)
        except OSError:
            return
        question = dns.parse(packet)
        if question is None:
            continue
        name = question.name.lower()
        made.asked.append(name)
        found = made.names.get(name)
        if found is None:
            answer = dns.answer(question, dns.NO_SUCH_NAME)
        else:
            address = ipaddress.IPv4Address(found) if question.kind == dns.A else None
            answer = dns.answer(question, dns.NO_ERROR, address)
        asked.sendto(answer, sender)


def _serve(made: Internet, listener: socket.socket) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        host, port = client.getsockname()
        made.arrived.append((host, port))
        with client:
            client.settimeout(10)
            try:
                if client.recv(65536):
                    client.sendall(
                        b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\nconnection: close\r\n\r\nhello\n"
                    )
            except OSError:
                pass
