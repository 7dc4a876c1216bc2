"""Processes: what they are started with, and how their end is told."""

from __future__ import annotations

import asyncio
import signal

import pytest

from skerry.errors import InvalidRequest
from skerry.guest.start import START_MAX, Start
from tests.conformance.harness import ENV, Box, expect, finish

ODD_ARGUMENTS = {
    "spaces": ["a b", " ", "  two  "],
    "empty": ["", "", "x", ""],
    "newlines": ["a\nb", "\n", "a\n"],
    "quotes": ["'", '"', "\\", "$HOME", "`id`", "*", "~", "-n", "--"],
    "not-utf-8": ["\udcff\udcfe", "caf\udce9", "\udc80"],
    "unicode": ["grüße", "日本語", "\U0001f3dd"],
    "controls": ["\x01\x02\x1b[31m\x7f", "\t\r\v\f"],
    "a-thousand": [f"argument {n}" for n in range(1000)],
    "long": ["x" * 100_000],
}


def as_bytes(words: list[str]) -> list[bytes]:
    return [word.encode("utf-8", "surrogateescape") for word in words]


@pytest.mark.parametrize("words", ODD_ARGUMENTS.values(), ids=ODD_ARGUMENTS)
async def test_arguments_arrive_as_they_are(box: Box, words: list[str]) -> None:
    result = await box.sh('printf "%s\\0" "$@"', *words)
    assert result.stdout.split(b"\0")[:-1] == as_bytes(words)


async def test_the_environment_is_exactly_the_given_one(box: Box) -> None:
    env = {
        "PATH": ENV["PATH"],
        "A": "1",
        "EMPTY": "",
        "ODD": "a b\n'\"$x\udcff",
        "LONG": "x" * 50_000,
        "a.b-c": "=",
    }
    result = await box.run("env", "-0", env=env)
    found = sorted(entry for entry in result.stdout.split(b"\0") if entry)
    assert found == sorted(as_bytes([f"{name}={value}" for name, value in env.items()]))


async def test_an_empty_environment_is_empty(box: Box) -> None:
    assert (await box.run("/usr/bin/env", env={})).stdout == b""


async def test_a_program_is_looked_up_in_the_path_that_it_is_given(box: Box) -> None:
    await box.sh("mkdir -p bin; printf '#!/bin/sh\\necho found\\n' >bin/skerry-odd; chmod +x bin/skerry-odd")
    assert (await box.run("skerry-odd", env={"PATH": f"/nowhere:{box.path('bin')}"})).stdout == b"found\n"
    assert (await box.run("skerry-odd")).code == 127


async def test_the_working_directory_is_the_workspace_or_the_given_one(box: Box) -> None:
    await box.channel.mkdir("some/where")
    assert (await box.run("pwd")).stdout.decode() == f"{box.instance.workspace_path}\n"
    assert (await box.run("pwd", cwd=box.path("some/where"))).stdout.decode() == f"{box.path('some/where')}\n"
    assert (await box.run("pwd", cwd="/")).stdout == b"/\n"


async def test_a_working_directory_that_is_not_there_is_the_callers_fault(box: Box) -> None:
    await box.channel.write("plain", b"")
    for cwd in ("/nowhere", box.path("plain"), box.path("x" * 300)):
        with pytest.raises(InvalidRequest, match="working directory"):
            await box.run("true", cwd=cwd)


async def test_a_working_directory_that_was_deleted_is_not_used_again(box: Box) -> None:
    script = "mkdir gone; cd gone; rmdir ../gone; echo at; read x; echo over"
    process = await box.start("sh", "-c", script, stdin=True)
    await expect(process, b"at")
    with pytest.raises(InvalidRequest):
        await box.run("true", cwd=box.path("gone"))
    await process.write(b"\n")
    assert (await finish(process)).stdout == b"over\n"


async def test_a_program_that_is_not_there_ends_with_127_and_says_so(box: Box) -> None:
    for argv in (["no-such-program"], ["/no/such/program"], [""]):
        result = await box.run(*argv)
        assert (result.code, result.exit.signal, result.stdout) == (127, None, b"")
        assert b"not found" in result.stderr


async def test_a_program_that_cannot_be_executed_ends_with_126_and_says_so(box: Box) -> None:
    await box.channel.write("plain.txt", b"text")
    for argv in ([box.path("plain.txt")], ["/"]):
        result = await box.run(*argv)
        assert (result.code, result.exit.signal, result.stdout) == (126, None, b"")
        assert result.stderr.endswith(b"\n")


