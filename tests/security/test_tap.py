"""What a hostile virtual machine can do with its network device: a tap of one, in our hands instead of a monitor's."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
from collections.abc import Iterator
from ipaddress import ip_address

import pytest

from skerry.errors import IsolationUnavailable
from skerry.host import netlink
from skerry.host.launcher import Helper
from skerry.host.network import DNS_PORT, Sockets, catch_all_of, tap_of
from tests.security import frames
from tests.security.frames import Answer, connection, packet, query, udp

pytestmark = pytest.mark.root

ANY = ("93.184.216.34", "2606:2800:220:1::34")
MANY = 20_000
LENIENT = {
    "ipv4/ip_forward": "1",
    "ipv6/conf/all/forwarding": "1",
    **{
        f"ipv4/conf/{which}/{name}": value
        for which in ("all", "default")
        for name, value in (("accept_local", "1"), ("route_localnet", "1"), ("rp_filter", "0"))
    },
    **{f"ipv6/conf/{which}/accept_ra": "2" for which in ("all", "default")},
    **{f"ipv4/conf/{which}/accept_source_route": "1" for which in ("all", "default")},
    **{f"ipv6/conf/{which}/accept_source_route": "1" for which in ("all", "default")},
}
"""Settings with which the kernel itself refuses the least. A new network has some of them from the host's."""


class Wire:
    """A tap, the sockets of a daemon behind it, and a process in the same network."""

    def __init__(self, helper: Helper, pid: int) -> None:
        self.helper, self.pid = helper, pid
        self.tap = tap_of(helper, pid)
        self.sockets = Sockets([], [])
        self._count = 0

    def open(self) -> None:
        self.sockets.close()
        self.sockets = catch_all_of(self.helper, self.pid, machine=True)

    def close(self) -> None:
        self.sockets.close()
        os.close(self.tap)

    def inside(self, *argv: str) -> str:
        """The output of a program in that network."""
        entered = ["nsenter", "--net", "--target", str(self.pid), "--", *argv]
        return subprocess.run(entered, check=True, capture_output=True, text=True).stdout

    def send(self, *sent: bytes) -> tuple[list[bytes], list[Answer]]:
        """What has come to the daemon's sockets for queries, and back, when the kernel is done with these frames."""
        self._count += 1
        first, second = (b"%s %d" % (word, self._count) for word in (b"first", b"second"))
        queries: list[bytes] = []
        answers: list[Answer] = []
        for frame in sent:
            os.write(self.tap, frame)
        # With the first of our own all before it have arrived, and with the answer to the second all answers.
        for mark in (first, second):
            os.write(self.tap, query(ANY[0], mark, from_port=5000))
            while mark not in queries:
                queries += self._queries()
            queries.remove(mark)
        while (answer := self.receive()).content[8:] != second:
            if not _of_the_kernel(answer) and answer.content[8:] != first:
                answers.append(answer)
        return queries, answers

    def receive(self) -> Answer:
        while True:
            with contextlib.suppress(BlockingIOError):
                return Answer(os.read(self.tap, 65536))

    def _queries(self) -> list[bytes]:
        """Those that are there; each is sent back as an answer."""
        found = []
        for one in self.sockets.udp:
            with contextlib.suppress(BlockingIOError):
                while True:
                    data, where, _, sender = one.recvmsg(4096, 64)
                    one.sendmsg([data], where, 0, sender)
                    found.append(data)
        return found

    def accept(self) -> list[tuple[str, int]]:
        """Where the connections went that have arrived."""
        found = []
        for one in self.sockets.tcp:
            with contextlib.suppress(BlockingIOError):
                while True:
                    client, _ = one.accept()
                    with client:
                        found.append(client.getsockname()[:2])
        return found

    def neighbours(self) -> str:
        return self.inside("ip", "neighbour")


def _of_the_kernel(answer: Answer) -> bool:
    """What IPv6 says of itself when a device is up, to groups."""
    return answer.kind == frames.IPV6 and ip_address(answer.to).is_multicast


@pytest.fixture
def wire() -> Iterator[Wire]:
    script = "ip link set lo up && echo up && exec cat"
    with subprocess.Popen(
        ["unshare", "--user", "--map-root-user", "--net", "--", "sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        helper = Helper()
        cpus = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cpus)})  # so that frames are handled in their order
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            with contextlib.closing(Wire(helper, process.pid)) as made:
                assign = "".join(f"echo {value} > /proc/sys/net/{name};" for name, value in LENIENT.items())
                made.inside("sh", "-c", assign)
                made.open()
                yield made
        finally:
            os.sched_setaffinity(0, cpus)
            helper.close()
            process.kill()


def nothing(wire: Wire, *sent: bytes) -> None:
    """Whether these reach nobody and nothing comes back."""
    assert wire.send(*sent) == ([], [])
    assert wire.accept() == []
    assert wire.neighbours() == ""


