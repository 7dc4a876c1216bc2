"""A command: its validation, and the request to the guest that starts it."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from skerry.egress.presets import install_variables
from skerry.errors import InvalidRequest
from skerry.guest.start import START_MAX, Restrictions, Start
from skerry.policy import MIB, seconds

if TYPE_CHECKING:
    from skerry.backends.base import Instance
    from skerry.languages import Language

OUTPUT_LIMIT = 1 * MIB
OUTPUT_LIMIT_MAX = 16 * MIB
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

USERS: dict[str, int | None] = {"appuser": None, "root": 0}
"""By name; None is the environment's unprivileged user."""
VARIABLES_MAX = START_MAX - (8 << 10)
"""Bytes of an environment's variables. They are sent with every command, whose own part takes 8 KiB."""
_FIELD = 5
"""Bytes of overhead for each argument and each variable."""
_SHELL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,24}")
_UTF8 = {"LC_CTYPE": "C.UTF-8"}
"""LANG stays unset: with it most programs open a dozen locale files at start that say the same as "C"."""
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Command:
    """A command to run: either `argv` or `text`. Raises InvalidRequest."""

    argv: list[str] | None = None
    text: str | None = None
    shell: str = ""
    """The stateful shell that runs `text`; with "", a fresh `sh` does."""
    cwd: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    """Variables of which only the names are recorded. Other code in the environment can read them."""
    user: str = "appuser"
    timeout: float | None = None
    output_limit: int | None = None
    """Bytes of each stream. None passes all of it on, and keeps the most recent part."""
    stdin: bool = False
    pty: tuple[int, int] | None = None
    """Rows and columns."""
    profile: str = ""
    """The execution profile; "" for none. A stateful shell could not get rid of it afterwards."""

    def __post_init__(self) -> None:
        if (self.argv is None) == (self.text is None):
            raise InvalidRequest("give either argv or command")
        if self.argv is not None and not self.argv:
            raise InvalidRequest("argv is empty", hint="its first item is the program")
        # Before a look at each of them, and before the audit writes them down.
        size = len(self.text or "") + sum(len(item) + _FIELD for item in self.argv or ())
        size += _size(self.env) + _size(self.secrets)
        if size > START_MAX:
            raise InvalidRequest(
                f"the command with its variables takes {size} bytes, more than {START_MAX}",
                hint="write long scripts or data to a file first and run that",
            )
        if self.argv is not None and not self.argv[0]:
            raise InvalidRequest("argv begins with an empty string", hint="its first item is the program")
        if self.shell and not _SHELL_NAME.fullmatch(self.shell):
            raise InvalidRequest(
                f"{self.shell!r} is not a name for a shell", hint="up to 24 of A-Z a-z 0-9 _ . -"
            )
        if self.shell and self.profile:
            raise InvalidRequest(
                "a command of a stateful shell cannot have a profile: the shell would keep it",
                hint="run the program by itself: `run` in the SDK, `argv` in the API",
            )
        if self.user not in USERS:
            raise InvalidRequest(f"unknown user {self.user!r}", hint=f"known: {', '.join(USERS)}")
        if self.timeout is not None:
            seconds(self.timeout, "timeout")
        if self.output_limit is not None and not 0 <= self.output_limit <= OUTPUT_LIMIT_MAX:
            raise InvalidRequest(
                f"output_limit must be between 0 and {OUTPUT_LIMIT_MAX}, not {self.output_limit}"
            )
        if self.pty is not None and not all(0 < size < 1 << 16 for size in self.pty):
            raise InvalidRequest("a terminal has between 1 and 65535 rows and columns")
        for what, value in (("command", self.text), ("cwd", self.cwd)):
            if value is not None:
                _check_text(value, what)
        for item in self.argv or ():
            _check_text(item, "an argument")
        check_variables(self.env)
        check_variables(self.secrets)
        for name in self.env.keys() & self.secrets.keys():
            raise InvalidRequest(f"{name!r} is both in env and in secrets")
        for name in (*self.env, *self.secrets) if self.shell else ():
            if not _IDENTIFIER.fullmatch(name):
                raise InvalidRequest(f"a shell cannot export a variable with the name {name!r}")

    @property
    def label(self) -> str:
        """The command as text for people."""
        return shlex.join(self.argv) if self.argv is not None else self.text or ""

    @property
    def told(self) -> dict[str, Any]:
        """What the audit records of it."""
        return {
            "argv": self.argv,
            "command": self.text,
            "shell": self.shell or None,
            "cwd": self.cwd,
            "env": sorted(self.env) or None,
            "secrets": sorted(self.secrets) or None,
            "user": self.user,
            "timeout": self.timeout,
            "pty": self.pty is not None or None,
            "profile": self.profile or None,
        }

    @property
    def shell_id(self) -> str:
        """The guest's name for the shell: shells belong to one user."""
        return self.shell if self.user == "appuser" else f"{self.shell}@{self.user}"

    def start(
        self, base: dict[str, str], traceparent: str = "", restrictions: Restrictions | None = None
    ) -> Start:
        """The guest's request; variables of the command override those of the environment.

        TRACEPARENT is not set in a stateful shell, where it would stay for the commands of other callers.
        """
        env = dict(base)
        if self.user != "appuser":
            env["USER"] = env["LOGNAME"] = self.user
        if self.pty is not None:
            env.setdefault("TERM", "xterm-256color")
        uid = USERS[self.user]
        if self.shell:
            return Start(
                command=self.text,
                shell=self.shell_id,
                cwd=self.cwd,
                env=env,
                exports={**self.env, **self.secrets},
                uid=uid,
                stdin=self.stdin,
                output_limit=self.output_limit,
            )
        if traceparent:
            env["TRACEPARENT"] = traceparent
        env = _above(env, {**self.env, **self.secrets})
        return Start(
            argv=self.argv if self.argv is not None else ["/bin/sh", "-c", self.text or ""],
            cwd=self.cwd,
            env=env,
            uid=uid,
            stdin=self.stdin,
            pty=self.pty,
            output_limit=self.output_limit,
            restrictions=restrictions,
        )


