"""Sessions in Python on every backend: state, results, and a true outcome for whatever code does to its interpreter."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from skerry.errors import Conflict, InvalidRequest, LimitReached, SessionNotFound
from skerry.manager.audit.acts import Subject
from skerry.manager.caller import Caller
from skerry.manager.environments.records import Records
from skerry.manager.executions.registry import Executions
from skerry.manager.executions.runtime import Runtime
from skerry.manager.sessions import registry as module
from skerry.manager.sessions.calls import SessionCode
from skerry.manager.sessions.interpreter import Interpreter
from skerry.manager.sessions.registry import Sessions
from skerry.models import Outcome, SessionResult
from skerry.policy import MIB, Limits
from tests.conformance.harness import ENV, Box, Site, eventually, needs

CALLER = Caller("tests")
STUBBORN = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('begun')\nwhile True: pass"


class Forgetful:
    """Writes nothing down."""

    def audit(self, *args: object, **options: object) -> asyncio.Future[None]:
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        written.set_result(None)
        return written


def runtime_of(box: Box) -> Runtime:
    return Runtime(
        "tests",
        Subject(box.id, "", "", ""),
        box.backend,
        box.channel,
        cast(Records, Forgetful()),
        dict(ENV),
        lost=lambda reason: None,
        secluded=lambda: False,
    )


def sessions_of(box: Box, runtime: Runtime | None = None) -> Sessions:
    records = cast(Records, Forgetful())
    return Sessions(Executions(runtime or runtime_of(box), records, touch=lambda: None))


async def interpreter(sessions: Sessions, language: str, id: str = "", **options: Any) -> Interpreter:
    session = await sessions.open(CALLER, language, id, **options)
    assert isinstance(session, Interpreter)
    return session


@contextlib.asynccontextmanager
async def opened(box: Box, language: str = "python", **options: Any) -> AsyncIterator[Interpreter]:
    sessions = sessions_of(box)
    session = await interpreter(sessions, language, **options)
    try:
        yield session
    finally:
        await sessions.close(CALLER, session.id)


async def run(session: Interpreter, text: str, **options: Any) -> SessionResult:
    return await session.prepare(CALLER, SessionCode(text, **options)).run()


async def said(session: Interpreter, text: str, **options: Any) -> str:
    """What code that must be all right writes."""
    result = await run(session, text, **options)
    assert (result.outcome, result.raised, result.stderr) == (Outcome.COMPLETED, None, "")
    return result.stdout


async def running(session: Interpreter, text: str, **options: Any) -> asyncio.Task[SessionResult]:
    """A call that has written something."""
    call = session.prepare(CALLER, SessionCode(text, **options))
    tap = call.tap()
    task = asyncio.create_task(call.run())
    await anext(tap)
    call.untap(tap)
    return task


async def asked(session: Interpreter) -> None:
    """Returns when a call has been sent to it, and nothing has come back yet."""
    while session.current is None:  # noqa: ASYNC110
        await asyncio.sleep(0)


# ---- state and results ----


@pytest.mark.requirement("R9", "R45")
async def test_state_stays_for_a_thousand_calls(box: Box) -> None:
    async with opened(box) as session:
        assert (await run(session, "x = 0")).value is None
        for _ in range(998):
            await run(session, "x += 1")
        assert (await run(session, "x")).value == "998"
        assert session.info.calls == 1000


async def test_the_last_expression_is_the_value(box: Box) -> None:
    async with opened(box) as session:
        for code, value in (
            ("6 * 7", "42"),
            ("x = 1", None),
            ("None", None),
            ("1\n'two'", "'two'"),
            ("", None),
        ):
            result = await run(session, code)
            assert (result.value, result.exit_code) == (value, 0), code
        shown = await run(session, "class A:\n def __repr__(self): return 'é\\ud800'\nA()")
        assert shown.value == "é\\ud800"


async def test_code_is_that_of_a_main_module(box: Box) -> None:
    async with opened(box) as session:
        code = "import pickle\nclass A: x = 5\npickle.loads(pickle.dumps(A())).x, __name__, A.__module__"
        assert (await run(session, code)).value == "(5, '__main__', '__main__')"


async def test_the_working_directory_can_be_imported_from_and_hides_nothing(box: Box) -> None:
    for name in ("json", "traceback", "threading"):
        await box.channel.write(f"shadow/{name}.py", b"raise RuntimeError('not this one')")
    await box.channel.write("shadow/own.py", b"x = 5")
    async with opened(box, cwd=box.path("shadow")) as session:
        assert (await run(session, "import own, json\nown.x")).value == "5"


async def test_all_output_comes_before_the_end(box: Box) -> None:
    """Output and replies are streams of their own: the order between them is the guest's work."""
    async with opened(box) as session:
        for size in (1, 4096, 65536, 65537, 300_000):
            code = f"import subprocess, sys\nprint('a' * {size})\nprint('b' * {size}, file=sys.stderr)\n"
            code += f"subprocess.run(['sh', '-c', 'head -c {size} /dev/zero']).returncode"
            result = await run(session, code)
            assert (result.value, result.stdout_size, result.stderr_size) == ("0", 2 * size + 1, size + 1)


