"""The API of a Docker Engine, with a deadline on every call and Skerry's errors. The only user of `aiodocker`."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import socket
import ssl
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skerry.errors import IsolationUnavailable, LaunchFailed, PlatformError

if TYPE_CHECKING:
    from aiodocker import Docker
    from aiodocker.stream import Stream as Stream
else:
    Stream = "aiodocker.stream.Stream"

ANSWER_SECONDS = 60.0
"""The engine waits for its disk, and deletes many containers at once slowly."""
DEFAULT_HOST = "unix:///var/run/docker.sock"
NOT_FOUND, CONFLICT, FAILED = 404, 409, 500
STDOUT = 1
_NOT_CONNECTED = 900
"""The answer that aiodocker makes up when there was none."""
_INSTALL = "install a Docker Engine (Debian: `apt-get install docker.io`) and start it, or set DOCKER_HOST"


class EngineRefused(LaunchFailed):
    """The engine answered with an error."""

    def __init__(self, answer: int, message: str) -> None:
        super().__init__(
            f"the Docker Engine says: {message}", hint="its log says more: `journalctl -u docker`"
        )
        self.answer = answer
        self.said = message


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the engine is, as the environment variables of Docker's own client say."""

    host: str
    certificates: str | None = None
    """A directory with ca.pem, cert.pem and key.pem: the connection is TLS."""

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] = os.environ) -> Endpoint:
        host = variables.get("DOCKER_HOST") or DEFAULT_HOST
        directory = variables.get("DOCKER_CERT_PATH") or os.path.expanduser("~/.docker")
        return cls(host, directory if variables.get("DOCKER_TLS_VERIFY") else None)

    @property
    def socket(self) -> str | None:
        """The path of a unix socket."""
        return self.host.removeprefix("unix://") if self.host.startswith("unix://") else None

    def trouble(self) -> str:
        """Why no engine can be there, and what to do; empty if nothing is known against it. Costs next to nothing."""
        if self.socket is None:
            if self.host.startswith("tcp://"):
                return ""
            return f"DOCKER_HOST is {self.host!r}: use unix:// or tcp://"
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.settimeout(1.0)
                probe.connect(self.socket)
            except FileNotFoundError:
                return f"no Docker Engine at {self.socket}: {_INSTALL}"
            except PermissionError:
                return (
                    f"no permission to use {self.socket}: run the daemon as root, or add its user to the group of that "
                    "socket (`usermod -aG docker USER`), which makes the user as powerful as root"
                )
            except OSError as error:
                return f"the Docker Engine at {self.socket} does not answer ({error.strerror or error}): start it"
        return ""

    def url(self) -> str:
        scheme = "https://" if self.certificates else "http://"
        return self.host if self.socket else self.host.replace("tcp://", scheme, 1)

    def tls(self) -> ssl.SSLContext | None:
        """Raises IsolationUnavailable."""
        if self.certificates is None or self.socket:
            return None
        try:
            context = ssl.create_default_context(cafile=f"{self.certificates}/ca.pem")
            context.load_cert_chain(f"{self.certificates}/cert.pem", f"{self.certificates}/key.pem")
        except OSError as error:
            raise IsolationUnavailable(
                f"the certificates in {self.certificates} cannot be used: {error}",
                hint="DOCKER_CERT_PATH names a directory with ca.pem, cert.pem and key.pem",
            ) from error
        return context


