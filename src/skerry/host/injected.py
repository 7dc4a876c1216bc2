"""A guest in a container that somebody else makes: its files, and the arguments of the helper as process 1 there.

The files are mounted at GUEST and can only be read; the guest listens in CONTROL, a file system of its own.
"""

from __future__ import annotations

from skerry.host import plan, seccomp
from skerry.host.launcher import HELPER, Step
from skerry.policy import Limits

INSIDE = "/.skerry"
"""Where the guest finds its own things."""
GUEST, CONTROL = f"{INSIDE}/guest", f"{INSIDE}/ctl"
SOCKET = f"{CONTROL}/guest.sock"
PROGRAM = f"{GUEST}/skerry-guest"
CGROUPS = "/sys/fs/cgroup"
_FILTER_SLOT = "0"
_SHIELD = "65533"
"""An id that no program inside has. gVisor lets a process of the workload's user end process 1."""
_COMPLETED = """
extends = "{profile}"
[[calls.lgetxattr]] # for a symlink gVisor answers EBADF, of which `ls -l` complains
then = "EOPNOTSUPP"
[[calls.llistxattr]]
then = "EOPNOTSUPP"
[[calls.seccomp]] # gVisor has no listeners, and filters take none of the host's space
then = "allow"
"""


def files(*, gvisor: bool) -> dict[str, tuple[bytes, int]]:
    """(content, mode) by name: the helper, and the compiled profiles. Raises OSError, IsolationUnavailable."""
    found = {"skerry-guest": (HELPER.read_bytes(), 0o755)}
    for name in seccomp.profile_names():
        if gvisor:
            program = seccomp.parse_profile(_COMPLETED.format(profile=name)).compile()
        else:
            program = seccomp.compile_profile(name)
        found[name] = program, 0o644
    return found


def init_as_root(profile: str, limits: Limits, orphan: float, *, users: bool = True) -> list[str]:
    """The arguments where the guest begins as root of gVisor's kernel.

    At CGROUPS it needs cgroups (v1) that root can write. It becomes appuser. With `users` it keeps what it needs to
    switch users, and hides the cgroups, for which root needs CAP_SYS_ADMIN; else appuser is the only one inside.
    """
    return _arguments(
        *_listening(profile),
        ("processes", CGROUPS, str(limits.pids)),
        *([("unmount", CGROUPS)] if users else []),
        ("bounding",),
        ("drop", str(plan.UID), str(plan.GID), str(plan.CAPABILITIES_KEPT if users else 0)),
        *([("shield", _SHIELD)] if users else []),
        ("confine", _FILTER_SLOT),
        plan.guest_step(limits, orphan, switch=users, gvisor=True, data=str(limits.memory)),
    )


def init_as_user(profile: str, limits: Limits, orphan: float) -> list[str]:
    """The arguments where the guest begins, and stays, as appuser without any capability.

    What runs inside has the same user, and could connect to the socket: the guest refuses its own user.
    """
    return _arguments(
        ("mode", "rootless"),
        *_listening(profile),
        ("chmod", SOCKET, "0666"),
        ("drop", str(plan.UID), str(plan.GID), "0"),
        *plan.LANDLOCK,
        ("confine", _FILTER_SLOT),
        plan.guest_step(limits, orphan, switch=False, strangers=True),
    )


def _listening(profile: str) -> list[Step]:
    return [
        ("rlimit", str(plan.RLIMIT_CORE), plan.NO_DUMPS),
        ("listen", SOCKET),
        ("open", _FILTER_SLOT, f"{GUEST}/{profile}"),
    ]


def _arguments(*steps: Step) -> list[str]:
    return [PROGRAM, "init", *(word for step in steps for word in ("--", *step))]
