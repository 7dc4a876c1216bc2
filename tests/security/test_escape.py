"""Ways out of an environment, each tried for real: with the defences in place, and without the one that stops it.

Where a second layer would stop an attack by itself, the comment at the control says which.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import stat
import tempfile
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from skerry.errors import InvalidRequest
from skerry.host import injected, plan
from tests import support
from tests.conformance.kinds import RUNGS
from tests.security.box import Boxes, own_kernel, users
from tests.security.conftest import Mutate

pytestmark = pytest.mark.timeout(60)
needs, each_rung = pytest.mark.needs, pytest.mark.each_rung

DUMPABLE = ("launch.c", "sk_check(prctl(PR_SET_DUMPABLE, 0,", "sk_check(prctl(PR_SET_DUMPABLE, 1,")
HOST_ONLY = {"root", "home", "boot", "var", "sys", "srv", "media", "mnt"}


# ---- mounts, namespaces, handles ----


class Attack(NamedTuple):
    """One that ends with `refused`; it comes to `control` in an environment without some defences."""

    name: str
    without: tuple[str, ...]
    refused: Any = "EPERM"
    control: Any = "done"
    binds: tuple[tuple[str, str], ...] = ()


# "confine" is no_new_privs, Landlock and seccomp: Landlock alone refuses every change of mounts as well, and no process
# has a capability, so that without the two each attack goes through a user namespace of its own.
ATTACKS = [
    Attack("mount_tmpfs", ("confine",)),
    Attack("mount_cgroup", ("confine",)),
    Attack("mount_cgroup_v1", ("confine",)),
    Attack("bind_mount", ("confine",)),
    Attack("new_mount_api", ("confine",)),
    Attack("pivot_root", ("confine",)),
    Attack("open_tree", ("seccomp",)),
    # The kernel gives no fresh /proc or /sys to those whose own is partly covered, or missing.
    Attack("mount_proc", ("confine", "mask", "readonly")),
    Attack("mount_sysfs", ("confine", "mask", "readonly"), binds=(("/sys", "sys"),)),
    Attack("set_namespace", ("seccomp",)),
    Attack("hostname", ("seccomp",)),
    Attack("keyring", ("seccomp",)),
    # An overlay has none to give; to open one takes a capability in the host's own user namespace.
    Attack(
        "handles", ("seccomp", "own"), {"name": "EPERM", "open": "EPERM"}, {"name": "done", "open": "EPERM"}
    ),
]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_refused(boxes: Boxes, mode: str, attack: Attack) -> None:
    assert boxes(mode).probe(f"escape.{attack.name}") == attack.refused
    weak = boxes(mode, without=attack.without, binds=attack.binds)
    assert weak.probe(f"escape.{attack.name}") == attack.control


@needs("users")
def test_root_inside_is_refused_as_well(boxes: Boxes, mode: str) -> None:
    box = boxes(mode)
    assert {attack.name: box.probe(f"escape.{attack.name}", user="root") for attack in ATTACKS} == {
        attack.name: attack.refused for attack in ATTACKS
    }


def test_masks_stay_even_in_a_namespace_of_ones_own(boxes: Boxes, mode: str) -> None:
    """What holds when seccomp and Landlock are both gone: mounts of another user's namespace are locked."""
    weak = boxes(mode, without=["confine"])
    assert weak.probe("escape.uncover") == "EINVAL"
    assert weak.probe("escape.remount_writable") == "EPERM"
    assert weak.probe("escape.mount_and_unmount") == "done"


def test_double_chroot(boxes: Boxes, mode: str) -> None:
    assert boxes(mode).probe("escape.double_chroot") == "EPERM"
    # Without seccomp it works, and leads to the environment's own root: the host's is not mounted any more.
    reached = boxes(mode, without=["seccomp"]).probe("escape.double_chroot")
    assert reached == sorted(boxes(mode).sh("ls /").text.split())
    assert not HOST_ONLY & set(reached)


# ---- the guest and its supervisors ----


@pytest.mark.parametrize("target", ["1", "parent"])
def test_the_guest_and_supervisors_cannot_be_read(
    boxes: Boxes, mode: str, mutate: Mutate, target: str
) -> None:
    box = boxes(mode)
    for user in users(mode):
        found = box.probe("escape.process_files", target, user=user)
        if own_kernel(
            mode
        ):  # gVisor shows what has no power: names of descriptors, and addresses of another program
            found = {name: said for name, said in found.items() if name in ("exe", "cwd", "root", "mem")}
        assert set(found.values()) == {"EACCES"}
    if mode != "rootless":
        return  # without this defence they would still have capabilities, or another user, that the workload lacks
    weak = boxes(mode, helper=mutate(DUMPABLE))
    assert set(weak.probe("escape.process_files", target).values()) == {"done"}


