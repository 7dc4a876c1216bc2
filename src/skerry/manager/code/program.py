"""A request to run a program."""

from __future__ import annotations

from dataclasses import dataclass, field

from skerry.errors import InvalidRequest, PathOutside
from skerry.guest.errors import printable
from skerry.languages import Language
from skerry.manager.executions.commands import OUTPUT_LIMIT
from skerry.policy import MIB, Limits, Policy, seconds

TIMEOUT, TIMEOUT_MAX = 30.0, 300.0
CPU_LIMIT, CPU_LIMIT_MAX = 1000, 1_024_000
"""Millicores."""
MEM_LIMIT, MEM_LIMIT_MIN, MEM_LIMIT_MAX = 512, 16, 1 << 20
"""MiB."""
PIDS, FDS = 100, 1024
FILES_MAX = 1000
"""Limit of files, and of their directories."""
PATH_MAX = 1024


@dataclass(frozen=True, slots=True)
class Program:
    """Raises InvalidRequest for limits out of range."""

    language: str
    code: str
    stdin: bytes | bytearray | None = None
    files: dict[str, str] = field(default_factory=dict)
    """Contents by path, beside the program. Surrogate escapes stand for bytes that are not UTF-8."""
    timeout: float = TIMEOUT
    cpu_limit: int = CPU_LIMIT
    mem_limit: int = MEM_LIMIT
    isolation: str = "namespace"
    network: str = "none"
    allow: tuple[str, ...] = ()
    image: str | None = None
    """Overrides the image of the language."""
    output_limit: int = OUTPUT_LIMIT
    packages: tuple[str, ...] = ()
    """Installed before it runs."""

    def __post_init__(self) -> None:
        seconds(self.timeout, "timeout", TIMEOUT_MAX)
        _whole(self.cpu_limit, "cpu_limit", 10, CPU_LIMIT_MAX, "millicores")
        _whole(self.mem_limit, "mem_limit", MEM_LIMIT_MIN, MEM_LIMIT_MAX, "MB")

    @property
    def policy(self) -> Policy:
        """Raises InvalidRequest."""
        limits = Limits(cpus=self.cpu_limit / 1000, memory=self.mem_limit * MIB, pids=PIDS, fds=FDS)
        return Policy(isolation=self.isolation, network=self.network, allow=self.allow, limits=limits)

    def tree(self, language: Language) -> dict[str, bytes]:
        """The program and its files by their paths, as `Backend.deliver` takes them.

        Raises InvalidRequest, PathOutside for a path that leaves the directory.
        """
        if len(self.files) > FILES_MAX:
            raise InvalidRequest(f"{len(self.files)} files are too many", hint=f"at most {FILES_MAX}")
        found = {language.file: _encoded(self.code, "code")}
        for path, content in self.files.items():
            plain = _plain(path)
            if plain == language.file:
                raise InvalidRequest(
                    f"the file {printable(path)} would replace the program", hint="give it another name"
                )
            if plain in found:
                raise InvalidRequest(f"the file {printable(path)} is there twice")
            found[plain] = _encoded(content, f"the file {printable(path)}")
        directories: set[str] = set()
        for path in found:
            above, slash, _ = path.rpartition("/")
            while slash and above not in directories:
                if above in found:
                    raise InvalidRequest(
                        f"{printable(above)} is a file, and cannot hold {printable(path)}",
                        hint="give one of them another name",
                    )
                directories.add(above)
                if len(directories) > FILES_MAX:
                    raise InvalidRequest("the files lie in too many directories", hint=f"at most {FILES_MAX}")
                above, slash, _ = above.rpartition("/")
        return found


def _plain(path: str) -> str:
    """The same path without `.` and doubled slashes."""
    data = _encoded(path, "the path of a file")
    if len(data) > PATH_MAX:
        raise InvalidRequest(f"the path of a file has more than {PATH_MAX} bytes")
    if b"\0" in data:
        raise InvalidRequest(f"the path {printable(path)} holds a NUL byte")
    parts = path.split("/")
    if path.startswith("/") or ".." in parts:
        raise PathOutside(
            f"the file {printable(path)} would be outside of the program's directory",
            hint="use a path that begins in that directory, without ..",
        )
    if not parts[-1] or parts[-1] == ".":
        raise InvalidRequest(f"{printable(path)} is not the path of a file")
    return "/".join(part for part in parts if part not in ("", "."))


def _encoded(text: str, what: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise InvalidRequest(f"{what} is not valid text") from None


def _whole(value: int, what: str, low: int, high: int, unit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(f"{what} must be a whole number of {unit} from {low} to {high}, not {value!r}")
