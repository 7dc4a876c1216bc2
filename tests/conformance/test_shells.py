"""Stateful shells: one command after the other, each to a truthful end, whatever it does to its shell."""

from __future__ import annotations

import asyncio
import random
import signal

import pytest

from skerry.errors import Busy, InvalidRequest
from tests.conformance.harness import BIG, ENV, Box, Site, expect, feed, finish, needs

posix = pytest.mark.posix
ALL_BYTES = bytes(range(256))


@posix
async def test_the_two_streams_stay_apart(box: Box) -> None:
    result = await box.shell("echo out; echo err >&2")
    assert (result.code, result.stdout, result.stderr) == (0, b"out\n", b"err\n")


@posix
async def test_output_is_exact(box: Box) -> None:
    await box.channel.write("all-bytes", ALL_BYTES)
    result = await box.shell(f"cd {box.path('')}; cat all-bytes; cat all-bytes >&2")
    assert (result.stdout, result.stderr) == (ALL_BYTES, ALL_BYTES)


@posix
async def test_much_output_passes(box: Box) -> None:
    result = await box.shell(f"head -c {BIG} /dev/zero; head -c {BIG} /dev/zero >&2")
    assert (result.stdout, result.stderr) == (bytes(BIG), bytes(BIG))
    assert (result.exit.stdout_size, result.exit.stderr_size) == (BIG, BIG)


@posix
async def test_a_command_has_no_input_unless_given(box: Box) -> None:
    assert (await box.shell("cat; echo end")).stdout == b"end\n"


@posix
async def test_a_command_takes_input(box: Box) -> None:
    data = random.Random(2).randbytes(BIG)
    assert (await box.shell("cat", stdin=data)).stdout == data
    assert (await box.shell("read line; echo [$line]", stdin=b"typed\nrest\n")).stdout == b"[typed]\n"
    assert (await box.shell("cat", stdin=b"")).stdout == b""


@posix
async def test_input_that_a_command_leaves_is_not_the_next_ones(box: Box) -> None:
    assert (await box.shell("head -c1", stdin=b"abc" * 100_000)).stdout == b"a"
    assert (await box.shell("cat")).stdout == b""
    assert (await box.shell("cat", stdin=b"mine")).stdout == b"mine"


@posix
async def test_the_exit_code_is_that_of_the_last_command(box: Box) -> None:
    for command, code in (
        ("true", 0),
        ("false", 1),
        ("(exit 200)", 200),
        ("no-such-command", 127),
        ("", 0),
        ("#", 0),
    ):
        result = await box.shell(command)
        assert (result.code, result.exit.signal) == (code, None), command


@posix
async def test_exit_ends_the_command_and_not_the_shell(box: Box) -> None:
    await box.shell("kept=before")
    result = await box.shell("kept=during; echo out; exit 3; echo not reached")
    assert (result.code, result.stdout) == (3, b"out\n")
    assert await box.said("echo $kept") == "before"


@posix
async def test_every_exit_code_is_told(box: Box) -> None:
    for code in (0, 1, 2, 77, 126, 127, 128, 137, 254, 255):
        assert (await box.shell(f"exit {code}")).code == code
        assert (await box.shell(f"(exit {code})")).code == code


@posix
async def test_a_syntax_error_is_told_and_the_shell_lives(box: Box) -> None:
    await box.shell("kept=yes")
    for broken in ("if true; then", "echo 'unfinished", "done", "( echo", "case x in"):
        result = await box.shell(broken)
        assert result.code in (1, 2), broken
        assert any(word in result.stderr for word in (b"yntax error", b"nterminated", b"unexpected")), broken
        assert result.stdout == b""
    assert await box.said("echo $kept") == "yes"


@posix
async def test_a_command_that_is_replaced_by_a_program_ends_with_it(box: Box) -> None:
    await box.shell("kept=yes")
    result = await box.shell("exec sh -c 'echo replaced; exit 9'")
    assert (result.code, result.stdout) == (9, b"replaced\n")
    assert await box.said("echo $kept") == "yes"