@pytest.mark.parametrize("target", ["1", "parent"])
@pytest.mark.parametrize("profile", ["default", "debug"])
def test_the_guest_and_supervisors_cannot_be_changed(
    boxes: Boxes, mode: str, mutate: Mutate, profile: str, target: str
) -> None:
    """A debugger's calls are refused by seccomp, and under `debug`, which lets them through, by the kernel."""
    found = boxes(mode, profile=profile).probe("escape.write_memory", target)
    if found["pidfd_getfd"] == "ENOSYS":  # a kernel without pidfds
        del found["pidfd_getfd"]
    refused = {"mem": "EACCES", "process_vm_writev": "EPERM", "ptrace": "EPERM", "pidfd_getfd": "EPERM"}
    assert found.items() <= refused.items()
    assert len(found) >= 3
    if mode == "rootless" and profile == "debug":
        weak = boxes(mode, profile=profile, helper=mutate(DUMPABLE)).probe("escape.write_memory", target)
        assert weak == {"mem": "done", "process_vm_writev": "EFAULT", "ptrace": "done", "pidfd_getfd": "done"}


@each_rung
@needs("protected")
def test_no_signal_reaches_the_guest(boxes: Boxes, mode: str) -> None:
    """The kernel keeps all signals from inside away from process 1, or refuses them. The child shows that they arrive
    elsewhere."""
    with boxes.fresh(mode) as box:
        for user in users(mode):
            found = box.probe("escape.signals", "1", user=user)
            assert (found["child"], len(found["answers"])) == ("T", 1)
            assert found["answers"][0] in ("done", "EPERM")
            assert found["state"] in ("R", "S")  # not stopped, and not gone
        box.ping()


def test_the_helper_cannot_be_overwritten(boxes: Boxes, mode: str, mutate: Mutate) -> None:
    """As with runc once: a program that is the helper itself leads to its file, and so to all later environments."""
    slow = mutate(("main.c", 'return printf("%d', 'return pause(), printf("%d'))
    with (
        boxes.fresh(mode, helper=slow) as box,
        boxes.fresh(mode, helper=slow, without=["sealed"]) as weak,
    ):
        found = box.probe("escape.helper_of", _running_helper(box))
        assert "skerry-guest" in found["name"]
        assert (found["seals"], found["mode"], found["write"], found["truncate"]) == (
            15,
            "0o555",
            "EACCES",
            "EACCES",
        )
        assert found["chmod"] == ("EPERM" if mode == "rootful" else "done")
        with boxes.fresh(mode) as later:
            assert later.run(["echo", "still"]).text == "still"
        # What remains without the seals and the mode: no file is written to while it runs, which the kernel of
        # Linux 6.11 and 6.12 allows.
        found = weak.probe("escape.helper_of", _running_helper(weak))
        assert (found["seals"], found["mode"], found["write"]) == (1, "0o777", "ETXTBSY")


def _running_helper(box: Any) -> str:
    """The pid of a process whose program is the helper."""
    box.start(["/proc/self/exe", "version"])
    found = box.sh(
        "cd /proc; for p in [0-9]*; do [ -r $p/exe ] && readlink $p/exe | grep -q guest && echo $p; done"
    )
    (pid,) = found.text.split()
    return str(pid)


# ---- descriptors and working directories ----


def test_descriptors_of_programs(boxes: Boxes, mode: str, mutate: Mutate) -> None:
    box = boxes(mode)
    assert sorted(box.probe("escape.descriptors")) == ["0", "1", "2"]
    assert sorted(box.probe("escape.descriptors", pty=(24, 80))) == ["0", "1", "2"]
    assert sorted(box.probe("escape.descriptors", stdin=b"x")) == ["0", "1", "2"]
    listed = "python3 -B /tmp/escape.py descriptors"
    assert sorted(json.loads(box.shell(listed).text)) == ["0", "1", "2"]
    assert sorted(json.loads(box.shell(f"true; {listed} <<<x", name="other").text)) == ["0", "1", "2"]
    listening = mutate(("launch.c", "fcntl(LISTENER, F_SETFD, FD_CLOEXEC)", "fcntl(3, F_SETFD, 0)"))
    assert "3" in boxes(mode, helper=listening).probe("escape.descriptors")
    connected = mutate(("guest.c", "SOCK_CLOEXEC | SOCK_NONBLOCK", "SOCK_NONBLOCK"))
    assert any("socket" in to for to in boxes(mode, helper=connected).probe("escape.descriptors").values())


