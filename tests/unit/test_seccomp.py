"""The compiled profiles, run by a small interpreter of classic BPF: every call on both architectures."""

from __future__ import annotations

import errno
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.backends import microvm
from skerry.errors import InvalidRequest, IsolationUnavailable
from skerry.host.seccomp import compile_profile, parse_profile, profile_names

ALLOW, ASK, KILL, ERRNO = 0x7FFF0000, 0x7FC00000, 0x80000000, 0x00050000
ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
I386, ARM = 0x40000003, 0x40000028
PROFILES = ("debug", "default", "filters", "strict")
TABLES = Path(__file__).parents[2] / "src/skerry/host/profiles/syscalls"
NUMBERS = {
    arch: {
        name: int(number)
        for number, name in re.findall(r"^(\d+) (\w+)$", (TABLES / f"{arch}.tbl").read_text(), re.M)
    }
    for arch in ARCHES
}
HIGH = 0xDEADBEEF << 32

words = st.integers(0, 2**32 - 1)
arches = st.sampled_from(sorted(ARCHES))


def decode(program: bytes) -> list[tuple[int, int, int, int]]:
    return list(struct.iter_unpack("<HBBI", program))


def run(program: bytes, number: int, *args: int, audit_arch: int) -> int:
    data = struct.pack("<IIQ6Q", number, audit_arch, 0x1234, *args, *[0] * (6 - len(args)))
    code = decode(program)
    at = accumulator = 0
    while True:
        op, if_true, if_false, k = code[at]
        at += 1
        if op == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif op == 0x54:
            accumulator &= k
        elif op == 0x05:
            at += k
        elif op == 0x15:
            at += if_true if accumulator == k else if_false
        elif op == 0x35:
            at += if_true if accumulator >= k else if_false
        elif op == 0x06:
            return k
        else:
            raise AssertionError(f"no such instruction: {op:#x}")


def answer(profile: str, call: str | int, *args: int, arch: str = "x86_64") -> str:
    """`allow`, `ask`, `kill`, `ignore`, the name of an errno."""
    number = NUMBERS[arch][call] if isinstance(call, str) else call
    action = run(compile_profile(profile, arch), number & 0xFFFFFFFF, *args, audit_arch=ARCHES[arch])
    if action & 0xFFFF0000 == ERRNO:
        return errno.errorcode[action & 0xFFFF] if action & 0xFFFF else "ignore"
    return {ALLOW: "allow", ASK: "ask", KILL: "kill"}[action]


def plain_answers(profile: str, arch: str) -> dict[str, str]:
    """What each known call is answered with all of its arguments 0."""
    return {name: answer(profile, name, arch=arch) for name in NUMBERS[arch]}


def names(text: str) -> set[str]:
    return set(text.split())


# --- the whole of each profile, written down a second time -------------------------------------------------