@posix
async def test_errexit_ends_the_command_and_not_the_shell(box: Box) -> None:
    result = await box.shell("set -e; false; echo not reached", "strict")
    assert (result.code, result.stdout) == (1, b"")
    await box.shell("set -e", "strict")
    assert (await box.shell("false; echo not reached", "strict")).stdout == b""
    assert (await box.shell("false || echo reached", "strict")).stdout == b"reached\n"
    await box.shell("set +e", "strict")
    assert (await box.shell("false; echo reached", "strict")).stdout == b"reached\n"


@posix
async def test_a_command_may_close_its_streams(box: Box) -> None:
    assert (await box.shell("exec >&- 2>&- <&-")).code == 0
    assert await box.said("echo open again") == "open again"


@posix
async def test_a_command_may_redirect_itself(box: Box) -> None:
    result = await box.shell(f"exec >{box.path('redirected')}; echo to the file")
    assert result.stdout == b""
    assert await box.content("redirected") == b"to the file\n"
    assert await box.said("echo to the caller") == "to the caller"


@posix
async def test_here_documents_and_comments_are_fine_to_the_last_byte(box: Box) -> None:
    assert (await box.shell("cat <<EOF\nline $((1+1))\nEOF")).stdout == b"line 2\n"
    assert (await box.shell("cat <<'EOF'\n$x `y` \\\nEOF\n")).stdout == b"$x `y` \\\n"
    assert (await box.shell("echo end # comment")).stdout == b"end\n"


@posix
async def test_a_command_is_taken_byte_by_byte_as_it_is(box: Box) -> None:
    odd = "\x01\x02\x07\x1b\x7f\u00e9\udcff\udc80\\ \t%s"
    expected = odd.encode("utf-8", "surrogateescape")
    assert (await box.shell(f"printf %s '{odd}'")).stdout == expected


@posix
async def test_a_long_command_is_fine(box: Box) -> None:
    text = "x" * 100_000
    assert (await box.shell(f"echo {text} | wc -c")).stdout.strip() == b"100001"


@posix
async def test_the_environment_of_the_first_command_is_the_shells(box: Box) -> None:
    await box.shell("true", "own", env={**ENV, "FIRST": "1 2"})
    assert await box.said("echo $FIRST", "own") == "1 2"
    await box.shell("true", "own", env={**ENV, "FIRST": "other"})
    assert await box.said("sh -c 'echo $FIRST'", "own") == "1 2"


@posix
async def test_exports_and_directory_of_a_command_stay(box: Box) -> None:
    value = 'it\'s "$HOME"\n\\x'
    await box.shell("true", exports={"GIVEN": value}, cwd="/usr")
    assert (await box.shell("pwd; sh -c 'printf %s \"$GIVEN\"'")).stdout.decode() == f"/usr\n{value}"


@posix
async def test_a_directory_that_is_not_there_is_told_and_changes_nothing(box: Box) -> None:
    await box.shell("cd /usr")
    result = await box.shell("echo not reached", cwd="/no/where")
    assert (result.code, result.stdout) == (1, b"")
    assert b"/no/where" in result.stderr
    assert await box.said("pwd") == "/usr"


@posix
async def test_two_commands_at_once_are_one_too_many(box: Box) -> None:
    process = await box.start_shell("sleep 1000")
    with pytest.raises(Busy):
        await box.shell("true")
    await process.kill()
    assert (await box.shell("echo free")).stdout == b"free\n"


@posix
async def test_shells_with_names_are_independent(box: Box) -> None:
    await box.shell("cd /usr; v=one", "one")
    await box.shell("cd /tmp; v=two", "two")
    busy = await box.start_shell("sleep 1000", "two")
    assert await box.said("echo $v $PWD", "one") == "one /usr"
    await busy.kill()
    assert await box.said("echo $v $PWD", "two") == "two /tmp"


@posix
async def test_many_shells_work_at_once(box: Box) -> None:
    names = [f"many-{n}" for n in range(20)]
    await asyncio.gather(*(box.shell(f"v={name}", name) for name in names))
    assert await asyncio.gather(*(box.said("echo $v", name) for name in names)) == names


async def test_a_name_that_is_too_long_is_the_callers_fault(box: Box) -> None:
    with pytest.raises(InvalidRequest):
        await box.shell("true", "x" * 100)


