"""What one command of a shell leaves to the next, for as many commands as you like."""

from __future__ import annotations

import asyncio

import pytest

from tests.conformance.harness import Box, expect

posix = pytest.mark.posix

MANY = 300
"""Commands: more than twice what a shell runs before it starts over from its saved state."""


async def pass_time(box: Box, name: str = "main", commands: int = MANY) -> None:
    for n in range(commands):
        result = await box.shell("true", name)
        assert (result.code, result.stdout, result.stderr) == (0, b"", b""), n


@posix
async def test_the_working_directory_stays(box: Box) -> None:
    await box.shell("cd /usr")
    assert await box.said("pwd; cd ..") == "/usr"
    assert await box.said("pwd; cd -") == "/\n/usr"


@posix
async def test_variables_stay_and_only_exports_reach_programs(box: Box) -> None:
    await box.shell("plain='a  b'; export SEEN='c  d'")
    assert await box.said('echo "$plain"; sh -c \'echo "$plain-$SEEN"\'') == "a  b\n-c  d"
    await box.shell("unset plain SEEN")
    assert await box.said("echo ${plain-gone} ${SEEN-gone}") == "gone gone"


@posix
async def test_functions_stay(box: Box) -> None:
    await box.shell('greet() { echo "hello $1"; }')
    assert await box.said("greet you") == "hello you"
    await box.shell("unset -f greet")
    assert (await box.shell("greet you")).code == 127


@posix
async def test_options_stay(box: Box) -> None:
    await box.shell("set -u; set -f", "options")
    assert await box.said("echo *", "options") == "*"
    result = await box.shell("echo $undefined; echo not reached", "options")
    assert result.code != 0
    assert result.stdout == b""
    assert result.stderr
    await box.shell("set +u", "options")
    assert await box.said("echo [$undefined]", "options") == "[]"


async def test_tracing_shows_the_commands_and_nothing_of_ours(box: Box) -> None:
    await box.shell("set -x", "tracing")
    result = await box.shell("echo hi", "tracing")
    assert result.stdout == b"hi\n"
    # Bash itself writes one sign for each level that it is in.
    assert result.stderr.lstrip(b"+") == b" echo hi\n"


@posix
async def test_positional_parameters_stay(box: Box) -> None:
    await box.shell("set -- one 'two  words' ''")
    assert await box.said('printf "[%s]" "$#" "$@"') == "[3][one][two  words][]"


@posix
async def test_the_umask_stays(box: Box) -> None:
    await box.shell("umask 077", "masked")
    assert await box.said("umask", "masked") == "0077"


@posix
async def test_aliases_stay(box: Box) -> None:
    await box.shell("shopt -s expand_aliases 2>/dev/null; alias greet='echo hi'")
    assert await box.said("greet there") == "hi there"


@posix
async def test_the_last_exit_code_and_the_last_background_pid_stay(box: Box, nap: str) -> None:
    assert await box.said("echo $?") == "0"
    await box.shell("(exit 42)")
    assert (await box.shell("echo $?")).stdout == b"42\n"
    assert (await box.shell("echo $?")).stdout == b"0\n"
    await box.shell(f"sleep {nap} &")
    await box.there(nap)
    assert [int(await box.said("echo $!"))] == await box.alive(nap)


async def test_arrays_stay(box: Box) -> None:
    await box.shell("list=(a 'b  c' '' d); list[9]=z; declare -A map=([k 1]='v  1' ['q\"']=$'n\\nl')")
    assert await box.said('printf "[%s]" "${list[@]}" "${!list[@]}"') == "[a][b  c][][d][z][0][1][2][3][9]"
    assert await box.said('printf "[%s]" "${map[k 1]}" "${map[q\\"]}"') == "[v  1][n\nl]"


async def test_options_of_bash_stay(box: Box) -> None:
    await box.shell("set -o pipefail; shopt -s nullglob extglob", "bash")
    assert (await box.shell("false | true", "bash")).code == 1
    assert await box.said("echo /no/such/*", "bash") == ""
    assert await box.said("case abc in @(abc|def)) echo yes;; esac", "bash") == "yes"


async def test_the_directory_stack_stays(box: Box) -> None:
    await box.shell("cd /; pushd /usr >/dev/null; pushd /tmp >/dev/null", "stack")
    assert await box.said("popd >/dev/null; pwd; dirs", "stack") == "/usr\n/usr /"


@posix
async def test_a_shell_runs_any_number_of_commands(box: Box) -> None:
    await box.shell("count=0")
    for _ in range(MANY):
        await box.shell("count=$((count + 1))")
    assert await box.said("echo $count") == str(MANY)