REFUSED = names(
    "mount umount2 pivot_root chroot fsopen fsconfig fsmount fspick move_mount open_tree open_tree_attr"
    " mount_setattr unshare setns name_to_handle_at open_by_handle_at fanotify_init fanotify_mark"
    " init_module finit_module delete_module create_module query_module get_kernel_syms kexec_load"
    " kexec_file_load reboot bpf perf_event_open add_key request_key keyctl userfaultfd"
    " ptrace process_vm_readv process_vm_writev pidfd_getfd kcmp lookup_dcookie"
    " settimeofday clock_settime adjtimex clock_adjtime swapon swapoff quotactl quotactl_fd acct"
    " iopl ioperm modify_ldt syslog vhangup sethostname setdomainname sync remap_file_pages"
    " _sysctl uselib ustat sysfs nfsservctl afs_syscall tuxcall security vserver getpmsg putpmsg"
    " epoll_ctl_old epoll_wait_old get_thread_area set_thread_area"
)
ABSENT = names(
    "clone3 sched_setattr io_uring_setup io_uring_enter io_uring_register memfd_secret process_madvise"
    " io_setup io_destroy io_submit io_cancel io_getevents io_pgetevents syncfs"
    " get_mempolicy set_mempolicy set_mempolicy_home_node mbind migrate_pages move_pages"
    " cachestat statmount listmount listns file_getattr file_setattr rseq_slice_yield"
    " lsm_get_self_attr lsm_set_self_attr lsm_list_modules"
)
STRICT_REFUSED = names(
    "socket connect bind listen accept sendmmsg recvmmsg"
    " inotify_init inotify_init1 inotify_add_watch inotify_rm_watch"
    " shmget shmat shmdt shmctl semget semop semtimedop semctl msgget msgsnd msgrcv msgctl"
    " mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr"
    " personality sched_setscheduler sched_setparam ioprio_set vmsplice tee mlockall process_mrelease"
)
STRICT_ABSENT = names("seccomp memfd_create pkey_alloc pkey_free pkey_mprotect")
DEBUG_ALLOWED = names("ptrace process_vm_readv process_vm_writev pidfd_getfd kcmp")
ON_ZEROES = {"socket": "EAFNOSUPPORT", "socketpair": "EAFNOSUPPORT", "ioctl": "ENOTTY", "prctl": "EINVAL"}
ON_ZEROES |= {"ioprio_set": "EPERM"}
STRICT_ON_ZEROES = ON_ZEROES | {"setsockopt": "ENOPROTOOPT"}


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(
    ("profile", "refused", "absent", "on_zeroes"),
    [
        ("default", REFUSED, ABSENT, ON_ZEROES),
        ("filters", REFUSED, ABSENT, ON_ZEROES),
        ("debug", REFUSED - DEBUG_ALLOWED, ABSENT, ON_ZEROES),
        ("strict", REFUSED | STRICT_REFUSED, ABSENT | STRICT_ABSENT, STRICT_ON_ZEROES),
    ],
)
def test_every_known_call(
    profile: str, arch: str, refused: set[str], absent: set[str], on_zeroes: dict[str, str]
) -> None:
    expected = dict.fromkeys(NUMBERS[arch], "allow") | on_zeroes
    expected |= {name: "EPERM" for name in refused if name in expected}
    expected |= {name: "ENOSYS" for name in absent if name in expected}
    assert plain_answers(profile, arch) == expected
    assert refused | absent <= set(NUMBERS["x86_64"])


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("arch", ARCHES)
def test_numbers_in_no_table_are_absent(profile: str, arch: str) -> None:
    highest = max(NUMBERS[arch].values())
    gaps = set(range(highest + 1)) - set(NUMBERS[arch].values())
    for number in [*gaps, highest + 1, 512, 547, 1000, 0x3FFFFFFF, 0x80000000, 0xC0000000, -2, -1]:
        assert answer(profile, number, arch=arch) == "ENOSYS", number


@pytest.mark.parametrize("profile", PROFILES)
def test_x32_numbers_kill(profile: str) -> None:
    for number in [*range(1024), 0x3FFFFFFF]:
        assert answer(profile, 0x40000000 | number) == "kill", number
    assert answer(profile, 0x40000000, arch="aarch64") == "ENOSYS"


@given(number=words, arch=arches, other=st.sampled_from([I386, ARM, *ARCHES.values()]) | words)
def test_foreign_architectures_kill(number: int, arch: str, other: int) -> None:
    for profile in PROFILES:
        program = compile_profile(profile, arch)
        if other != ARCHES[arch]:
            assert run(program, number, audit_arch=other) == KILL


@given(number=words, arch=arches, args=st.lists(st.integers(0, 2**64 - 1), min_size=6, max_size=6))
def test_any_number_and_arguments(number: int, arch: str, args: list[int]) -> None:
    strict, default, debug = (answer(p, number, *args, arch=arch) for p in ("strict", "default", "debug"))
    if number not in NUMBERS[arch].values():
        x32 = arch == "x86_64" and 0x40000000 <= number < 0x80000000
        assert strict == default == debug == ("kill" if x32 else "ENOSYS")
    if strict == "allow":
        assert default == "allow"
    if default == "allow":
        assert debug == "allow"


# --- rules on arguments ------------------------------------------------------------------------------------

NEW_NAMESPACES = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
STREAM, DGRAM, RAW, SEQPACKET, PACKET = 1, 2, 3, 5, 10
FLAGS = 0x80800  # SOCK_CLOEXEC | SOCK_NONBLOCK
THREAD = 0x3D0F00  # what pthread_create passes