async def test_every_exit_code_is_told(box: Box) -> None:
    results = await asyncio.gather(*(box.run("sh", "-c", f"exit {code}") for code in range(256)))
    assert [(result.code, result.exit.signal) for result in results] == [(code, None) for code in range(256)]


@pytest.mark.parametrize(
    "number", [signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, 64]
)
async def test_the_end_by_a_signal_is_told_as_shells_do(box: Box, number: int) -> None:
    result = await box.sh(f"kill -{int(number)} $$")
    assert (result.code, result.exit.signal) == (128 + number, number)


async def test_a_process_has_a_pid_and_an_id_of_its_own(box: Box) -> None:
    started = [await box.start("sh", "-c", "echo $$; exec sleep 1000") for _ in range(20)]
    assert len({process.id for process in started}) == 20
    for process in started:
        assert int(await expect(process, b"\n")) == process.pid


async def test_a_hundred_processes_run_side_by_side(box: Box) -> None:
    results = await asyncio.gather(
        *(box.sh(f"read line; echo $line {n}", stdin=b"hello\n") for n in range(100))
    )
    assert [result.stdout for result in results] == [b"hello %d\n" % n for n in range(100)]


async def test_ended_processes_leave_nothing(box: Box) -> None:
    await asyncio.gather(*(box.run("true") for _ in range(20)))
    await box.idle()


async def test_the_list_tells_what_runs_and_how_many_processes_it_has(box: Box) -> None:
    assert await box.channel.processes() == []
    lone = await box.start("sleep", "1000")
    three = await box.start("sh", "-c", "sleep 1000 & setsid sleep 1000 & echo up; wait")
    await expect(three, b"up")
    listed = {info.id: info for info in await box.channel.processes()}
    assert set(listed) == {lone.id, three.id}
    assert (listed[lone.id].pid, listed[lone.id].name, listed[lone.id].processes) == (lone.pid, "sleep", 1)
    assert listed[lone.id].running
    assert (listed[three.id].name, listed[three.id].processes) == ("sh", 3)


async def test_a_request_that_is_too_large_is_refused_before_it_is_sent(box: Box) -> None:
    for start in (
        Start(argv=["true", "x" * START_MAX]),
        Start(argv=["true"], env={"X": "x" * START_MAX}),
        Start(command="#" * START_MAX, shell="main"),
    ):
        with pytest.raises(InvalidRequest, match="bytes"):
            await box.channel.start(start)
    await box.channel.ping()


async def test_a_request_just_within_the_limit_is_served(box: Box) -> None:
    env = {f"V{n}": "v" * 1000 for n in range(120)}
    result = await box.run("env", env={**ENV, **env})
    assert len(result.stdout.splitlines()) == len(env) + len(ENV)


@pytest.mark.parametrize(
    "start",
    [
        Start(argv=["true", "a\0b"]),
        Start(argv=["true"], env={"A": "a\0b"}),
        Start(argv=["true"], cwd="/\0"),
        Start(command="true\0false", shell="main"),
        Start(command="true", shell="a\0b"),
    ],
    ids=["argument", "variable", "cwd", "command", "shell"],
)
async def test_a_nul_byte_is_the_callers_fault(box: Box, start: Start) -> None:
    with pytest.raises(InvalidRequest, match="NUL"):
        await box.channel.start(start)


async def test_programs_start_with_nothing_open_but_the_three_streams(box: Box) -> None:
    # The fourth is the directory that ls itself reads.
    assert (await box.run("ls", "/proc/self/fd")).stdout.split() == [b"0", b"1", b"2", b"3"]


async def test_programs_start_with_no_signal_blocked_or_ignored(box: Box) -> None:
    script = """
import signal
of_python = {signal.SIGPIPE, signal.SIGXFSZ}
print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
print({n for n in signal.valid_signals() - of_python if signal.getsignal(n) == signal.SIG_IGN})
"""
    assert (await box.run("python3", "-c", script)).stdout == b"set()\nset()\n"
    # A program that ignores SIGPIPE, or has it blocked, would say that it cannot write.
    assert (await box.run("bash", "-c", "yes | true; echo ${PIPESTATUS[0]}")).stdout == b"141\n"


async def test_programs_start_with_the_usual_umask_and_no_core_files(box: Box) -> None:
    assert (await box.sh("umask; ulimit -c; ulimit -n")).stdout == b"0022\n0\n1024\n"


async def test_programs_lead_a_session_of_their_own(box: Box) -> None:
    fields = (await box.sh("cat /proc/$$/stat")).stdout.rpartition(b")")[2].split()
    pid = (await box.sh("cut -d' ' -f1 /proc/$$/stat")).stdout
    assert pid.strip().isdigit()
    assert fields[2] == fields[3]