async def test_output_comes_while_it_runs_and_is_cut(box: Box) -> None:
    async with opened(box) as session:
        task = await running(session, "print('first')\nprint(input())\nprint('a' * 3_000_000)", stdin=b"in\n")
        result = await task
        assert result.stdout.startswith("first\nin\naaa")
        assert (result.stdout_size, result.stdout_truncated) == (3_000_010, True)


async def test_a_traceback_points_at_the_lines_that_were_given(box: Box) -> None:
    async with opened(box) as session:
        await run(session, "def divide(a, b):\n    return a / b")
        result = await run(session, "x = 1\ndivide(x, 0)")
        assert (result.outcome, result.exit_code, result.crashed) == (Outcome.FAILED, 1, False)
        raised = result.raised
        assert raised is not None
        assert (raised.name, raised.value) == ("ZeroDivisionError", "division by zero")
        lines = [line for line in raised.traceback.splitlines() if not set(line) <= set(" ~^")]
        assert lines == [
            "Traceback (most recent call last):",
            '  File "<call 2>", line 2, in <module>',
            "    divide(x, 0)",
            '  File "<call 1>", line 2, in divide',
            "    return a / b",
            "ZeroDivisionError: division by zero",
        ]


@pytest.mark.parametrize(
    ("code", "name", "exit_code"),
    [
        ("x = = 1", "SyntaxError", 1),
        ("import sys; sys.exit(3)", "SystemExit", 3),
        ("raise SystemExit('words')", "SystemExit", 1),
        ("input()", "EOFError", 1),
        ("def f(): f()\nf()", "RecursionError", 1),
        ("class E(Exception):\n def __str__(self): raise ValueError\nraise E", "E", 1),
        ("raise Exception('x' * 10_000_000)", "Exception", 1),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", 1),
    ],
)
async def test_code_that_raises_is_a_result(box: Box, code: str, name: str, exit_code: int) -> None:
    async with opened(box) as session:
        result = await run(session, code)
        assert result.raised is not None
        assert (result.raised.name, result.exit_code) == (name, exit_code)
        assert len(result.raised.traceback) < 20_000
        assert "<session>" not in result.raised.traceback
        assert (await run(session, "import sys; sys.exit()")).ok
        assert (await run(session, "1")).value == "1"


