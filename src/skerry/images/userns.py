"""Run a program as root of a user namespace of its own: `python userns.py READY GO FOLDER PROGRAM [ARGUMENT...]`.

What runs there is nobody on the host: scripts of packages are strangers' code, and a build by root would run them as
the host's root. READY and GO are descriptors of pipes: the parent learns from the first that the namespace is there,
maps its ids, and says so by the second. FOLDER, which belongs to the first of those ids, becomes /var/tmp.

A program of its own, without Skerry's modules: `unshare` is for a process with one thread, and the capabilities that
it gives are lost by the next exec unless the process is root of the namespace by then.
"""

from __future__ import annotations

import ctypes
import os
import sys

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_BIND, MS_REC, MS_SLAVE = 0x1000, 0x4000, 0x80000
TMP = "/var/tmp"  # noqa: S108 (another directory is mounted there)


def main(ready: int, go: int, folder: str, argv: list[str]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int) -> None:
        if result != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    check(libc.unshare(CLONE_NEWUSER | CLONE_NEWNS))
    os.close(ready)
    if os.read(go, 1) != b"g":
        raise SystemExit("the ids of the user namespace were not mapped")
    os.close(go)
    check(libc.mount(b"none", b"/", None, MS_REC | MS_SLAVE, None))
    check(libc.mount(os.fsencode(folder), TMP.encode(), None, MS_BIND, None))
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    os.execv(argv[0], argv)  # noqa: S606


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
