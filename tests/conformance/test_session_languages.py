"""Sessions in JavaScript and bash: what is said of those in Python holds for them as well."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from skerry.errors import Conflict, InvalidRequest
from skerry.manager.sessions import shell as shell_sessions
from skerry.manager.sessions.calls import SessionCode
from skerry.manager.sessions.shell import ShellSession
from skerry.models import Outcome, SessionResult
from tests import support
from tests.conformance.harness import Box
from tests.conformance.test_sessions import CALLER, opened, run, running, sessions_of


@pytest.fixture(autouse=True)
def node() -> None:
    support.require("node")


@pytest.mark.requirement("R9")
async def test_javascript_keeps_its_state(box: Box) -> None:
    async with opened(box, "nodejs") as session:
        assert (await run(session, "const a = 1; let b = 2; var c = 3; class D {}")).value is None
        assert (await run(session, "const p = await Promise.resolve(5)")).value is None
        result = await run(session, "console.log(a); console.error(b); [c, p, new D()]")
        assert (result.value, result.stdout, result.stderr) == ("[ 3, 5, D {} ]", "1\n", "2\n")
        found = {each.name: (each.type, each.text) for each in await session.variables(CALLER)}
        assert found.keys() == {"a", "b", "c", "D", "p"}
        assert found["p"] == ("number", "5")


@pytest.mark.parametrize(
    ("code", "name", "trace"),
    [
        ("x = = 1", "SyntaxError", "<call 1>:1\nx = = 1"),
        ("\nnull.x", "TypeError", "<call 1>:2"),
        ("await Promise.reject(new RangeError('far'))", "RangeError", "RangeError: far"),
        (
            "setTimeout(() => { throw new Error('late') }, 1); await new Promise(() => {})",
            "Error",
            "Error: late",
        ),
        ("throw 'text'", "string", "Uncaught 'text'"),
        ("function f() {", "SyntaxError", "Unexpected end of input"),
    ],
)
async def test_javascript_that_throws_is_a_result(box: Box, code: str, name: str, trace: str) -> None:
    async with opened(box, "nodejs") as session:
        raised = (await run(session, code)).raised
        assert raised is not None
        assert raised.name == name
        assert trace in raised.traceback
        assert "<session>" not in raised.traceback
        assert (await run(session, "1")).value == "1"


async def test_javascript_is_interrupted_and_keeps_its_state(box: Box) -> None:
    async with opened(box, "nodejs") as session:
        await run(session, "const x = 5")
        begun = "fs.writeSync(1, 'begun')"  # an interrupt in the middle of console.log() would break that
        for code in (
            f"{begun}; while (true) {{}}",
            f"setTimeout(() => {begun}, 1); await new Promise(() => {{}})",
        ):
            task = await running(session, code)
            session.interrupt()
            result = await task
            assert result.raised is not None
            assert (result.raised.name, result.crashed) == ("Interrupted", False)
            assert (await run(session, "x")).value == "5"
        result = await run(session, "while (true) {}", timeout=0.3)
        assert (result.outcome, result.crashed) == (Outcome.TIMED_OUT, False)
        assert (await run(session, "x")).value == "5"


async def test_javascript_that_ends_its_interpreter(box: Box) -> None:
    async with opened(box, "nodejs") as session:
        result = await run(session, "process.exit(3)")
        assert (result.outcome, result.exit_code, result.crashed) == (Outcome.FAILED, 3, True)
        with pytest.raises(Conflict):
            await run(session, "1")
        await session.restart(CALLER)
        assert (await run(session, "1")).value == "1"


async def test_input_of_javascript(box: Box) -> None:
    async with opened(box, "nodejs") as session:
        assert (await run(session, "fs.readFileSync(0).toString()", stdin=b"in")).value == "'in'"
        code = "var all = ''; for await (const part of process.stdin) all += part; console.log(all)"
        for text in ("one", "two"):
            assert (await run(session, code, stdin=text.encode())).stdout == f"{text}\n"
        assert (await run(session, "fs.readFileSync(0).length")).value == "0"


async def test_programs_of_javascript_do_not_inherit_the_private_descriptors(box: Box) -> None:
    async with opened(box, "nodejs") as session:
        code = "require('child_process').execSync('ls /proc/self/fd').toString()"
        assert (await run(session, code)).value == "'0\\n1\\n2\\n3\\n'"


async def test_a_limit_of_memory_is_for_python_alone(box: Box) -> None:
    async with opened(box, "nodejs") as session:
        with pytest.raises(InvalidRequest):
            session.prepare(CALLER, SessionCode("1", memory=1 << 30))


@asynccontextmanager
async def bash(box: Box, **options: Any) -> AsyncIterator[ShellSession]:
    sessions = sessions_of(box)
    session = await sessions.open(CALLER, "bash", **options)
    assert isinstance(session, ShellSession)
    yield session
    await sessions.close(CALLER, session.id)


async def command(session: ShellSession, text: str, **options: Any) -> SessionResult:
    return await session.prepare(CALLER, SessionCode(text, **options)).run()


@pytest.mark.requirement("R9", "R45")
async def test_bash_keeps_its_state(box: Box) -> None:
    async with bash(box, cwd="/tmp") as session:
        result = await command(session, "x=5; y=(1 2); f() { echo f; }; pwd; (exit 3)")
        assert (result.stdout, result.exit_code, result.outcome) == ("/tmp\n", 3, Outcome.FAILED)
        assert (await command(session, "echo $? $x ${y[1]}; f; cat", stdin=b"in")).stdout == "3 5 2\nf\nin"
        found = {each.name: (each.type, each.text) for each in await session.variables(CALLER)}
        assert found == {"x": ("string", "5"), "y": ("array", "1 2")}
        assert (await command(session, "x=6; sleep 1000", timeout=0.1)).outcome == Outcome.TIMED_OUT
        assert (await command(session, "echo $x")).stdout == "5\n"
        await session.restart(CALLER)
        assert (await command(session, "echo [$x]; pwd")).stdout == "[]\n/tmp\n"
        assert session.info.calls == 1


async def test_bash_is_interrupted(box: Box, nap: str) -> None:
    async with bash(box) as session:
        task = asyncio.create_task(command(session, f"sleep {nap}"))
        await box.there(nap)
        assert session.info.state == "busy"
        session.interrupt()
        assert (await task).exit_code == 130
        assert (await command(session, "echo fine")).stdout == "fine\n"


async def test_a_closed_bash_leaves_no_shell(box: Box) -> None:
    sessions = sessions_of(box)
    for _ in range(70):  # more than a guest holds
        await sessions.open(CALLER, "bash", "one")
        await sessions.close(CALLER, "one")
    with pytest.raises(InvalidRequest, match="nowhere"):
        await sessions.open(CALLER, "bash", cwd="/nowhere")
    assert sessions.list() == []


async def test_a_bash_that_does_not_want_to_end(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its words may mean anything by then. It stays in its environment, and nobody waits for it."""
    monkeypatch.setattr(shell_sessions, "END_SECONDS", 0.2)
    async with bash(box) as session:
        result = await command(session, "read() { while :; do :; done; }")
        assert result.outcome is Outcome.COMPLETED
    assert sessions_of(box).list() == []
