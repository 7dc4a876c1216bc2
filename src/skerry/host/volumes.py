"""Disk-backed workspaces with exact limits: each an ext4 of its own, mounted nowhere on the host.

A volume is a sparse file without a name, a loop device on it and a detached mount of that. The mount's
descriptor is all there is: it goes to the launch helper, which attaches it inside the environment, and when
its last user is gone (the environment ends, or a process dies with it) the kernel unmounts, the loop device
detaches itself and the file's space is free. There is nothing to clean up, whoever is killed, whenever.

No formatting is on the way of a create. A *template* is made once for every pair of limits and kept, a file:

    mkfs.ext4, somewhat larger than needed → SUBDIR, the future workspace → empty files that take the surplus
    inodes, in a directory beside it that is never seen inside → `tune2fs -r`, which takes the surplus blocks

so that statvfs() inside shows exactly the limits, which is read back from the kernel for every volume. A new
volume is a copy of the template's few hundred KiB of data; a thread keeps some of them ready.

Reserved blocks are for the host's root alone, and no user of an environment is that one. The kernel draws on
them, and on its own small reserve, for the metadata of data that a user has already been given room for: a
user never stores more than the limit, and at most a handful of blocks less.

The data is as short-lived as the environment: no journal, no barriers (fsync inside waits for no disk),
nothing to recover after a crash. Deleted files give their space back to the host (`discard`). The loop
device goes through the host's page cache: direct I/O writes large files faster, but was at least four
times slower at fsync and at deleting small files. While an environment streams data, its device is switched
to direct I/O (`disk_shares`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from skerry.errors import DiskFull, InvalidRequest, LaunchFailed, SkerryError
from skerry.failpoints import hit
from skerry.host import mounts
from skerry.host.space import check_space
from skerry.policy import GIB, MIB, format_size

SUBDIR = "w"
"""The directory of a volume that becomes the workspace; the helper shows nothing else of it."""

_FILLERS = "f"
_BLOCK = 4096
_INODE = 256
_GROUP = 8 * _BLOCK
"""Blocks of one block group, at most."""
_SMALLEST, _LARGEST = MIB, 1024 * GIB
_OWN_INODES = 12
"""Ten that ext4 reserves, SUBDIR and _FILLERS."""

_TEMPLATE = "v1-"
_TEMPLATES_MAX = 16
_KINDS_MAX = 4

_FEATURES = (
    "extent,dir_index,filetype,flex_bg,sparse_super,large_file,huge_file,dir_nlink,extra_isize,metadata_csum"
)
_MKFS = (
    f"-q -F -b {_BLOCK} -I {_INODE} -m 0 -U null -O none,{_FEATURES} "
    "-E lazy_itable_init=1,nodiscard,root_owner=0:0"
)
_OPTIONS = {"errors": "remount-ro", "nobarrier": None, "discard": None, "noinit_itable": None}

_HINTS = {
    errno.EPERM: "disk volumes need root with CAP_SYS_ADMIN; use a workspace in memory",
    errno.EACCES: "disk volumes need root; use a workspace in memory",
    errno.ENOENT: "is the loop driver there? `modprobe loop`; in a container /dev must be a devtmpfs",
    errno.ENODEV: "the kernel has no ext4: `modprobe ext4`",
    errno.ENOSYS: "the kernel is older than 5.12",
}

_Kind = tuple[int, int]
"""Blocks and inodes."""


class Volumes:
    """Makes volumes and keeps some ready. All methods may be called from any thread."""

    def __init__(
        self, directory: str, *, spare: int = 2, attached: Callable[[str], None] = lambda device: None
    ) -> None:
        """`directory` is made if need be, private to this user, and belongs to this object alone.

        `spare` is how many of each kind that is wanted are kept ready. `attached` is called with the number (`7:0`) of
        each device that a volume is on, before that is handed out.
        """
        self._attached = attached
        self._directory = directory
        self._spare = spare
        os.makedirs(directory, mode=0o700, exist_ok=True)
        for name in os.listdir(directory):
            # The rest is of another version, or of a process that was killed at its work.
            if not name.startswith(_TEMPLATE):
                os.unlink(f"{directory}/{name}")
        self._templates = threading.Lock()
        self._tried = threading.Lock()
        self._reason: str | None = None
        self._changed = threading.Condition()
        # All below is guarded by _changed.
        self._ready: dict[_Kind, deque[int]] = {}
        self._wanted: dict[_Kind, None] = {}
        self._loops: set[int] = set()
        self._thread: threading.Thread | None = None
        self._closed = False

    def unavailable(self) -> str:
        """Why there can be no volumes here and what to do about it; empty when they work.

        Finds out by making one, the first time.
        """
        with self._tried:
            if self._reason is None:
                try:
                    check_space(self._directory)
                    os.close(self._make(_kind(_SMALLEST, 16)))
                    self._reason = ""
                except DiskFull:  # for now: says nothing about whether they work
                    return ""
                except SkerryError as error:
                    self._reason = str(error)
            return self._reason

    def take(self, size: int, inodes: int, uid: int, gid: int) -> int:
        """A new volume: the descriptor of its mount, close-on-exec, the caller's to pass on and close.

        Its SUBDIR is empty, of `uid`:`gid` (as the host counts them) and has room for exactly `size` bytes,
        rounded up to 4 KiB, and `inodes` files. Blocks for milliseconds, for the first of a kind longer.

        Raises InvalidRequest for limits that no volume can have, DiskFull when the host's disk has no more free
        than its reserve (see `space`), LaunchFailed when a step fails.
        """
        ready = self.take_ready(size, inodes, uid, gid)
        return self._hand_out(self._make(_kind(size, inodes)), uid, gid) if ready is None else ready

    def take_ready(self, size: int, inodes: int, uid: int, gid: int) -> int | None:
        """As `take`, but only if one waits, else None: never blocks."""
        kind = _kind(size, inodes)
        check_space(self._directory)
        with self._changed:
            waiting = self._ready.get(kind)
            if not waiting:
                return None
            mount = waiting.popleft()
        return self._hand_out(mount, uid, gid)

    def file(self, size: int, inodes: int) -> int:
        """A new volume that is not mounted, for a kernel of its own: a file without a name, the caller's to close.

        Its SUBDIR belongs to root. Blocks and raises as `take` does.
        """
        kind = _kind(size, inodes)
        check_space(self._directory)
        template = self._template(kind)
        try:
            with open(template, "rb") as source, tempfile.TemporaryFile(dir=self._directory) as file:
                _copy(source.fileno(), file.fileno())
                return os.dup(file.fileno())
        except OSError as error:
            raise _failed("copy", error) from error

    def want(self, size: int, inodes: int) -> None:
        """Have volumes of this kind kept ready from now on, as long as it is among the last few asked for.

        To be called after each `take`, when the caller's own work is done: this is what replaces the one that
        was taken. Returns at once. What goes wrong meanwhile is not told here: the next `take` meets it again.
        Raises InvalidRequest.
        """
        kind = _kind(size, inodes)
        with self._changed:
            self._wanted.pop(kind, None)
            self._wanted[kind] = None
            if len(self._wanted) > _KINDS_MAX:
                del self._wanted[next(iter(self._wanted))]
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._keep_ready, name="skerry-volumes", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Release the spare volumes and end the thread. Volumes in use are left alone."""
        with self._changed:
            self._closed = True
            self._wanted.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        for waiting in self._ready.values():
            while waiting:
                os.close(waiting.popleft())
        extra = [number for number in self._loops if number >= _loops_at_boot()]
        self._loops.clear()
        with ThreadPoolExecutor(32) as threads:  # each takes 40 ms, of which the kernel waits nearly all
            for _ in threads.map(_remove_loop, extra):
                pass

    # The thread

    def _keep_ready(self) -> None:
        if self.unavailable():
            return
        while True:
            with self._changed:
                while (job := self._next()) is None and not self._closed:
                    self._changed.wait()
                if job is None:
                    return
            kind, surplus = job
            if surplus is not None:
                os.close(surplus)
                continue
            try:
                check_space(self._directory)
                mount = self._make(kind)
            except SkerryError:
                with self._changed:  # until it is wanted again
                    self._wanted.pop(kind, None)
                continue
            with self._changed:
                self._ready.setdefault(kind, deque()).append(mount)

    def _next(self) -> tuple[_Kind, int | None] | None:
        """The next thing to do for the thread: close a volume that is not wanted any more, or make one."""
        for kind in [kind for kind in self._ready if kind not in self._wanted]:
            if waiting := self._ready[kind]:
                return kind, waiting.pop()
            del self._ready[kind]
        for kind in reversed(self._wanted):
            if len(self._ready.get(kind, ())) < self._spare:
                return kind, None
        return None

    # Volumes

    def _hand_out(self, mount: int, uid: int, gid: int) -> int:
        try:
            workspace = os.open(SUBDIR, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=mount)
            try:
                os.fchown(workspace, uid, gid)
                os.fchmod(workspace, 0o755)  # whatever the umask was when its template was made
            finally:
                os.close(workspace)
        except OSError as error:
            os.close(mount)
            raise _failed("chown", error) from error
        return mount

    def _make(self, kind: _Kind) -> int:
        """The mount of a new volume, with exactly these limits."""
        template = self._template(kind)
        try:
            with open(template, "rb") as source, tempfile.TemporaryFile(dir=self._directory) as file:
                _copy(source.fileno(), file.fileno())
                mount = self._mount(file.fileno())
            hit("volume.mounted")
            self._attached(device_of(mount))
            if _room(mount) != kind:
                os.close(mount)
                raise LaunchFailed(
                    "a new volume has not the limits it should have", detail={"step": "verify"}
                )
            _look_into(mount)
            return mount
        except (OSError, LaunchFailed) as error:
            with contextlib.suppress(FileNotFoundError):  # in case it is damaged: the next one is made anew
                os.unlink(template)
            if isinstance(error, OSError):
                raise _failed("copy", error) from error
            raise

    def _mount(self, file: int) -> int:
        try:
            loop = mounts.Loop(file, _BLOCK)
        except OSError as error:
            raise _failed("loop device", error) from error
        with self._changed:
            self._loops.add(loop.number)
        try:
            attributes = mounts.NOSUID | mounts.NODEV | mounts.NOATIME
            return mounts.mount_detached("ext4", loop.path, _OPTIONS, attributes)
        except OSError as error:
            raise _failed("mount", error) from error
        finally:
            loop.close()

    # Templates

    def _template(self, kind: _Kind) -> str:
        """The path of the template for these limits; it is made when there is none."""
        path = f"{self._directory}/{_TEMPLATE}{kind[0]}-{kind[1]}.ext4"
        with self._templates:
            try:
                os.utime(path)
            except FileNotFoundError:
                self._make_template(kind, path)
                self._forget_templates()
        return path

    def _make_template(self, kind: _Kind, path: str) -> None:
        try:
            file, making = tempfile.mkstemp(prefix="new-", dir=self._directory)
        except OSError as error:
            raise _failed("template", error) from error
        try:
            surplus, slack = -1, 64
            while surplus < 0:
                self._format(making, file, kind, slack)
                surplus = self._fill(file, kind)
                slack *= 2
            _run("tune2fs", "-r", str(surplus), making)
            os.fsync(file)
            os.rename(making, path)
        except OSError as error:
            raise _failed("template", error) from error
        finally:
            os.close(file)
            with contextlib.suppress(FileNotFoundError):  # it has its name
                os.unlink(making)

    def _format(self, path: str, file: int, kind: _Kind, slack: int) -> None:
        """An ext4 with at least the inodes, and `slack` more blocks than it can be expected to need."""
        blocks, inodes = kind[0], kind[1] + _OWN_INODES
        blocks += inodes * _INODE // _BLOCK * 33 // 32  # groups that are mostly inodes hold a little less
        blocks += min(blocks // 49, 4096)  # the kernel reserves 2% of it all for itself, at most 4096 blocks
        blocks += slack + blocks // _GROUP * 8
        os.ftruncate(file, 0)
        os.ftruncate(file, blocks * _BLOCK)
        _run("mkfs.ext4", *_MKFS.split(), "-N", str(inodes), path)

    def _fill(self, file: int, kind: _Kind) -> int:
        """Lay out a fresh file system, down to the number of inodes; how many blocks too many it has."""
        mount = self._mount(file)
        try:
            os.rmdir("lost+found", dir_fd=mount)
            os.mkdir(SUBDIR, 0o755, dir_fd=mount)
            os.mkdir(_FILLERS, 0o700, dir_fd=mount)
            fillers = os.open(_FILLERS, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=mount)
            try:
                for number in range(_room(mount)[1] - kind[1]):
                    os.mknod(str(number), dir_fd=fillers)
            finally:
                os.close(fillers)
            return _room(mount)[0] - kind[0]
        finally:
            os.close(mount)

    def _forget_templates(self) -> None:
        with os.scandir(self._directory) as entries:
            found = sorted(
                (e for e in entries if e.name.startswith(_TEMPLATE)), key=lambda e: e.stat().st_mtime_ns
            )
        for entry in found[:-_TEMPLATES_MAX]:
            os.unlink(entry)


def device_of(place: int | str) -> str:
    """The device that an open directory, or a path, is on, as cgroups name it: `7:0`. Raises OSError."""
    number = os.stat(place).st_dev
    return f"{os.major(number)}:{os.minor(number)}"


def _kind(size: int, inodes: int) -> _Kind:
    if not _SMALLEST <= size <= _LARGEST:
        raise InvalidRequest(
            f"a disk-backed workspace has between {format_size(_SMALLEST)} and {format_size(_LARGEST)}",
            hint="use another size, or a workspace in memory",
        )
    return -(-size // _BLOCK), inodes


def _look_into(mount: int) -> None:
    """Have the kernel read the workspace's directory now: else the first command would wait for that."""
    workspace = os.open(SUBDIR, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=mount)
    try:
        os.listdir(workspace)
    finally:
        os.close(workspace)


def _room(mount: int) -> _Kind:
    """What a user of this mount can still get."""
    space = os.statvfs(mount)
    return space.f_bavail, space.f_ffree


def _copy(source: int, target: int) -> None:
    """Make `target` equal to `source`, holes and all; copies share their blocks where the file system can."""
    os.ftruncate(target, os.fstat(source).st_size)
    end = 0
    while True:
        try:
            start = os.lseek(source, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        end = os.lseek(source, start, os.SEEK_HOLE)
        while start < end:
            start += os.copy_file_range(source, target, end - start, start, start)


def _run(program: str, *arguments: str) -> None:
    path = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if path is None:
        raise LaunchFailed(
            f"{program} is missing",
            hint="apt-get install e2fsprogs",
            detail={"step": program, "errno": "ENOENT"},
        )
    done = subprocess.run([path, *arguments], capture_output=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise LaunchFailed(
            f"{program} failed: {said}", detail={"step": program, "exit_code": done.returncode}
        )


def _loops_at_boot() -> int:
    """Loop devices below this number are there without anybody having asked for them."""
    try:
        with open("/sys/module/loop/parameters/max_loop") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 8


def _remove_loop(number: int) -> None:
    with contextlib.suppress(OSError):  # in use, by an environment or by somebody else
        mounts.remove_loop(number)


def _failed(step: str, error: OSError) -> DiskFull | LaunchFailed:
    code = error.errno or 0
    if code in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(
            f"cannot make a disk volume: {step}: {error.strerror}",
            hint="make room on the disk of the daemon's home",
        )
    return LaunchFailed(
        f"cannot make a disk volume: {step}: {error.strerror}",
        hint=_HINTS.get(code, "the kernel's log may say more"),
        detail={"step": f"volume: {step}", "errno": errno.errorcode.get(code, str(code))},
    )
