"""What a caller may set when it creates an environment or runs something in one: one row per parameter.

`skerry.policy` validates from these rows and the CLI derives its options from them. REST bodies, SDK signatures,
`pools.toml` and the proto files are checked against them by `tests/unit/test_parameters.py`, which names the door that
lacks a row. To add a parameter, add its row, run that test, and add what it asks for (ADR 31).

Every start of the CLI loads this module, so it imports nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MIB, _GIB = 1 << 20, 1 << 30

_DOORS = ("rest", "grpc", "sdk", "cli")
_API = ("rest", "grpc", "sdk")
_AND_POOLS = (*_DOORS, "pools")
"""Also a key of a table in `pools.toml`."""
_AND_NETWORK = (*_DOORS, "network")
"""Can be changed while the environment runs (`PUT .../network`)."""
_LIMIT = (*_AND_POOLS, "limits")
"""Also a field of `policy.Limits`."""
_NETWORK_LIMIT = (*_AND_NETWORK, "limits")

_TAKES = {
    "size": "SIZE",
    "number": "NUMBER",
    "count": "NUMBER",
    "seconds": "SECONDS",
    "flag": "",
    "terminal": "",
}


class ParameterSpec:
    """One parameter: its name on the wire, kind, default, bounds, help, and where it applies.

    `kind` is `size` (bytes, or a text such as "512m"), `number`, `count` (a whole number), `seconds`, `text`, `texts`,
    `variables` (texts by name), `content` (text or bytes), `flag` or `terminal` (rows and columns). `low` and `high`
    are inclusive, except that seconds are always more than 0. A default of None means that the parameter is optional
    and has no fixed default.

    `option` holds its names on the command line (default: `--name`), `takes` the placeholder of its value there ("" for
    a flag), and `completes` what shells complete it with. `{default}`, `{low}` and `{high}` in `help` are filled in.
    """

    __slots__ = (
        "choices",
        "completes",
        "default",
        "help",
        "high",
        "hint",
        "kind",
        "low",
        "name",
        "option",
        "takes",
        "unit",
        "where",
    )

    def __init__(
        self,
        name: str,
        kind: str,
        help: str,
        *,
        default: Any = None,
        low: float = 0,
        high: float = float("inf"),
        choices: tuple[str, ...] = (),
        unit: str = "",
        hint: str = "",
        option: tuple[str, ...] = (),
        takes: str | None = None,
        completes: str = "",
        where: tuple[str, ...] = _DOORS,
    ) -> None:
        self.name = name
        self.kind = kind
        self.help = help.format(default=default, low=low, high=high) if "{" in help else help
        self.default = default
        self.low = low
        self.high = high
        self.choices = choices
        self.unit = unit
        self.hint = hint
        self.option = option or (f"--{name.replace('_', '-')}",)
        self.takes = _TAKES.get(kind, "KIND" if choices else name.upper()) if takes is None else takes
        self.completes = completes
        self.where = where


_row = ParameterSpec


def _table(*rows: ParameterSpec) -> dict[str, ParameterSpec]:
    return {row.name: row for row in rows}


_ENV = _row("env", "variables", "set a variable", option=("-e", "--env"), takes="NAME=VALUE")
_ISOLATION = _row(
    "isolation",
    "text",
    "minimum isolation: namespace, gvisor or microvm; or several, best first",
    default="namespace",
    choices=("namespace", "gvisor", "microvm"),
    where=_AND_POOLS,
)
_NETWORK = _row(
    "network",
    "text",
    "network access: none (default), allowlist or public",
    default="none",
    choices=("none", "allowlist", "public"),
    where=_AND_NETWORK,
)
_ALLOW = _row(
    "allow",
    "texts",
    "allow api.example.com, *.example.com, ...; implies --network allowlist",
    takes="RULE",
    where=_AND_NETWORK,
)

CREATE = _table(
    _row(
        "image",
        "text",
        "image to start from (default: {default})",
        default="host",
        completes="image",
        where=_AND_POOLS,
    ),
    _row("name", "text", "name for the environment"),
    _row(
        "memory",
        "size",
        "memory limit, e.g. 512m",
        default=512 * _MIB,
        low=16 * _MIB,
        hint="a Python interpreter needs about 16 MiB",
        option=("-m", "--memory"),
        where=_LIMIT,
    ),
    _row(
        "cpus",
        "number",
        "CPU limit in cores, e.g. 0.5",
        default=1.0,
        low=0.01,
        high=1024,
        unit="cores",
        where=_LIMIT,
    ),
    _row("pids", "count", "maximum number of processes", default=256, low=8, high=1 << 22, where=_LIMIT),
    _row(
        "fds", "count", "maximum open files of each process", default=1024, low=16, high=1 << 20, where=_LIMIT
    ),
    _row("disk", "size", "size of /workspace, e.g. 2g", default=2 * _GIB, low=_MIB, where=_LIMIT),
    _row(
        "inodes",
        "count",
        "maximum number of files in /workspace",
        default=131072,
        low=16,
        high=1 << 26,
        where=_LIMIT,
    ),
    _row(
        "connections",
        "count",
        "maximum open connections out of the environment",
        default=1024,
        low=1,
        high=1 << 16,
        where=_NETWORK_LIMIT,
    ),
    _row(
        "traffic",
        "size",
        "maximum bytes sent and received in total, e.g. 10g",
        default=100 * _GIB,
        where=_NETWORK_LIMIT,
    ),
    _row(
        "lifetime",
        "seconds",
        "delete the environment after this time (default: {default:g})",
        default=3600.0,
        high=365 * 86400.0,
    ),
    _row(
        "idle",
        "seconds",
        "delete the environment after this time without activity",
        default=900.0,
        high=365 * 86400.0,
    ),
    _ISOLATION,
    _row("backend", "text", "use this backend, if it gives that isolation: namespace, oci, ..."),
    _row(
        "profile",
        "text",
        "system call profile: default, strict, debug or filters",
        default="default",
        choices=("default", "strict", "debug", "filters"),
        takes="NAME",
        where=_AND_POOLS,
    ),
    _NETWORK,
    _ALLOW,
    _row(
        "workspace",
        "text",
        "where /workspace is stored: auto (default), disk or memory",
        default="auto",
        choices=("auto", "disk", "memory"),
        where=_AND_POOLS,
    ),
    _ENV,
)
"""Of a new environment."""

_COMMAND = _row("command", "text", "the command, as text for a shell")
_ARGV = _row("argv", "texts", "the program and its arguments", option=("command",))
_STDIN = _row(
    "stdin", "content", "pass stdin on (default: empty stdin)", option=("-i", "--interactive"), takes=""
)
_CWD = _row("cwd", "text", "working directory (default: /workspace)", option=("-w", "--workdir"), takes="DIR")
_SECRETS = _row(
    "secrets",
    "variables",
    "pass this variable on; its value is never written down",
    option=("--secret",),
    takes="NAME",
)
_USER = _row(
    "user",
    "text",
    "user to run as: appuser (default) or root",
    default="appuser",
    choices=("appuser", "root"),
    option=("-u", "--user"),
    takes="USER",
)
_TIMEOUT = _row("timeout", "seconds", "kill the command after this time", high=365 * 86400.0)
_OUTPUT_LIMIT = _row(
    "output_limit",
    "count",
    "bytes to keep of each output stream",
    default=_MIB,
    low=0,
    high=16 * _MIB,
    where=_API,
)
_PROFILE = _row(
    "profile",
    "text",
    "restrict the command further: strict, offline, readonly, or another",
    option=("--execution-profile",),
    takes="NAME",
)
_PACKAGES = _row(
    "packages",
    "texts",
    "install this package first: 'pandas==2.*', 'lodash@^4'",
    option=("--package",),
    takes="NAME",
)

EXECUTE = _table(
    _COMMAND,
    _ARGV,
    _row("shell", "text", "name of the shell that keeps its state", default="main", where=_API),
    _TIMEOUT,
    _row("timeout_seconds", "seconds", "same as timeout", high=365 * 86400.0, where=("rest",)),
    _OUTPUT_LIMIT,
    _STDIN,
    _CWD,
    _ENV,
    _SECRETS,
    _USER,
    _PROFILE,
)
"""Of a command whose result is awaited."""

START = _table(
    _COMMAND,
    _ARGV,
    _row("pty", "terminal", "give the command a terminal", option=("-t", "--tty")),
    _row("stdin", "flag", "keep stdin open", option=("-i", "--interactive")),
    _TIMEOUT,
    _CWD,
    _ENV,
    _SECRETS,
    _USER,
    _PROFILE,
)
"""Of a command that runs in the background or attached."""

SESSION = _table(
    _row(
        "language",
        "text",
        "python (default), nodejs or bash",
        choices=("python", "nodejs", "bash"),
        option=("-l", "--language"),
        takes="NAME",
    ),
    _row(
        "session_id",
        "text",
        "id of the session, which is opened if it does not exist (default: main)",
        option=("-s", "--session"),
        takes="ID",
    ),
    _row("cwd", "text", "working directory", where=_API),
    _row("env", "variables", "variables of the session", where=_API),
    _row("secrets", "variables", "secrets of the session", where=_API),
    _PACKAGES,
)
"""Of a new session."""

SESSION_CALL = _table(
    _row("code", "content", "the code to run (default: read from stdin)", option=("-c", "--code")),
    _row("timeout", "seconds", "interrupt the code after this time", high=365 * 86400.0),
    _row("stdin", "content", "input of the code", where=_API),
    _row("memory", "size", "memory limit of the interpreter for this call", where=_API),
)
"""Of one call in a session."""

PROGRAM = _table(
    _row("language", "text", "language of the program (see skerry languages)", option=("-l", "--language")),
    _row("code", "content", "the program; - for stdin", option=("file_",), takes="FILE"),
    _STDIN,
    _row(
        "files",
        "variables",
        "add a read-only file; PATH=LOCAL if it is stored elsewhere",
        option=("--file",),
        takes="PATH",
    ),
    _row(
        "timeout",
        "seconds",
        "kill the program after this time (default: {default:g}, maximum: {high:g})",
        default=30.0,
        high=300.0,
    ),
    _row(
        "cpu_limit",
        "count",
        "CPU limit, 1000 is one core (default: {default})",
        default=1000,
        low=10,
        high=1_024_000,
        unit="millicores",
        takes="MILLICORES",
    ),
    _row(
        "mem_limit",
        "count",
        "memory limit (default: {default})",
        default=512,
        low=16,
        high=1 << 20,
        unit="MB",
        takes="MB",
    ),
    _NETWORK,
    _ALLOW,
    _PACKAGES,
    _ISOLATION,
    _row("image", "text", "image to use instead of the language's own", completes="image"),
    _OUTPUT_LIMIT,
)
"""Of a program that runs once, in an environment of its own."""
