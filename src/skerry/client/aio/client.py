"""One daemon: environments, programs, images, pools, tenants and audit."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from skerry.client import autostart
from skerry.client.aio.stream import blocking, blocking_iterator
from skerry.client.aio.transport import AsyncTransport
from skerry.client.http1 import quote
from skerry.errors import DaemonUnavailable, PlatformError, from_dict
from skerry.models import (
    CodeResult,
    EnvironmentInfo,
    ImageInfo,
    LanguageInfo,
    PoolHealth,
    PoolStats,
    comma_separated,
    encode_bytes,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from os import PathLike
    from typing import Self

    from skerry.client.aio.transport import AsyncResponse
    from skerry.client.http1 import Query

    Progress = Callable[[str, float], object]


class AsyncClient:
    """A client of one daemon: that of `home`, started on first use, or the one at `url`, with the access token `token`.

    Without either, the daemon is selected by `SKERRY_URL` and `SKERRY_TOKEN`, `SKERRY_CONTEXT`, `SKERRY_HOME` or
    the current context; else it is that of this user. `traceparent` is the W3C trace context of its requests
    (default: `TRACEPARENT`), which the audit records. Raises InvalidRequest for an invalid URL, and for a token
    that would be sent unencrypted.

    Every method raises a SkerryError. The constructor does not connect; `close()`, or leaving a `with` block,
    closes the connections.
    """

    def __init__(
        self,
        home: str | None = None,
        *,
        url: str | None = None,
        token: str | None = None,
        traceparent: str | None = None,
    ) -> None:
        self.transport = AsyncTransport(home, url, token, traceparent)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self.transport.close()

    async def version(self) -> dict[str, Any]:
        """`version`, `api`, `pid`, `home` and the number of `environments` of the daemon."""
        answer: dict[str, Any] = await self.transport.call("GET", "/version")
        return answer

    async def ready(self) -> dict[str, Any]:
        """The default `isolation` of new environments. Raises DaemonUnavailable if none can be started."""
        answer: dict[str, Any] = await self.transport.call("GET", "/readyz")
        return answer

    async def doctor(self) -> dict[str, Any]:
        """Check what the daemon's machine supports: `version`, `isolation` and `checks`."""
        answer: dict[str, Any] = await self.transport.call("GET", "/doctor")
        return answer

    async def stop(self, force: bool = False) -> bool:
        """Stop the daemon and wait until it has ended. Returns False if none was running in this home.

        Raises Conflict while environments are running, unless `force`, which deletes them first.
        """
        home = self.transport.endpoint.home
        if home is None:
            await self.transport.call("POST", "/stop", json={"force": force})
            try:
                await self.transport.gone(autostart.STOP_SECONDS)
            except TimeoutError:
                raise PlatformError("the daemon has not ended yet") from None
            return True
        try:
            daemon = autostart.open_process(home)
        except DaemonUnavailable:
            return False
        try:
            try:  # noqa: SIM105 (contextlib is not worth its time at the start of the CLI)
                await self.transport.call("POST", "/stop", json={"force": force}, start=False)
            except DaemonUnavailable:
                pass  # it is stopping already
            self.close()
            await blocking(autostart.wait_process, daemon)
        finally:
            os.close(daemon)
        return True

    async def environments(
        self,
        ended: bool = False,
        *,
        state: str | None = None,
        name: str | None = None,
        image: str | None = None,
    ) -> list[EnvironmentInfo]:
        """The running environments, oldest first; with `ended`, also those that ended in the last day.

        `state`, `name` and `image` (name or digest) are filters. Raises InvalidRequest.
        """
        query: Query = {"all": ended or None, "state": state, "name": name, "image": image}
        found: list[EnvironmentInfo] = []
        while True:
            answer = await self.transport.call("GET", "/environments", query=query)
            found += [EnvironmentInfo.from_dict(raw) for raw in answer["environments"]]
            if not answer.get("next"):
                return found
            query = {**query, "after": answer["next"]}

    async def execute_code(
        self,
        language: str,
        code: str,
        *,
        stdin: str | bytes | None = None,
        files: Mapping[str, str | bytes] | None = None,
        timeout: float | None = None,
        cpu_limit: int | None = None,
        mem_limit: int | None = None,
        network: str | None = None,
        allow: Sequence[str] | None = None,
        isolation: str | Sequence[str] | None = None,
        image: str | None = None,
        output_limit: int | None = None,
        packages: Sequence[str] | None = None,
    ) -> CodeResult:
        """Run a program once, in an environment of its own, which is deleted afterwards.

        `files` are more files by path. They and the program are read-only; /tmp is writable. `timeout` is in seconds
        (default 30, maximum 300), `cpu_limit` in millicores (1000), `mem_limit` in MB (512). `packages`
        (`["pandas==2.*"]`) are installed first and cached for programs with the same packages. A program that fails,
        hangs or is killed is a result, not an exception. Canceling the call kills the program.

        Raises InvalidRequest, LanguageNotFound if the language is unknown or the image cannot run it, InstallFailed and
        RegistryUnavailable for packages, and the errors of `Environment.create()`.
        """
        request: dict[str, Any] = {"language": language, "code": code}
        if stdin is not None:
            data = stdin.encode(errors="surrogateescape") if isinstance(stdin, str) else bytes(stdin)
            request["stdin"], request["stdin_encoding"] = encode_bytes(data)
        if files:
            request["files"] = {
                path: content if isinstance(content, str) else bytes(content).decode(errors="surrogateescape")
                for path, content in files.items()
            }
        given = {
            "timeout": timeout,
            "cpu_limit": cpu_limit,
            "mem_limit": mem_limit,
            "network": network if network or not allow else "allowlist",
            "allow": list(allow) if allow else None,
            "isolation": comma_separated(isolation),
            "image": image,
            "output_limit": output_limit,
            "packages": list(packages) if packages else None,
        }
        request |= {name: value for name, value in given.items() if value is not None}
        return CodeResult.from_dict(await self.transport.call("POST", "/execute", json=request))

    async def languages(self) -> list[LanguageInfo]:
        """The languages of `execute_code`, and whether each is available."""
        answer = await self.transport.call("GET", "/languages")
        return [LanguageInfo.from_dict(raw) for raw in answer["languages"]]

    async def images(self) -> list[ImageInfo]:
        """The images of this daemon."""
        answer = await self.transport.call("GET", "/images")
        return [ImageInfo.from_dict(raw) for raw in answer["images"]]

    async def image(self, ref: str) -> ImageInfo:
        """Raises ImageNotFound."""
        return ImageInfo.from_dict(await self.transport.call("GET", f"/images/{quote(ref)}"))

    async def remove_image(self, ref: str) -> None:
        """Raises ImageNotFound, and Conflict while an environment uses the image."""
        await self.transport.call("DELETE", f"/images/{quote(ref)}")

    async def build_image(self, name: str, progress: Progress | None = None) -> ImageInfo:
        """Build an image from its definition. `progress` is called with each step and the fraction done.

        Raises ImageNotFound if there is no such definition, ImageBuildFailed.
        """
        return await _built(await self.transport.send("POST", "/images/build", json={"name": name}), progress)

    async def pull_image(self, image: str, progress: Progress | None = None) -> ImageInfo:
        """Pull an image (`docker://python:3.12-slim`) if the daemon's Docker Engine lacks it.

        `Environment.create()` pulls as well, without progress. Raises Denied unless the operator allows the image,
        ImageNotFound, RegistryUnavailable, DiskFull, IsolationUnavailable.
        """
        return await _built(
            await self.transport.send("POST", "/images/pull", json={"image": image}), progress
        )

    async def import_image(
        self, path: str | PathLike[str], name: str, progress: Progress | None = None
    ) -> ImageInfo:
        """Create an image from a local archive: a root filesystem tar, an OCI layout, or a `docker save` archive.

        Raises OSError if it cannot be read, InvalidRequest, ImageBuildFailed.
        """
        from skerry.client.archive import read_file

        body = blocking_iterator(read_file(path))
        return await _built(
            await self.transport.send("POST", "/images/import", query={"name": name}, body=body), progress
        )

    async def create_token(
        self,
        name: str,
        *,
        tenant: str | None = None,
        verbs: Sequence[str] | None = None,
        lifetime: float | None = None,
    ) -> dict[str, Any]:
        """Create a token. Its secret is in `token` and cannot be retrieved again. Raises InvalidRequest."""
        wanted = {"name": name, "tenant": tenant, "verbs": None if verbs is None else list(verbs)}
        answer: dict[str, Any] = await self.transport.call(
            "POST", "/tokens", json={**wanted, "lifetime": lifetime}
        )
        return answer

    async def tokens(self, tenant: str | None = None) -> list[dict[str, Any]]:
        """All tokens, including revoked and expired ones, without their secrets."""
        answer = await self.transport.call("GET", "/tokens", query={"tenant": tenant})
        found: list[dict[str, Any]] = answer["tokens"]
        return found

    async def revoke_token(self, token_id: str) -> None:
        """Revoke a token and close its open requests and streams. Raises NotFound."""
        await self.transport.call("DELETE", f"/tokens/{quote(token_id)}")

    async def quota(self, tenant: str) -> dict[str, Any]:
        """The quota of a tenant (None: unlimited), its usage (`used`) and the load it has `caused`."""
        answer: dict[str, Any] = await self.transport.call("GET", f"/quotas/{quote(tenant)}")
        return answer

    async def set_quota(
        self,
        tenant: str,
        *,
        environments: int | None = None,
        cpus: float | None = None,
        memory: str | int | None = None,
        disk: str | int | None = None,
        isolation: str | None = None,
    ) -> dict[str, Any]:
        """Replace the quota of a tenant; None means unlimited. `isolation` is the least that its new environments
        have. Raises InvalidRequest."""
        wanted = {
            "environments": environments,
            "cpus": cpus,
            "memory": memory,
            "disk": disk,
            "isolation": isolation,
        }
        answer: dict[str, Any] = await self.transport.call("PUT", f"/quotas/{quote(tenant)}", json=wanted)
        return answer

    async def pools(self) -> list[PoolStats]:
        """Statistics of each pool."""
        answer = await self.transport.call("GET", "/pools")
        return [PoolStats.from_dict(stats) for stats in answer["pools"]]

    async def warm_up_pool(self, pool: str, count: int, maximum: int | None = None) -> PoolStats:
        """Warm the pool up to `count` ready environments, and wait for them.

        `maximum` limits the pool: ready, starting and in use together. Raises NotFound, InvalidRequest, and the errors
        of `Environment.create()`.
        """
        wanted = {"count": count, "maximum": maximum}
        answer = await self.transport.call("POST", f"/pools/{quote(pool)}/warmup", json=wanted)
        return PoolStats.from_dict(answer)

    async def shrink_pool(self, pool: str, count: int) -> PoolStats:
        """Shrink the pool to `count` ready environments. Raises NotFound."""
        answer = await self.transport.call("POST", f"/pools/{quote(pool)}/shrink", json={"count": count})
        return PoolStats.from_dict(answer)

    async def check_pool(self, pool: str) -> PoolHealth:
        """Start an environment as the pool does, use it and delete it. Raises NotFound."""
        return PoolHealth.from_dict(await self.transport.call("POST", f"/pools/{quote(pool)}/health"))

    async def audit(
        self, *, after: int = 0, last: int | None = None, follow: bool = False, **filters: str | int | None
    ) -> AsyncIterator[dict[str, Any]]:
        """Rows of the tenant's audit, oldest first. The filters are those of `GET /audit`."""
        query = {"after": after or None, "last": last, "follow": follow or None, **filters}
        response = await self.transport.send("GET", "/audit", query=query)
        try:
            async for row in response.lines():
                yield row
        finally:
            response.close()

    async def verify_audit(self, seq: int | None = None, hash: str | None = None) -> dict[str, Any]:
        """Whether the audit is `intact`, where it is `broken`, and `seq` and `hash` of its last row.

        Pass `seq` and `hash` of an earlier answer to verify that the rows up to there are unchanged. `pruned` is the
        last pruned row, or None.
        """
        answer: dict[str, Any] = await self.transport.call(
            "GET", "/audit/verify", query={"seq": seq, "hash": hash}
        )
        return answer

    async def prune_audit(self, before: float) -> dict[str, Any]:
        """Remove audit rows older than this Unix time, up to the first intent without a result.

        Returns the number of `removed` rows, `seq` and `hash` of the last one, and the `unfinished` row that
        stopped it. Raises Conflict if the audit is not intact.
        """
        answer: dict[str, Any] = await self.transport.call("POST", "/audit/prune", json={"before": before})
        return answer


async def _built(response: AsyncResponse, progress: Progress | None) -> ImageInfo:
    try:
        async for line in response.lines():
            if "error" in line:
                raise from_dict(line["error"])
            if "image" in line:
                return ImageInfo.from_dict(line["image"])
            if progress is not None:
                progress(line["step"], line["fraction"])
    finally:
        response.close()
    raise PlatformError("the daemon closed the connection before the build ended")
