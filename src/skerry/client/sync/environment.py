# Generated from aio/environment.py by scripts/generate_sync.py. Change that file, not this one.
"""One environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skerry.client.http1 import quote
from skerry.client.sync.client import Client
from skerry.client.sync.files import Files
from skerry.client.sync.network import Network
from skerry.client.sync.process import Process
from skerry.client.sync.session import Session
from skerry.errors import InvalidRequest, NotFound
from skerry.models import (
    EnvironmentInfo,
    ExecutionInfo,
    ExecutionResult,
    SessionInfo,
    Usage,
    comma_separated,
    encode_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self


class Environment:
    """An isolated place to run code in.

    Entering a `with` block or calling `create()` creates it; leaving the block or calling `delete()` deletes it with
    everything in it. Parameters left out get the daemon's defaults. Sizes are bytes or strings such as "512m";
    `lifetime` and `idle` are seconds; `env` are variables of everything that runs inside. `secrets` are variables of
    what this object runs: they are sent with each command and never stored, but other code in the environment can read
    them while the command runs. The daemon is that of `client`, or the one that `Client(url=url, token=token)` selects.

    `create()` raises InvalidRequest, ImageNotFound, IsolationUnavailable, LimitReached, LaunchFailed; for an image of a
    Docker Engine (`docker://`) Denied, unless the operator allows it, and RegistryUnavailable. Every method raises
    DaemonUnavailable, and EnvironmentNotFound or EnvironmentEnded after the environment's end.
    """

    def __init__(
        self,
        image: str = "host",
        *,
        memory: str | int | None = None,
        cpus: float | None = None,
        pids: int | None = None,
        fds: int | None = None,
        disk: str | int | None = None,
        inodes: int | None = None,
        connections: int | None = None,
        traffic: str | int | None = None,
        lifetime: float | None = None,
        idle: float | None = None,
        isolation: str | Sequence[str] | None = None,
        backend: str | None = None,
        profile: str | None = None,
        network: str | None = None,
        allow: Sequence[str] | None = None,
        workspace: str | None = None,
        name: str | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        client: Client | None = None,
        url: str | None = None,
        token: str | None = None,
    ) -> None:
        wanted = {
            "image": image,
            "memory": memory,
            "cpus": cpus,
            "pids": pids,
            "fds": fds,
            "disk": disk,
            "inodes": inodes,
            "connections": connections,
            "traffic": traffic,
            "lifetime": lifetime,
            "idle": idle,
            "isolation": comma_separated(isolation),
            "backend": backend,
            "profile": profile,
            "network": network if network or not allow else "allowlist",
            "allow": list(allow) if allow else None,
            "workspace": workspace,
            "name": name,
            "env": dict(env) if env else None,
        }
        self._wanted = {key: value for key, value in wanted.items() if value is not None}
        if client is not None and (url or token):
            raise InvalidRequest("url and token cannot be combined with client")
        self._client = client or Client(url=url, token=token)
        self._owns_client = client is None
        self._secrets = dict(secrets or {})
        self._id = ""
        self._created = False

    @classmethod
    def get(
        cls,
        ref: str,
        client: Client | None = None,
        *,
        secrets: Mapping[str, str] | None = None,
        url: str | None = None,
        token: str | None = None,
    ) -> Self:
        """The existing environment with this id, unique beginning of an id, or name.

        Leaving a `with` block on it does not delete it. Raises EnvironmentNotFound.
        """
        if not ref:
            raise InvalidRequest("empty environment id or name")
        env = cls(secrets=secrets, client=client, url=url, token=token)
        env._id = (env._client.transport.call("GET", f"/environments/{quote(ref)}"))["environment_id"]
        return env

    def create(self, key: str | None = None) -> Self:
        """Create the environment. Returns self. Raises InvalidRequest if it has been created already.

        `key` makes the create idempotent for a day: a repeated create with the same key, also from another process,
        returns the same environment.
        """
        if self._id:
            raise InvalidRequest(f"environment {self._id} has been created already")
        try:
            answer = self._client.transport.call("POST", "/environments", json=self._wanted, key=key)
            self._id = answer["environment_id"]
        except BaseException:
            self._close()
            raise
        self._created = True
        return self

    def delete(self) -> None:
        """Delete it with everything in it. Does nothing if it has ended already."""
        try:
            self._client.transport.call("DELETE", self._path)
        except NotFound:
            pass
        finally:
            self._close()

    def __enter__(self) -> Self:
        return self if self._id else self.create()

    def __exit__(self, *exc: object) -> None:
        if self._created:
            self.delete()
        self._close()

    def _close(self) -> None:
        if self._owns_client:
            self._client.close()

    @property
    def id(self) -> str:
        """Raises InvalidRequest before `create()`."""
        if not self._id:
            raise InvalidRequest("the environment has not been created", hint="use `with`, or call create()")
        return self._id

    @property
    def _path(self) -> str:
        return f"/environments/{quote(self.id)}"

    @property
    def client(self) -> Client:
        """The client it uses."""
        return self._client

    @property
    def files(self) -> Files:
        """Its files. Relative paths start at the workspace."""
        return Files(self._client.transport, self._path)

    @property
    def network(self) -> Network:
        """Its network rules and limits."""
        return Network(self._client.transport, self._path)

    def info(self) -> EnvironmentInfo:
        """Its state, and the limits that the kernel enforces."""
        return EnvironmentInfo.from_dict(self._client.transport.call("GET", self._path))

    def usage(self) -> Usage:
        return Usage.from_dict(self._client.transport.call("GET", f"{self._path}/usage"))

    def heartbeat(self, lifetime: float | None = None) -> float:
        """Renew its lease for `lifetime` seconds from now. Returns the Unix time at which it ends."""
        answer = self._client.transport.call("POST", f"{self._path}/heartbeat", json={"lifetime": lifetime})
        return float(answer["expires_at"])

    def execute(
        self,
        command: str,
        *,
        shell: str = "main",
        timeout: float | None = None,
        stdin: str | bytes | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        output_limit: int | None = None,
        user: str | None = None,
    ) -> ExecutionResult:
        """Run a command in a named shell, which keeps its directory, variables and functions between calls.

        `env` and `secrets` are set as variables and stay set. Of secrets only the names are recorded, but other code in
        the environment can read them. A command that fails, hangs or is killed is a result, not an exception. Output
        beyond `output_limit` bytes per stream is truncated. Canceling the call kills the command.
        """
        return self._execute(
            {"command": command, "shell": shell}, timeout, stdin, cwd, env, secrets, output_limit, user
        )

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float | None = None,
        stdin: str | bytes | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        output_limit: int | None = None,
        user: str | None = None,
        profile: str | None = None,
    ) -> ExecutionResult:
        """Run a program with these arguments, without a shell or its state. Otherwise like `execute`.

        `profile` names an execution profile, which restricts this program further than its environment: `strict`,
        `offline`, `readonly`, or one of the operator's. Raises InvalidRequest for an unknown one, IsolationUnavailable
        if it cannot be put in force there.
        """
        return self._execute(
            {"argv": list(argv)}, timeout, stdin, cwd, env, secrets, output_limit, user, profile
        )

    def _execute(
        self,
        request: dict[str, Any],
        timeout: float | None,
        stdin: str | bytes | None,
        cwd: str | None,
        env: Mapping[str, str] | None,
        secrets: Mapping[str, str] | None,
        output_limit: int | None,
        user: str | None,
        profile: str | None = None,
    ) -> ExecutionResult:
        if stdin is not None:
            data = stdin.encode(errors="surrogateescape") if isinstance(stdin, str) else bytes(stdin)
            request["stdin"], request["stdin_encoding"] = encode_bytes(data)
        request |= _given(
            timeout=timeout, cwd=cwd, env=env, output_limit=output_limit, user=user, profile=profile
        )
        self._add_secrets(request, secrets)
        answer = self._client.transport.call("POST", f"{self._path}/execute", json=request)
        return ExecutionResult.from_dict(answer)

    def _add_secrets(self, request: dict[str, Any], secrets: Mapping[str, str] | None) -> None:
        if self._secrets or secrets:
            request["secrets"] = {**self._secrets, **(secrets or {})}

    def start(
        self,
        command: str | Sequence[str],
        *,
        pty: tuple[int, int] | bool = False,
        stdin: bool = False,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        user: str | None = None,
        profile: str | None = None,
    ) -> Process:
        """Start a program in the background: text for `sh -c`, or a list of arguments.

        `pty` gives it a terminal of (rows, columns), or 24 by 80; `stdin` keeps its stdin open for `write()`. It is
        killed at the end of the `with` block, and when this process disconnects. `profile` is an execution
        profile, as in `run`.
        """
        request: dict[str, Any] = (
            {"command": command} if isinstance(command, str) else {"argv": list(command)}
        )
        if pty:
            rows, cols = pty if isinstance(pty, tuple) else (24, 80)
            request["pty"] = {"rows": rows, "cols": cols}
        request |= _given(stdin=stdin, timeout=timeout, cwd=cwd, env=env, user=user, profile=profile)
        self._add_secrets(request, secrets)
        return Process.open(self._client.transport, self._path, request)

    def attach(self, execution_id: str) -> Process:
        """Attach to a running process: its recent output, then its live output.

        Leaving a `with` block on it does not end it. Raises ExecutionNotFound.
        """
        return Process.open(self._client.transport, self._path, {"execution_id": execution_id})

    def session(
        self,
        language: str = "python",
        *,
        id: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        packages: Sequence[str] | None = None,
    ) -> Session:
        """Open an interpreter that keeps its state between calls: `python`, `nodejs` or `bash`.

        If a session with this `id` exists, it is returned unchanged. Leaving a `with` block closes the session.
        `packages` (`["pandas==2.*"]`) are installed in the workspace first. Raises InvalidRequest (the image has no
        such interpreter), Conflict (the id belongs to a session in another language), LimitReached; InstallFailed
        and RegistryUnavailable for packages.
        """
        request: dict[str, Any] = {"language": language}
        request |= _given(session_id=id, cwd=cwd, env=env, packages=list(packages) if packages else None)
        self._add_secrets(request, secrets)
        return Session.open(self._client.transport, self._path, request)

    def sessions(self) -> list[SessionInfo]:
        answer = self._client.transport.call("GET", f"{self._path}/sessions")
        return [SessionInfo.from_dict(raw) for raw in answer["sessions"]]

    def executions(self) -> list[ExecutionInfo]:
        answer = self._client.transport.call("GET", f"{self._path}/executions")
        return [ExecutionInfo.from_dict(raw) for raw in answer["executions"]]


def _given(**values: Any) -> dict[str, Any]:
    return {
        name: dict(value) if name == "env" else value for name, value in values.items() if value is not None
    }
