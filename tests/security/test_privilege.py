"""Nothing inside has, gains or passes on a privilege: not by programs, files, calls, users or the supervisors."""

from __future__ import annotations

import os
import shutil
import stat
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skerry.host import injected
from tests import support
from tests.conformance.kinds import RUNGS
from tests.security.box import Box, Boxes, own_kernel, users
from tests.security.conftest import Mutate

pytestmark = pytest.mark.timeout(60)

NONE = "0000000000000000"
NOTHING = {
    **dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), NONE),
    "NoNewPrivs": "1",
    "Seccomp": "2",
    "securebits": "0xef",
}
OF_EVERY_RUNG = ("CapInh", "CapPrm", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp")
"""gVisor has neither securebits nor ambient capabilities. In an engine nobody was ever root, to lock securebits."""
SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
GAINS = {
    **dict.fromkeys(
        ("setuid", "setgid", "setgroups", "capset", "ambient", "securebits", "keepcaps"), "EPERM"
    ),
    "no_new_privs": "EINVAL",  # the kernel knows no way to take it back
}
TMPFS = ("mounts.c", "ATTR_NOSUID | ATTR_NODEV | (strstr(c->argv[3]", "ATTR_NODEV | (strstr(c->argv[3]")
TREES = ("mounts.c", "uint64_t set = ATTR_NOSUID | (strstr", "uint64_t set = (strstr")

only_rootful = pytest.mark.root
needs, each_rung = pytest.mark.needs, pytest.mark.each_rung


def ways(box: Box) -> list[dict[str, Any]]:
    """All ways in which a program is started, as options of Box.probe."""
    return [
        {"user": user, **way} for user in users(box.mode) for way in ({}, {"pty": (24, 80)}, {"stdin": b"x"})
    ]


# ---- what a process has ----


@each_rung
@pytest.mark.requirement("R39")
def test_every_set_is_empty(boxes: Boxes, mode: str) -> None:
    box = boxes(mode)
    nothing = NOTHING if mode not in RUNGS else {name: NOTHING[name] for name in OF_EVERY_RUNG}
    for way in ways(box):
        found = box.probe("privilege.status", **way)
        assert {name: found.get(name) for name in nothing} == nothing, way
        assert found["Groups"] in ("", "1000"), way  # an engine puts a user into its own group
    for command in ("python3 -B /tmp/privilege.py status", "exec python3 -B /tmp/privilege.py status"):
        said = box.shell(command)
        assert all(f'"{name}": "{value}"' in said.text for name, value in nothing.items()), said
    weak = boxes(mode, without=["bound", "drop", "confine"]).probe("privilege.status")
    assert {name: weak[name] for name in NOTHING} == {
        **NOTHING,
        "CapBnd": "000001ffffffffff",
        "NoNewPrivs": "0",
        "Seccomp": "0",
        "securebits": "0x0",
    }


@only_rootful
def test_being_root_gives_nothing(boxes: Boxes) -> None:
    """Without locked securebits and no_new_privs, executing a program as root gives all that the bounding set has."""
    weak = boxes("rootful", without=["bound", "drop", "confine"]).probe("privilege.status", user="root")
    assert weak["CapEff"] == weak["CapPrm"] == weak["CapBnd"] == "000001ffffffffff"


@needs("host_processes")
def test_applets_and_supervisors_have_nothing(boxes: Boxes, mode: str, mutate: Mutate) -> None:
    assert _sets_of_an_applet(boxes, mode) == {NONE}
    if mode == "rootful":
        keeps = mutate(
            ("supervisor.c", "if (getpid() != 1 && sk_config.switch_users && ", "if (getpid() == 1 && ")
        )
        assert _sets_of_an_applet(boxes, mode, helper=keeps) == {NONE, "00000000000000e0"}


def _sets_of_an_applet(boxes: Boxes, mode: str, **options: Any) -> set[str]:
    """All capability sets of an applet and of its supervisor."""
    with boxes.fresh(mode, **options) as box:
        box.keeper.call("watch", id=box.id, name=f"{box.id}/watch", path=".")
        found = box.on_host()
        assert len(found) == 2
        return {value for pid in found for name, value in _status(pid).items() if name in SETS}


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@needs("host_processes")
def test_the_guest_keeps_three_capabilities_at_most(boxes: Boxes, mode: str) -> None:
    """To signal and to switch users, within its own user namespace; nobody below it can have them."""
    found = _status(boxes(mode).pid)
    kept = "00000000000000e0" if mode == "rootful" else NONE
    assert [found[name] for name in SETS] == [NONE, kept, kept, NONE, NONE]
    assert (found["NoNewPrivs"], found["Seccomp"]) == ("1", "2")


@only_rootful
def test_groups_of_the_daemon_do_not_come_along(boxes: Boxes, mutate: Mutate) -> None:
    """The rootful keeper has further groups. (Without root the kernel does not let one drop them: see SECURITY.md.)"""
    box = boxes("rootful")
    assert "1234" in _status(box.keeper.pid)["Groups"].split()
    for user in ("appuser", "root"):
        assert box.probe("privilege.status", user=user)["Groups"] == ""
    keeps = mutate(
        ("launch.c", 'sk_check(setgroups(0, NULL), "users", "setgroups");', ""),
        ("privileges.c", 'sk_check(setgroups(0, NULL), "drop", "setgroups");', "{ }"),
        ("supervisor.c", "setgroups(0, NULL) < 0 || ", ""),
    )
    assert "65534" in boxes("rootful", helper=keeps).probe("privilege.status")["Groups"].split()


# ---- what it may do ----


@pytest.mark.parametrize("user", ["appuser", "root"])
def test_no_call_gains_anything(boxes: Boxes, mode: str, user: str) -> None:
    if user not in users(mode):
        pytest.skip("there is one user inside")
    # Without root there are no others to become.
    others = dict.fromkeys(("setuid", "setgid"), "EINVAL") if mode == "rootless" else {}
    if mode in RUNGS:
        others = {"keepcaps": "done"}  # with nothing to keep
    if own_kernel(mode):
        others |= {"ambient": "EINVAL", "securebits": "EINVAL"}
    assert boxes(mode).probe("privilege.gain", user=user) == GAINS | others
    if user == "root":
        weak = boxes(mode, without=["bound", "drop", "confine"]).probe("privilege.gain", user=user)
        assert {
            name: weak[name] for name in ("setuid", "setgid", "setgroups", "capset", "securebits")
        } == dict.fromkeys(("setuid", "setgid", "setgroups", "capset", "securebits"), "done")


@each_rung
def test_no_user_namespace_by_any_call(boxes: Boxes, mode: str) -> None:
    refused = {"unshare": "EPERM", "clone": "EPERM", "clone3": "ENOSYS"}
    for way in ways(boxes(mode)):
        assert boxes(mode).probe("privilege.nested", **way) == refused
    assert boxes(mode, profile="debug").probe("privilege.nested") == refused
    assert boxes(mode, profile="strict").probe("privilege.nested") == refused
    assert set(boxes(mode, without=["seccomp"]).probe("privilege.nested").values()) == {"done"}


def test_no_device_is_made(boxes: Boxes, mode: str) -> None:
    assert set(boxes(mode).probe("privilege.devices").values()) == {"EPERM"}
    # All but the whiteout take a capability in the host's own user namespace.
    weak = boxes(mode, without=["seccomp"]).probe("privilege.devices")
    assert weak == {"mem": "EPERM", "null": "EPERM", "whiteout": "done", "block": "EPERM"}


@each_rung
@needs("users")
def test_setuid_programs_are_ignored(boxes: Boxes, mode: str, mutate: Mutate) -> None:
    """By the mounts, which are nosuid, and by no_new_privs: each alone is enough."""
    assert _euid_of_setuid(boxes, mode) == "1000"
    loose = mutate(TMPFS)
    for options in ({"without": ["confine"]}, {"helper": loose}):
        assert _euid_of_setuid(boxes, mode, **options) == "1000", options
    assert _euid_of_setuid(boxes, mode, helper=loose, without=["confine"]) == "0"


def _euid_of_setuid(boxes: Boxes, mode: str, **options: Any) -> str:
    """Of a program that root inside has made setuid, run by appuser."""
    with boxes.fresh(mode, **options) as box:
        made = box.sh("cp /usr/bin/id /tmp/id && chmod 4755 /tmp/id && stat -c %a:%u /tmp/id", user="root")
        assert made.text == "4755:0", made
        return box.run(["/tmp/id", "-u"]).text


@pytest.mark.parametrize("program", [["su", "-c", "id -u"], ["newgrp", "root"], ["chfn", "-f", "x"]])
def test_the_hosts_setuid_programs_give_nothing(boxes: Boxes, mode: str, program: list[str]) -> None:
    path = Path(support.require(program[0])).resolve()
    assert path.stat().st_mode & stat.S_ISUID, f"{path} is not setuid here"
    assert boxes(mode).sh(f"[ -x {path} ]").code == 0
    done = boxes(mode).run([str(path), *program[1:]], stdin=b"id -u\n")
    assert "0" not in done.text.split(), done


@pytest.fixture
def tool() -> Iterator[Path]:
    """A folder of the host's with a program in it that everybody can execute."""
    with tempfile.TemporaryDirectory(prefix="skerry-test-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        shutil.copy("/usr/bin/cat", folder / "cat")
        yield folder


@only_rootful
def test_file_capabilities_are_ignored(boxes: Boxes, mutate: Mutate, tool: Path) -> None:
    """Ones that name the environment's own root. Three layers: nosuid, no_new_privs and the empty bounding set."""
    loose = mutate(TREES)
    for options in ({}, {"helper": loose}, {"helper": loose, "without": ["confine"]}):
        assert _permitted_by_file(boxes, tool, **options) == NONE, options
    assert _permitted_by_file(boxes, tool, helper=loose, without=["confine", "bound", "drop"]) != NONE


def _permitted_by_file(boxes: Boxes, tool: Path, **options: Any) -> str:
    """The permitted set of a program to which its file gives all."""
    with boxes.fresh("rootful", binds=[(str(tool), "tool")], **options) as box:
        base = int(Path(f"/proc/{box.pid}/uid_map").read_text().split()[1])
        # struct vfs_ns_cap_data, revision 3: all permitted, nothing inheritable, of this root
        value = struct.pack("<6I", 0x03000000, 0xFFFFFFFF, 0, 0x1FF, 0, base)
        os.setxattr(tool / "cat", "security.capability", value)
        lines = box.run(["/dev/tool/cat", "/proc/self/status"]).text.splitlines()
        return next(line.split()[1] for line in lines if line.startswith("CapPrm"))


PLACES = ["/", "/dev", "/dev/pts", "/etc", "/usr", "/usr/bin", "/bin", "/proc", "/proc/sys", "/proc/self"]
PLACES += [injected.INSIDE, injected.GUEST, injected.CONTROL]


@pytest.mark.requirement("R56")
def test_little_is_writable(boxes: Boxes, mode: str) -> None:
    for way in ways(boxes(mode)):
        found = boxes(mode).probe("privilege.writable", *PLACES, "/dev/shm", "/tmp", **way)
        if own_kernel(mode) and way["user"] == "root":
            # gVisor's own, in memory; and who is root there can replace the guest's socket.
            found = [place for place in found if place not in ("/dev", injected.CONTROL)]
        assert found == ["/dev/shm", "/tmp"]
    weak = boxes(mode, without=["own-root", "own", "seal", "landlock"])
    # As the owner of these two, where there is one inside.
    user = "root" if mode == "rootful" else "appuser"
    assert {"/", "/dev"} <= set(weak.probe("privilege.writable", *PLACES, user=user)) <= {"/", "/dev", "/etc"}


@needs("users")
def test_root_inside_is_not_above_other_users(boxes: Boxes, mode: str) -> None:
    box = boxes(mode)
    secret = "umask 077; echo mine >/workspace/secret"
    assert box.sh(secret).code == 0
    assert box.probe("privilege.readable", "/workspace/secret", user="root") == "EACCES"
    weak = boxes(mode, without=["bound", "drop", "confine"])
    assert weak.sh(secret).code == 0
    assert weak.probe("privilege.readable", "/workspace/secret", user="root") == "done"


# ---- supervisors ----


@needs("users")
def test_supervisors_take_no_signals_from_the_workload(boxes: Boxes, mode: str, mutate: Mutate) -> None:
    box = boxes(mode)
    found = box.probe("escape.signals", "parent")
    assert found == {"child": "T", "answers": ["EPERM"], "state": "S"}
    same = mutate(
        (
            "supervisor.c",
            "if (sk_config.switch_users && (setresgid(0, 0, 0) < 0 || setresuid(0, 0, 0) < 0)) {",
            "if (0) {",
        )
    )
    weak = boxes(mode, helper=same).run(["sh", "-c", "kill -9 $PPID; sleep 5; echo lived"])
    assert (weak.code, weak.signal, weak.text) == (137, 9, "")


STRAY = "(setsid sleep 987 >/dev/null 2>&1 &); sleep 0.1; kill -9 $PPID; sleep 987"


def test_killing_ones_supervisor_leaves_nothing(boxes: Boxes, mutate: Mutate) -> None:
    """Without root both have the same user. What the supervisor watched over dies with it, daemons included."""
    with boxes.fresh("rootless") as box:
        done = box.sh(STRAY)
        assert (done.code, done.signal) == (137, 9)
        assert box.run(["echo", "alive"]).text == "alive"
        assert box.left() == []
    lets_live = mutate(
        (
            "process.c",
            "    if (strays)\n        sk_kill_strays();\n",
            "    (void)strays;\n    (void)sk_kill_strays;\n",
        )
    )
    with boxes.fresh("rootless", helper=lets_live) as weak:
        weak.sh(STRAY)
        assert "sleep" in weak.on_host().values()


def test_stopping_ones_supervisor_ends_the_execution(boxes: Boxes, mutate: Mutate) -> None:
    stop = "sleep 0.1; kill -STOP $PPID; sleep 987"
    with boxes.fresh("rootless") as box:
        done = box.sh(stop)
        assert (done.code, done.signal, done.late) == (137, 9, False)
        assert box.left() == []
    patient = mutate(("process.c", "WNOHANG | WUNTRACED", "WNOHANG"))
    with boxes.fresh("rootless", helper=patient) as weak:
        assert weak.sh(stop, seconds=1).late