@pytest.mark.parametrize("to", [*ANY, "10.0.0.1", "169.254.169.254", "192.0.2.1", "fd00::1", "8.8.8.8"])
def test_daemon_gets_queries_and_connections_to_any_address(wire: Wire, to: str) -> None:
    queries, answers = wire.send(query(to, b"asked"))
    assert queries == [b"asked"]
    (answer,) = answers
    assert (answer.source, answer.ports, answer.content[8:]) == (to, (53, 4000), b"asked")
    _, (answer,) = wire.send(connection(to, 8080))
    assert (answer.source, answer.ports, answer.flags) == (to, (8080, 4000), frames.SYN_ACK)
    wire.send(connection(to, 8080, frames.ACK, sequence=2, ack=answer.sequence + 1))
    assert wire.accept() == [(to, 8080)]


def test_next_daemon_gets_what_the_last_one_got(wire: Wire) -> None:
    port = wire.sockets.tcp[0].getsockname()[1]
    wire.open()
    assert wire.sockets.tcp[0].getsockname()[1] != port
    _, answers = wire.send(connection(ANY[0], port), connection(ANY[1], 80))
    assert [answer.flags for answer in answers] == [frames.SYN_ACK] * 2


def test_nothing_passes_before_a_daemon_is_there(wire: Wire) -> None:
    os.close(wire.tap)
    wire.tap = tap_of(wire.helper, wire.pid)
    with pytest.raises(OSError, match="Input/output error"):
        os.write(wire.tap, query(ANY[0], b"early"))


@pytest.mark.parametrize(
    "source", ["93.184.216.35", "192.0.2.1", "127.0.0.1", "0.0.0.0", "2606:2800::1", "::1", "fe80::9"]
)
def test_forged_sender_reaches_nobody(wire: Wire, source: str) -> None:
    to = ANY[ip_address(source).version == 6]
    nothing(wire, query(to, b"x", source=source), connection(to, 80, source=source))


@pytest.mark.parametrize(
    "to",
    [
        "127.0.0.1",
        "127.9.9.9",
        "255.255.255.255",
        "224.0.0.1",
        "239.1.1.1",
        "240.0.0.1",
        "::1",
        "ff02::1",
        "ff05::2",
    ],
)
def test_loopback_groups_and_broadcast_reach_nobody(wire: Wire, to: str) -> None:
    nothing(wire, query(to, b"x"), connection(to, 80))


@pytest.mark.parametrize("to", ANY)
def test_other_sockets_of_the_network_are_not_reached(wire: Wire, to: str) -> None:
    """All connections are the daemon's, and of datagrams only queries arrive."""
    family = socket.AF_INET6 if ":" in to else socket.AF_INET
    host = "::" if ":" in to else "0.0.0.0"
    listener, receiver = _sockets_in(wire.pid, family, host)
    with listener, receiver:
        sent = udp(to, receiver.getsockname()[1], b"x")
        queries, answers = wire.send(
            connection(to, listener.getsockname()[1]), packet(socket.IPPROTO_UDP, sent, to)
        )
        assert queries == []
        assert [answer.flags for answer in answers] == [frames.SYN_ACK]
        ack = connection(to, listener.getsockname()[1], frames.ACK, sequence=2, ack=answers[0].sequence + 1)
        wire.send(ack)
        assert wire.accept() == [(to, listener.getsockname()[1])]
        for one in (listener, receiver):
            one.setblocking(False)
            with pytest.raises(BlockingIOError):
                one.recv(1) if one is receiver else one.accept()


def _sockets_in(pid: int, family: socket.AddressFamily, host: str) -> tuple[socket.socket, socket.socket]:
    """Of a process's network, made in a child that enters it."""
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            with open(f"/proc/{pid}/ns/net") as network:
                _enter(network.fileno())
            made = [socket.socket(family, kind) for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM)]
            for one in made:
                one.bind((host, 0))
            made[0].listen()
            socket.send_fds(theirs, [b"x"], [one.fileno() for one in made])
        finally:
            os._exit(0)
    with ours, theirs:
        _, fds, _, _ = socket.recv_fds(ours, 1, 2)
        os.waitpid(child, 0)
    first, second = (socket.socket(fileno=fd) for fd in fds)
    return first, second


def _enter(network: int) -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).setns(network, 0):
        raise OSError(ctypes.get_errno(), "setns")


def test_fragments_are_not_put_together(wire: Wire) -> None:
    """Nor held: their memory is the host's."""
    whole = udp(ANY[0], DNS_PORT, b"x" * 24)
    more, last = 0x2000, len(whole[:16]) // 8
    sent = [
        packet(socket.IPPROTO_UDP, whole[:16], ANY[0], fragment=more),
        packet(socket.IPPROTO_UDP, whole[16:], ANY[0], fragment=last),
    ]
    of_six = udp(ANY[1], DNS_PORT, b"x" * 24)
    for at, part, flags in ((0, of_six[:16], 1), (16, of_six[16:], 0)):
        head = struct.pack(">BBHI", socket.IPPROTO_UDP, 0, at | flags, 7)
        sent.append(packet(0, head + part, ANY[1], extension=44))
    nothing(wire, *sent)
    nothing(wire, sent[0], sent[2])
    held = wire.inside("cat", "/proc/net/sockstat", "/proc/net/sockstat6").splitlines()
    assert [line for line in held if "FRAG" in line] == ["FRAG: inuse 0 memory 0", "FRAG6: inuse 0 memory 0"]


