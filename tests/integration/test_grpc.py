"""gRPC against a real daemon: every RPC, streams, cancellation, errors, TLS."""

from __future__ import annotations

import asyncio
import io
import re
import socket
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from skerry.daemon.grpc.methods import SERVICES, Method, methods
from skerry.daemon.http import table
from skerry.manager.caller import VERBS
from skerry.v1 import (
    audit_pb2,
    code_pb2,
    daemon_pb2,
    environments_pb2,
    executions_pb2,
    files_pb2,
    images_pb2,
    network_pb2,
    pools_pb2,
    sessions_pb2,
    tenants_pb2,
)
from skerry.v1.problem_pb2 import Problem
from tests import certificates, support
from tests.integration.daemon import Daemon, launch, started
from tests.integration.grpc_client import Client, messages

SECONDS = 60.0
METHODS = [method for service in SERVICES for method in methods(service, table.OPERATIONS)]


class Served:
    """A daemon with a gRPC port, and a token for everything."""

    def __init__(self, daemon: Daemon, address: str) -> None:
        self.daemon = daemon
        self.address = address
        self.token = self.new_token(*VERBS)["token"]

    def new_token(self, *verbs: str, tenant: str = "default") -> Any:
        body = {"name": "test", "verbs": list(verbs), "tenant": tenant}
        return self.daemon.call("POST", "/tokens", body, expect=201)

    def run(self, use: Callable[[Client], Coroutine[Any, Any, None]], token: str | None = None) -> None:
        async def main() -> None:
            async with grpc.aio.insecure_channel(self.address) as channel, asyncio.timeout(SECONDS):
                await use(Client(channel, self.token if token is None else token))

        asyncio.run(main())

    def run_in_environment(self, use: Callable[[Client, str], Coroutine[Any, Any, None]]) -> None:
        async def main(client: Client) -> None:
            created = await client.CreateEnvironment(environments_pb2.CreateEnvironmentRequest())
            try:
                await use(client, created.environment_id)
            finally:
                await client.DeleteEnvironment(
                    environments_pb2.DeleteEnvironmentRequest(environment_id=created.environment_id)
                )

        self.run(main)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    address = f"127.0.0.1:{support.free_port()}"
    with support.temporary_home() as home, started(home, "--grpc", address) as daemon:
        yield Served(daemon, address)
        # What clients do, leaving included, is nothing that an operator has to read about.
        log = (home / "daemon.log").read_text()
        assert [line for line in log.splitlines() if '"level": "error"' in line] == []