async def test_input_is_of_one_call(box: Box) -> None:
    async with opened(box) as session:
        assert (await run(session, "input(), input()", stdin="é\nb\nc\n".encode())).value == "('é', 'b')"
        assert (await run(session, "import sys; sys.stdin.read()")).value == "''"
        code = "import subprocess; subprocess.run('cat', capture_output=True).stdout"
        assert (await run(session, code, stdin=b"for a child")).value == "b'for a child'"
        for spoiling in (
            "sys.stdin.close()",
            "sys.stdin.detach()",
            "import os; os.close(0)",
            "os.dup2(1, 0)",
        ):
            await run(session, spoiling)
            assert (await run(session, "sys.stdin.read()")).value == "''", spoiling
            assert (await run(session, "input()", stdin=b"x")).value == "'x'", spoiling
            assert (await run(session, "sys.stdin.read()")).value == "''", spoiling


async def test_await_at_the_top_level(box: Box) -> None:
    async with opened(box) as session:
        begin = "import asyncio\ndone = asyncio.Event()\nasync def set(): done.set()\ntask = asyncio.create_task(set())"
        assert (await run(session, f"{begin}\nawait asyncio.sleep(0, 1)")).value == "1"
        assert (await run(session, "await done.wait()")).value == "True"
        assert (await run(session, "asyncio.run(asyncio.sleep(0, 2))")).value == "2"


async def test_rich_results(box: Box) -> None:
    code = """
class Rich:
    def __repr__(self): return "rich"
    def _repr_html_(self): return "<b>é</b>"
    def _repr_markdown_(self): return "**b**"
    def _repr_svg_(self): return "<svg/>"
    def _repr_png_(self): return b"\\x89PNG"
    def _repr_json_(self): return {"a": [1]}
class Odd:
    def __repr__(self): return "odd"
    def _repr_html_(self): raise ValueError
    def _repr_svg_(self): return 5
    def __getattr__(self, name): return lambda: object()
display(Odd(), Rich)
Rich()
"""
    async with opened(box) as session:
        odd, a_class, rich = (await run(session, code)).values
        assert (odd.kind, odd.data) == ("display", {"text/plain": "odd"})
        assert a_class.data == {"text/plain": "<class '__main__.Rich'>"}
        assert (rich.kind, rich.text, rich.png, rich.json) == ("value", "rich", b"\x89PNG", {"a": [1]})
        assert rich.data["text/html"] == "<b>é</b>"
        assert rich.data["text/markdown"] == "**b**"
        assert rich.data["image/svg+xml"] == "<svg/>"
        assert rich.truncated == []


async def test_what_is_too_large_is_cut_and_said_to_be(box: Box) -> None:
    async with opened(box) as session:
        (value,) = (await run(session, "'a' * 10_000_000")).values
        assert (len(value.text), value.truncated) == (65536, ["text/plain"])
        code = "class Big:\n def _repr_html_(self): return 'b' * self.n\nb = Big()\n"
        (value,) = (await run(session, f"{code}b.n = 5_000_000\nb")).values
        assert ("text/html" in value.data, value.truncated) == (False, ["text/html"])
        values = (await run(session, f"{code}b.n = 3_000_000\nfor _ in range(100): display(b)")).values
        assert [len(value.data.get("text/html", "")) for value in values] == [3_000_000] * 2 + [0] * 30


async def test_variables_are_listed(box: Box) -> None:
    async with opened(box) as session:
        await run(
            session,
            "import os\nx = 5\n_hidden = 1\ny = ['a' * 100] * 1_000\nclass Bad:\n __repr__ = 5\nb = Bad()",
        )
        found = {variable.name: variable for variable in await session.variables(CALLER)}
        assert found.keys() == {"x", "y", "Bad", "b"}
        assert (found["x"].type, found["x"].text) == ("int", "5")
        assert len(found["y"].text) <= 200
        assert found["b"].text.startswith("<")


async def test_calls_wait_for_each_other(box: Box) -> None:
    async with opened(box) as session:
        await run(session, "found = []")
        await asyncio.gather(*(run(session, f"found.append({n})") for n in range(20)))
        assert (await run(session, "found")).value == str(list(range(20)))


