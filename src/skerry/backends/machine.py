"""What the backends of one daemon share on its machine: cgroups, volumes, shares of CPU and disk, the native helper."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable

from skerry.host import seccomp, uids
from skerry.host.cgroups import CgroupManager
from skerry.host.cpu_shares import CpuShares
from skerry.host.crowds import Crowds
from skerry.host.disk_shares import DiskShares
from skerry.host.launcher import Helper
from skerry.host.space import Promises, io_limits
from skerry.host.volumes import Volumes
from skerry.images.hostroot import HostRoots
from skerry.policy import Limits

VOLUMES_READY = 4


class Machine:
    """Closed with the last backend that uses it."""

    def __init__(self, home: str) -> None:
        """Raises IsolationUnavailable when the native helper was not built."""
        self.home = home
        self.instances = f"{home}/instances"
        self.rootful = os.geteuid() == 0
        self.helper = Helper()
        # The parent cgroup is this home's alone, so that sweeping never touches another daemon's environments.
        self.cgroups = CgroupManager.detect(f"skerry-{hashlib.sha256(os.fsencode(home)).hexdigest()[:12]}")
        self.crowds = Crowds(self.cgroups.unified)
        self.cpu_shares = CpuShares()
        self.disk_shares = DiskShares(f"{home}/volumes", *io_limits(), cgroups=self.cgroups.io_top)
        self.volumes = (
            Volumes(f"{home}/volumes", spare=VOLUMES_READY, attached=self._attached) if self.rootful else None
        )
        if self.volumes is not None and not self.volumes.unavailable():
            self.volumes.want(Limits().disk, Limits().inodes)
        self.host_roots = HostRoots(f"{home}/host")
        self.promises = Promises(home)
        self.unused: set[str] = set()
        """Ids of prepared environments that no request has: see `backends.blanks`."""
        self._filters: dict[str, int] = {}
        self._users: list[Callable[[], int]] = []
        os.makedirs(self.instances, mode=0o700, exist_ok=True)
        if self.rootful:
            uids.sweep()

    def enter(self, written: Callable[[], int]) -> None:
        """`written`: bytes that the workspaces on disk of one backend hold now."""
        self._users.append(written)

    def written(self) -> int:
        return sum(each() for each in self._users)

    async def leave(self, written: Callable[[], int]) -> None:
        self._users.remove(written)
        if self._users:
            return
        await asyncio.to_thread(self.crowds.close)
        await asyncio.to_thread(self.cpu_shares.close)
        await asyncio.to_thread(self.disk_shares.close)
        if self.volumes is not None:
            await asyncio.to_thread(self.volumes.close)
        for fd in self._filters.values():
            os.close(fd)
        self._filters.clear()
        self.cgroups.close()
        self.helper.close()

    def filter(self, profile: str) -> int:
        """A descriptor of the compiled profile. Raises InvalidRequest for an unknown one."""
        program = seccomp.compile_profile(profile)
        if profile not in self._filters:
            fd = os.memfd_create(f"skerry-{profile}", os.MFD_CLOEXEC)
            os.write(fd, program)
            self._filters[profile] = fd
        return self._filters[profile]

    def _attached(self, device: str) -> None:
        self.cgroups.prepare_io(device)
        self.disk_shares.add(device)
