"""Runs one command, attached to this terminal or these pipes.

One loop polls stdin, the daemon and signals, and never blocks on sending: otherwise a command that waits for its output
to be read would deadlock with us.
"""

from __future__ import annotations

import json
import os
import select
import signal
from socket import MSG_DONTWAIT

from skerry.client import frames
from skerry.client.http1 import Malformed
from skerry.errors import DaemonUnavailable, from_dict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any, Self

    from skerry.client.sync.transport import Transport
    from skerry.client.sync.websocket import WebSocket

_READ = 64 << 10
_QUEUED_MAX = 256 << 10
"""Bytes queued for the daemon above which stdin is not read."""


class Stopped(BaseException):
    """A signal asked this process to clean up and exit."""

    def __init__(self, code: int) -> None:
        self.code = code


class Signals:
    """Turns signals into events inside the block.

    The first SIGINT is passed to the command; the second, or SIGTERM or SIGHUP, raises Stopped where `stoppable` allows
    it. Leaving the block with Stopped exits with its code. A third SIGINT raises KeyboardInterrupt anywhere.
    """

    def __init__(self) -> None:
        self.interrupts = 0
        self.resized = False
        self.stoppable = False
        self._stop = 0
        self._old: dict[int, Any] = {}
        self._old_wakeup = -1
        self.wakeup, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        self._old_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGWINCH):
            if signal.getsignal(number) != signal.SIG_IGN:  # keep it ignored: nohup, background jobs
                self._old[number] = signal.signal(number, self._arrived)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)
        signal.set_wakeup_fd(self._old_wakeup)
        os.close(self.wakeup)
        os.close(self._write)
        if isinstance(error, Stopped):
            raise SystemExit(error.code) from None

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGWINCH:
            self.resized = True
            return
        if number == signal.SIGINT:
            self.interrupts += 1
            if self.interrupts == 1:
                return
            if self.interrupts > 2:
                raise KeyboardInterrupt
        self._stop = 128 + (signal.SIGKILL if number == signal.SIGINT else number)
        if self.stoppable:
            self.check()

    def check(self) -> None:
        """Raises Stopped if a signal has asked for it."""
        if self._stop:
            self.stoppable = False
            raise Stopped(self._stop)


def attach(
    transport: Transport,
    path: str,
    request: dict[str, Any],
    signals: Signals,
    *,
    stdin: bool,
    tty: bool,
) -> dict[str, Any]:
    """Run what `request` describes and return its result. Raises SkerryError, BrokenPipeError, Stopped."""
    request["stdin"] = stdin
    if tty:
        rows, cols = _size()
        request["pty"] = {"rows": rows, "cols": cols}
        request["env"] = {"TERM": os.environ.get("TERM") or "xterm", **request.get("env", {})}
    socket = transport.websocket(f"{path}/attach")
    attachment = _Attachment(socket, signals, stdin, tty)
    attachment.queue(json.dumps(request))
    terminal = _Terminal()
    try:
        if tty and stdin:
            terminal.make_raw()
        # Two blocks: a signal may raise while the inner one is left, and the terminal is restored even then.
        try:
            signals.stoppable = True
            signals.check()
            return attachment.run()
        finally:
            signals.stoppable = False
    finally:
        terminal.restore()
        socket.close()


class _Attachment:
    def __init__(self, socket: WebSocket, signals: Signals, stdin: bool, tty: bool) -> None:
        self._stream = socket.stream
        self._sock = socket.stream.sock
        self._parser = socket.parser
        self._signals = signals
        self._tty = tty
        self._stdin = stdin
        self._out = bytearray()
        """Bytes for the socket, already encrypted if TLS is used."""
        self._interrupted = False
        self._started = False
        self._result: dict[str, Any] | None = None

    def queue(self, message: str | bytes) -> None:
        self._out += self._stream.seal(frames.message(message))

    def run(self) -> dict[str, Any]:
        poll = select.poll()
        poll.register(self._signals.wakeup, select.POLLIN)
        while True:
            self._handle_signals()
            self._send()
            self._take_messages()
            if self._result is not None:
                return self._result
            if self._stream.ended:
                raise DaemonUnavailable("the connection to the daemon broke")
            poll.register(self._sock, select.POLLIN | (select.POLLOUT if self._out else 0))
            if self._wants_stdin():
                poll.register(0, select.POLLIN)
            ready = dict(poll.poll())
            if self._wants_stdin():
                poll.unregister(0)
            if self._signals.wakeup in ready:
                os.read(self._signals.wakeup, 4096)
            if ready.get(0):
                self._read_stdin()
            if ready.get(self._sock.fileno(), 0) & ~select.POLLOUT:
                self._receive()

    def _wants_stdin(self) -> bool:
        """False until the command runs: input read earlier would be lost if it cannot start."""
        return self._stdin and self._started and len(self._out) < _QUEUED_MAX

    def _read_stdin(self) -> None:
        try:
            data = os.read(0, _READ)
        except OSError:  # closed, or a terminal that is gone
            data = b""
        self.queue(b"\0" + data)
        self._stdin = bool(data)

    def _handle_signals(self) -> None:
        if self._signals.interrupts and self._started and not self._interrupted:
            self._interrupted = True
            self.queue(json.dumps({"signal": int(signal.SIGINT)}))
        if self._signals.resized:
            self._signals.resized = False
            if self._tty:
                self.queue(json.dumps({"resize": _size()}))

    def _send(self) -> None:
        if not self._out:
            return
        try:
            del self._out[: self._sock.send(self._out, MSG_DONTWAIT)]
        except BlockingIOError:
            pass
        except ConnectionError:
            self._out.clear()  # the next read reports why

    def _receive(self) -> None:
        try:
            data = self._stream.unseal(self._sock.recv(_READ))
        except ConnectionError:
            data = b""
        if data == b"":
            raise DaemonUnavailable("the connection to the daemon broke")
        self._parser.feed(data or b"")

    def _take_messages(self) -> None:
        while self._result is None and (got := self._parser.next()) is not None:
            opcode, payload = got
            if opcode == frames.BINARY:
                _write(1 if payload[:1] == b"\x01" else 2, memoryview(payload)[1:])
            elif opcode == frames.TEXT:
                self._event(payload)
            elif opcode == frames.PING:
                self._out += self._stream.seal(frames.frame(frames.PONG, payload))
            elif opcode == frames.CLOSE:
                raise DaemonUnavailable("the daemon closed the connection")

    def _event(self, payload: bytes) -> None:
        try:
            event = json.loads(payload)
            kind = event["event"]
            if kind == "ended":
                self._result = event["result"]
            elif kind == "error":
                raise from_dict(event["error"])
        except (ValueError, TypeError, KeyError) as error:
            raise Malformed(f"invalid message from the daemon: {payload[:80]!r}") from error
        self._started = True
        self._handle_signals()  # a signal from before the start would otherwise wait for the next event


def _write(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _size() -> tuple[int, int]:
    """(rows, columns) of the terminal here."""
    for fd in (0, 1, 2):
        try:
            size = os.get_terminal_size(fd)
        except OSError:
            continue
        return size.lines or 24, size.columns or 80
    return 24, 80


class _Terminal:
    """The terminal on stdin, in raw mode: every key is passed on."""

    def __init__(self) -> None:
        self._old: list[Any] | None = None

    def make_raw(self) -> None:
        import termios
        import tty

        self._old = termios.tcgetattr(0)
        tty.setraw(0, termios.TCSANOW)  # the default mode discards typeahead

    def restore(self) -> None:
        if self._old is not None:
            import termios

            termios.tcsetattr(0, termios.TCSANOW, self._old)