@pytest.mark.requirement("R9")
async def test_sessions_are_found_by_id_and_do_not_share_state(box: Box) -> None:
    sessions = sessions_of(box)
    first, second = await interpreter(sessions, "python", "one"), await interpreter(sessions, "python", "two")
    assert await sessions.open(CALLER, "python", "one") is first
    await run(first, "x = 1")
    assert (await run(second, "x")).raised is not None
    with pytest.raises(InvalidRequest):
        await sessions.open(CALLER, "python", "a/b")
    with pytest.raises(InvalidRequest):
        await sessions.open(CALLER, "cobol")
    for each in ("one", "two"):
        await sessions.close(CALLER, each)
    with pytest.raises(SessionNotFound):
        sessions.find("one")


async def test_there_are_not_too_many(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SESSIONS_MAX", 1)
    sessions = sessions_of(box)
    await sessions.open(CALLER, "python", "one")
    with pytest.raises(LimitReached):
        await sessions.open(CALLER, "python")
    await sessions.close(CALLER, "one")


async def test_an_image_without_the_interpreter(box: Box) -> None:
    runtime = runtime_of(box)
    runtime.variables["PATH"] = "/nowhere"
    sessions = sessions_of(box, runtime)
    with pytest.raises(InvalidRequest, match="there is no python3"):
        await sessions.open(CALLER, "python")
    assert sessions.list() == []


# ---- the end of calls ----


async def test_an_interrupt_ends_the_call_and_keeps_the_state(box: Box) -> None:
    async with opened(box) as session:
        for code in (
            "while True: pass",
            "import time; time.sleep(1000)",
            "import asyncio; await asyncio.sleep(1000)",
        ):
            task = await running(session, f"x = 5\nprint('begun')\n{code}")
            session.interrupt()
            result = await task
            assert result.raised is not None
            assert (result.outcome, result.raised.name, result.crashed) == (
                "failed",
                "KeyboardInterrupt",
                False,
            )
            assert "<session>" not in result.raised.traceback
            assert (await run(session, "x")).value == "5"
        session.interrupt()  # nothing runs
        assert (await run(session, "x")).value == "5"


async def test_an_interrupt_that_comes_early_is_not_missed(box: Box) -> None:
    async with opened(box) as session:
        for _ in range(20):
            task = asyncio.create_task(run(session, "while True: pass"))
            await asked(session)
            session.interrupt()
            result = await task
            assert result.raised is not None
            assert result.raised.name == "KeyboardInterrupt"
        assert (await run(session, "1")).value == "1"


async def test_an_interrupt_that_comes_late_is_for_nobody_else(box: Box) -> None:
    async with opened(box) as session:
        for _ in range(30):
            task = asyncio.create_task(run(session, "x = 1"))
            await asked(session)
            session.interrupt()
            await task
            assert (await run(session, "'next'")).value == "'next'"
        session.interrupted = True  # and it comes after the end
        session.signal(signal.SIGINT)
        assert (await run(session, "'next'")).value == "'next'"


async def test_a_time_limit_interrupts(box: Box) -> None:
    async with opened(box) as session:
        result = await run(session, "x = 5\nwhile True: pass", timeout=1)
        assert (result.outcome, result.exit_code, result.crashed) == (Outcome.TIMED_OUT, 124, False)
        assert result.message == "interrupted after 1 s"
        assert (await run(session, "x")).value == "5"


async def test_code_that_ignores_its_limit_is_killed(box: Box) -> None:
    async with opened(box) as session:
        result = await run(session, STUBBORN, timeout=1)
        assert (result.outcome, result.exit_code, result.crashed) == (Outcome.TIMED_OUT, 124, True)
        with pytest.raises(Conflict, match="has crashed: it did not end when it was interrupted"):
            await run(session, "1")
        await session.restart(CALLER)
        assert (await run(session, "1")).value == "1"


async def test_a_caller_that_goes_away_interrupts(box: Box) -> None:
    async with opened(box) as session:
        call = session.prepare(CALLER, SessionCode("x = 5\nwhile True: pass"))
        waiting = session.prepare(CALLER, SessionCode("x = 6"))
        tasks = [asyncio.create_task(each.run()) for each in (call, waiting)]
        await asked(session)
        waiting.stop(Outcome.CANCELED, "gone")
        call.stop(Outcome.CANCELED, "gone")
        results = [await task for task in tasks]
        assert [(result.outcome, result.crashed) for result in results] == [(Outcome.CANCELED, False)] * 2
        assert (await run(session, "'x' in dir() and x == 6")).value == "False"


async def test_a_restart_ends_what_runs(box: Box) -> None:
    async with opened(box) as session:
        task = await running(session, STUBBORN)
        await session.restart(CALLER)
        result = await task
        assert (result.outcome, result.crashed, result.message) == (
            "canceled",
            True,
            "the session was restarted",
        )
        assert (session.info.state, session.info.calls) == ("idle", 0)
        assert (await run(session, "1")).value == "1"


async def test_closing_ends_what_it_started_and_finishes_files(box: Box, nap: str) -> None:
    async with opened(box) as session:
        code = f"import subprocess\nsubprocess.Popen(['setsid', 'sleep', '{nap}'])\n"
        await run(session, f"{code}f = open('left', 'w')\nf.write('all')")
        await box.there(nap)
    await box.gone(nap)
    assert await box.content("left") == b"all"


# ---- crashes ----


@pytest.mark.parametrize(
    ("code", "outcome", "exit_code", "message"),
    [
        ("os._exit(3)", "failed", 3, "the interpreter ended with exit code 3"),
        ("os._exit(0)", "failed", 0, "the interpreter ended with exit code 0"),
        ("import ctypes; ctypes.string_at(0)", "signaled", 139, "the interpreter was killed by SIGSEGV"),
        ("os.abort()", "signaled", 134, "the interpreter was killed by SIGABRT"),
        ("os.kill(os.getpid(), 9)", "signaled", 137, "the interpreter was killed by SIGKILL"),
        ("os.closerange(3, 50)", "failed", 1, "the interpreter ended with exit code 1"),
        ("os.execvp('true', ['true'])", "failed", 0, "the interpreter ended with exit code 0"),
    ],
)
async def test_a_crash_is_reported_and_can_be_mended(
    box: Box, code: str, outcome: str, exit_code: int, message: str
) -> None:
    async with opened(box) as session:
        result = await run(session, f"import os\nprint('before')\n{code}")
        assert (result.outcome, result.exit_code, result.message) == (outcome, exit_code, message)
        assert (result.crashed, result.stdout) == (True, "before\n")
        assert (session.info.state, session.info.message) == ("crashed", message)
        await session.restart(CALLER)
        assert await said(session, "print('again')") == "again\n"


async def test_a_crash_between_calls(box: Box) -> None:
    async with opened(box) as session:
        await run(session, "import os, threading\nthreading.Timer(0.05, os._exit, (5,)).start()")

        async def crashed() -> bool:
            return session.info.state == "crashed"

        await eventually(crashed)
        assert session.info.message == "the interpreter ended with exit code 5"
        with pytest.raises(Conflict):
            await session.variables(CALLER)


async def test_a_limit_of_memory_for_one_call(box: Box) -> None:
    async with opened(box) as session:
        result = await run(session, "x = 5\ny = 'a' * 500_000_000", memory=200 * MIB)
        assert result.raised is not None
        assert (result.raised.name, result.crashed) == ("MemoryError", False)
        assert (await run(session, "x")).value == "5"
        result = await run(session, "y = []\nwhile True: y.append('a' * 100_000)", memory=100 * MIB)
        assert result.raised is not None
        assert result.raised.name == "MemoryError"
        assert (await run(session, "y = None; len('a' * 120_000_000)")).value == "120000000"


@needs("counters")
async def test_a_memory_bomb(site: Site) -> None:
    async with (
        site.box(Limits(cpus=4, memory=96 * MIB, disk=64 * MIB, pids=64)) as box,
        opened(box) as session,
    ):
        result = await run(session, "x = []\nwhile True: x.append(bytearray(1_000_000))")
        assert (result.outcome, result.exit_code, result.crashed) == (Outcome.OOM_KILLED, 137, True)
        await session.restart(CALLER)
        assert (await run(session, "1")).value == "1"


@needs("pids")
@pytest.mark.parametrize(
    "code", ["while True: os.fork()", "while True:\n try: os.fork()\n except BaseException: pass"]
)
async def test_a_fork_bomb(site: Site, code: str) -> None:
    async with (
        site.box(Limits(cpus=4, memory=256 * MIB, disk=64 * MIB, pids=64)) as box,
        opened(box) as session,
    ):
        result = await run(session, f"import os\n{code}", timeout=1)
        assert result.outcome in (Outcome.FAILED, Outcome.TIMED_OUT)
        assert not result.ok
        await session.restart(CALLER)
        assert (await run(session, "1")).value == "1"
        assert (await box.sh("echo fine")).stdout == b"fine\n"


# ---- streams ----


async def test_prints_that_imitate_the_protocol_are_text(box: Box) -> None:
    lines = [
        json.dumps({"token": "0" * 16, "end": None}),
        json.dumps({"token": "0" * 16, "value": 1, "kind": "value", "type": "text/plain", "size": 0}),
        "\\x00\\x00",
    ]
    async with opened(box) as session:
        text = "\n".join(lines)
        result = await run(session, f"import sys\nprint({text!r})\nprint({text!r}, file=sys.stderr)\n5")
        assert (result.stdout, result.stderr, result.value) == (f"{text}\n", f"{text}\n", "5")


async def test_replies_without_the_token_are_nothing(box: Box) -> None:
    forged = json.dumps({"token": "0" * 16, "end": None}) + "\n"
    forged += (
        json.dumps({"token": "0" * 16, "variable": {"name": "x", "type": "int", "text": "1", "size": 1}})
        + "\n"
    )
    async with opened(box) as session:
        result = await run(session, f"import os\nos.write(9, {forged.encode()!r})\nprint('after')\n5")
        assert (result.stdout, result.value) == ("after\n", "5")


@pytest.mark.parametrize(
    "code",
    [
        "os.write(9, b'nonsense\\n')",
        "os.write(9, b'[' * 100_000 + b'\\n')",
        "os.write(9, b'{\"size\": 1e9}\\n')",
        "os.write(9, b'{\"size\": -1}\\n')",
        "while True: os.write(9, b'a' * 65536)",
        "while True: os.write(9, b'{}\\n' * 1000)",
    ],
)
async def test_whoever_breaks_the_protocol_breaks_their_own_session(box: Box, code: str) -> None:
    async with opened(box) as session, opened(box) as other:
        result = await run(session, f"import os, time\n{code}\ntime.sleep(1000)")
        assert result.crashed
        assert result.message.startswith("the interpreter broke the protocol")
        assert (await run(other, "1")).value == "1"


async def test_a_lie_about_its_own_call_spoils_that_call_alone(box: Box) -> None:
    lie = """
import gc, json, os
(runner,) = [each for each in gc.get_objects() if type(each).__name__ == "SessionRunner"]
end = {"token": runner._token, "end": {"name": 5, "value": None}}
value = {"token": runner._token, "value": 10**9, "kind": [], "type": {}, "size": 0}
variable = {"token": runner._token, "variable": {"name": "x"}}
os.write(9, b"".join(json.dumps(each).encode() + b"\\n" for each in (value, variable, end, end)))
print("more")
"""
    async with opened(box) as session:
        result = await run(session, lie)
        assert (result.outcome, result.values) == (Outcome.COMPLETED, ())
        assert (await run(session, "'next'")).value == "'next'"


async def test_lies_about_values_are_bounded(box: Box) -> None:
    lie = """
import gc, json, os
(runner,) = [each for each in gc.get_objects() if type(each).__name__ == "SessionRunner"]
for number in range(-5, 40):
    for form in range(20):
        head = {"token": runner._token, "value": number, "kind": "value", "type": f"text/f{form}", "cut": form % 2}
        os.write(9, json.dumps({**head, "size": 4}).encode() + b"\\ndata")
    for odd in ("a" * 1000 + "/b", "text", "", None, 5, "TEXT/PLAIN", "text/pl ain"):
        os.write(9, json.dumps({**head, "type": odd, "size": 0}).encode() + b"\\n")
"""
    async with opened(box) as session:
        values = (await run(session, lie)).values
        assert len(values) == 32
        for value in values:
            assert len(value.data) + len(value.truncated) <= 17
            assert all(media.startswith("text/f") for media in (*value.data, *value.truncated))
        assert (await run(session, "1")).value == "1"


async def test_programs_do_not_inherit_the_private_descriptors(box: Box) -> None:
    async with opened(box) as session:
        code = "import subprocess\nprint(subprocess.run('ls /proc/self/fd', shell=True, close_fds=False, "
        code += "capture_output=True).stdout.split())"
        assert await said(session, code) == "[b'0', b'1', b'2', b'3']\n"


async def test_a_fork_that_comes_back_ends(box: Box) -> None:
    async with opened(box) as session:
        code = "import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\nprint('parent' if pid else 'child')"
        assert await said(session, code) == "child\nparent\n"
        assert (await run(session, "1")).value == "1"


@pytest.mark.parametrize(
    "code", ["sys.stdout.close()", "os.close(1)", "sys.stdout = None", "os.close(1); sys.stdout.close()"]
)
async def test_a_closed_stdout_is_there_again_for_the_next_call(box: Box, code: str) -> None:
    async with opened(box) as session:
        result = await run(session, f"import os, sys\nprint('before')\n{code}\nprint('lost')")
        assert result.stdout == "before\n"
        assert not result.crashed
        after = await said(session, "print('after')\nos.system('echo child') and None")
        assert after.removeprefix("lost\n") == "after\nchild\n"  # what could not be written then may be now


async def test_a_replaced_stdout_stays_replaced(box: Box) -> None:
    async with opened(box) as session:
        assert (
            await said(session, "import io, sys\nold, sys.stdout = sys.stdout, io.StringIO()\nprint('kept')")
            == ""
        )
        assert (await run(session, "print('too')\nsys.stdout.getvalue()")).value == "'kept\\ntoo\\n'"
        broken = "class Broken:\n def write(self, text): raise OSError\n def __getattr__(self, name): raise OSError"
        result = await run(session, f"{broken}\nsys.stdout = Broken()\nprint('x')")
        assert result.raised is not None
        assert result.raised.name == "OSError"
        assert await said(session, "sys.stdout = old\nprint('back')") == "back\n"


async def test_what_threads_write_after_their_call_is_in_the_log_alone(box: Box) -> None:
    runtime = runtime_of(box)
    sessions = sessions_of(box, runtime)
    session = await interpreter(sessions, "python")
    code = "import os, threading, time\n"
    code += "def late():\n while not os.path.exists('go'): time.sleep(0.005)\n print('late')\n"
    assert await said(session, f"{code}threading.Thread(target=late).start()\nprint('call')") == "call\n"
    tap = runtime.log.read(follow=True)
    await box.channel.write("go", b"")
    async for entry in tap:
        if b"late" in entry.data:
            break
    runtime.log.leave(tap)
    assert await said(session, "print('next')") == "next\n"
    await sessions.close(CALLER, session.id)
    await box.channel.remove("go")
