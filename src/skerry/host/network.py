"""The sockets at which everything arrives that an environment sends."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

from skerry.errors import IsolationUnavailable
from skerry.host import netlink
from skerry.host.launcher import Helper, spawn

DNS_PORT = 53
_NEW_USER, _NEW_NET = 0x10000000, 0x40000000
_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Namespaces:
    """Descriptors. The user namespace is -1 where it need not be entered: root may do everything in both."""

    user: int
    net: int

    @classmethod
    def of(cls, pid: int, *, rootful: bool) -> Namespaces:
        """Of a process that may be looked at. Raises OSError."""
        flags = os.O_RDONLY | os.O_CLOEXEC
        net = os.open(f"/proc/{pid}/ns/net", flags)
        try:
            return cls(-1 if rootful else os.open(f"/proc/{pid}/ns/user", flags), net)
        except OSError:
            os.close(net)
            raise

    def close(self) -> None:
        for fd in (self.user, self.net):
            if fd >= 0:
                os.close(fd)


@dataclass(frozen=True, slots=True)
class Sockets:
    tcp: list[socket.socket]
    udp: list[socket.socket]

    def close(self) -> None:
        for one in (*self.tcp, *self.udp):
            one.close()


def catch_all(helper: Helper, namespaces: Namespaces) -> Sockets:
    """Make everything that is sent in these namespaces arrive at new sockets. To be called once for each, in a thread.

    Raises IsolationUnavailable with what this machine lacks.
    """
    control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with control:
        control.settimeout(_SECONDS)
        with other:
            pid = spawn(helper, "network", [other.fileno()])
        try:
            return _prepare(control, namespaces)
        except OSError as error:  # it does not answer, or is gone
            raise IsolationUnavailable(f"the network did not get ready: {error}") from error
        finally:
            control.close()
            os.waitpid(pid, 0)


def _prepare(control: socket.socket, namespaces: Namespaces) -> Sockets:
    made: list[socket.socket] = []
    try:
        if namespaces.user >= 0:
            _ask(control, "entering its user namespace", b"e", _NEW_USER, fd=namespaces.user)
        _ask(control, "entering its network", b"e", _NEW_NET, fd=namespaces.net)
        tcp = _socket(control, socket.SOCK_STREAM, socket.AF_INET, "127.0.0.1", 0)
        made.append(tcp)
        port = tcp.getsockname()[1]
        made.append(_socket(control, socket.SOCK_STREAM, socket.AF_INET6, "::1", port))
        made.append(_socket(control, socket.SOCK_DGRAM, socket.AF_INET, "127.0.0.1", DNS_PORT))
        made.append(_socket(control, socket.SOCK_DGRAM, socket.AF_INET6, "::1", DNS_PORT))
        # Before there is a way out there is somebody at its end.
        _ask(
            control, "redirecting connections", b"n", netlink.NETFILTER, netlink.redirections(port, DNS_PORT)
        )
        _ask(control, "adding routes", b"n", netlink.ROUTE, netlink.routes())
    except BaseException:
        for one in made:
            one.close()
        raise
    return Sockets(made[:2], made[2:])


def _socket(control: socket.socket, kind: int, family: int, host: str, port: int) -> socket.socket:
    if family == socket.AF_INET:
        address = struct.pack("=H", family) + struct.pack(">H", port) + socket.inet_aton(host) + bytes(8)
    else:
        packed = socket.inet_pton(family, host)
        address = struct.pack("=H", family) + struct.pack(">HI", port, 0) + packed + bytes(4)
    fd = _ask(control, f"listening on {host} port {port or 'any'}", b"s", kind, address)
    return socket.socket(fileno=fd)


def _ask(
    control: socket.socket, what: str, request: bytes, number: int, data: bytes = b"", fd: int = -1
) -> int:
    """The descriptor in the answer, or -1. Raises IsolationUnavailable."""
    socket.send_fds(control, [request + struct.pack("<I", number) + data], [] if fd < 0 else [fd])
    # Not by recv_fds, which forgets the flag: no program that is started meanwhile may get the descriptor.
    answer, ancillary, _, _ = control.recvmsg(4, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
    fds = [struct.unpack("=i", data)[0] for _, kind, data in ancillary if kind == socket.SCM_RIGHTS]
    code = struct.unpack("<I", answer)[0] if len(answer) == 4 else 5
    if code:
        raise IsolationUnavailable(
            f"{what} failed: {os.strerror(code)}",
            hint="a network needs netfilter (nf_tables with nat) in the kernel; `skerry doctor` checks it",
        )
    return int(fds[0]) if fds else -1
