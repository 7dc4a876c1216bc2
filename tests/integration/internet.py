"""A daemon whose internet is ours: in a network namespace of its own, with a name server and listeners there.

Nothing that it sends can leave the machine, whatever address it has.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from skerry.egress import dns
from tests.integration.egress_world import ip, new_network


def in_a_network_of_its_own(body: Callable[[], None]) -> None:
    """Run something in a thread that has left the machine's network; raise what it raises."""
    failure: list[BaseException] = []

    def run() -> None:
        try:
            new_network()
            body()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]


@contextmanager
def relayed(places: Iterable[tuple[str, int]], folder: Path) -> Iterator[Callable[[ExitStack], None]]:
    """What, called elsewhere, makes these places of the real network be there; for packages of the registries."""
    with ExitStack() as here:
        ways = {}
        for number, place in enumerate(places):
            listener = here.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(folder / f"relay{number}"))
            listener.listen(64)
            threading.Thread(target=_relay, args=(listener, place), daemon=True).start()
            ways[place] = str(folder / f"relay{number}")

        def there(stack: ExitStack) -> None:
            for place, way in ways.items():
                outer = stack.enter_context(socket.create_server(place))
                threading.Thread(target=_relay, args=(outer, way), daemon=True).start()

        yield there


@contextmanager
def through_a_socket(place: tuple[str, int], path: Path) -> Iterator[str]:
    """A gRPC target for a place of this thread's network: gRPC connects in threads of the network of earlier tests."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(64)
        threading.Thread(target=_relay, args=(listener, place), daemon=True).start()
        yield f"unix:{path}"


def _relay(listener: socket.socket, target: str | tuple[str, int]) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        try:
            if isinstance(target, str):
                server = socket.socket(socket.AF_UNIX)
                server.connect(target)
            else:
                server = socket.create_connection(target, timeout=60)
        except OSError:
            client.close()
            continue
        threading.Thread(target=_join, args=(client, server), daemon=True).start()


def _join(client: socket.socket, server: socket.socket) -> None:
    with client, server:
        back = threading.Thread(target=_copy, args=(server, client), daemon=True)
        back.start()
        _copy(client, server)
        back.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


class Internet:
    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.asked: list[str] = []
        self.arrived: list[tuple[str, int]] = []


@contextmanager
def internet(
    addresses: Iterable[str],
    ports: Iterable[int] = (80,),
    also: Callable[[ExitStack], None] = lambda stack: None,
) -> Iterator[Internet]:
    """Another network namespace, which is all that the caller's can reach: these addresses, with a web server behind
    each port, and the machine's name servers, which know `names`. `also` is called there, to add more."""
    made = Internet()
    there, go, ready, over = (threading.Event() for _ in range(4))
    failure: list[BaseException] = []
    thread_id = 0

    def outside() -> None:
        nonlocal thread_id
        try:
            new_network()
            thread_id = threading.get_native_id()
            there.set()
            go.wait()
            ip("link set lo up", "link set skerry1 up", "addr add 198.51.100.2/24 dev skerry1")
            servers = [server for server in _name_servers() if not _on_loopback(server)]
            ip(*(f"addr add {address} dev lo" for address in {*addresses, *servers}))
            with ExitStack() as stack:
                for server in servers:
                    stack.enter_context(_name_server(made, server))
                for port in ports:
                    listener = stack.enter_context(socket.create_server(("0.0.0.0", port)))
                    threading.Thread(target=_serve, args=(made, listener), daemon=True).start()
                also(stack)
                ready.set()
                over.wait()
        except BaseException as error:
            failure.append(error)
        finally:
            there.set()
            ready.set()

    thread = threading.Thread(target=outside)
    thread.start()
    try:
        there.wait()
        ip(
            "link set lo up",
            "link add skerry0 type veth peer name skerry1",
            f"link set skerry1 netns {thread_id}",
            "addr add 198.51.100.1/24 dev skerry0",
            "link set skerry0 up",
            "route add default via 198.51.100.2",
        )
        go.set()
        ready.wait()
        if failure:
            raise failure[0]
        with ExitStack() as stack:
            for server in filter(_on_loopback, _name_servers()):
                stack.enter_context(_name_server(made, server))
            yield made
    finally:
        go.set()
        over.set()
        thread.join()


def _name_servers() -> list[str]:
    lines = [line.split() for line in Path("/etc/resolv.conf").read_text().splitlines()]
    return [words[1] for words in lines if words[:1] == ["nameserver"]] or ["127.0.0.1"]


def _on_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _name_server(made: Internet, address: str) -> socket.socket:
    asked = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
    asked.bind((address, 53))
    threading.Thread(target=_answer, args=(made, asked), daemon=True).start()
    return asked


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