RULES: list[tuple[str, tuple[int, ...], str]] = [
    ("clone", (17,), "allow"),
    ("clone", (THREAD,), "allow"),
    ("clone", (0x4111,), "allow"),  # CLONE_VFORK | CLONE_VM | SIGCHLD
    ("clone", (0x80000011,), "allow"),  # CLONE_IO
    *[("clone", (17 | flag,), "EPERM") for flag in NEW_NAMESPACES],
    ("clone", (THREAD | 0x10000000,), "EPERM"),
    ("socket", (1, STREAM, 0), "allow"),
    ("socket", (1, SEQPACKET | FLAGS, 0), "allow"),
    *[("socket", (f, t, p), "allow") for f in (2, 10) for t, p in ((1, 0), (1, 6), (2, 17), (2 | FLAGS, 0))],
    *[("socket", (f, STREAM, p), "EPROTONOSUPPORT") for f in (2, 10) for p in (132, 262, 33, 256)],
    *[("socket", (f, DGRAM, p), "EPROTONOSUPPORT") for f in (2, 10) for p in (1, 58, 115, 136)],
    *[("socket", (f, t, 0), "EPERM") for f in (2, 10) for t in (RAW, RAW | FLAGS, PACKET, SEQPACKET, 6, 0)],
    ("socket", (2, RAW, 6), "EPERM"),
    ("socket", (16, RAW, 0), "allow"),
    ("socket", (16, DGRAM | FLAGS, 0), "allow"),
    *[("socket", (16, RAW, p), "EPROTONOSUPPORT") for p in range(1, 24)],
    *[("socket", (f, STREAM, 0), "EAFNOSUPPORT") for f in range(47) if f not in (1, 2, 10, 16)],
    ("socket", (0xFFFFFFFF, STREAM, 0), "EAFNOSUPPORT"),
    ("socketpair", (1, STREAM | FLAGS, 0), "allow"),
    *[("socketpair", (f, STREAM, 0), "EAFNOSUPPORT") for f in (0, 2, 10, 16, 30, 40)],
    ("setsockopt", (3, 6, 1), "allow"),
    ("setsockopt", (3, 1, 31), "allow"),
    ("setsockopt", (3, 6, 31), "ENOPROTOOPT"),
    ("setsockopt", (3, 1, 26), "ENOPROTOOPT"),
    ("setsockopt", (3, 1, 51), "ENOPROTOOPT"),
    ("setrlimit", (4,), "ignore"),
    ("setrlimit", (HIGH | 4,), "ignore"),
    ("setrlimit", (7,), "allow"),
    ("prlimit64", (0, 4, 8), "ignore"),
    ("prlimit64", (0, 7, 8), "allow"),
    ("prlimit64", (1, 7, 8), "EPERM"),
    ("prlimit64", (1, 4, 8), "EPERM"),
    ("prlimit64", (2, 7, 8), "allow"),
    *[("setpriority", (which, 1, 5), "EPERM") for which in (0, 1, 2)],
    *[("setpriority", (which, who, 5), "allow") for which in (0, 1) for who in (0, 2)],
    ("setpriority", (2, 0, 5), "EPERM"),
    *[("ioprio_set", (which, 1, 5), "EPERM") for which in (1, 2, 3)],
    *[("ioprio_set", (which, who, 5), "allow") for which in (1, 2) for who in (0, 2)],
    ("ioprio_set", (3, 0, 5), "EPERM"),
    *[("sched_setaffinity", (pid,), "EPERM" if pid == 1 else "allow") for pid in (0, 1, 2)],
    *[("sched_setparam", (pid,), "EPERM" if pid == 1 else "allow") for pid in (0, 1, 2)],
    *[("sched_setscheduler", (pid, 0), "EPERM" if pid == 1 else "allow") for pid in (0, 1, 2)],
    *[("seccomp", (operation,), "allow") for operation in (0, 2, 3)],
    ("seccomp", (1,), "ask"),
    *[("mmap", (0, 4096, 3, flags), "allow") for flags in (0x22, 0x100022, 0x20002)],
    *[("mmap", (0, 4096, 3, flags), "ENOMEM") for flags in (0x40022, 0x54040022)],
    *[("memfd_create", (8, flags), "allow") for flags in (0, 3, 8)],
    *[("memfd_create", (8, flags), "EINVAL") for flags in (4, 7, 0x54000004)],
    *[("shmget", (0, 4096, flags), "allow") for flags in (0, 0o1600)],
    *[("shmget", (0, 4096, flags), "EPERM") for flags in (0o5600, 0x54000800)],
    *[("ioctl", (0, r), "EPERM") for r in (0x5412, 0x541C, 0x541D, 0x5423)],
    *[("ioctl", (0, r), "allow") for r in (0x5401, 0x5413, 0x540E, 0x541B, 0x5421, 0x5451, 0x5411, 0x541E)],
    *[("ioctl", (0, r), "allow") for r in (0x80045430, 0x40045431, 0x5441, 0x802C542A, 0x5422, 0x5424)],
    *[("ioctl", (0, r), "allow") for r in (0x8912, 0x8905, 0x80108906, 0xC0502100, 0x40182103)],
    *[("ioctl", (0, r), "allow") for r in (0x40049409, 0x4020940D, 0xC020660B, 0x80086601, 0x801C581F)],
    # FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR, FIFREEZE, FS_IOC_ENABLE_VERITY, FS_IOC_SET_ENCRYPTION_POLICY,
    # EXT4_IOC_MOVE_EXT, BTRFS_IOC_SUBVOL_CREATE, FIBMAP, KVM_CREATE_VM, NS_GET_PARENT
    *[("ioctl", (0, r), "ENOTTY") for r in (0x40086602, 0x401C5820, 0xC0045877, 0x40806685, 0x800C6613)],
    *[("ioctl", (0, r), "ENOTTY") for r in (0xC028660F, 0x5000940E, 1, 0xAE01, 0xB702)],
    *[("mknodat", (0, 0, m), "allow") for m in (0, 0o644, 0o100644, 0o010600, 0o140777)],
    *[("mknodat", (0, 0, m), "EPERM") for m in (0o020666, 0o060660, 0o040755, 0o120777, 0o170000)],
    ("mknodat", (0, 0, 0o020666 | 0x10000), "EPERM"),  # the kernel takes 16 bits
    *[("personality", (p,), "allow") for p in (0, 8, 0x20000, 0x20008, 0xFFFFFFFF)],
    *[("personality", (p,), "EPERM") for p in (0x40000, 0x400000, 0x100000, 0x8000000, 1, 9, 0xFFFFFFFE)],
    *[("sched_setscheduler", (0, p), "allow") for p in (0, 3, 5, 0x40000000, 0x40000003)],
    *[("sched_setscheduler", (0, p), "EPERM") for p in (1, 2, 6, 7, 0x40000001, 0xFFFFFFFF)],
    *[("prctl", (o,), "allow") for o in (1, 4, 8, 15, 21, 24, 28, 36, 38, 47, 0x53564D41)],
    *[
        ("prctl", (o,), "EINVAL")
        for o in (0, 22, 31, 35, 48, 57, 59, 62, 67, 77, 1000, 0x53564D40, 0x53564D42)
    ],
]


