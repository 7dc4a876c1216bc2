"""I/O limits of environments on the host's disk, divided among the busy ones.

Each environment has a limit of operations and of bytes a second in its own cgroup. All together have `operations` for
each core of the machine (an operation on a loop device costs CPU time of the kernel, which is charged to nobody) and
`bandwidth`. A thread looks which devices are busy, and divides both between them.

On cgroups v1 the limit of an environment's cgroup sees what its programs read, sync or write directly. What stays in
the page cache until the kernel's own threads write it back is charged to those, and they are in the root cgroup. So the
limit of each workspace's loop device is set there as well. It concerns that device alone, and is taken off when the
device is ours no longer: a loop device detaches itself when its environment ends, and others may use it next.

A limit of a loop device alone would be for nothing where much is written: the device writes to the page cache of its
file, and the kernel writes that back in bursts at the disk's full speed. So a device whose environment streams data to
it is switched to direct I/O, and back when that has ended. Small writes stay in the page cache: they would be slower,
and more work for the disk.
"""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass
from typing import Protocol

from skerry.errors import PlatformError
from skerry.host.cgroup_places import read_text, write
from skerry.host.mounts import set_direct_io

TICK, IDLE_TICK = 0.25, 1.0
"""Seconds between two looks, while devices are busy and while none is."""
BUSY, BUSY_OPERATIONS = 1 << 20, 100
"""Bytes written, and operations, in a TICK from which on a device counts as busy."""
LEAST, LEAST_OPERATIONS = 1 << 20, 100
"""Bytes, and operations, a second that each gets, however many there are."""
STREAM = 16 << 10
"""Bytes of a write, on average, from which on a device that is busy writing is streamed to."""
CALM = 20
"""Looks without a stream after which a device goes through the page cache again."""
_FILE = "blkio.throttle.write_bps_device"
_SECTOR = 512
_LOOP_MAJOR = "7:"


class Limited(Protocol):
    """An environment's cgroup."""

    def limit_io(self, device: str, operations: int, bandwidth: int) -> None: ...


@dataclass(slots=True)
class _Device:
    use: str
    """What tells it from its next use."""
    operations: int
    writes: int
    """Those of the operations that were writes."""
    written: int
    """Bytes, so far."""
    direct: int = 0
    """Looks until it goes through the page cache again; 0 if it does."""
    cgroup: Limited | None = None
    """Of the environment that has it."""