class EngineClient:
    """One client; connects when it is first used, in the running loop."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._docker: Docker | None = None

    async def _load(self) -> None:
        """Import the library, which takes a third of a second, in a thread. Raises IsolationUnavailable."""
        if "aiodocker" not in sys.modules:
            try:
                await asyncio.to_thread(importlib.import_module, "aiodocker")
            except ImportError as error:
                raise IsolationUnavailable(
                    "the client of Docker's API is not installed", hint="pip install 'skerry[docker]'"
                ) from error

    def _client(self) -> Docker:
        """Raises IsolationUnavailable."""
        if self._docker is None:
            import aiodocker

            self._docker = aiodocker.Docker(url=self.endpoint.url(), ssl_context=self.endpoint.tls())
        return self._docker

    async def close(self) -> None:
        if self._docker is not None:
            docker, self._docker = self._docker, None
            await docker.close()

    async def call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: Any = None,
        content: str = "application/json",
        seconds: float | None = ANSWER_SECONDS,
    ) -> Any:
        """The engine's answer, decoded. A `body` that is no dict is sent as it is.

        Raises EngineRefused for an error in the answer, IsolationUnavailable without one.
        """
        data = json.dumps(body) if isinstance(body, dict) else body
        headers = {"Content-Type": content}
        async with (
            self._translated(seconds),
            self._client()._query(
                path, method, params=params, data=data, headers=headers, timeout=None
            ) as response,
        ):
            answer = await response.read()
        try:
            return json.loads(answer) if answer else None
        except ValueError:
            return _last(answer)

    async def steps(
        self, path: str, params: Mapping[str, Any], seconds: float
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Lines of progress of a job, each within `seconds` of the one before. Raises as `call`."""
        async with contextlib.AsyncExitStack() as undo:
            async with self._translated(seconds):
                query = self._client()._query(path, "POST", params=params, timeout=None)
                response = await undo.enter_async_context(query)
            while True:
                async with self._translated(seconds):
                    line = await response.content.readline()
                if not line:
                    return
                yield _last(line) or {}

    @contextlib.asynccontextmanager
    async def attached(self, container: str) -> AsyncIterator[Stream]:
        """What process 1 of a container, which need not run yet, will write to stdout and stderr.

        Raises as `call`.
        """
        async with self._translated(ANSWER_SECONDS):
            stream = self._client().containers.container(container).attach(stdout=True, stderr=True)
            await stream._init()
        try:
            yield stream
        finally:
            await close_stream(stream)

    async def execute(self, container: str, argv: list[str], user: str) -> Stream:
        """The stdio of a program started in a container. Raises as `call`."""
        async with self._translated(ANSWER_SECONDS):
            place = self._client().containers.container(container)
            made = await place.exec(argv, stdin=True, stdout=True, stderr=True, user=user, workdir="/")
            stream = made.start(detach=False)
            await stream._init()
            return stream

    async def heard(self, stream: Stream, seconds: float | None = None) -> tuple[int, bytes] | None:
        """(which of stdout and stderr, what) comes next; None at the end. Raises as `call`."""
        async with self._translated(seconds):
            message = await stream.read_out()
            return None if message is None else (message.stream, message.data)

    async def tell(self, stream: Stream, data: bytes) -> None:
        """Raises as `call`."""
        async with self._translated(None):
            await stream.write_in(data)

    def end_input(self, stream: Stream) -> None:
        """Nothing more is told; what was told still arrives."""
        connection = stream._resp.connection if stream._resp is not None else None
        if (
            connection is not None
            and (transport := connection.transport) is not None
            and transport.can_write_eof()
        ):
            transport.write_eof()

    @contextlib.asynccontextmanager
    async def _translated(self, seconds: float | None) -> AsyncIterator[None]:
        """Raises EngineRefused, IsolationUnavailable."""
        await self._load()
        import aiohttp
        from aiodocker.exceptions import DockerError

        try:
            async with asyncio.timeout(seconds):
                yield
        except DockerError as error:
            if error.status == _NOT_CONNECTED:
                raise self._unreachable(self.endpoint.trouble() or error.message) from error
            raise EngineRefused(error.status, str(error.message).strip()) from error
        except TimeoutError as error:
            raise self._unreachable(f"no answer within {seconds:g} s") from error
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            raise self._unreachable(str(error) or type(error).__name__) from error

    def _unreachable(self, why: str) -> PlatformError:
        return IsolationUnavailable(
            f"the Docker Engine at {self.endpoint.host} is out of reach: {why}",
            hint="see that it runs (`docker info`, `systemctl status docker`), then try again",
        )


def _last(answer: bytes) -> Any:
    """The last line of a stream of progress. Raises EngineRefused: errors are told there, below a good status."""
    try:
        last = json.loads(answer.splitlines()[-1])
    except ValueError:
        return None
    if "error" in last:
        raise EngineRefused(FAILED, str(last["error"]))
    return last


async def close_stream(stream: Stream) -> None:
    # It may have been closed by the other side, or never have been opened.
    with contextlib.suppress(Exception):
        await stream.close()