@pytest.mark.parametrize(("call", "args", "expected"), RULES)
def test_rule(call: str, args: tuple[int, ...], expected: str) -> None:
    """The kernel drops the upper half of each of these arguments, so setting it must change nothing."""
    for arch in ARCHES:
        assert answer("default", call, *args, arch=arch) == expected
        assert answer("default", call, *[HIGH | arg for arg in args], arch=arch) == expected


@pytest.mark.parametrize("profile", PROFILES)
def test_null_pointers(profile: str) -> None:
    """All of a pointer counts: memory at an address whose lower half is zero is no way around."""
    assert answer(profile, "prlimit64", 0, 4, 0) == "allow"
    assert answer(profile, "prlimit64", 0, HIGH | 4, 0) == "allow"
    assert answer(profile, "prlimit64", 0, 4, 1 << 32) == "ignore"
    assert answer(profile, "prlimit64", 0, 4, HIGH) == "ignore"


@given(flags=st.integers(0, 2**64 - 1), arch=arches)
def test_clone_never_makes_a_namespace(flags: int, arch: str) -> None:
    expected = "EPERM" if flags & sum(NEW_NAMESPACES) else "allow"
    assert answer("default", "clone", flags, arch=arch) == expected


@given(mode=st.integers(0, 2**64 - 1))
def test_both_calls_that_make_nodes_agree(mode: int) -> None:
    assert answer("default", "mknod", 0, mode) == answer("default", "mknodat", 0, 0, mode)


RULED = sorted({call for call, _, _ in RULES} | {"mknod"})
# An argument that some rule asks for, or any other: random words alone would rarely meet a rule.
likely = st.sampled_from(sorted({arg for _, args, _ in RULES for arg in args})) | words


@given(call=st.sampled_from(RULED), args=st.tuples(likely, likely, likely), arch=arches)
def test_rules_nest_from_strict_to_debug(call: str, args: tuple[int, int, int], arch: str) -> None:
    if call not in NUMBERS[arch]:
        return
    strict, default, debug = (answer(p, call, *args, arch=arch) for p in ("strict", "default", "debug"))
    if strict == "allow":
        assert default == "allow"
    assert debug == default or (call == "personality" and args[0] & 0x40000)


