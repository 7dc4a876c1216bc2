"""Execution profiles on the real kernel: what one command cannot do that its environment can."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from skerry.errors import IsolationUnavailable, SkerryError
from skerry.host import readback
from tests import support
from tests.conformance.kinds import RUNGS
from tests.security.box import Box, Boxes, Running
from tests.security.conftest import Mutate

pytestmark = [pytest.mark.timeout(60), pytest.mark.requirement("F10"), pytest.mark.needs("path_rules")]

WITHOUT = (
    ("profile.c", "    return install(&filter);", "    return 0;"),
    (
        "profile.c",
        "syscall(NR_LANDLOCK_RESTRICT, ruleset, 0u) < 0",
        "ruleset < 0",
    ),
)
"""No filter, and no rules on paths."""
LAX = (
    ("profile.c", ".scoped = abi >= LANDLOCK_SCOPES ? 3 : 0", ".scoped = 0"),
    ("profile.c", ".resolve = RESOLVE_SYMLINKS_NOT", ".resolve = 0"),
    ("profile.c", "(fs.f_flag & ST_RDONLY)", "(fs.f_flag | ST_RDONLY)"),
    ("profile.c", "if (sk_process_begins((pid_t)question.pid))", "if (question.pid > 0)"),
)
"""Signals go anywhere, symlinks are followed, what can be written is executed, and everybody may install filters."""
CARELESS = (
    "supervisor.c",
    "if (s->profile != NULL && sk_profile_apply(s, pty) < 0)",
    "if (s->profile != NULL && sk_profile_apply(s, pty) > 0)",
)
REFUSED = {"EPERM", "EACCES"}
PLACES = ("/workspace", "/tmp", "/dev/shm")


@pytest.fixture(autouse=True)
def _landlock() -> None:
    if reason := readback.path_rules():
        support.missing(reason)


@contextlib.contextmanager
def sibling(
    box: Box, script: str = "echo started; exec sleep 600", **options: Any
) -> Iterator[tuple[Running, int]]:
    """Another command of the same user, without a profile; and its number inside."""
    running = box.start(["sh", "-c", f"echo $$ >/tmp/sibling; {script}"], **options)
    try:
        running.until("started")
        yield running, int(box.get("/tmp/sibling"))
    finally:
        running.kill()


# ---- system calls ----

NO_DIRECTORIES = {"deny": ["mkdir", "mkdirat"]}
TREE = """
mkdir /tmp/a 2>&1
sh -c 'mkdir /tmp/b' 2>&1
(setsid sh -c 'mkdir /tmp/c 2>&1; echo over' &) | cat
"""


def test_denied_call_is_denied_to_everything_below_the_command(
    boxes: Boxes, mode: str, mutate: Mutate
) -> None:
    with boxes.fresh(mode) as box:
        said = box.sh(TREE, profile=NO_DIRECTORIES).text
        assert (said.count("Operation not permitted"), said.splitlines()[-1]) == (3, "over")
        assert box.sh(TREE).text == "over", "another command of the same environment"
    with boxes.fresh(mode, helper=mutate(*WITHOUT)) as weak:
        assert weak.sh(TREE, profile=NO_DIRECTORIES).text == "over"


def test_no_sockets_but_pairs(boxes: Boxes, mode: str, mutate: Mutate) -> None:
    box = boxes(mode)
    none = {**dict.fromkeys(("unix", "inet", "inet6", "netlink", "datagram pair"), "EPERM"), "pair": "done"}
    assert box.probe("profile.sockets", profile="offline") == none
    assert box.probe("profile.sockets", profile="strict") == none
    assert set(box.probe("profile.sockets").values()) == {"done"}
    weak = boxes(mode, helper=mutate(*WITHOUT))
    assert set(weak.probe("profile.sockets", profile="offline").values()) == {"done"}


@pytest.mark.parametrize("profile", ["default", "strict", "debug", "filters"])
def test_holds_in_environments_of_every_profile(boxes: Boxes, mode: str, profile: str) -> None:
    box = boxes(mode, profile=profile)
    assert box.probe("profile.sockets", profile="strict")["inet"] == "EPERM"
    assert box.sh("mkdir /tmp/a", profile=NO_DIRECTORIES).code == 1
    assert box.probe("profile.filters", profile="offline") == "EINVAL"


def test_only_what_becomes_a_command_with_a_profile_installs_filters(
    boxes: Boxes, mode: str, mutate: Mutate
) -> None:
    with boxes.fresh(mode) as box, sibling(box, profile=NO_DIRECTORIES):
        assert box.probe("profile.filters") == "EINVAL"
    with boxes.fresh(mode, helper=mutate(*LAX)) as weak:
        assert weak.probe("profile.filters") == "done"
        assert weak.probe("profile.filters", profile="offline") == "EINVAL", "its own filter says no first"


# ---- paths ----


def _writes(box: Box, profile: Any, *directories: str) -> dict[str, dict[str, str]]:
    box.sh("; ".join(f"mkdir -p {each}; echo x >{each}/old" for each in directories))
    found: dict[str, dict[str, str]] = box.probe("profile.writes", *directories, profile=profile)
    return found


def test_nothing_is_written_but_below_the_given_paths(boxes: Boxes, mode: str, mutate: Mutate) -> None:
    places = ("/workspace/out", "/workspace/in", "/tmp", "/dev/shm")
    with boxes.fresh(mode) as box:
        found = _writes(box, {"writable": ["/workspace/out"]}, *places)
        assert set(found.pop("/workspace/out").values()) == {"done"}
        for place, changes in found.items():
            assert set(changes.values()) <= {*REFUSED, "EXDEV"}, place
        nothing = _writes(box, "readonly", *places)
        assert all(set(changes.values()) <= {*REFUSED, "EXDEV"} for changes in nothing.values()), nothing
        assert box.sh("echo x >/dev/null; chmod 600 /workspace/in/old", profile="readonly").code == 1
        assert box.get("/workspace/in/old") == b"x\n"
    with boxes.fresh(mode, helper=mutate(*WITHOUT)) as weak:
        found = _writes(weak, {"writable": ["/workspace/out"]}, *places)
        assert {outcome for changes in found.values() for outcome in changes.values()} == {"done"}


def test_children_and_orphans_write_nothing_either(boxes: Boxes, mode: str) -> None:
    tree = TREE.replace("mkdir /tmp", "touch /workspace")
    said = boxes(mode).sh(tree, profile="readonly").text
    assert (said.count("Permission denied"), said.splitlines()[-1]) == (3, "over")


def test_a_symlink_in_place_of_a_path_grants_nothing(boxes: Boxes, mode: str, mutate: Mutate) -> None:
    """The workload can shape everything below /workspace before the command starts."""
    attempt = "ln -sfn /workspace /workspace/out; mkdir -p /workspace/in"
    profile = {"writable": ["/workspace/out"]}
    with boxes.fresh(mode) as box:
        box.sh(attempt)
        assert box.sh("touch /workspace/in/x", profile=profile).code == 1
    with boxes.fresh(mode, helper=mutate(*LAX)) as weak:
        weak.sh(attempt)
        assert weak.sh("touch /workspace/in/x", profile=profile).code == 0


def test_own_terminal_can_be_used_and_no_other(boxes: Boxes, mode: str) -> None:
    with boxes.fresh(mode) as box, sibling(box, "echo started; tty; exec sleep 600", pty=(24, 80)):
        script = "echo one >/dev/tty; echo two >/dev/stdout; stty size </dev/tty; echo x >/dev/pts/0 || echo refused"
        said = box.run(["sh", "-c", script], profile="strict", pty=(24, 80)).text
        assert [word for word in ("one", "two", "24 80", "refused") if word in said] == [
            "one",
            "two",
            "24 80",
            "refused",
        ], said


# ---- new files ----


def test_what_can_be_written_cannot_be_executed(boxes: Boxes, mode: str, mutate: Mutate) -> None:
    profile = {"execute_new": False}
    with boxes.fresh(mode) as box:
        assert box.probe("profile.executes", "/workspace", "/tmp", profile=profile) == {
            "/workspace": "EACCES",
            "/tmp": "EACCES",
        }
        assert box.probe("profile.memory_file", profile=profile) == "ENOSYS"
        assert box.probe("profile.executes", "/workspace", "/tmp") == {"/workspace": "done", "/tmp": "done"}
        assert box.probe("profile.memory_file") == "done"
        box.sh("cp /bin/true /workspace/old")
        assert box.run(["/workspace/old"], profile=profile).code == 126
        assert box.run(["/workspace/old"]).code == 0
        assert (
            box.sh("git --version >/dev/null; ls / | sort | head -1; python3 -c pass", profile=profile).code
            == 0
        )
    with boxes.fresh(mode, helper=mutate(*LAX)) as weak:
        assert weak.probe("profile.executes", "/workspace", profile=profile) == {"/workspace": "done"}


def test_files_are_still_read_by_interpreters(boxes: Boxes, mode: str) -> None:
    """Documented: what an interpreter or the dynamic loader reads is not executed, as the kernel sees it."""
    box = boxes(mode)
    box.put("/workspace/program.py", b"print(6 * 7)")
    assert box.run(["python3", "/workspace/program.py"], profile="strict").text == "42"


# ---- other commands of the same environment ----

HARMLESS = {"writable": ["/tmp"]}
"""Denies no call: Landlock alone stands before other processes."""


@pytest.mark.parametrize("profile", [HARMLESS, "offline"], ids=["paths", "offline"])
def test_other_processes_of_the_user_cannot_be_used(
    boxes: Boxes, mode: str, mutate: Mutate, profile: Any
) -> None:
    with boxes.fresh(mode, profile="debug") as box, sibling(box) as (_, pid):
        found = box.probe("profile.neighbour", str(pid), profile=profile)
        assert set(found.values()) <= REFUSED, found
        found = box.probe("profile.neighbour", str(pid))
        refused = {"remote"} if mode in RUNGS else set()  # by the filter of an engine, whatever the profile
        assert {name for name, said in found.items() if said != "done"} <= refused, found
    with boxes.fresh(mode, profile="debug", helper=mutate(*WITHOUT)) as weak, sibling(weak) as (_, pid):
        assert set(weak.probe("profile.neighbour", str(pid), profile=profile).values()) == {"done"}
    with boxes.fresh(mode, profile="debug", helper=mutate(*LAX)) as weak, sibling(weak) as (_, pid):
        assert weak.probe("profile.neighbour", str(pid), profile=profile)["signal"] == "done"


@pytest.mark.parametrize("profile", ["offline", "strict"])
def test_shells_take_no_commands_from_it(boxes: Boxes, mode: str, mutate: Mutate, profile: str) -> None:
    with boxes.fresh(mode) as box:
        box.shell("true")
        found = box.probe("profile.shell_pipes", profile=profile)
        assert {"/run/1.c", "/run/new", "descriptor 9"} <= set(found)
        assert set(found.values()) <= {*REFUSED, "ENOENT"}, found
        assert box.shell("echo fine").text == "fine"
    with boxes.fresh(mode, helper=mutate(*WITHOUT)) as weak:
        weak.shell("true")
        assert "done" in set(weak.probe("profile.shell_pipes", profile=profile).values())


# ---- a profile that cannot be put in force ----


BROKEN = {
    "old kernel": ("profile.c", "abi < LANDLOCK_NEEDED", "abi > 0"),
    "landlock": ("profile.c", "RESTRICT, ruleset, 0u) < 0", "RESTRICT, -1, 0u) < 0"),
    "seccomp": ("profile.c", "SECCOMP_INSTALL, 0, &program", "SECCOMP_INSTALL, 0, NULL"),
    "refused": ("profile.c", "if (sk_process_begins((pid_t)question.pid))", "if (question.pid == 0)"),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_the_command_does_not_run_without_its_profile(
    boxes: Boxes, mode: str, mutate: Mutate, broken: tuple[str, str, str]
) -> None:
    with boxes.fresh(mode, helper=mutate(broken)) as box:
        with pytest.raises(IsolationUnavailable, match="execution profile cannot be put in force"):
            box.sh("touch /tmp/ran", profile="offline")
        assert box.sh("ls /tmp").text == ""
        box.ping()


def test_the_command_would_run_if_nobody_looked(boxes: Boxes, mode: str, mutate: Mutate) -> None:
    """Without the check before exec the cases above run the command."""
    with boxes.fresh(mode, helper=mutate(BROKEN["landlock"], CARELESS)) as weak:
        assert weak.sh("touch /tmp/ran", profile="offline").code == 0


def test_a_profile_of_nonsense_starts_nothing(boxes: Boxes, mode: str) -> None:
    box = boxes(mode)
    for writable in (["tmp"], ["/tmp\0/x"]):
        with pytest.raises(SkerryError):
            box.sh("true", profile={"writable": writable})
    box.ping()