@needs("host_processes")
def test_descriptors_of_applets_and_supervisors(boxes: Boxes, mode: str, mutate: Mutate) -> None:
    """An applet has the two directories that it may work in, what it works on, and nothing of the guest's."""
    open_files = _files_of_an_applet(boxes, mode)
    supervisor, applet = sorted(open_files.values(), key=len)
    assert list(supervisor) == ["0"]
    assert supervisor["0"].startswith("pipe:")
    assert {applet[name] for name in ("4", "5")} == {"/workspace", "/tmp"}
    allowed = ("pipe:", "anon_inode:inotify", "anon_inode:inotify", "/workspace", "/tmp", "/dev/null")
    assert all(to.startswith(allowed) for to in applet.values()), applet
    careless = mutate(
        ("supervisor.c", "        close(sk_config.listen_fd);\n", ""),
        ("supervisor.c", "        syscall(NR_CLOSE_RANGE, (unsigned)sk_roots.tmp_fd + 1, LAST_FD, 0);\n", ""),
    )
    leaked = _files_of_an_applet(boxes, mode, helper=careless)
    assert any(to.startswith("socket:") for files in leaked.values() for to in files.values())


def _files_of_an_applet(boxes: Boxes, mode: str, **options: Any) -> dict[int, dict[str, str]]:
    """The open files of an applet that watches, and of its supervisor, by pid."""
    with boxes.fresh(mode, **options) as box:
        box.keeper.call("watch", id=box.id, name=f"{box.id}/watch", path=".")
        box.ping()
        return {
            pid: {name: os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")}
            for pid in box.on_host()
        }


def test_no_working_directory_leads_out(boxes: Boxes, mode: str, mutate: Mutate) -> None:
    """As with runc once: /proc/self/fd/N as the working directory, where N is the starting process's."""
    assert _tops(boxes(mode), 40) == {tuple(boxes(mode).sh("LC_ALL=C ls -A /").text.split())}
    leak = '    fcntl(open("/", O_DIRECTORY), F_DUPFD, 20);\n    if (!bare)\n        sk_check(mount(NULL, "/"'
    careless = mutate(
        ("launch.c", '    if (!bare)\n        sk_check(mount(NULL, "/"', leak),
        (
            "launch.c",
            "sk_check(syscall(NR_CLOSE_RANGE, sk_filters_fd",
            "sk_check(0 && syscall(NR_CLOSE_RANGE, sk_filters_fd",
        ),
    )
    # Even then Landlock refuses all that is not below the environment's own root.
    assert ("refused",) in _tops(boxes(mode, helper=careless), 40)
    reached = _tops(boxes(mode, helper=careless, without=["confine"]), 40)
    assert any(set(names) >= {"root", "home"} for names in reached), reached


def _tops(box: Any, count: int) -> set[tuple[str, ...]]:
    """The highest directories that are reached from the starting process's descriptors."""
    found = set()
    for number in range(count):
        try:
            found.add(tuple(box.probe("escape.top", cwd=f"/proc/self/fd/{number}")))
        except InvalidRequest:
            continue
    return found


@pytest.mark.parametrize("place", ["/proc/1/cwd", "/proc/1/root", "/proc/1/fd/4", "/proc/1/task/1/cwd"])
def test_no_working_directory_of_the_guests(boxes: Boxes, mode: str, place: str) -> None:
    if own_kernel(mode) and "/fd/" in place:  # gVisor lets it in, and what is there is its own
        assert boxes(mode).run(["pwd"], cwd=place).text in ("/workspace", "/tmp")
        return
    with pytest.raises(InvalidRequest):
        boxes(mode).run(["pwd"], cwd=place)


# ---- the host, as far as it can be seen ----


def test_an_environment_is_one_trust_domain(boxes: Boxes, mode: str) -> None:
    """As docs/tenants.md says of secrets: another execution of the same environment reads them, no other one does."""
    read = "cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep ^API_KEY="
    with boxes.fresh(mode) as box, boxes.fresh(mode) as other:
        running = box.start(["sh", "-c", "echo started; exec sleep 600"], env={"API_KEY": "hunter2"})
        running.until("started")
        assert box.sh(read).text == "API_KEY=hunter2"
        assert other.sh(read).text == ""
        running.kill()


@each_rung
def test_host_processes_are_not_visible(boxes: Boxes, mode: str) -> None:
    ours = os.getpid()
    with boxes.fresh(mode) as box:
        assert max(box.probe("escape.pids")) < 50
        assert box.probe("escape.exists", f"/proc/{ours}", "/proc/999999") == []
    # With the host's /proc in its place, all that is left is that none of it may be opened.
    weak = boxes(mode, without=["own-proc", "mask", "readonly", "sysctl"])
    assert ours in weak.probe("escape.pids")
    refused = weak.probe("escape.process_files", str(ours))
    assert set(refused.values()) <= {"EACCES", "EPERM", "ENOENT"}


def test_abstract_and_tcp_sockets_of_the_host(boxes: Boxes, mode: str, mutate: Mutate) -> None:
    with socket.socket(socket.AF_UNIX) as abstract, socket.socket() as tcp:
        name = f"skerry-test-{os.getpid()}"
        abstract.bind(f"\0{name}")
        abstract.listen()
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        port = str(tcp.getsockname()[1])
        box = boxes(mode)
        # Landlock's answer to the first is EPERM; the network namespace's would be ECONNREFUSED.
        assert box.probe("escape.connect_unix", f"@{name}") in ("EPERM", "ECONNREFUSED")
        assert box.probe("escape.connect_loopback", port) == "ECONNREFUSED"
        shared = mutate(("launch.c", "CLONE_NEWNET | ", ""))
        weak = boxes(mode, helper=shared, without=["confine", "loopback"])
        assert weak.probe("escape.connect_unix", f"@{name}") == "done"
        assert weak.probe("escape.connect_loopback", port) == "done"


@pytest.fixture
def host_folder() -> Iterator[Path]:
    """A folder that everybody may enter, with a socket of the host and a device in it."""
    with (
        tempfile.TemporaryDirectory(prefix="skerry-test-", dir="/tmp") as name,
        socket.socket(socket.AF_UNIX) as sock,
    ):
        folder = Path(name)
        folder.chmod(0o755)
        sock.bind(f"{folder}/daemon.sock")
        sock.listen()
        (folder / "daemon.sock").chmod(0o777)
        yield folder


def test_no_socket_of_the_host_is_visible(boxes: Boxes, mode: str, host_folder: Path) -> None:
    assert boxes(mode).probe("escape.sockets") in ([], [injected.SOCKET])
    with boxes.fresh(mode, binds=[(str(host_folder), "shared")]) as weak:
        assert weak.probe("escape.sockets") == ["/dev/shared/daemon.sock"]
        assert weak.probe("escape.connect_unix", "/dev/shared/daemon.sock") == "done"


@pytest.mark.root
def test_devices_on_shared_mounts_do_not_open(boxes: Boxes, mode: str, host_folder: Path) -> None:
    os.mknod(host_folder / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    (host_folder / "null").chmod(0o666)
    path = "/dev/shared/null"
    with boxes.fresh(mode, binds=[(str(host_folder), "shared")], without=["landlock"]) as box:
        assert box.probe("escape.open_for_writing", path) == {path: "EACCES"}
    with boxes.fresh(mode, binds=[(str(host_folder), "shared", "rec,dev")], without=["landlock"]) as weak:
        assert weak.probe("escape.open_for_writing", path) == {path: "done"}


SECRETS = [
    *("/root", "/home", "/boot", "/var", "/srv", "/sys", "/mnt", "/media"),
    *(
        "/etc/shadow",
        "/etc/gshadow",
        "/etc/ssh",
        "/etc/sudoers",
        "/etc/machine-id",
        "/etc/fstab",
        "/etc/environment",
    ),
    *("/etc/ssl/private", "/etc/profile", "/etc/pip.conf", "/etc/apt", "/etc/docker", "/etc/kubernetes"),
    *("/run/docker.sock", "/run/systemd", "/run/dbus", "/run/user", "/run/lock", "/run/skerry-uids"),
    *(
        "/dev/mem",
        "/dev/kmsg",
        "/dev/kvm",
        "/dev/fuse",
        "/dev/net",
        "/dev/sda",
        "/dev/vda",
        "/dev/loop0",
        "/dev/loop-control",
    ),
    *(
        "/dev/mapper",
        "/dev/input",
        "/dev/snd",
        "/dev/dri",
        "/dev/console",
        "/dev/tty0",
        "/dev/hugepages",
        "/dev/mqueue",
    ),
]


OF_A_RUNG = {"/sys", "/dev/fuse", "/dev/net", "/dev/mqueue"}
"""What a kernel of the environment's own makes itself, or an engine: an empty /sys, and its own queues."""


@each_rung
def test_the_host_image_has_no_secrets(boxes: Boxes, mode: str) -> None:
    there = set(boxes(mode).probe("escape.exists", *SECRETS))
    assert there <= (OF_A_RUNG if mode in RUNGS else set())
    weak = boxes(mode, binds=[("/etc", "host-etc"), ("/dev", "host-dev")])
    assert weak.probe("escape.exists", "/dev/host-etc/shadow", "/dev/host-dev/kmsg") == [
        "/dev/host-etc/shadow",
        "/dev/host-dev/kmsg",
    ]


MASKED = [f"/proc/{name}" for name in plan.MASKED]
JUDGED: dict[str, dict[str, Any]] = tomllib.loads((Path(__file__).parents[2] / "docs/proc.toml").read_text())


def judgement(path: str) -> str | None:
    """The section of docs/proc.toml for a file below /proc."""
    for section, judged in JUDGED.items():
        if any(fnmatchcase(path, pattern) for pattern in judged["files"]):
            return section
    return None


@needs("host_kernel")
def test_what_is_masked_tells_nothing(boxes: Boxes, mode: str) -> None:
    assert set(boxes(mode).probe("escape.sizes", *MASKED).values()) <= {0, -1}
    seen = boxes(mode, without=["mask"]).probe("escape.sizes", *MASKED)
    readable = {path.removeprefix("/proc/") for path, size in seen.items() if size > 0}
    assert {"kallsyms", "cmdline", "interrupts", "vmstat", "cgroups", "fs", "bus"} <= readable
    assert "sys/kernel/random/boot_id" in readable


@needs("host_kernel")
def test_every_other_file_of_proc_was_judged(boxes: Boxes, mode: str) -> None:
    """One that is new on this kernel fails until it is masked or in docs/proc.toml."""
    box, neighbour = boxes(mode), boxes(mode, limits={"pids": 100})
    masked = tuple(f"{name}/" for name in plan.MASKED)
    first = box.probe("escape.proc")
    neighbour.sh(
        "for i in 1 2 3 4 5 6 7 8; do (cat /etc/passwd | sort >/tmp/file$i); done; ls -R /usr/lib | tail -1"
    )
    second = box.probe("escape.proc")
    assert {"stat", "meminfo", "net/sockstat", "sys/fs/file-nr"} <= first.keys()
    shown = {path for path, text in first.items() if text and not path.startswith(masked)}
    assert {path for path in shown if judgement(path) is None} == set()
    changed = {path for path in shown if second.get(path) != first[path]}
    assert {path for path in changed if judgement(path) == "constant"} == set()
    assert "stat" in changed


def test_volumes_of_others_are_not_seen(boxes: Boxes) -> None:
    with boxes.fresh("rootful", workspace="disk"):
        assert boxes("rootful").sh("ls -A /proc/fs /proc/irq /proc/bus").text.split() == [
            "/proc/bus:",
            "/proc/fs:",
            "/proc/irq:",
        ]


PROGRAMS = [
    "free",
    "top -b -n 1",
    "nproc",
    "uptime",
    "ps aux",
    "df",
    "python3 -c 'import os; os.getloadavg()'",
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_that_read_proc_work(boxes: Boxes, mode: str, program: str) -> None:
    name = program.split()[0]
    support.require(name)
    done = boxes(mode).sh(f"{program} >/dev/null")
    assert (done.code, done.stderr) == (0, b"")


def test_no_address_of_the_kernel_is_readable(boxes: Boxes, mode: str) -> None:
    """The kernel shows hashed ones, if any, to those without its capabilities; the control is a file of our own."""
    box = boxes(mode)
    box.put("pointer", b"sock ffff888100a3c000 1\n")
    assert box.probe("escape.pointers", "/workspace/pointer") == ["/workspace/pointer"]


# Opened only, never written to.
SWITCHES = [
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/kernel/modprobe",
    "/proc/sys/kernel/hostname",
    "/proc/sys/kernel/randomize_va_space",
    "/proc/sys/vm/drop_caches",
    "/proc/sys/fs/file-max",
    "/proc/sys/net/ipv4/ip_forward",
    "/proc/sys/user/max_user_namespaces",
]


@needs("host_kernel")
@pytest.mark.parametrize("user", ["appuser", "root"])
def test_settings_of_the_kernel_are_read_only(boxes: Boxes, mode: str, user: str) -> None:
    if user not in users(mode):
        pytest.skip("there is one user inside")
    box = boxes(mode)
    refused = box.probe("escape.open_for_writing", *SWITCHES, user=user)
    assert set(refused.values()) <= {"EROFS", "EACCES", "ENOENT"}
    assert box.probe("escape.writable_settings", user=user) == []
    assert box.probe("escape.exists", "/proc/sys/fs/binfmt_misc/register", user=user) == []
    # Who owns them would do: the host's root. That the mounts are read-only as well shows where owners come second.
    there = [path for path, said in refused.items() if said != "ENOENT"]
    assert set(box.probe("escape.change_mode", *there, user=user).values()) == {"EROFS"}
    weak = boxes(mode, without=["readonly"])
    assert set(weak.probe("escape.change_mode", *there, user=user).values()) == {"EPERM"}


@needs("host_kernel")
def test_masked_switches_are_no_switches(boxes: Boxes, mode: str) -> None:
    """What can be opened for writing in place of sysrq-trigger and the like is /dev/null."""
    there = [path for path in ("/proc/sysrq-trigger", "/proc/kmsg", "/proc/kcore") if os.path.exists(path)]
    device = f"stat -c %t:%T {' '.join(there)}"
    assert set(boxes(mode).sh(device).text.split()) == {"1:3"}
    assert set(boxes(mode, without=["mask"]).sh(device).text.split()) == {"0:0"}


def test_others_who_use_the_same_files_are_not_noticed(boxes: Boxes, mode: str) -> None:
    """The host's programs are there in every environment. Watches and locks of one end where it ends."""
    assert _seen_by_a_watch(boxes, mode, boxes(mode)) == set()
    weak = boxes(mode, without=["own"])
    assert _seen_by_a_watch(boxes, mode, weak) == {"cut", "tr"}
    with open("/usr/bin/nl") as ours:
        fcntl.flock(ours, fcntl.LOCK_EX)
        assert boxes(mode).probe("escape.lock", "/usr/bin/nl") == "done"
        assert weak.probe("escape.lock", "/usr/bin/nl") == "EAGAIN"


def _seen_by_a_watch(boxes: Boxes, mode: str, box: Any) -> set[str]:
    """Which of two programs it sees, one of which the host opens and the other one a neighbour."""
    box.probe("escape.exists")  # so that the program is there
    watching = box.start(["python3", "-B", "/tmp/escape.py", "watch_programs", "/usr/bin", "nl"])
    watching.until("watching")
    Path("/usr/bin/cut").read_bytes()
    with boxes.fresh(mode, without=["own"]) as neighbour:
        assert neighbour.sh("read -r line </usr/bin/tr; true").code == 0
    assert box.sh("read -r line </usr/bin/nl; true").code == 0
    return {"cut", "tr"} & set(json.loads(watching.finish().text))


# ---- the guest's files in /run ----


@pytest.mark.parametrize("plant", ["ln -s /workspace/victim", "mkdir", "mkfifo", "touch"])
def test_what_is_planted_in_run_is_not_used(boxes: Boxes, mode: str, mutate: Mutate, plant: str) -> None:
    """Names that the guest is about to use for a command of a shell."""
    names = "cd /run && echo keep >/workspace/victim && for n in $(seq 0 40); do for s in c i o e l s; do"
    with boxes.fresh(mode) as box:
        assert box.shell("echo before").text == "before"
        assert box.sh(f"{names} {plant} $n.$s 2>/dev/null; done; done").code == 0
        for number in range(3):
            assert box.shell(f"echo {number}", seconds=10).text == str(number)
        assert box.get("victim") == b"keep\n"
        assert box.sh("rm -rf /run/*").code == 0
        assert box.shell("echo after", seconds=10).text == "after"
    if plant.startswith("ln"):
        careless = mutate(
            (
                "shell.c",
                "    unlink(path);\n    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW",
                "    int fd = open(path, O_RDWR | O_CREAT",
            )
        )
        with boxes.fresh(mode, helper=careless) as weak:
            weak.shell("true")
            assert weak.sh(f"{names} {plant} $n.$s 2>/dev/null; done; done").code == 0
            weak.shell("echo written over", seconds=10)
            assert b"written over" in weak.get("victim")