def test_debug_adds_only_what_debuggers_need() -> None:
    for arch in ARCHES:
        default, debug = plain_answers("default", arch), plain_answers("debug", arch)
        assert {name for name in default if default[name] != debug[name]} == DEBUG_ALLOWED
    for persona in (0, 8, 0x20000, 0x20008):
        assert answer("debug", "personality", persona | 0x40000) == "allow"
    assert answer("debug", "personality", 0x400000) == "EPERM"
    assert answer("debug", "perf_event_open") == "EPERM"


def test_filters_adds_only_seccomp_filters() -> None:
    for arch in ARCHES:
        assert plain_answers("filters", arch) == plain_answers("default", arch)
        assert (
            answer("filters", "seccomp", 1, arch=arch) == answer("filters", "prctl", 22, arch=arch) == "allow"
        )
        for option in (*range(128), 0x53564D41, 0x41555856, 0x59616D61):
            if option != 22:
                assert answer("filters", "prctl", option) == answer("default", "prctl", option)


def test_strict_has_no_network_and_no_filters() -> None:
    for family in range(47):
        assert answer("strict", "socket", family, STREAM, 0) == "EPERM"
    assert answer("strict", "socketpair", 1, STREAM, 0) == "allow"
    assert answer("strict", "prctl", 22) == "EINVAL"
    assert answer("strict", "seccomp", 1) == "ask"
    assert answer("strict", "ioctl", 0, 0x8912) == "ENOTTY"
    assert answer("strict", "ioctl", 0, 0x5412) == "EPERM"
    assert answer("strict", "ioctl", 0, 0x5413) == "allow"


# --- the program as the kernel wants it --------------------------------------------------------------------


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("arch", ARCHES)
def test_program_is_well_formed(profile: str, arch: str) -> None:
    code = decode(compile_profile(profile, arch))
    assert 0 < len(code) <= 4096
    reached = {0}
    for at, (op, if_true, if_false, k) in enumerate(code):
        assert at in reached, "no dead code"
        if op == 0x06:
            continue
        jumps = {0x05: (k,), 0x15: (if_true, if_false), 0x35: (if_true, if_false)}.get(op, (0,))
        reached |= {at + 1 + jump for jump in jumps}
    assert max(reached) < len(code)


@pytest.mark.parametrize("arch", ARCHES)
def test_a_call_is_found_in_few_steps(arch: str) -> None:
    """The search, from instruction 4 on, is logarithmic: nobody pays for the length of the list."""
    code = decode(compile_profile("default", arch))
    for number in NUMBERS[arch].values():
        at, steps = 4, 0
        while code[at][0] in (0x05, 0x35):
            op, if_true, if_false, k = code[at]
            at += 1 + (k if op == 0x05 else if_true if number >= k else if_false)
            steps += 1
        assert 1 < steps <= 8


def two_lists(values: list[int]) -> bytes:
    """A program that lets read pass if both its second and its third argument are among `values`."""
    rule = f'when = [{{ arg = 1, is = {values} }}, {{ arg = 2, is = {values} }}]\nthen = "allow"'
    return parse_profile(f"[[calls.read]]\n{rule}\n").compile("x86_64")