def program_command(language: Language, instance: Instance, cpus: float) -> Command:
    """The command that runs a program in the workspace."""
    env = {**writable(instance), **language.variables(cpus)}
    return Command(argv=[*language.command], env=env, output_limit=OUTPUT_LIMIT)


def writable(instance: Instance) -> dict[str, str]:
    """Variables that name the directory which a program can write."""
    return dict.fromkeys(("HOME", "TMPDIR"), instance.tmp_path)


def check_variables(env: dict[str, str]) -> None:
    """Raises InvalidRequest for names and values that no process can have."""
    for name, value in env.items():
        if not name or "=" in name:
            raise InvalidRequest(f"{name!r} is not a name for a variable")
        _check_text(name, "a variable's name")
        _check_text(value, f"the variable {name}")


def check_environment(env: dict[str, str]) -> None:
    """Raises InvalidRequest for variables with which no command could be started."""
    size = _size(env)
    if size <= VARIABLES_MAX:
        check_variables(env)
        size = sum(len(f"{name}{value}".encode("utf-8", "surrogateescape")) for name, value in env.items())
    if size > VARIABLES_MAX:
        raise InvalidRequest(
            f"the variables take {size} bytes, more than {VARIABLES_MAX}",
            hint="every command gets all of them: write large values to a file",
        )


def _size(env: dict[str, str]) -> int:
    """A lower bound of their size in bytes."""
    return sum(len(name) + len(value) + _FIELD + 1 for name, value in env.items())


def base_variables(image_env: dict[str, str], workspace: str, env: dict[str, str]) -> dict[str, str]:
    """Variables of everything that runs in an environment."""
    own = {
        **install_variables(workspace, image_env.get("PATH", DEFAULT_PATH)),
        "HOME": workspace,
        "USER": "appuser",
        "LOGNAME": "appuser",
        "SHELL": "/bin/bash",
    }
    return _above(_above(_UTF8, image_env), {**own, **env})


def _above(base: dict[str, str], given: dict[str, str]) -> dict[str, str]:
    """Both, `given` first. A given LANG also removes our LC_CTYPE, which would override a part of it."""
    if "LANG" in given and _UTF8.items() <= base.items():
        base = {name: value for name, value in base.items() if name not in _UTF8}
    return {**base, **given}


def _check_text(value: str, what: str) -> None:
    if "\0" in value:
        raise InvalidRequest(f"{what} contains a NUL byte")
    if not value.isascii():
        try:
            value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:  # which holds the value
            raise InvalidRequest(f"{what} is not valid text") from None