@posix
async def test_a_killed_command_leaves_the_state_from_before(box: Box, nap: str) -> None:
    await box.shell("cd /usr; v=before")
    process = await box.start_shell(
        f"cd /; v=during; echo up; sleep {nap} & (setsid sleep {nap} &); sleep {nap}"
    )
    await expect(process, b"up")
    await process.kill()
    exit = await process.wait()
    assert exit.code == 137
    assert await box.alive(nap) == []
    assert await box.said("echo $v $PWD") == "before /usr"


@posix
async def test_a_killed_first_command_leaves_a_shell_that_works(box: Box) -> None:
    process = await box.start_shell("echo up; while :; do :; done", "fresh")
    await expect(process, b"up")
    await process.kill()
    assert await box.said("echo works", "fresh") == "works"


@posix
async def test_a_kill_right_after_the_start_leaves_nothing(box: Box) -> None:
    for n in range(60):
        process = await box.start_shell("sleep 1000", f"hasty-{n % 2}")
        await process.kill()
        assert (await process.wait()).code == 137
    await box.idle()
    assert await box.said("echo works", "hasty-0") == "works"


@posix
async def test_a_kill_spares_what_earlier_commands_left(box: Box, nap: str) -> None:
    assert (await box.shell(f"sleep {nap} &")).code == 0
    process = await box.start_shell(f"sleep {nap}1 & echo up; wait")
    await expect(process, b"up")
    await process.kill()
    assert await box.alive(f"{nap}1") == []
    await box.there(nap)
    await box.shell("kill $!")
    await box.gone(nap)


@posix
async def test_a_kill_spares_what_programs_of_earlier_commands_start_meanwhile(box: Box, nap: str) -> None:
    """Killed with the command, they would look like a tree that forks faster than it can be killed."""
    gate = box.path("spare-gate")
    await box.sh("mkfifo spare-gate")
    await box.shell(f"(read line <{gate}; while :; do sleep {nap}; echo ended; done >{box.path('spare')}) &")
    process = await box.start_shell("echo up; sleep 1000")
    await expect(process, b"up")
    await box.sh("echo >spare-gate")
    await box.there(nap)
    await process.kill()
    await box.there(nap)
    assert await box.channel.read("spare") == b""
    await box.shell("kill $!")
    for pid in await box.alive(nap):
        await box.sh(f"kill {pid}")
    await box.gone(nap)


@posix
async def test_a_background_process_neither_delays_the_end_nor_dies_with_it(box: Box, nap: str) -> None:
    result = await box.shell(f"sleep {nap} & echo started")
    assert (result.code, result.stdout) == (0, b"started\n")
    assert await box.said("echo next") == "next"
    await box.there(nap)
    await box.shell("kill $!")
    await box.gone(nap)


@posix
async def test_a_background_writer_lives_on(box: Box) -> None:
    gate, status = box.path("shell-gate"), box.path("shell-status")
    await box.sh("mkfifo shell-gate")
    await box.shell(f"(read go <{gate}; head -c 300000 /dev/zero; echo $? >{status}) & echo bye")
    await box.sh("echo >shell-gate")
    assert await box.written("shell-status") == b"0\n"


@posix
async def test_signals_reach_the_command(box: Box) -> None:
    process = await box.start_shell("trap 'echo cleaned; exit 7' TERM; echo up; while :; do sleep 0.01; done")
    await expect(process, b"up")
    process.signal(signal.SIGTERM)
    result = await finish(process)
    assert (result.code, result.stdout) == (7, b"cleaned\n")
    assert await box.said("echo alive") == "alive"


@posix
async def test_an_interrupted_command_leaves_the_state_from_before(box: Box, nap: str) -> None:
    await box.shell("v=before")
    process = await box.start_shell(f"v=during; sleep {nap}")
    await box.there(nap)
    process.signal(signal.SIGINT)
    assert (await process.wait()).code == 130
    assert await box.said("echo $v") == "before"


