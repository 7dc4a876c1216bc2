"""Write docs/rungs.json, from which SECURITY.md tells what each backend shows of the host.

python scripts/probe_rungs.py           every backend that works here; what does not keeps its earlier column
python scripts/probe_rungs.py oci       these alone

Runs probe_inside.py in an environment of each backend and, as a plain user, on the host. Afterwards run
generate_security.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import skerry
from skerry.policy import MIB

PROGRAM = Path(__file__).parent / "probe_inside.py"
TARGET = Path(__file__).resolve().parent.parent / "docs" / "rungs.json"
RUNGS = ("namespace", "oci", "docker", "docker-runsc", "microvm")
HOST = "no isolation"
MEMORY = 256 * MIB
MEASURED = (
    "kernel",
    "system calls that are answered",
    "files below `/proc`",
    "files below `/sys`",
    "`getpid`",
)
"""Rows that depend on the machine, the release or the moment: the suite does not compare these."""
NOBODY = 65534

Seen = Mapping[str, Any]


def on_host() -> Seen:
    """What a plain user sees."""
    user = NOBODY if os.geteuid() == 0 else None
    done = subprocess.run(
        ["/usr/bin/python3", "-"],
        input=PROGRAM.read_bytes(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        user=user,
        check=True,
    )
    found: Seen = json.loads(done.stdout)
    return found


def rows(seen: Seen, host: Seen) -> dict[str, str]:
    """What a program has `seen`, in words: what is the host's, and what is not."""

    def whose(key: str) -> str:
        return "the host's" if seen[key] == host[key] else "its own" if seen[key] else "none"

    def counted(key: str) -> str:
        """A number that grows on the host all the time."""
        return "the host's" if seen[key] >= 0.9 * host[key] else "its own"

    def listed(kind: str) -> str:
        if seen is host:
            return "the host's"
        return ", ".join(f"`{name}`" for name in seen["devices"][kind]) or "none"

    disks = set(host["devices"]["block"]) & {os.path.basename(name) for name in seen["mounts"]}
    own_memory = "its limit" if seen["memory"] <= MEMORY else "its own"
    loads = [sum(map(float, each["load"])) for each in (seen, host)]
    same_load = loads[0] > 0 and abs(loads[0] - loads[1]) < 1
    empty = "0" * 16
    refused = "refused" if seen["kernel_log"] in ("EPERM", "ENOSYS") else ""
    kernel_log = refused or (
        "the host's" if seen["kernel_log"][:100] == host["kernel_log"][:100] else "its own"
    )
    slowdown = seen["call_seconds"] / host["call_seconds"]
    return {
        "kernel": seen["release"].partition("-")[0],
        "kernel's release": whose("release"),
        "boot id": whose("boot_id"),
        "kernel's log": kernel_log,
        "processor's model": whose("processor"),
        "number of processors": whose("processors"),
        "size of memory": "the host's" if seen["memory"] == host["memory"] else own_memory,
        "uptime": counted("uptime"),
        "CPU time of the whole host": counted("busy") if seen["busy"] else "none",
        "load": "the host's" if same_load else "none",
        "clock source": whose("clock"),
        "processes of others": "shown" if os.getpid() in seen["processes"] else "none",
        "host name": whose("host_name"),
        "network interfaces": ", ".join(seen["interfaces"]) if seen is not host else "the host's",
        "names of the host's disks": "none" if not disks else "in `/proc/self/mountinfo`",
        "block devices": listed("block"),
        "character devices": listed("character"),
        "user ids, as it sees them": str(sum(seen["users"])),
        "capabilities": "none" if set(seen["capabilities"]) == {empty} else "some",
        "`no_new_privs`": "on" if seen["no_new_privileges"] else "off",
        "seccomp filter": "on" if seen["seccomp"] == "2" else "off",
        "system calls that are answered": str(seen["calls"]),
        "files below `/proc`": str(seen["proc"]),
        "files below `/sys`": str(seen["sys"]),
        "`getpid`": f"{slowdown:.1f} times the host's" if seen is not host else "1",
    }


def inside(client: skerry.Client, backend: str) -> Seen:
    """What a program sees in an environment. Raises SkerryError."""
    with skerry.Environment(memory=MEMORY, workspace="memory", backend=backend, client=client) as env:
        result = env.run(["python3", "-B", "-"], stdin=PROGRAM.read_text(), timeout=120)
        if not result.ok:
            raise skerry.SkerryError(f"the probe failed: {result.stderr}")
        found: Seen = json.loads(result.stdout)
        return found


def main() -> int:
    wanted = sys.argv[1:] or list(RUNGS)
    columns: dict[str, dict[str, str]] = json.loads(TARGET.read_text()) if TARGET.exists() else {}
    with tempfile.TemporaryDirectory(prefix="skerry-probe-", dir="/tmp") as home:
        with skerry.Client(home) as client:
            try:
                for backend in wanted:
                    try:
                        host = on_host()
                        columns[backend] = rows(inside(client, backend), host)
                        columns[HOST] = rows(host, host)
                    except skerry.SkerryError as error:
                        print(f"{backend}: {error}", file=sys.stderr)
            finally:
                client.stop(force=True)
    ordered = {name: columns[name] for name in (HOST, *RUNGS) if name in columns}
    TARGET.write_text(json.dumps(ordered, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
