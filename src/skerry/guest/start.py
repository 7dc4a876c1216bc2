"""What the guest is asked to run."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from skerry.errors import InvalidRequest
from skerry.guest import frames
from skerry.guest.frames import WINDOW, Flag, Tag
from skerry.guest.shells import with_context

START_MAX = frames.PAYLOAD_MAX
USERS = 65536


@dataclass(frozen=True, slots=True)
class Restrictions:
    """What the guest puts on one program, on top of what the environment has. It can only restrict."""

    filter: bytes
    """A compiled seccomp filter."""
    access: int = 0
    """Rights of Landlock that the program has only where a rule grants them; 0: no rules on paths."""
    rules: tuple[tuple[int, str], ...] = ()
    """(rights, path). `/x/*` is what lies in /x on read-only file systems; a path that does not exist is skipped."""

    def encode(self) -> bytes:
        pieces = [frames.field(Tag.FILTER, self.filter)]
        if self.access:
            pieces.append(frames.field(Tag.ACCESS, struct.pack("<Q", self.access)))
        for access, path in self.rules:
            pieces.append(frames.field(Tag.RULE, struct.pack("<Q", access) + path.encode() + b"\0"))
        return b"".join(pieces)


@dataclass(slots=True)
class Start:
    """What to run: an argv, a command for a stateful shell, or one of the guest's applets."""

    argv: list[str] | None = None
    command: str | None = None
    shell: str = ""
    applet: str | None = None
    cwd: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    """The whole environment of a program; of a shell, when this is its first command."""
    exports: dict[str, str] = field(default_factory=dict)
    """For a shell's command: exported before it, and from then on."""
    uid: int | None = None
    """None: the environment's own user."""
    stdin: bool = False
    pty: tuple[int, int] | None = None
    output_limit: int | None = None
    keep: bool = False
    replies: bool = False
    """Whether its descriptor 9 is a third stream, of which a piece comes behind all output that was written before."""
    restrictions: Restrictions | None = None
    """Of a program alone: neither a shell's command nor an applet can have them."""

    def encode(self) -> bytes:
        """The payload of START. Raises InvalidRequest when it is too large or holds a NUL."""
        if self.shell and self.command is not None:
            command = with_context(self.command, self.cwd, self.exports)
            parts = [(Tag.SHELL, self.shell), (Tag.COMMAND, command)]
        else:
            parts = [(Tag.ARG, argument) for argument in self.argv or []]
            if self.cwd is not None:
                parts.append((Tag.CWD, self.cwd))
        if self.applet is not None:
            parts.append((Tag.APPLET, self.applet))
        parts += [(Tag.ENV, f"{name}={value}") for name, value in self.env.items()]
        pieces = []
        for tag, text in parts:
            data = text.encode("utf-8", "surrogateescape")
            if b"\0" in data:
                raise InvalidRequest("a command, its arguments and its environment cannot hold a NUL byte")
            pieces.append(frames.field(tag, data))
        flags = Flag.STDIN * self.stdin | Flag.PTY * (self.pty is not None) | Flag.KEEP * self.keep
        flags |= Flag.REPLIES * self.replies
        pieces.append(frames.field(Tag.FLAGS, struct.pack("<I", flags)))
        if self.uid is not None:
            if not 0 <= self.uid < USERS:
                raise InvalidRequest(f"there is no user {self.uid} inside", hint=f"ids are 0 to {USERS - 1}")
            pieces.append(frames.field(Tag.USER, struct.pack("<II", self.uid, self.uid)))
        pieces.append(frames.field(Tag.CREDIT, struct.pack("<I", WINDOW)))
        if self.pty is not None:
            pieces.append(frames.field(Tag.WINSIZE, struct.pack("<HH", *self.pty)))
        if self.output_limit is not None:
            pieces.append(frames.field(Tag.LIMIT, struct.pack("<Q", self.output_limit)))
        if self.restrictions is not None:
            pieces.append(frames.field(Tag.PROFILE, self.restrictions.encode()))
        payload = b"".join(pieces)
        if len(payload) > START_MAX:
            raise InvalidRequest(
                f"the command with its environment takes {len(payload)} bytes, more than {START_MAX}",
                hint="write long scripts or data to a file first and run that",
            )
        return payload