@posix
@pytest.mark.parametrize("target", ["$$", "$PPID", "0", "-$$"], ids=["shell", "parent", "group", "its-group"])
async def test_a_first_command_that_kills_its_shell_has_an_end_and_the_next_works(
    box: Box, target: str
) -> None:
    name = f"suicide{target}"
    # Where its parent is another user's, it cannot be killed, and the command goes on.
    result = await box.shell(f"kill -9 {target} 2>/dev/null; sleep 0.01; exit 5", name)
    assert result.code in (137, 5)
    assert await box.said("echo next", name) == "next"


@posix
async def test_first_commands_that_kill_what_starts_their_shells_have_an_end(site: Site) -> None:
    """Some of them before it was told that the shell has started."""
    async with site.box() as box:
        commands = (box.shell("kill -9 $PPID 2>/dev/null; exit 5", str(number)) for number in range(20))
        assert {result.code for result in await asyncio.gather(*commands)} <= {137, 5}


@needs("isolated")  # elsewhere these numbers may be anybody's
@pytest.mark.parametrize("target", ["$$", "$PPID", "0", "-$$", "-1"])
async def test_a_later_command_that_kills_its_shell_has_an_end_and_the_next_works(
    site: Site, target: str
) -> None:
    async with site.box() as box:
        for _ in range(3):
            await box.shell("true")
        result = await box.shell(f"kill -9 {target} 2>/dev/null; sleep 0.01; exit 5")
        assert result.code in (137, 5)
        assert await box.said("echo next") == "next"


@needs("isolated")
async def test_a_shell_that_is_killed_between_two_commands_is_replaced(site: Site) -> None:
    async with site.box() as box:
        await box.shell("v=lost")
        pid = await box.said("sh -c 'echo $PPID'")
        await box.sh(f"kill -9 {pid}; kill -9 -1")
        assert await box.said("echo works") == "works"


@posix
async def test_only_the_three_streams_are_open_in_children(box: Box) -> None:
    for _ in range(3):
        # The fourth is the directory that ls itself reads.
        assert (await box.shell("ls /proc/self/fd")).stdout.split() == [b"0", b"1", b"2", b"3"]


@posix
async def test_nothing_of_ours_is_in_the_environment_of_children(box: Box) -> None:
    assert (await box.shell("env | grep __; set -a; env | grep __", "exporting")).stdout == b""
    for _ in range(2):
        assert (await box.shell("x=1; env | grep __; env | grep -c ^x=", "exporting")).stdout == b"1\n"


@posix
async def test_output_beyond_the_limit_is_counted_and_not_delivered(box: Box) -> None:
    result = await box.shell("head -c 300000 /dev/zero", output_limit=1000)
    assert (len(result.stdout), result.exit.stdout_size) == (1000, 300_000)


@posix
async def test_output_comes_while_the_command_runs(box: Box) -> None:
    process = await box.start_shell("echo first; read x; echo second", stdin=True)
    await expect(process, b"first")
    await feed(process, b"\n")
    assert (await finish(process)).stdout == b"second\n"


@posix
async def test_a_working_directory_that_was_removed_does_not_end_the_shell(box: Box) -> None:
    await box.shell(f"mkdir {box.path('removed')}; cd {box.path('removed')}; v=here")
    await box.shell(f"rmdir {box.path('removed')}")
    assert (await box.shell("echo $v")).stdout == b"here\n"
    assert (await box.shell("cd /; pwd")).stdout == b"/\n"


@posix
async def test_what_a_command_leaves_behind_is_listed_no_longer_than_it_lives(box: Box) -> None:
    await box.shell("true")
    assert [info for info in await box.channel.processes() if info.running] == []


@needs("users")
async def test_shells_of_several_users_work_side_by_side(box: Box) -> None:
    for uid, name in ((1000, "user"), (0, "root"), (12345, "other")):
        for _ in range(2):
            result = await box.shell("id -u; cat; echo err >&2", name, uid=uid, stdin=b"in\n")
            assert (result.stdout, result.stderr) == (f"{uid}\nin\n".encode(), b"err\n")
        assert (await box.shell("exit 4", name, uid=uid)).code == 4
    result = await box.shell(f"touch {box.path('of-root')}", "root", uid=0)
    assert b"denied" in result.stderr