@pytest.mark.parametrize("count", [1, 60, 120, 126, 127, 128, 129, 130, 200, 500])
def test_long_programs(count: int) -> None:
    """Branches reach 255 instructions; what is further away is reached all the same."""
    values = [3 * n for n in range(count)]
    program = two_lists(values)
    probes = [n for value in (0, values[count // 3], values[-1]) for n in (value, value + 1)]
    for first in probes:
        for second in probes:
            expected = ALLOW if first % 3 == second % 3 == 0 else ERRNO | errno.EPERM
            assert run(program, 0, 0, first, second, audit_arch=ARCHES["x86_64"]) == expected


def test_a_program_that_is_too_long() -> None:
    with pytest.raises(InvalidRequest, match="kernel takes 4096"):
        two_lists([3 * n for n in range(1000)])


# --- tables, names, files ----------------------------------------------------------------------------------


def test_the_machine_headers_agree_with_the_table() -> None:
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.skip("no kernel headers of x86_64 here")
    found = re.findall(r"^#define __NR_(\w+) (\d+)$", header.read_text(), re.M)
    installed = {name: int(number) for name, number in found}
    newest = max(NUMBERS["x86_64"].values())
    assert {name: n for name, n in installed.items() if n <= newest}.items() <= NUMBERS["x86_64"].items()


def test_numbers_added_since_5_1_are_the_same_everywhere() -> None:
    young = {name: n for name, n in NUMBERS["x86_64"].items() if n >= 424}
    assert {name: n for name, n in NUMBERS["aarch64"].items() if n >= 424} == young


def test_names() -> None:
    assert profile_names() == list(PROFILES)


@pytest.mark.parametrize(
    "name", ["", "nothing", "../profiles/default", "default.toml", "/etc/passwd", "a\0b"]
)
def test_unknown_profile(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compile_profile(name)
    assert caught.value.hint == "known: debug, default, filters, strict"


def test_unknown_architecture() -> None:
    with pytest.raises(IsolationUnavailable, match="riscv64") as caught:
        compile_profile("default", "riscv64")
    assert "x86_64, aarch64" in caught.value.hint


def test_the_machine_is_the_default_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.uname", lambda: type("Uname", (), {"machine": "aarch64"}))
    profile = parse_profile((TABLES.parent / "default.toml").read_text())
    assert profile.compile() == profile.compile("aarch64") != profile.compile("x86_64")


def test_a_profile_that_extends_another() -> None:
    profile = parse_profile(
        'extends = "strict"\n'
        'allow = ["sync"]\ndeny = ["fork"]\nenosys = ["statx"]\n'
        '[[calls.kill]]\nwhen = [{ arg = 1, is = [0] }]\nthen = "allow"\n'
    )
    program = profile.compile("x86_64")

    def result(call: str, *args: int) -> int:
        return run(program, NUMBERS["x86_64"][call], *args, audit_arch=ARCHES["x86_64"])

    assert result("sync") == result("kill", 1, 0) == result("read") == ALLOW
    assert result("fork") == result("kill", 1, 9) == result("socket", 1) == ERRNO | errno.EPERM
    assert result("statx") == ERRNO | errno.ENOSYS


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("allow = [", "Invalid value"),
        ('allow = ["opne"]', "unknown system call 'opne'"),
        ('allow = "read"', "unknown system call 'r'"),
        ('alow = ["read"]', "unknown key alow"),
        ('allow = ["read"]\nenosys = ["read"]', "read is there twice"),
        ('[[calls.read]]\nthen = "EWHAT"', "'EWHAT' is neither"),
        ('[[calls.read]]\nthen = "allow"\n[[calls.read]]\nthen = "EPERM"', "never reached"),
        ('[[calls.read]]\nthen = "allow"\nif = 1', "unknown key if"),
        ('[[calls.read]]\nthen = "allow"\nwhen = [{ arg = 6, is = [1] }]', "argument from 0 to 5"),
        ('[[calls.read]]\nthen = "allow"\nwhen = [{ arg = 0, is = [] }]', "and a value"),
        ('[[calls.read]]\nthen = "allow"\nwhen = [{ arg = 0, mask = 0x100000000, is = [1] }]', "32 bits"),
        ('[[calls.read]]\nthen = "allow"\nwhen = [{ arg = 0, mask = 6, is = [1] }]', "outside of its mask"),
        ('[[calls.read]]\nthen = "allow"\nwhen = [{ arg = 0, is = [0x100000000] }]', "outside of its mask"),
        ('[[calls.read]]\nthen = "allow"\nwhen = [{ arg = 0, is = [-1] }]', "outside of its mask"),
    ],
)
def test_mistakes_in_a_profile_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_profile(text)


@pytest.mark.parametrize("accelerator", ["tcg", "kvm"])
def test_monitor_of_a_machine_asks_for_flags_of_its_tap_and_turns_offloads_off_and_no_more(
    accelerator: str,
) -> None:
    program = microvm.monitor_filter(accelerator)

    def asked(request: int, argument: int = 0) -> int:
        number = NUMBERS["x86_64"]["ioctl"]
        return run(program, number, 5, request, argument, audit_arch=ARCHES["x86_64"])

    flags, offloads = 0x800454D2, 0x400454D0
    assert (asked(flags, 0x7FFF0000), asked(offloads)) == (ALLOW, ALLOW)
    refused = {asked(0x40040000 | number) for number in range(0x54C0, 0x5500) if number != 0x54D0}
    assert refused | {asked(offloads, 1)} == {ERRNO | errno.ENOTTY}
