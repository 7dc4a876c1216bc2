"""The real guest under damaged frames: no sanitizer has anything to say, and it goes on answering."""

from __future__ import annotations

import contextlib
import random
import select
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skerry.guest import frames
from skerry.guest.frames import Flag, Tag, Type, field
from skerry.guest.start import Restrictions
from tests import support
from tests.security import sanitized

pytestmark = pytest.mark.timeout(100)


def args(*words: bytes) -> bytes:
    return b"".join(field(Tag.ARG, word) for word in words)


def flags(number: int) -> bytes:
    return field(Tag.FLAGS, struct.pack("<I", number))


def command(shell: bytes, text: bytes) -> bytes:
    return field(Tag.SHELL, shell) + field(Tag.COMMAND, text)


PATH = field(Tag.ENV, b"PATH=/usr/bin:/bin")
PROFILE = Restrictions(b"\x06\0\0\0\0\0\xff\x7f", 3, ((2, "/tmp"), (1, "/*"))).encode()
CREDIT = field(Tag.CREDIT, struct.pack("<I", 4096))
STDIN, PTY, KEEP = int(Flag.STDIN), int(Flag.PTY), int(Flag.KEEP)
SEEDS: list[tuple[int, bytes]] = [
    *(
        (Type.START, payload + PATH + CREDIT)
        for payload in (
            args(b"/bin/true") + flags(0),
            args(b"/bin/cat") + flags(STDIN),
            args(b"/bin/cat") + flags(STDIN | KEEP),
            args(b"cat", b"/dev/zero") + flags(KEEP) + field(Tag.LIMIT, struct.pack("<Q", 10_000)),
            args(b"sleep", b"5") + flags(0),
            args(b"sh", b"-c", b"setsid sleep 5 & kill -STOP $PPID") + flags(0),
            args(b"sh", b"-c", b"kill -9 $PPID; sleep 5") + flags(0),
            args(b"missing") + flags(0),
            args(b"/bin/cat") + flags(STDIN | PTY) + field(Tag.WINSIZE, struct.pack("<HH", 24, 80)),
            command(b"a", b"echo hi; read x") + flags(STDIN),
            command(b"b", b"echo hi; sleep 1 & exit 3") + flags(0),
            command(b"a", b"kill -9 $$ $BASHPID") + flags(KEEP),
            command(b"c", b"kill -STOP $$ $BASHPID") + flags(0),
            args(b"true") + flags(0) + field(Tag.PROFILE, PROFILE),
            args(b".") + field(Tag.APPLET, b"list") + flags(0),
            args(b".", b"-r") + field(Tag.APPLET, b"watch") + flags(0),
            args(b".") + field(Tag.APPLET, b"tar") + flags(0),
            args(b"d") + field(Tag.APPLET, b"untar") + flags(STDIN),
        )
    ),
    (Type.STDIN, b"hello\n"),
    (Type.STDIN, b""),
    (Type.STDIN, b"x" * 65536),
    (Type.CREDIT, struct.pack("<BI", 1, 1000)),
    (Type.CREDIT, struct.pack("<BI", 2, 0xFFFFFFFF)),
    (Type.SIGNAL, struct.pack("<I", 15)),
    (Type.SIGNAL, struct.pack("<I", 19)),
    *[(Type.KILL, b"")] * 3,
    (Type.RESIZE, struct.pack("<HH", 10, 10)),
    (Type.LIST, b""),
    (Type.ATTACH, struct.pack("<I", 1000)),
    (Type.FORGET, b""),
    (Type.PING, b"x"),
    (
        Type.FILE_READ,
        field(Tag.PATH, b"a/b") + field(Tag.OFFSET, bytes(8)) + field(Tag.LENGTH, struct.pack("<I", 9)),
    ),
    (
        Type.FILE_WRITE,
        field(Tag.PATH, b"a/b") + flags(Flag.PARENTS | Flag.TRUNCATE) + field(Tag.DATA, b"data"),
    ),
    (Type.FILE_STAT, field(Tag.PATH, b"a")),
    (Type.FILE_MKDIR, field(Tag.PATH, b"a/c/d")),
    (Type.FILE_RENAME, field(Tag.PATH, b"a") + field(Tag.PATH2, b"e/f")),
    (Type.FILE_REMOVE, field(Tag.PATH, b"a/b")),
]
SIZES = (0, 1, 0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 131072, 65536)