class DiskShares:
    """For all loop devices whose files are in `directory`. A limit of 0 is none.

    `cgroups` is the cgroup of v1's blkio that is ours to write, if any. If it is the root, what is written back is
    limited as well.
    """

    def __init__(
        self,
        directory: str,
        operations: int,
        bandwidth: int,
        *,
        cgroups: str = "",
        devices: str = "/sys/dev/block",
        cores: int = 0,
    ) -> None:
        self._directory = os.path.realpath(directory)
        self._most = operations, bandwidth
        self._shares = self._most
        self._cores = cores or os.cpu_count() or 1
        self._file = f"{cgroups}/{_FILE}"
        self._sys = devices
        self._stopped = threading.Event()
        self._changed = threading.Lock()
        self._devices: dict[str, _Device] = {}
        self._thread: threading.Thread | None = None
        """Runs while there are devices."""
        self._works = any(self._most)
        # Only the root cgroup of a hierarchy has a release_agent.
        top = bool(cgroups) and os.path.exists(f"{cgroups}/release_agent")
        self._limits_write_back = bool(bandwidth) and top and os.access(self._file, os.W_OK)
        if self._limits_write_back:
            self._adopt()

    def add(self, device: str) -> None:
        """Limit the write-back of a newly attached device (`7:0`)."""
        if not self._limits_write_back or (found := self._known(device)) is None:
            return
        with self._changed:
            if self._stopped.is_set():
                return
            self._devices[device] = found
            self._limit_write_back(device, self._shares[1])
            self._start()

    def give(self, device: str, cgroup: Limited) -> None:
        """Limit a device in the cgroup of the environment that has it. Raises LaunchFailed if the kernel refuses."""
        if not self._works:
            return
        found = self._known(device)
        with self._changed:
            cgroup.limit_io(device, *self._shares)
            if found is not None:
                found.cgroup = cgroup
                self._devices[device] = found
                self._start()

    def lift(self, device: str) -> None:
        """Let go of a device whose environment is to end: who waits for it to be written cannot be killed."""
        with self._changed:
            if self._devices.pop(device, None) is not None:
                self._limit_write_back(device, 0)

    def close(self) -> None:
        """Take the limits of write-back off, and end the thread. What environments have stays."""
        self._works = False
        self._stopped.set()
        if (thread := self._thread) is not None:
            thread.join()
        with self._changed:  # volumes may still be attached
            for device in self._devices:
                self._limit_write_back(device, 0)
            self._devices.clear()
            self._limits_write_back = False

    def _adopt(self) -> None:
        """Those that an earlier daemon left: its environments live, or its limits are still there."""
        for device in sorted(os.listdir(self._sys)):
            if device.startswith(_LOOP_MAJOR):
                self.add(device)
        limited = (line.partition(" ")[0] for line in read_text(self._file).splitlines())
        for device in limited:
            free = not os.path.exists(f"{self._sys}/{device}/loop/backing_file")
            if device.startswith(_LOOP_MAJOR) and free:
                self._limit_write_back(device, 0)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="skerry-disk-shares", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        busy = False
        while not self._stopped.wait(TICK if busy else IDLE_TICK):
            busy = self.look()
            with self._changed:
                if not self._devices:
                    self._thread = None
                    return

    def look(self) -> bool:
        """Divide the limits among the busy devices. Returns False if none is busy."""
        operations, bandwidth = self._shares
        many = min(BUSY_OPERATIONS, operations * TICK / 2) if operations else BUSY_OPERATIONS
        much = min(BUSY, bandwidth * TICK / 2) if bandwidth else BUSY
        operating = writing = 0
        for name, before in list(self._devices.items()):
            try:
                now = self._read(name)
            except OSError:  # such as too many open files: it stays as it is until the next look
                continue
            if now is None or now.use != before.use:
                self._forget(name, before)
                continue
            operating += now.operations - before.operations >= many
            written = now.written - before.written
            writing += written >= much
            self._direct(name, before, written >= max(much, STREAM * (now.writes - before.writes)))
            before.operations, before.writes, before.written = now.operations, now.writes, now.written
        self._share(operating, writing)
        return bool(operating or writing)

    def _share(self, operating: int, writing: int) -> None:
        operations, bandwidth = self._most
        if operations:
            fair = operations * self._cores // max(1, operating)
            operations = min(operations, max(LEAST_OPERATIONS, fair))
        if bandwidth:
            bandwidth = min(bandwidth, max(LEAST, bandwidth // max(1, writing)))
        if (operations, bandwidth) == self._shares:
            return
        self._shares = operations, bandwidth
        for name in list(self._devices):
            with self._changed:  # one by one, so that nobody waits for all of them
                if (device := self._devices.get(name)) is not None:
                    self._limit_write_back(name, bandwidth)
                    if device.cgroup is not None:
                        with contextlib.suppress(PlatformError):  # it is about to go
                            device.cgroup.limit_io(name, operations, bandwidth)

    def _direct(self, name: str, device: _Device, streams: bool) -> None:
        """Switch a device to direct I/O when it is streamed to, and back after a while."""
        before, device.direct = device.direct, CALM if streams else max(0, device.direct - 1)
        if bool(before) != bool(device.direct):
            path = f"/dev/{os.path.basename(os.path.realpath(f'{self._sys}/{name}'))}"
            with contextlib.suppress(OSError):  # it has just been detached, or its file system cannot do that
                set_direct_io(path, int(device.use), bool(device.direct))

    def _forget(self, name: str, device: _Device) -> None:
        with self._changed:
            if self._devices.get(name) is device:
                del self._devices[name]
                self._limit_write_back(name, 0)

    def _known(self, device: str) -> _Device | None:
        try:
            return self._read(device)
        except OSError:
            return None

    def _read(self, device: str) -> _Device | None:
        """Returns None for a device of another owner. Raises OSError if that is unknown."""
        place = f"{self._sys}/{device}"
        try:
            ours = _text(f"{place}/loop/backing_file").startswith(f"{self._directory}/")
        except FileNotFoundError:
            return None
        if not ours:
            return None
        counters = _text(f"{place}/stat").split()
        reads, writes, written = (int(counters[column]) for column in (0, 4, 6))
        return _Device(_text(f"{place}/diskseq"), reads + writes, writes, written * _SECTOR)

    def _limit_write_back(self, device: str, share: int) -> None:
        if self._limits_write_back:
            with contextlib.suppress(OSError):  # it has been removed, and its limit with it
                write(self._file, f"{device} {share}")


def _text(path: str) -> str:
    with open(path, "rb", buffering=0) as file:
        return os.fsdecode(file.read()).strip()
