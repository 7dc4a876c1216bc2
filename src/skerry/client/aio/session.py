"""One session: an interpreter that keeps its state between calls."""

from __future__ import annotations

import codecs
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from skerry.client.http1 import Malformed, quote
from skerry.errors import DaemonUnavailable, NotFound, SessionNotFound
from skerry.models import SessionInfo, SessionResult, Variable, decode_bytes, encode_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from typing import Self

    from skerry.client.aio.transport import AsyncTransport

EVENT_MAX = 32 << 20
KEPT_MAX = 1 << 20


class AsyncSession:
    """An interpreter in an environment, which keeps its state between calls.

    Leaving a `with` block closes it and ends every process it started. Every method raises DaemonUnavailable,
    SessionNotFound after it was closed, and EnvironmentNotFound or EnvironmentEnded after its environment's end.
    """

    def __init__(
        self, transport: AsyncTransport, path: str, info: SessionInfo, request: dict[str, Any]
    ) -> None:
        self._transport = transport
        self._sessions = f"{path}/sessions"
        self._path = f"{self._sessions}/{quote(info.session_id)}"
        self._request = request
        self.id = info.session_id
        self.language = info.language

    @classmethod
    async def open(cls, transport: AsyncTransport, path: str, request: dict[str, Any]) -> Self:
        answer = await transport.call("POST", f"{path}/sessions", json=request)
        return cls(transport, path, SessionInfo.from_dict(answer), request)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def run(
        self,
        code: str,
        *,
        timeout: float | None = None,
        stdin: str | bytes | None = None,
        memory: str | int | None = None,
        on_stdout: Callable[[str], object] | None = None,
        on_stderr: Callable[[str], object] | None = None,
    ) -> SessionResult:
        """Run code and return its result, with the value of its last expression.

        Code that raises, hangs or crashes the interpreter is a result, not an exception. After `timeout` seconds it is
        interrupted and its state stays; if it does not stop, it is killed with the interpreter. `memory` limits the
        interpreter during the call. `on_stdout` and `on_stderr` are called with output as it arrives. Canceling the
        call interrupts the code. Raises Conflict if the interpreter has crashed: call `restart()`.
        """
        request: dict[str, Any] = {"code": code}
        if stdin is not None:
            data = stdin.encode(errors="surrogateescape") if isinstance(stdin, str) else bytes(stdin)
            request["stdin"], request["stdin_encoding"] = encode_bytes(data)
        for name, value in (("timeout", timeout), ("memory", memory)):
            if value is not None:
                request[name] = value
        if on_stdout is None and on_stderr is None:
            answer = await self._transport.call("POST", f"{self._path}/run", json=request)
        else:
            answer = await self._follow(request, {"stdout": on_stdout, "stderr": on_stderr})
        return SessionResult.from_dict(answer)

    async def _follow(
        self, request: dict[str, Any], readers: dict[str, Callable[[str], object] | None]
    ) -> dict[str, Any]:
        """Pass output to the readers as it arrives; returns the result with the first part of it."""
        decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in readers}
        kept = {name: bytearray() for name in readers}
        response = await self._transport.send("POST", f"{self._path}/stream", json=request)
        try:
            async for event in _events(response):
                if "result" in event:
                    answer: dict[str, Any] = event["result"]
                    for name, first in kept.items():
                        answer[name], answer[f"{name}_encoding"] = encode_bytes(bytes(first))
                    return answer
                name, data = event["stream"], decode_bytes(event["data"], event["encoding"])
                kept[name] += data[: KEPT_MAX - len(kept[name])]
                text, reader = decoders[name].decode(data), readers[name]
                if reader is not None and text:
                    reader(text)
        finally:
            response.close()
        raise DaemonUnavailable("the daemon closed the connection before the call had ended")

    async def interrupt(self) -> None:
        """Interrupt the running code, as Ctrl-C does. The state stays."""
        await self._transport.call("POST", f"{self._path}/interrupt")

    async def restart(self) -> None:
        """Restart the interpreter without its state, also after a crash or a restart of the daemon.

        Kills running code.
        """
        try:
            await self._transport.call("POST", f"{self._path}/restart")
        except SessionNotFound:
            again = {**self._request, "session_id": self.id}
            await self._transport.call("POST", self._sessions, json=again)

    async def variables(self) -> list[Variable]:
        """The variables that its code has defined."""
        answer = await self._transport.call("GET", f"{self._path}/variables")
        return [Variable.from_dict(raw) for raw in answer["variables"]]

    async def info(self) -> SessionInfo:
        return SessionInfo.from_dict(await self._transport.call("GET", self._path))

    async def close(self) -> None:
        """Close it and end every process it started. Does nothing if it is closed already."""
        with suppress(NotFound):
            await self._transport.call("DELETE", self._path)


async def _events(chunks: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The data of server-sent events, as they arrive."""
    rest = b""
    async for chunk in chunks:
        *blocks, rest = (rest + chunk).split(b"\n\n")
        for block in blocks:
            for line in block.split(b"\n"):
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])
        if len(rest) > EVENT_MAX:
            raise Malformed(f"the daemon sent an event of more than {EVENT_MAX} bytes")