def test_options_and_extension_headers_are_refused(wire: Wire) -> None:
    asked = udp(ANY[0], DNS_PORT, b"x")
    source_route = bytes((131, 7, 4, *ip_address("10.0.0.1").packed, 0))
    sent = [
        packet(socket.IPPROTO_UDP, asked, ANY[0], options=options) for options in (source_route, b"\1" * 4)
    ]
    for kind in (0, 43, 60):  # hop by hop, routing, destination
        head = struct.pack(">BBHI", socket.IPPROTO_UDP, 0, 0x0104 if kind != 43 else 0, 0)
        sent.append(packet(0, head + udp(ANY[1], DNS_PORT, b"x"), ANY[1], extension=kind))
    nothing(wire, *sent)


def test_own_address_is_not_a_way_to_have_packets_forwarded(wire: Wire) -> None:
    for own in frames.HERE.values():
        nothing(wire, query(own, b"x"), connection(own, 80))


def test_nobody_answers_or_learns_of_neighbours(wire: Wire) -> None:
    """The tables of neighbours are one for all networks of a kernel."""
    sender, asked = b"\2\0\0\0\0\7", ip_address(ANY[0]).packed
    sent = []
    for operation in (1, 2):
        for number in range(4):
            own = ip_address(f"192.0.2.{100 + number}").packed
            body = struct.pack(">HHBBH", 1, frames.IPV4, 6, 4, operation) + sender + own + bytes(6) + asked
            sent += [frames.ethernet(frames.ARP, body, to) for to in (netlink.MAC, b"\xff" * 6)]
    link = "fe80::9"
    prefix = struct.pack(">BBBBIII", 3, 4, 64, 0xC0, 9000, 9000, 0) + ip_address("2001:db8:9::").packed
    for message in (
        struct.pack(">BBHI", 135, 0, 0, 0) + ip_address(ANY[1]).packed + b"\1\1" + sender,  # who has
        struct.pack(">BBHI", 136, 0, 0, 0x20000000) + ip_address(link).packed + b"\2\1" + sender,
        struct.pack(">BBHBBHII", 134, 0, 0, 64, 0, 9000, 0, 0) + b"\1\1" + sender + prefix,  # a router
        struct.pack(">BBHI", 128, 0, 0, 1),  # an echo
    ):
        for source in (link, frames.HERE[6]):
            for to in (ANY[1], "ff02::1"):
                content = frames.icmp6(to, message, source=source)
                sent.append(packet(socket.IPPROTO_ICMPV6, content, to, source=source))
    addresses = wire.inside("ip", "-brief", "address"), wire.inside("ip", "-6", "route")
    nothing(wire, *sent)
    assert (wire.inside("ip", "-brief", "address"), wire.inside("ip", "-6", "route")) == addresses


@pytest.mark.parametrize("protocol", [1, 2, 4, 41, 47, 50, 58, 89, 103, 115, 132, 136, 255])
def test_other_protocols_reach_nobody(wire: Wire, protocol: int) -> None:
    echo = bytes((8, 0, 0xF7, 0xFF, 0, 0, 0, 0))
    nothing(wire, *(packet(protocol, echo + bytes(56), to) for to in ANY))


@pytest.mark.parametrize("kind", [0x8100, 0x88A8, 0x8847, 0x8863, 0x88CC, 0x0004, 0x8035, 0x9000])
def test_other_frames_reach_nobody(wire: Wire, kind: int) -> None:
    within = struct.pack(">HH", 5, frames.IPV4) + query(ANY[0], b"x")[14:]
    nothing(wire, frames.ethernet(kind, within), frames.ethernet(kind, b""), b"\2" * 14)


def test_flood_is_bounded_and_no_connection_is_tracked(wire: Wire) -> None:
    """With the limits of every network; half-open connections cost the listener's backlog at most."""
    answered = 0
    for number in range(MANY):
        os.write(wire.tap, connection(ANY[0], 80, from_port=1024 + number))
        with contextlib.suppress(BlockingIOError):
            while True:
                answered += Answer(os.read(wire.tap, 65536)).kind == frames.IPV4
    assert 0 < answered < MANY
    arrived = 0
    asked = query(ANY[0], b"x")
    for _ in range(MANY):
        os.write(wire.tap, asked)
        with contextlib.suppress(BlockingIOError):
            wire.sockets.udp[0].recv(64)
            arrived += 1
    assert 0 < arrived < MANY
    assert wire.inside("cat", "/proc/sys/net/netfilter/nf_conntrack_count") == "0\n"


def test_tap_that_cannot_be_made_is_told_and_leaves_nothing_open(wire: Wire) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(IsolationUnavailable, match="a network device cannot be made"):
        tap_of(wire.helper, wire.pid)  # there is one
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
        with pytest.raises(IsolationUnavailable, match="cannot be entered"):
            tap_of(wire.helper, ended.pid)
    assert os.listdir("/proc/self/fd") == before
