"""The daemon as a whole: its environments, images, tenants and audit."""

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
    """One daemon: that of `home`, started when it is needed, or the one at `url`, which `token` lets in.

    Without either it is what `SKERRY_URL` and `SKERRY_TOKEN`, `SKERRY_CONTEXT`, `SKERRY_HOME` or the current context
    say, else the daemon of this user. Raises InvalidRequest for a URL that is none, or that a token is not safe with.
    `traceparent` is the W3C trace context of what is done with it (default: `TRACEPARENT`); the audit has its trace.

    Every method raises a SkerryError. Making a client does nothing yet; `close()` (or leaving a `with` block)
    closes its connections.
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
        """The `isolation` that environments get now. Raises DaemonUnavailable when none can be started."""
        answer: dict[str, Any] = await self.transport.call("GET", "/readyz")
        return answer

    async def doctor(self) -> dict[str, Any]:
        """What the daemon's machine can do, by trying: `version`, `isolation` and `checks`."""
        answer: dict[str, Any] = await self.transport.call("GET", "/doctor")
        return answer

    async def stop(self, force: bool = False) -> bool:
        """Stop the daemon and wait for its end. False: none was running in this home.

        Raises Conflict while environments live, unless `force`, which deletes them first.
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
        """The running environments, oldest first, and with `ended` those that ended in the last day.

        `state`, `name` and `image` (its name or digest) leave only those that have it. Raises InvalidRequest.
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
        isolation: str | None = None,
        image: str | None = None,
        output_limit: int | None = None,
        packages: Sequence[str] | None = None,
    ) -> CodeResult:
        """Run a program once, in an environment that is made for it and removed afterwards.

        `files` are other files by their paths; like the program they can only be read, and /tmp can be written.
        `timeout` is in seconds (30, at most 300), `cpu_limit` in millicores (1000), `mem_limit` in MB (512). A program
        that fails, hangs or is killed is a result, not an exception. Giving up on the call kills it. `packages`
        (`["pandas==2.*"]`) are installed before it runs, once for all programs that name the same.

        Raises InvalidRequest, LanguageNotFound when there is no such language or the image cannot run it,
        InstallFailed and RegistryUnavailable for packages, and what creating an environment does.
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
            "isolation": isolation,
            "image": image,
            "output_limit": output_limit,
            "packages": list(packages) if packages else None,
        }
        request |= {name: value for name, value in given.items() if value is not None}
        return CodeResult.from_dict(await self.transport.call("POST", "/execute", json=request))

    async def languages(self) -> list[LanguageInfo]:
        """The languages that programs can be written in, and whether they can be run here."""
        answer = await self.transport.call("GET", "/languages")
        return [LanguageInfo.from_dict(raw) for raw in answer["languages"]]

    async def images(self) -> list[ImageInfo]:
        """The images that environments can be made from now."""
        answer = await self.transport.call("GET", "/images")
        return [ImageInfo.from_dict(raw) for raw in answer["images"]]

    async def image(self, ref: str) -> ImageInfo:
        """Raises ImageNotFound."""
        return ImageInfo.from_dict(await self.transport.call("GET", f"/images/{quote(ref)}"))

    async def remove_image(self, ref: str) -> None:
        """Raises ImageNotFound, and Conflict while an environment uses it."""
        await self.transport.call("DELETE", f"/images/{quote(ref)}")

    async def build_image(self, name: str, progress: Progress | None = None) -> ImageInfo:
        """Build an image from its definition. `progress` is called with each step and the fraction done.

        Raises ImageNotFound without such a definition, ImageBuildFailed.
        """
        return await _built(await self.transport.send("POST", "/images/build", json={"name": name}), progress)

    async def import_image(
        self, path: str | PathLike[str], name: str, progress: Progress | None = None
    ) -> ImageInfo:
        """Make an image from a local archive: a root filesystem tar, an OCI layout, a `docker save`.

        Raises OSError when it cannot be read, InvalidRequest, ImageBuildFailed.
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
        """A new token; its text is in `token`, and cannot be had again. Raises InvalidRequest."""
        wanted = {"name": name, "tenant": tenant, "verbs": None if verbs is None else list(verbs)}
        answer: dict[str, Any] = await self.transport.call(
            "POST", "/tokens", json={**wanted, "lifetime": lifetime}
        )
        return answer

    async def tokens(self, tenant: str | None = None) -> list[dict[str, Any]]:
        """All tokens, the revoked and expired too, without their text."""
        answer = await self.transport.call("GET", "/tokens", query={"tenant": tenant})
        found: list[dict[str, Any]] = answer["tokens"]
        return found

    async def revoke_token(self, token_id: str) -> None:
        """Everything that is under way with it is cut. Raises NotFound."""
        await self.transport.call("DELETE", f"/tokens/{quote(token_id)}")

    async def quota(self, tenant: str) -> dict[str, Any]:
        """What a tenant may have, None for what is not limited, what it has `used`, and what work it has `caused`."""
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
    ) -> dict[str, Any]:
        """Replace the quota of a tenant; what is None is not limited. Raises InvalidRequest."""
        wanted = {"environments": environments, "cpus": cpus, "memory": memory, "disk": disk}
        answer: dict[str, Any] = await self.transport.call("PUT", f"/quotas/{quote(tenant)}", json=wanted)
        return answer

    async def pools(self) -> list[PoolStats]:
        """How each pool is doing."""
        answer = await self.transport.call("GET", "/pools")
        return [PoolStats.from_dict(stats) for stats in answer["pools"]]

    async def warm_up_pool(self, pool: str, count: int, maximum: int | None = None) -> PoolStats:
        """Have so many environments ready, and wait for it; from now on no more than `maximum` are ready or in use.

        Raises NotFound, InvalidRequest, and what a create does.
        """
        wanted = {"count": count, "maximum": maximum}
        answer = await self.transport.call("POST", f"/pools/{quote(pool)}/warmup", json=wanted)
        return PoolStats.from_dict(answer)

    async def shrink_pool(self, pool: str, count: int) -> PoolStats:
        """Keep no more than so many ready. Raises NotFound."""
        answer = await self.transport.call("POST", f"/pools/{quote(pool)}/shrink", json={"count": count})
        return PoolStats.from_dict(answer)

    async def check_pool(self, pool: str) -> PoolHealth:
        """Start an environment as the pool does, use it and remove it. Raises NotFound."""
        return PoolHealth.from_dict(await self.transport.call("POST", f"/pools/{quote(pool)}/health"))

    async def audit(
        self, *, after: int = 0, last: int | None = None, follow: bool = False, **filters: str | int | None
    ) -> AsyncIterator[dict[str, Any]]:
        """The rows of the tenant's audit, the oldest first. The filters are those of `GET /audit`."""
        query = {"after": after or None, "last": last, "follow": follow or None, **filters}
        response = await self.transport.send("GET", "/audit", query=query)
        try:
            async for row in response.lines():
                yield row
        finally:
            response.close()

    async def verify_audit(self, seq: int | None = None, hash: str | None = None) -> dict[str, Any]:
        """Whether the audit is `intact`, where it is `broken`, and `seq` and `hash` of its last row.

        Those of an earlier answer, kept elsewhere, prove that the rows up to there are the same. `pruned` is the last
        row that was removed, None if none was.
        """
        answer: dict[str, Any] = await self.transport.call(
            "GET", "/audit/verify", query={"seq": seq, "hash": hash}
        )
        return answer

    async def prune_audit(self, before: float) -> dict[str, Any]:
        """Remove rows of the audit that are older than this unix time, up to the first intent without a result.

        Returns how many were `removed`, `seq` and `hash` of the last of them, and the row that is `unfinished`.
        Raises Conflict if the audit is not intact.
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
    raise PlatformError("the daemon stopped without saying how the image ended")
