# Generated from aio/process.py by scripts/generate_sync.py. Change that file, not this one.
"""One running program in an environment."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from skerry.client.http1 import Malformed
from skerry.errors import DaemonUnavailable, SkerryError, from_dict
from skerry.models import ExecutionInfo, ExecutionResult

if TYPE_CHECKING:
    from typing import Self

    from skerry.client.sync.transport import Transport
    from skerry.client.sync.websocket import WebSocket

KEPT_MAX = 1 << 20
_STREAMS = {1: "stdout", 2: "stderr"}


class Process:
    """A running program. Iterate over it for its output as it arrives: ("stdout" or "stderr", bytes).

    Output is not buffered without limit: a program whose output is not read blocks until it is. With a terminal all
    output is "stdout". Only one thread may read; any may write, signal and kill. Every method raises
    DaemonUnavailable when the connection to the daemon breaks.
    """

    def __init__(self, socket: WebSocket, info: ExecutionInfo, started_here: bool) -> None:
        self._socket = socket
        self._info = info
        self._started_here = started_here
        self._ended: dict[str, Any] | None = None
        self._kept = {1: bytearray(), 2: bytearray()}

    @classmethod
    def open(cls, transport: Transport, path: str, request: dict[str, Any]) -> Self:
        """Start or attach to an execution; `request` is the first message of the attach protocol."""
        socket = transport.websocket(f"{path}/attach")
        try:
            socket.send(json.dumps(request))
            event = _event(socket.receive())
            if event.get("event") != "started":
                raise Malformed(f"the daemon began with {str(event)[:80]!r}")
            return cls(socket, ExecutionInfo.from_dict(event["execution"]), "execution_id" not in request)
        except BaseException:
            socket.close()
            raise

    @property
    def id(self) -> str:
        return self._info.execution_id

    @property
    def pid(self) -> int:
        """Its process id inside the environment."""
        return self._info.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[str, bytes]:
        got = self._next(None)
        if got is None:
            raise StopIteration
        return _STREAMS[got[0]], got[1]

    def _next(self, timeout: float | None) -> tuple[int, bytes] | None:
        """(stream, data), or None when it has ended."""
        while self._ended is None:
            message = self._socket.receive(timeout)
            if isinstance(message, bytes):
                if message[:1] not in (b"\x01", b"\x02"):
                    raise Malformed("the daemon sent output of an unknown stream")
                return message[0], message[1:]
            event = _event(message)
            if event.get("event") == "ended":
                self._ended = event["result"]
                self._socket.close()
        return None

    def wait(self, timeout: float | None = None) -> ExecutionResult:
        """Wait for its end. Raises TimeoutError if it is still running after `timeout` seconds.

        The output in the result is what `wait` itself has read, i.e. what followed the last iteration, at most 1
        MiB per stream.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            got = self._next(left)
            if got is None:
                break
            kept = self._kept[got[0]]
            kept += got[1][: KEPT_MAX - len(kept)]
        assert self._ended is not None
        stdout, stderr = bytes(self._kept[1]), bytes(self._kept[2])
        result = ExecutionResult.from_dict({**self._ended, "stdout": "", "stderr": ""})
        return _with_output(result, stdout, stderr)

    def write(self, data: bytes | str) -> None:
        """Write to its stdin. Blocks while the program does not read, so read its output concurrently."""
        raw = data.encode(errors="surrogateescape") if isinstance(data, str) else bytes(data)
        for at in range(0, len(raw), 64 << 10):
            self._send(b"\x00" + raw[at : at + (64 << 10)])

    def close_stdin(self) -> None:
        self._send(b"\x00")

    def signal(self, number: int) -> None:
        """Send a signal to the program alone."""
        self._send(json.dumps({"signal": int(number)}))

    def resize(self, rows: int, cols: int) -> None:
        self._send(json.dumps({"resize": [rows, cols]}))

    def kill(self) -> None:
        """Kill it and every process it started; `wait()` returns when they are gone."""
        self._send(json.dumps({"kill": True}))

    def _send(self, message: str | bytes) -> None:
        """Send a message; does nothing if the program has ended, like a signal to a zombie."""
        if self._ended is not None:
            return
        self._socket.send(message)

    def close(self) -> None:
        """Kill it and wait for its end, if this object started it; else only detach."""
        try:
            if self._started_here and self._ended is None and not self._socket.closed:
                self.kill()
                while self._next(None) is not None:
                    pass
        except SkerryError:
            pass  # it ended meanwhile, or the daemon is gone
        finally:
            self._socket.close()


def _event(message: str | bytes | None) -> dict[str, Any]:
    """A text message of the attach protocol. Raises the error that it carries."""
    if message is None:
        raise DaemonUnavailable("the daemon closed the connection")
    try:
        event = json.loads(message)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise Malformed(f"invalid message from the daemon: {message[:80]!r}")
    if event.get("event") == "error":
        raise from_dict(event["error"])
    return event


def _with_output(result: ExecutionResult, stdout: bytes, stderr: bytes) -> ExecutionResult:
    from dataclasses import replace

    return replace(result, stdout_bytes=stdout, stderr_bytes=stderr)