async def failure(call: Any) -> tuple[grpc.StatusCode, Problem]:
    """How a call failed: its status, and what came with it."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    trailing = dict(caught.value.trailing_metadata() or ())
    assert "skerry-problem-bin" in trailing, caught.value
    problem = Problem.FromString(trailing["skerry-problem-bin"])
    assert trailing["skerry-code"] == problem.code
    assert problem.message in str(caught.value.details())
    return caught.value.code(), problem


def archive() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        info = tarfile.TarInfo("hello")
        info.size = 5
        tar.addfile(info, io.BytesIO(b"hello"))
    return packed.getvalue()


async def pieces(make: Callable[..., Any], data: bytes, **first: Any) -> AsyncIterator[Any]:
    yield make(**first)
    for at in range(0, len(data), 1000):
        yield make(data=data[at : at + 1000])


@pytest.mark.requirement("R23")
def test_every_rpc() -> None:
    address = f"127.0.0.1:{support.free_port()}"
    with support.temporary_home() as home, started(home, "--grpc", address) as daemon:
        served = Served(daemon, address)
        served.run(every_rpc)
        daemon.process.wait(SECONDS)  # the last one stopped it


async def every_rpc(client: Client) -> None:
    await daemon_rpcs(client)
    made = await client.CreateEnvironment(
        environments_pb2.CreateEnvironmentRequest(name="web", memory=64 << 20, env={"WHO": "wörld"})
    )
    await environment_rpcs(client, made)
    await execution_rpcs(client, made.environment_id)
    await code_rpcs(client)
    await session_rpcs(client, made.environment_id)
    await file_rpcs(client, made.environment_id)
    await network_rpcs(client, made.environment_id)
    await image_rpcs(client)
    await pool_rpcs(client)
    await tenant_rpcs(client)
    await audit_rpcs(client, made.environment_id)
    delete = environments_pb2.DeleteEnvironmentRequest(environment_id="web")
    assert (await client.DeleteEnvironment(delete)).deleted
    assert (await client.Stop(daemon_pb2.StopRequest(force=True))).stopping
    assert client.called == {method.name for service in SERVICES for method in service.methods}


async def daemon_rpcs(client: Client) -> None:
    assert (await client.Health(daemon_pb2.HealthRequest())).status == "ok"
    assert (await client.Ready(daemon_pb2.ReadyRequest())).isolation == "namespace"
    assert (await client.Version(daemon_pb2.VersionRequest())).environments == 0
    assert (await client.Doctor(daemon_pb2.DoctorRequest())).checks[0].status == "ok"


async def environment_rpcs(client: Client, made: Any) -> None:
    assert (made.state, made.limits.memory) == (environments_pb2.STATE_RUNNING, 64 << 20)
    listed = await client.ListEnvironments(
        environments_pb2.ListEnvironmentsRequest(state=environments_pb2.STATE_RUNNING, limit=10)
    )
    assert [environment.name for environment in listed.environments] == ["web"]
    assert not listed.HasField("next")
    found = await client.GetEnvironment(environments_pb2.GetEnvironmentRequest(environment_id="web"))
    assert found.environment_id == made.environment_id
    assert {row.name for row in found.enforced} >= {"memory", "pids"}
    lease = await client.Heartbeat(
        environments_pb2.HeartbeatRequest(environment_id=made.environment_id, lifetime=9000)
    )
    assert lease.expires_at > made.expires_at
    usage = await client.GetUsage(environments_pb2.GetUsageRequest(environment_id=made.environment_id))
    assert usage.memory_bytes > 0


async def execution_rpcs(client: Client, environment_id: str) -> None:
    result = await client.Execute(
        executions_pb2.ExecuteRequest(
            environment_id=environment_id, command="echo $WHO; cat >&2; exit 3", stdin=b"\xff\0"
        )
    )
    assert (result.stdout, result.stderr, result.exit_code) == ("wörld\n".encode(), b"\xff\0", 3)
    assert result.outcome == executions_pb2.OUTCOME_FAILED
    started_one = await client.StartExecution(
        executions_pb2.StartExecutionRequest(
            environment_id=environment_id, command="read a; echo $a; exec sleep 1000", stdin=True
        )
    )
    one = {"environment_id": environment_id, "execution_id": started_one.execution_id}
    listed = await client.ListExecutions(executions_pb2.ListExecutionsRequest(environment_id=environment_id))
    assert started_one.execution_id in [execution.execution_id for execution in listed.executions]
    events = client.ExecutionEvents(executions_pb2.ExecutionEventsRequest(**one))
    await client.WriteStdin(pieces(executions_pb2.WriteStdinRequest, b"line\n", eof=True, **one))
    first = await events.read()
    assert (first.output.stream, first.output.data) == (executions_pb2.STREAM_STDOUT, b"line\n")
    await client.SignalExecution(executions_pb2.SignalExecutionRequest(signal=15, **one))
    (last,) = [event async for event in messages(events)]
    assert last.ended.result.outcome == executions_pb2.OUTCOME_SIGNALED
    again = client.ExecutionEvents(executions_pb2.ExecutionEventsRequest(last_event_id=first.id, **one))
    assert [event.WhichOneof("event") async for event in again] == ["ended"]
    over = client.ExecutionEvents(executions_pb2.ExecutionEventsRequest(last_event_id=last.id, **one))
    assert [event async for event in over] == []
    found = await client.GetExecution(executions_pb2.GetExecutionRequest(**one))
    assert found.state == executions_pb2.EXECUTION_STATE_ENDED
    assert found.result.stdout == b"line\n"
    await client.KillExecution(executions_pb2.KillExecutionRequest(**one))
    logs = client.ReadLogs(
        executions_pb2.ReadLogsRequest(environment_id=environment_id, execution=started_one.execution_id)
    )
    assert b"".join([line.data async for line in logs]) == b"line\n"
    await attach(client, environment_id)


async def attach(client: Client, environment_id: str) -> None:
    call = client.Attach()
    command = "stty size; read line; stty size; echo $line"
    opening = executions_pb2.Opening(
        environment_id=environment_id,
        command=command,
        stdin=True,
        pty=executions_pb2.Terminal(rows=10, cols=20),
    )
    await call.write(executions_pb2.AttachRequest(opening=opening))
    started_one = (await call.read()).started
    assert started_one.pty
    assert (await call.read()).stdout == b"10 20\r\n"
    await call.write(executions_pb2.AttachRequest(resize=executions_pb2.Terminal(rows=11, cols=21)))
    await call.write(executions_pb2.AttachRequest(stdin=b"typed\n"))
    await call.done_writing()
    rest = [message async for message in messages(call)]
    assert b"11 21\r\ntyped\r\n" in b"".join(message.stdout for message in rest)
    assert rest[-1].ended.result.outcome == executions_pb2.OUTCOME_COMPLETED


async def code_rpcs(client: Client) -> None:
    listed = await client.ListLanguages(code_pb2.ListLanguagesRequest())
    bash = next(language for language in listed.languages if language.name == "bash")
    assert (bash.available, bash.file, bash.image, bash.reason) == (True, "main.sh", "host", "")
    request = code_pb2.ExecuteCodeRequest(
        language="bash",
        code="cat data/x -; echo err >&2; exit 3",
        files={"data/x": "wörld "},
        stdin=b"\xff",
        timeout=20,
        cpu_limit=500,
        mem_limit=64,
    )
    result = await client.ExecuteCode(request)
    assert (result.stdout, result.stderr, result.exit_code) == ("wörld ".encode() + b"\xff", b"err\n", 3)
    assert (result.outcome, result.language) == (executions_pb2.OUTCOME_FAILED, "bash")
    assert result.version == bash.version


async def session_rpcs(client: Client, environment_id: str) -> None:
    here: dict[str, Any] = {"environment_id": environment_id, "session_id": "one"}
    opened = await client.OpenSession(sessions_pb2.OpenSessionRequest(language="python", **here))
    assert opened.state == sessions_pb2.SESSION_STATE_IDLE
    ran = await client.RunCode(sessions_pb2.RunCodeRequest(code="x = input()\nx", stdin=b"5\n", **here))
    assert (ran.outcome, dict(ran.values[0].data)) == (
        executions_pb2.OUTCOME_COMPLETED,
        {"text/plain": "'5'"},
    )
    streaming = client.StreamCode(
        sessions_pb2.RunCodeRequest(code="print('a', flush=True)\nwhile True: pass", **here)
    )
    assert (await streaming.read()).output.data == b"a\n"
    await client.InterruptSession(sessions_pb2.InterruptSessionRequest(**here))
    (last,) = [event async for event in messages(streaming)]
    assert last.ran.result.raised.name == "KeyboardInterrupt"
    listed = await client.ListVariables(sessions_pb2.ListVariablesRequest(**here))
    assert [(variable.name, variable.text) for variable in listed.variables] == [("x", "'5'")]
    restarted = await client.RestartSession(sessions_pb2.RestartSessionRequest(**here))
    assert restarted == await client.GetSession(sessions_pb2.GetSessionRequest(**here))
    await client.CloseSession(sessions_pb2.CloseSessionRequest(**here))
    found = await client.ListSessions(sessions_pb2.ListSessionsRequest(environment_id=environment_id))
    assert list(found.sessions) == []


async def file_rpcs(client: Client, environment_id: str) -> None:
    here: dict[str, Any] = {"environment_id": environment_id}
    data = bytes(range(256)) * 20
    saved = await client.WriteFile(pieces(files_pb2.WriteFileRequest, data, path="a/b", **here))
    assert saved.size == len(data)
    reading = client.ReadFile(files_pb2.ReadFileRequest(path="a/b", offset=10, length=1000, **here))
    assert b"".join([chunk.data async for chunk in reading]) == data[10:1010]
    watching = client.WatchFiles(files_pb2.WatchFilesRequest(path=".", **here))
    assert (await watching.read()).kind == "ready"
    await client.MakeDirectory(files_pb2.MakeDirectoryRequest(path_bytes=b"d\xff", **here))
    event = await watching.read()
    assert (event.kind, event.path_bytes) == ("created", b"d\xff")
    watching.cancel()
    rename = files_pb2.RenameFileRequest(source="a/b", target_bytes=b"d\xff/c", **here)
    await client.RenameFile(rename)
    found = await client.StatFile(files_pb2.StatFileRequest(path_bytes=b"d\xff/c", **here))
    assert (found.type, found.size, found.path_bytes) == ("file", len(data), b"d\xff/c")
    listed = await client.ListFiles(files_pb2.ListFilesRequest(recursive=True, **here))
    assert {entry.path_bytes or entry.path.encode() for entry in listed.entries} >= {
        b"a",
        b"d\xff",
        b"d\xff/c",
    }
    await client.UploadArchive(pieces(files_pb2.UploadArchiveRequest, archive(), path="up", **here))
    download = client.DownloadArchive(files_pb2.DownloadArchiveRequest(path="up", contents=True, **here))
    packed = b"".join([chunk.data async for chunk in download])
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        assert [name.removeprefix("./") for name in tar.getnames() if name != "."] == ["hello"]
    await client.RemoveFile(files_pb2.RemoveFileRequest(path="up", recursive=True, **here))
    code, problem = await failure(client.StatFile(files_pb2.StatFileRequest(path="up", **here)))
    assert (code, problem.code) == (grpc.StatusCode.NOT_FOUND, "file_missing")


async def image_rpcs(client: Client) -> None:
    steps = client.ImportImage(pieces(images_pb2.ImportImageRequest, archive(), name="mine"))
    progress = [step async for step in steps]
    assert progress[-1].image.name == "mine"
    assert progress[0].step
    listed = await client.ListImages(images_pb2.ListImagesRequest())
    assert {image.name for image in listed.images} == {"host", "mine"}
    found = await client.GetImage(images_pb2.GetImageRequest(image="mine"))
    assert found.digest == progress[-1].image.digest
    await client.RemoveImage(images_pb2.RemoveImageRequest(image="mine"))
    build = client.BuildImage(images_pb2.BuildImageRequest(name="nothing"))
    code, problem = await failure(build.read())
    assert (code, problem.code) == (grpc.StatusCode.NOT_FOUND, "image_not_found")
    pull = client.PullImage(images_pb2.PullImageRequest(image="docker://localhost/nothing"))
    code, problem = await failure(pull.read())
    assert problem.code == "isolation_unavailable"  # `fake` has no engine
    broken = client.ImportImage(pieces(images_pb2.ImportImageRequest, b"no tar", name="mine"))
    with pytest.raises(grpc.aio.AioRpcError, match="archive"):
        [step async for step in broken]


async def pool_rpcs(client: Client) -> None:
    listed = await client.ListPools(pools_pb2.ListPoolsRequest())
    assert "default" in [pool.pool for pool in listed.pools]
    warm = await client.WarmUpPool(pools_pb2.WarmUpPoolRequest(pool="default", count=1))
    assert (warm.available, warm.image) == (1, "host")
    assert (await client.CheckPool(pools_pb2.CheckPoolRequest(pool="default"))).healthy
    assert (await client.ShrinkPool(pools_pb2.ShrinkPoolRequest(pool="default", count=0))).available == 0


async def tenant_rpcs(client: Client) -> None:
    made = await client.CreateToken(
        tenants_pb2.CreateTokenRequest(name="ci", tenant="acme", verbs=["read"], lifetime=60)
    )
    assert made.token.startswith("skt_")
    listed = await client.ListTokens(tenants_pb2.ListTokensRequest(tenant="acme"))
    assert [(token.id, list(token.verbs), token.token) for token in listed.tokens] == [
        (made.id, ["read"], "")
    ]
    await client.RevokeToken(tenants_pb2.RevokeTokenRequest(token_id=made.id))
    quota = await client.SetQuota(tenants_pb2.SetQuotaRequest(tenant="acme", environments=0))
    assert quota.HasField("environments")
    assert not quota.HasField("cpus")
    assert await client.GetQuota(tenants_pb2.GetQuotaRequest(tenant="acme")) == quota


async def network_rpcs(client: Client, environment_id: str) -> None:
    where: dict[str, Any] = {"environment_id": environment_id}
    shown = await client.AllowNetwork(
        network_pb2.AllowNetworkRequest(**where, rules=["example.com", "a.test:22"])
    )
    assert (shown.network, list(shown.allow)) == ("allowlist", ["example.com", "a.test:22"])
    shown = await client.DenyNetwork(network_pb2.DenyNetworkRequest(**where, rules=["a.test:22"]))
    assert list(shown.allow) == ["example.com"]
    shown = await client.SetNetwork(network_pb2.SetNetworkRequest(**where, network="none"))
    assert shown == await client.GetNetwork(network_pb2.GetNetworkRequest(**where))
    assert (shown.network, list(shown.denials)) == ("none", [])
    shown = await client.SetNetwork(network_pb2.SetNetworkRequest(**where, connections=5, traffic=1 << 40))
    assert (shown.network, shown.limits.connections, shown.limits.traffic) == ("none", 5, 1 << 40)


async def audit_rpcs(client: Client, environment_id: str) -> None:
    rows = client.ReadAudit(audit_pb2.ReadAuditRequest(environment=environment_id, kind="intent"))
    found = [row async for row in rows]
    assert {row.action for row in found} >= {"execution", "file.write"}
    assert all(row.peer.startswith("127.0.0.1:") and row.token for row in found)
    pruned = await client.PruneAudit(audit_pb2.PruneAuditRequest(before=1000))
    assert (pruned.removed, pruned.HasField("unfinished")) == (0, False)
    verdict = await client.VerifyAudit(audit_pb2.VerifyAuditRequest())
    assert not verdict.HasField("pruned")
    assert verdict.intact
    assert not verdict.HasField("broken")


def question(method: Method) -> Any:
    """A request that would be fine, for somebody who may, of something that is not there."""
    message: Any = method.request()
    target = message.opening if method.operation.websocket else message
    for part in method.operation.path.split("/"):
        if part.startswith("{"):
            setattr(target, part[1:-1], "none")
    return iter([message]) if method.takes_many else message


@pytest.mark.parametrize("token", ["", "skt_none_none", "Basic"])
def test_nothing_is_done_without_a_token(served: Served, token: str) -> None:
    async def use(client: Client) -> None:
        for method in METHODS:
            call = getattr(client, method.name)(question(method))
            if method.operation.verb:
                code, problem = await failure(call.read() if method.gives_many else call)
                assert (code, problem.code) == (grpc.StatusCode.UNAUTHENTICATED, "unauthorized"), method.name
            else:
                await call

    served.run(use, token)


def test_a_token_allows_its_verbs_alone(served: Served) -> None:
    for verb in VERBS:
        others = [other for other in VERBS if other != verb]
        wanted = [method for method in METHODS if method.operation.verb == verb]

        async def ask(client: Client, wanted: list[Method] = wanted) -> None:
            for method in wanted:
                call = getattr(client, method.name)(question(method))
                code, problem = await failure(call.read() if method.gives_many else call)
                assert (code, problem.code) == (grpc.StatusCode.PERMISSION_DENIED, "denied"), method.name

        served.run(ask, served.new_token(*others)["token"])


def test_other_tenants_are_not_there(served: Served) -> None:
    stranger = served.new_token(*VERBS, tenant="acme")["token"]

    async def use(client: Client, environment_id: str) -> None:
        other = Client(client.channel, stranger)
        get = environments_pb2.GetEnvironmentRequest(environment_id=environment_id)
        code, problem = await failure(other.GetEnvironment(get))
        assert (code, problem.code) == (grpc.StatusCode.NOT_FOUND, "environment_not_found")
        own = await other.ListEnvironments(environments_pb2.ListEnvironmentsRequest())
        assert list(own.environments) == []

    served.run_in_environment(use)


def test_revoking_a_token_cuts_its_calls(served: Served) -> None:
    made = served.new_token("read", "execute")

    async def use(client: Client, environment_id: str) -> None:
        doomed = Client(client.channel, made["token"])
        follow = doomed.ReadLogs(executions_pb2.ReadLogsRequest(environment_id=environment_id, follow=True))
        opening = executions_pb2.Opening(environment_id=environment_id, command="echo up; exec sleep 1000")
        attached = doomed.Attach()
        await attached.write(executions_pb2.AttachRequest(opening=opening))
        await attached.read()
        await follow.read()
        await client.RevokeToken(tenants_pb2.RevokeTokenRequest(token_id=made["id"]))
        for call in (follow, attached):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                [message async for message in messages(call)]
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        executions = executions_pb2.ListExecutionsRequest(environment_id=environment_id)
        listed = await client.ListExecutions(executions)
        one = {"environment_id": environment_id, "execution_id": listed.executions[0].execution_id}
        events = client.ExecutionEvents(executions_pb2.ExecutionEventsRequest(**one))
        *_, last = [event async for event in events]
        assert last.ended.result.outcome == executions_pb2.OUTCOME_CANCELED

    served.run_in_environment(use)


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a_command_whose_caller_leaves_is_killed(served: Served, how: str) -> None:
    async def use(client: Client, environment_id: str) -> None:
        running = client.Execute(
            executions_pb2.ExecuteRequest(environment_id=environment_id, argv=["sleep", "1000"]),
            timeout=5.0 if how == "deadline" else None,
        )
        executions = executions_pb2.ListExecutionsRequest(environment_id=environment_id)
        while not (listed := await client.ListExecutions(executions)).executions:
            pass
        one = {"environment_id": environment_id, "execution_id": listed.executions[0].execution_id}
        events = client.ExecutionEvents(executions_pb2.ExecutionEventsRequest(**one))
        if how == "cancel":
            running.cancel()
        (ended,) = [event async for event in events]
        assert ended.ended.result.outcome == executions_pb2.OUTCOME_CANCELED
        assert await running.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)

    served.run_in_environment(use)


def test_a_program_that_was_started_by_attach_ends_with_the_call(served: Served) -> None:
    async def use(client: Client, environment_id: str) -> None:
        call = client.Attach()
        opening = executions_pb2.Opening(environment_id=environment_id, argv=["sleep", "1000"])
        await call.write(executions_pb2.AttachRequest(opening=opening))
        execution_id = (await call.read()).started.execution_id
        other = client.Attach()
        join = executions_pb2.Opening(environment_id=environment_id, execution_id=execution_id)
        await other.write(executions_pb2.AttachRequest(opening=join))
        assert (await other.read()).started.execution_id == execution_id
        call.cancel()
        assert (await other.read()).ended.result.outcome == executions_pb2.OUTCOME_CANCELED

    served.run_in_environment(use)


def test_attach_refuses_what_makes_no_sense(served: Served) -> None:
    async def use(client: Client, environment_id: str) -> None:
        call = client.Attach()
        opening = executions_pb2.Opening(environment_id=environment_id, argv=["sleep", "1000"])
        await call.write(executions_pb2.AttachRequest(opening=opening))
        await call.read()
        await call.write(executions_pb2.AttachRequest(opening=opening))
        code, _ = await failure(call.read())
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        raw: Any = client.channel.stream_stream("/skerry.v1.Executions/Attach")(metadata=client.metadata)
        await raw.write(executions_pb2.AttachRequest(opening=opening).SerializeToString())
        await raw.read()
        await raw.write(b"\xff")
        assert (await failure(raw.read()))[0] == grpc.StatusCode.INVALID_ARGUMENT
        call = client.Attach()
        await call.write(executions_pb2.AttachRequest(opening=executions_pb2.Opening(environment_id="none")))
        assert (await failure(call.read()))[0] == grpc.StatusCode.NOT_FOUND

    served.run_in_environment(use)


def test_output_that_is_not_read_costs_no_memory(served: Served) -> None:
    async def use(client: Client, environment_id: str) -> None:
        started_one = await client.StartExecution(
            executions_pb2.StartExecutionRequest(environment_id=environment_id, command="exec yes")
        )
        before = resident(served.daemon)
        calls = [
            client.ExecutionEvents(
                executions_pb2.ExecutionEventsRequest(
                    environment_id=environment_id, execution_id=started_one.execution_id
                )
            )
            for _ in range(3)
        ]
        for call in calls:
            await call.read()
        usage = environments_pb2.GetUsageRequest(environment_id=environment_id)
        spent = -1.0
        while (now := (await client.GetUsage(usage)).cpu_seconds) != spent:
            spent = now
            await asyncio.sleep(0.3)
        assert resident(served.daemon) - before < 32 << 20
        for call in calls:
            call.cancel()

    served.run_in_environment(use)


def resident(daemon: Daemon) -> int:
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) << 10


def test_errors_have_the_status_of_the_table(served: Served) -> None:
    async def use(client: Client, environment_id: str) -> None:
        request = environments_pb2.GetEnvironmentRequest(environment_id="nowhere")
        code, problem = await failure(client.GetEnvironment(request))
        assert (code, problem.code) == (grpc.StatusCode.NOT_FOUND, "environment_not_found")
        code, problem = await failure(client.GetEnvironment(environments_pb2.GetEnvironmentRequest()))
        assert (code, problem.message) == (grpc.StatusCode.INVALID_ARGUMENT, "environment_id is missing")
        create = environments_pb2.CreateEnvironmentRequest(memory=1)
        code, problem = await failure(client.CreateEnvironment(create))
        assert (code, problem.code) == (grpc.StatusCode.INVALID_ARGUMENT, "invalid_request")
        assert problem.hint == "a Python interpreter needs about 16 MiB"
        code, problem = await failure(client.Stop(daemon_pb2.StopRequest()))
        assert (code, problem.code) == (grpc.StatusCode.FAILED_PRECONDITION, "conflict")

    served.run_in_environment(use)


def test_a_create_can_be_repeated(served: Served) -> None:
    async def use(client: Client) -> None:
        create = environments_pb2.CreateEnvironmentRequest(idempotency_key="once")
        first, second = await asyncio.gather(
            client.CreateEnvironment(create), client.CreateEnvironment(create)
        )
        assert first.environment_id == second.environment_id
        delete = environments_pb2.DeleteEnvironmentRequest(environment_id=first.environment_id)
        await client.DeleteEnvironment(delete)

    served.run(use)


def test_health_needs_no_token_and_reflection_one(served: Served) -> None:
    async def use(client: Client) -> None:
        health: Any = health_pb2_grpc.HealthStub(client.channel)
        for service in ("", "skerry.v1.Executions"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        stub: Any = reflection_pb2_grpc.ServerReflectionStub
        asking = stub(client.channel).ServerReflectionInfo
        ask = [reflection_pb2.ServerReflectionRequest(list_services="")]
        # Nothing is sent: a client whose message meets the refusal may tell of its own failure instead.
        assert await asking().code() == grpc.StatusCode.UNAUTHENTICATED
        (answer,) = [answer async for answer in asking(iter(ask), metadata=client.metadata)]
        names = {service.name for service in answer.list_services_response.service}
        assert names == {service.full_name for service in SERVICES} | {
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }

    served.run(use)


def test_tls() -> None:
    made = certificates.make()
    ca = Path(made.ca).read_bytes()
    port = support.free_port()
    options = ("--grpc", f"127.0.0.1:{port}", "--tls-cert", str(made.cert), "--tls-key", str(made.key))
    with support.temporary_home() as home, started(home, "--backend", "fake", *options):

        async def main() -> None:
            trusted = grpc.ssl_channel_credentials(ca)
            async with grpc.aio.secure_channel(f"127.0.0.1:{port}", trusted) as channel:
                assert (await Client(channel).Health(daemon_pb2.HealthRequest())).status == "ok"
            for credentials in (grpc.ssl_channel_credentials(), None):
                address = f"127.0.0.1:{port}"
                async with (
                    grpc.aio.secure_channel(address, credentials)
                    if credentials
                    else grpc.aio.insecure_channel(address)
                ) as channel:
                    with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                        await Client(channel).Health(daemon_pb2.HealthRequest())

        asyncio.run(main())


def test_port_zero_is_announced_as_the_port_that_was_chosen(home: Path) -> None:
    with started(home, "--backend", "fake", "--foreground", "--grpc", "127.0.0.1:0"):
        (address,) = re.findall(r"listening on grpc://(\S+)", (home / "daemon.log").read_text())

        async def main() -> None:
            async with grpc.aio.insecure_channel(address) as channel:
                assert (await Client(channel).Health(daemon_pb2.HealthRequest())).status == "ok"

        asyncio.run(main())


def test_without_tls_it_serves_loopback_alone(home: Path) -> None:
    process, word = launch(home, "--backend", "fake", "--grpc", f"0.0.0.0:{support.free_port()}")
    assert process.wait(SECONDS) == 2
    assert b"--tls-cert" in word


def test_a_port_that_is_taken_is_not_shared(home: Path) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as gRPC would by itself
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        process, word = launch(home, "--backend", "fake", "--grpc", address)
        assert process.wait(SECONDS) == 2
        assert f"cannot serve gRPC on {address}".encode() in word


def test_without_the_extra_it_says_what_to_install(home: Path) -> None:
    program = (
        "import sys; sys.modules['grpc'] = None; from skerry.daemon.__main__ import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--home", str(home), "--backend", "fake", "--grpc", "127.0.0.1:1"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 2
    assert "pip install 'skerry[grpc]'" in done.stderr


def test_the_example_in_the_documentation(served: Served) -> None:
    text = (Path(__file__).parents[2] / "docs" / "grpc.md").read_text()
    program = text.partition("```python\n")[2].partition("```")[0]
    for placeholder, real in (("TOKEN", served.token), ("127.0.0.1:8444", served.address)):
        assert placeholder in program
        program = program.replace(placeholder, real)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=SECONDS, check=True
    )
    assert done.stdout == "b'hello\\n' 0\nb'1\\n2\\n3\\n'\n0\n"


def test_canceled_write_leaves_the_old_content(served: Served) -> None:
    async def use(client: Client, environment: str) -> None:
        here: dict[str, Any] = {"environment_id": environment, "path": "file"}
        await client.WriteFile(pieces(files_pb2.WriteFileRequest, b"old" * 1000, **here))
        call = client.WriteFile()
        await call.write(files_pb2.WriteFileRequest(**here))
        for _ in range(5):
            await call.write(files_pb2.WriteFileRequest(data=bytes(1 << 20)))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        found = [chunk.data async for chunk in client.ReadFile(files_pb2.ReadFileRequest(**here))]
        assert b"".join(found) == b"old" * 1000

    served.run_in_environment(use)
