"""The kernel for the virtual machines of tests."""

from __future__ import annotations

from pathlib import Path

from skerry.host.initrd import KERNEL, MODULES, Kernel

FETCHED = Path(__file__).parent.parent / ".cache" / "kernel"
"""Where scripts/setup_test_deps.sh unpacks one."""


def kernel() -> Kernel | None:
    """None if there is none: then the host's own may do."""
    for path in FETCHED.glob("boot/vmlinuz-*"):
        return Kernel(path, FETCHED / "lib" / "modules" / path.name.partition("-")[2])
    return None


def settings() -> dict[str, str]:
    """For the environment of a daemon."""
    found = kernel()
    return {KERNEL: str(found.path), MODULES: str(found.modules)} if found else {}
