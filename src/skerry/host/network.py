"""Sockets that intercept all traffic of an environment's network namespace."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from skerry.errors import IsolationUnavailable
from skerry.host import netlink
from skerry.host.launcher import Helper, spawn

DNS_PORT = 53
_LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
_ANY = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}  # noqa: S104
_NEW_USER, _NEW_NET = 0x10000000, 0x40000000
_GET_OWNER = 0xB701  # NS_GET_USERNS of linux/nsfs.h
_SECONDS = 10.0


def network_of(pid: int) -> int:
    """A descriptor of the network namespace of a process that may be looked at. Raises OSError."""
    return os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def identity(net: int) -> list[int]:
    """(device, inode) of a network namespace, unique while it exists. Raises OSError."""
    found = os.fstat(net)
    return [found.st_dev, found.st_ino]


@dataclass(frozen=True, slots=True)
class Sockets:
    tcp: list[socket.socket]
    udp: list[socket.socket]

    def close(self) -> None:
        for one in (*self.tcp, *self.udp):
            one.close()


def catch_all_of(helper: Helper, pid: int, *, machine: bool = False) -> Sockets:
    """As `catch_all`, for root and the network of a process. Raises IsolationUnavailable."""
    with _network_of(pid) as network:
        return catch_all(helper, network, rootful=True, machine=machine)


def catch_all(helper: Helper, network: int, *, rootful: bool, machine: bool = False) -> Sockets:
    """Make everything that is sent in a network namespace arrive at new sockets. For a thread.

    Root may do everything there; others enter the user namespace that owns it. `machine`: what comes from the tap of
    `tap_of`. Raises IsolationUnavailable with what this machine lacks.
    """
    with _inside(helper, network, rootful) as control:
        return _prepare(control, machine)


def tap_of(helper: Helper, pid: int) -> int:
    """A new tap device in the network of a process, which lasts as long as this descriptor. For root, in a thread.

    It passes nothing before `catch_all`. Raises IsolationUnavailable.
    """
    with _network_of(pid) as network, _inside(helper, network, True) as control:
        code, fd = _request(control, b"d", netlink.TAP_INDEX, netlink.TAP_NAME.encode())
    if code:
        raise IsolationUnavailable(
            f"a network device cannot be made: {os.strerror(code)}",
            hint="a virtual machine's network needs /dev/net/tun: `modprobe tun`",
        )
    return fd


@contextlib.contextmanager
def _network_of(pid: int) -> Iterator[int]:
    try:
        network = network_of(pid)
    except OSError as error:
        raise IsolationUnavailable(f"its network cannot be entered: {error.strerror}") from error
    try:
        yield network
    finally:
        os.close(network)


@contextlib.contextmanager
def _inside(helper: Helper, network: int, rootful: bool) -> Iterator[socket.socket]:
    """A helper in that network, to `_ask`. Raises IsolationUnavailable."""
    try:
        control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with control:
            control.settimeout(_SECONDS)
            with other:
                pid = spawn(helper, "network", [other.fileno()])
            try:
                _enter(control, network, rootful)
                yield control
            finally:
                control.close()
                os.waitpid(pid, 0)
    except OSError as error:  # no descriptors are left, or the helper does not answer
        raise IsolationUnavailable(f"the network did not get ready: {error}") from error


def _enter(control: socket.socket, network: int, rootful: bool) -> None:
    if not rootful:
        owner = fcntl.ioctl(network, _GET_OWNER)
        try:
            _ask(control, "entering its user namespace", b"e", _NEW_USER, fd=owner)
        finally:
            os.close(owner)
    _ask(control, "entering its network", b"e", _NEW_NET, fd=network)


def _prepare(control: socket.socket, machine: bool) -> Sockets:
    made: list[socket.socket] = []
    try:
        families = [socket.AF_INET, socket.AF_INET6] if _has_ipv6(control) else [socket.AF_INET]
        port = 0
        for family in families:
            made.append(_socket(control, socket.SOCK_STREAM, family, port, machine))
            port = made[0].getsockname()[1]
        made += [_socket(control, socket.SOCK_DGRAM, family, DNS_PORT, machine) for family in families]
        # Before there is a way out there is somebody at its end.
        if machine:
            rules = netlink.interceptions(families, port)
            routes = netlink.routes(families) + netlink.machine(families)
        else:
            rules, routes = netlink.redirections(families, port, DNS_PORT), netlink.routes(families)
        _ask(control, "redirecting connections", b"n", netlink.NETFILTER, rules)
        _ask(control, "adding routes", b"n", netlink.ROUTE, routes)
    except BaseException:
        for one in made:
            one.close()
        raise
    half = len(families)
    return Sockets(made[:half], made[half:])


def _has_ipv6(control: socket.socket) -> bool:
    """Not every machine has it. Where nothing has an address of it, nothing can be sent by it either."""
    code, fd = _request(
        control, b"s", socket.SOCK_DGRAM, _address(socket.AF_INET6, _LOOPBACK[socket.AF_INET6], 0)
    )
    if fd >= 0:
        os.close(fd)
    return code not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)


def _socket(
    control: socket.socket, kind: int, family: socket.AddressFamily, port: int, any_address: bool
) -> socket.socket:
    host = (_ANY if any_address else _LOOPBACK)[family]
    request = b"t" if any_address else b"s"
    what = f"listening on {host} port {port or 'any'}"
    return socket.socket(fileno=_ask(control, what, request, kind, _address(family, host, port)))


def _address(family: socket.AddressFamily, host: str, port: int) -> bytes:
    """As the kernel wants it."""
    packed = socket.inet_pton(family, host)
    if family == socket.AF_INET:
        return struct.pack("=H", family) + struct.pack(">H", port) + packed + bytes(8)
    return struct.pack("=H", family) + struct.pack(">HI", port, 0) + packed + bytes(4)


def _ask(
    control: socket.socket, what: str, request: bytes, number: int, data: bytes = b"", fd: int = -1
) -> int:
    """The descriptor in the answer, or -1. Raises IsolationUnavailable."""
    code, found = _request(control, request, number, data, fd)
    if code:
        raise IsolationUnavailable(
            f"{what} failed: {os.strerror(code)}",
            hint="a network needs nf_tables with nat, ct and limit in the kernel, that of a virtual machine tproxy;"
            " `skerry doctor` checks the first",
        )
    return found


def _request(
    control: socket.socket, request: bytes, number: int, data: bytes, fd: int = -1
) -> tuple[int, int]:
    """The error in the answer, or 0, and the descriptor, or -1."""
    socket.send_fds(control, [request + struct.pack("<I", number) + data], [] if fd < 0 else [fd])
    # Not by recv_fds, which forgets the flag: no program that is started meanwhile may get the descriptor.
    answer, ancillary, _, _ = control.recvmsg(4, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
    fds = [struct.unpack("=i", data)[0] for _, kind, data in ancillary if kind == socket.SCM_RIGHTS]
    code = struct.unpack("<I", answer)[0] if len(answer) == 4 else errno.EIO
    return code, fds[0] if fds else -1