def damaged(rng: random.Random) -> bytes:
    """A frame, with some of its bytes not as they were."""
    kind, sound = rng.choice(SEEDS)
    payload = bytearray(sound)
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2, 4))):
        at = rng.randrange(len(payload) + 1)
        how = rng.randrange(6)
        if how == 0 and at < len(payload):
            payload[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            del payload[at:]
        elif how == 2:
            payload[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif how == 3 and at < len(payload):
            payload[at] = rng.choice((0, 0xFF, 0x7F, 0x80))
        elif how == 4:
            payload[at : at + 4] = struct.pack("<I", rng.choice(SIZES))
        else:
            payload += rng.choice(SEEDS)[1]
    if rng.random() < 0.03:
        kind = rng.randrange(256)
    if kind == Type.SHUTDOWN:
        kind = Type.PING
    frame = frames.encode(kind, rng.randrange(1, 9), bytes(payload[: frames.PAYLOAD_MAX]))
    return struct.pack("<I", rng.choice(SIZES)) + frame[4:] if rng.random() < 0.01 else frame


def session(real: sanitized.Guest, rng: random.Random) -> None:
    """One connection with some frames on it, in pieces, with answers read or not; and it hangs up in the middle."""
    with (
        real.connect(greet=rng.random() > 0.05) as sock,
        contextlib.suppress(ConnectionError, BrokenPipeError),
    ):
        sock.setblocking(False)
        data = b"".join(damaged(rng) for _ in range(rng.randrange(1, 40)))
        # A new connection puts an end to what the guest has not read of the old one.
        linger = rng.choice((0.0, 0.002, 0.01))
        patience = time.monotonic() + 5
        while data and time.monotonic() < patience:
            with contextlib.suppress(BlockingIOError):
                data = data[sock.send(data[: rng.choice((1, 9, 100, 100_000))]) :]
            with contextlib.suppress(BlockingIOError):
                if rng.random() < 0.7 and not sock.recv(rng.choice((1, 100, 65536))):
                    return
        while linger and select.select([sock], [], [], linger)[0] and sock.recv(65536):
            linger /= 2


def attack(folder: Path, sessions: int, *edits: tuple[str, str, str]) -> None:
    """Raises AssertionError when a sanitizer has said anything, or the guest does not answer any more."""
    program = sanitized.build(folder, *edits)
    with sanitized.running(program, folder) as real:
        for number in range(sessions):
            session(real, random.Random(number))
            if number % 25 == 24:
                real.check()
        real.check()


@pytest.fixture
def folder() -> Iterator[Path]:
    support.require("gcc")
    with tempfile.TemporaryDirectory(prefix="skerry-test-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_damaged_frames_do_no_harm_to_the_guest(folder: Path) -> None:
    attack(folder, 2000)


@pytest.mark.parametrize(
    "edit",
    [
        ("proto.c", "if (len > reader->left - 5)", "if (len > 200000)"),
        ("streams.c", "if (p->pending_len + len > SK_STDIN_WINDOW + 1) {", "if (len > 200000) {"),
        (
            "kill.c",
            "    if (!p->exited && !sk_shell_break(p))\n        sk_process_exited(p, 128 + SIGKILL, SIGKILL, NULL);\n"
            "    p->killing = false;\n",
            "    p->killing = false;\n    if (!p->exited && !sk_shell_break(p))\n"
            "        sk_process_exited(p, 128 + SIGKILL, SIGKILL, NULL);\n",
        ),
    ],
    ids=["lengths of fields", "the window of stdin", "a record that is used after its end"],
)
def test_the_fuzzing_finds_what_a_missing_check_lets_through(
    folder: Path, edit: tuple[str, str, str]
) -> None:
    with pytest.raises((AssertionError, OSError)):
        attack(folder, 3000, edit)
    assert list(folder.glob("reports.*"))
