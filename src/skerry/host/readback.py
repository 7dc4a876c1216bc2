"""Reading back from the kernel what protects a running environment: what is reported is what is."""

from __future__ import annotations

from skerry.models import Enforcement

_STATUS = {
    "no_new_privs": ("NoNewPrivs", "1", "no_new_privs: setuid programs and file capabilities have no effect"),
    "seccomp": ("Seccomp", "2", "a seccomp filter"),
    "capabilities": (
        "CapBnd",
        "0000000000000000",
        "an empty bounding set: nothing inside can gain a capability",
    ),
}


def protections(pid: int, profile: str) -> list[Enforcement]:
    """Rows for process `pid`, which everything inside descends from."""
    try:
        with open(f"/proc/{pid}/status") as file:
            status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    except OSError as error:
        return [Enforcement(name, False, by=f"cannot be read back: {error.strerror}") for name in _STATUS]
    rows = []
    for name, (key, wanted, by) in _STATUS.items():
        value = status.get(key, "").strip()
        on = value == wanted
        shown = profile if name == "seccomp" and on else "on" if on else f"{key} is {value or 'unknown'}"
        rows.append(Enforcement(name, on, shown, by if on else "the kernel says otherwise"))
    return rows
