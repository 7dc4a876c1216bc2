"""Where Skerry keeps its things, and the few environment variables it reads.

`SKERRY_DATABASE` is the URL of the store, if it is not to be a file in the home: `postgresql://...`

`SKERRY_PUBLIC_RANGES` and `SKERRY_INTERNAL_RANGES` are addresses that environments with a network may, or may never,
reach, other than the registries of special addresses say: `10.20.0.0/16, 2001:db8:7::/48`.

`SKERRY_DISK_RESERVE` is the free space on the home's disk that no tenant can use (`20g`), `SKERRY_DISK_OVERCOMMIT` how
many times what is free beyond it workspaces may be promised (see `host.space`).

`SKERRY_DISK_IOPS` and `SKERRY_DISK_BANDWIDTH` limit what an environment reads, and writes, in a second on its
workspace; on cgroups v1 those that write at the same time share the latter.

`SKERRY_KERNEL` is the kernel of virtual machines, `SKERRY_KERNEL_MODULES` the directory of its modules; without it, the
latest of Debian's cloud kernels in /boot.

`SKERRY_DOCKER_IMAGES` lists the images of a Docker Engine that environments may use, which pulls those it lacks (see
`images.references`); without it, none.

`SKERRY_AUDIT_DAYS` is how long rows of the audit are kept; without it, for ever.

`SKERRY_HOME` is the one directory of a daemon: socket, log, images, volumes, records. Two daemons with two
homes share nothing. Defaults: `/var/lib/skerry` for root, `$XDG_STATE_HOME/skerry` (or
`~/.local/state/skerry`) for everybody else, and `/tmp/skerry-<uid>` for a user without a writable home.
"""

from __future__ import annotations

import os
import stat

from skerry.errors import InvalidRequest

SOCKET_PATH_MAX = 107


class Home:
    """The layout of `SKERRY_HOME`. Making one touches nothing; `prepare()` makes the directory."""

    __slots__ = ("path",)

    def __init__(self, path: str | None = None) -> None:
        self.path = os.path.abspath(path or os.environ.get("SKERRY_HOME") or _default())

    def prepare(self) -> None:
        """Make the directory, private to this user. Raises InvalidRequest when it cannot be trusted."""
        try:
            os.makedirs(self.path, mode=0o700, exist_ok=True)
            info = os.lstat(self.path)
        except OSError as error:
            raise InvalidRequest(
                f"cannot make {self.path}: {error.strerror}", hint="set SKERRY_HOME to a directory you own"
            ) from error
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
            raise InvalidRequest(
                f"{self.path} is not a directory of this user", hint="set SKERRY_HOME to a directory you own"
            )
        if info.st_mode & 0o022:
            raise InvalidRequest(
                f"{self.path} can be written by others", hint=f"chmod go-w {self.path}, or set SKERRY_HOME"
            )
        if len(os.fsencode(self.path)) + len("/instances/xxxxxxxxxxxx/guest.sock") > SOCKET_PATH_MAX:
            raise InvalidRequest(
                f"{self.path} is too long for unix sockets", hint="set SKERRY_HOME to a shorter path"
            )

    @property
    def socket(self) -> str:
        return f"{self.path}/daemon.sock"

    @property
    def lock(self) -> str:
        return f"{self.path}/daemon.lock"

    @property
    def log(self) -> str:
        return f"{self.path}/daemon.log"

    @property
    def images(self) -> str:
        return f"{self.path}/images"

    @property
    def instances(self) -> str:
        return f"{self.path}/instances"

    @property
    def database(self) -> str:
        """The URL of the store: `SKERRY_DATABASE`, or a file of its own."""
        from urllib.parse import quote  # clients never get here, and start faster without

        return os.environ.get("SKERRY_DATABASE") or f"sqlite://{quote(self.path)}/state.db"

    def identity(self) -> str:
        """What tells this home's environments from those of others in a store that they share; made once."""
        path = f"{self.path}/identity"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            with open(path) as file:
                return file.read().strip()
        from skerry.ids import new_id

        with open(fd, "w") as file:
            file.write(f"{new_id()}\n")
        return self.identity()

    @staticmethod
    def ranges(variable: str) -> list[str]:
        """What `SKERRY_PUBLIC_RANGES` or `SKERRY_INTERNAL_RANGES` says, separated by commas."""
        return [word for word in os.environ.get(variable, "").replace(",", " ").split() if word]

    @property
    def volumes(self) -> str:
        return f"{self.path}/volumes"


def _default() -> str:
    uid = os.geteuid()
    if uid == 0:
        return "/var/lib/skerry"
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    base = state
    while base not in ("", "/") and not os.path.exists(base):
        base = os.path.dirname(base)
    return f"{state}/skerry" if base not in ("", "/") and os.access(base, os.W_OK) else f"/tmp/skerry-{uid}"  # noqa: S108