async def test_all_kinds_of_state_last(box: Box) -> None:
    name = "lasting"
    setup = r"""
cd /usr
plain='with "quotes" and '\''more'\'' and $dollars and `ticks` and \back'
newlines=$'first\nsecond\n\nlast\n'
odd=$'\x01\x02\x7f\xff\xfe'
export EXPORTED=$'two\nlines'
readonly CONSTANT='never changes'
declare -rx CONSTANT_EXPORTED=too
declare -i number=41
declare -l lower=ABC
declare -a list=(a 'b  c' '' $'d\ne')
list[7]=sparse
declare -A map=([simple]=1 ['two words']='v  2' [$'new\nline']=3)
declare -n reference=plain
declare -x declared_only
empty=
function_plain() { local x="$1"; echo "plain $x"; }
function_exported() { echo exported; }
export -f function_exported
recursive() { if (( $1 > 0 )); then echo -n "$1 "; recursive $(($1 - 1)); fi; }
readonly -f recursive
shopt -s extglob nullglob expand_aliases globstar
matches() { case "$1" in @(yes|y)) echo matched;; !(no)) echo other;; *) echo no;; esac; }
alias shout='echo LOUD'
set -o pipefail
set -u
set -C
umask 027
set -- first 'second  one' ''
"""
    look = r"""
echo "$PWD"; printf '%s|' "$plain" "$newlines" "$odd" "$EXPORTED" "$CONSTANT" "$CONSTANT_EXPORTED" "$empty"; echo
number+=1; echo "$number"; number=41
lower=DEF; echo "$lower"
printf '[%s]' "${list[@]}" "${!list[@]}"; echo
for k in simple 'two words' $'new\nline'; do printf '[%s]' "${map[$k]}"; done; echo
echo "$reference"
(declare -p declared_only) 2>&1
function_plain x; bash -c function_exported; recursive 3; echo; matches y; matches z; matches no
shout
false | true; echo "pipefail $?"
(echo "${undefined_thing}") 2>/dev/null || echo nounset
(echo x >|"$TMPFILE"; echo x >"$TMPFILE") 2>/dev/null || echo noclobber
(CONSTANT=changed) 2>/dev/null || echo constant
(recursive() { :; }) 2>/dev/null || echo constant function
umask
printf '[%s]' "$#" "$@"; echo
echo $-; shopt; set -o
env | grep -c '^EXPORTED='
alias
"""
    await box.shell(f"TMPFILE={box.path('clobber')}", name)
    first = await box.shell(setup, name)
    assert (first.code, first.stderr) == (0, b"")
    before = await box.shell(look, name)
    assert before.code == 0, before
    for word in (b"matched\nother\nno\n", b"LOUD\n", b"pipefail 1\nnounset\nnoclobber\nconstant\n"):
        assert word in before.stdout
    pid = await box.said("echo $$", name)
    await pass_time(box, name)
    assert await box.said("echo $$", name) != pid, "it has not started over"
    after = await box.shell(look, name)
    assert after.stdout == before.stdout
    assert (after.code, after.stderr) == (before.code, before.stderr)


async def test_functions_last_as_they_were_defined_whatever_aliases_came_later(box: Box) -> None:
    await box.shell("shopt -s expand_aliases; f() { echo plain; }; alias echo='echo aliased'", "aliases")
    assert await box.said("f; echo x", "aliases") == "plain\naliased x"
    await pass_time(box, "aliases", 130)
    assert await box.said("f; echo x", "aliases") == "plain\naliased x"


async def test_errexit_and_allexport_last(box: Box) -> None:
    await box.shell("set -ea", "flags")
    await pass_time(box, "flags", 130)
    assert (await box.shell("false; echo not reached", "flags")).stdout == b""
    assert (await box.shell("late=1; env | grep ^late", "flags")).stdout == b"late=1\n"


async def test_large_state_lasts_and_fills_nothing(box: Box) -> None:
    await box.shell("big=$(head -c 6000000 /dev/zero | tr '\\0' x)", "large")
    await pass_time(box, "large", 130)
    assert await box.said("echo ${#big}", "large") == "6000000"
    assert await box.said("echo works", "another") == "works"


async def test_a_variable_that_is_too_large_to_be_exported_does_not_cost_the_state(box: Box) -> None:
    await box.shell("kept=yes; export huge=$(head -c 200000 /dev/zero | tr '\\0' x)", "huge")
    await pass_time(box, "huge", 130)
    assert await box.said("echo $kept ${#huge}", "huge") == "yes 200000"


async def test_shells_that_start_over_at_the_same_time_keep_their_own_state(box: Box) -> None:
    names = [f"twin-{n}" for n in range(4)]

    async def live(name: str) -> str:
        await box.shell(f"mine={name}; readonly const_{name[-1]}=1; f() {{ echo {name}; }}", name)
        for _ in range(140):
            await box.shell(":", name)
        return await box.said("f; echo $mine ${!const_*}", name)

    results = await asyncio.gather(*(live(name) for name in names))
    assert results == [f"{name}\n{name} const_{name[-1]}" for name in names]


async def test_a_background_process_of_a_shell_that_started_over_is_still_spared_and_still_seen(
    box: Box, nap: str
) -> None:
    await box.shell(f"sleep {nap} &", "background")
    await pass_time(box, "background", 130)
    process = await box.start_shell(f"sleep {nap}1 & echo up; wait", "background")
    await expect(process, b"up")
    await process.kill()
    assert await box.alive(f"{nap}1") == []
    await box.there(nap)


async def test_a_command_that_gives_bash_another_name_does_not_cost_the_state(box: Box) -> None:
    await box.shell("BASH=/nowhere; unset BASH_VERSION; kept=yes", "renamed")
    await pass_time(box, "renamed", 130)
    assert await box.said("echo $kept", "renamed") == "yes"


async def test_a_startup_file_is_not_read_when_a_shell_starts_over(box: Box) -> None:
    await box.channel.write("startup", b"echo noise; kept=lost; exit 1\n")
    await box.shell(f"kept=yes; export BASH_ENV={box.path('startup')}", "startup")
    await pass_time(box, "startup", 130)
    assert await box.said("echo $kept $BASH_ENV", "startup") == f"yes {box.path('startup')}"


@posix
async def test_failing_commands_cost_no_state_however_many(box: Box) -> None:
    await box.shell("kept=yes; cd /usr", "failing")
    for n in range(MANY):
        assert (await box.shell(f"kept=no; cd /; exit {n % 256}", "failing")).code == n % 256
    assert await box.said("echo $kept $PWD", "failing") == "yes /usr"
