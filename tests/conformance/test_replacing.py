"""A file that is read or written in pieces: the old content or the new one, and nothing beside them."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import pytest

from skerry.errors import Busy, DiskFull, FileConflict, LimitReached, SkerryError
from skerry.guest import files
from skerry.guest.channel import READ_MAX, WRITE_MAX, Channel
from skerry.guest.frames import Flag
from skerry.policy import MIB
from tests.conformance.harness import LIMITS, Box, Site, needs

OLD = b"old " * 50_000
NEW = random.Random(7).randbytes(5 * WRITE_MAX + 17)
HANDLES_MAX = 256
"""Of a guest: native/handles.c."""


async def pieces(data: bytes, size: int = 50_000) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


class Held:
    """Content whose second half does not come."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.half_sent = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in pieces(self._data[: len(self._data) // 2]):
            yield piece
        self.half_sent.set()
        await asyncio.Event().wait()


async def half(channel: Channel, path: str) -> asyncio.Task[None]:
    """A write that has sent some of its frames, and waits for more."""
    held = Held(NEW)
    task = asyncio.create_task(files.write(channel, path, aiter(held)))
    await held.half_sent.wait()
    return task


async def rest(reader: files.Reader, at: int, length: int = READ_MAX) -> bytes:
    """The file from `at` on, in pieces of `length`."""
    found = b""
    while len(piece := await reader.read(at + len(found), length)) == length:
        found += piece
    return found + piece


async def entries(box: Box, directory: str) -> bytes:
    return (await box.sh(f"ls -A {directory}")).stdout


@pytest.mark.parametrize("size", [0, 1, WRITE_MAX - 1, WRITE_MAX, WRITE_MAX + 1, 2 * WRITE_MAX, len(NEW)])
async def test_content_of_any_size_replaces_the_old_one(box: Box, size: int) -> None:
    await files.write(box.channel, "sizes", pieces(OLD))
    await files.write(box.channel, "sizes", pieces(NEW[:size]))
    assert await box.content("sizes") == NEW[:size]


async def test_canceled_write_leaves_the_old_content_and_nothing_else(box: Box, site: Site) -> None:
    await files.write(box.channel, "canceled/file", pieces(OLD))
    for path in ("canceled/file", "canceled/fresh"):
        task = await half(box.channel, path)
        if "nameless" in site.kind.gives:
            assert await entries(box, "canceled") == b"file\n"
        assert await box.content("canceled/file") == OLD
        task.cancel()
        await asyncio.wait([task])
        assert await entries(box, "canceled") == b"file\n"
    assert await box.content("canceled/file") == OLD


async def test_lost_daemon_leaves_the_old_content_and_nothing_else(site: Site) -> None:
    async with site.box() as box:
        await files.write(box.channel, "lost/file", pieces(OLD))
        task = await half(box.channel, "lost/file")
        old, box.channel = box.channel, await box.reconnect()
        assert await box.content("lost/file") == OLD
        assert await entries(box, "lost") == b"file\n"
        with pytest.raises(SkerryError, match="Bad file descriptor"):
            await box.channel.write("lost/file", b"x", 5, handle=1, flags=Flag.COMMIT)
        task.cancel()
        await asyncio.wait([task])
        await old.close()


async def test_replaced_file_keeps_mode_and_symlink(box: Box) -> None:
    await files.write(box.channel, "kept/file", pieces(OLD))
    await box.sh("chmod 750 kept/file; ln -s kept/file link; ln -s nowhere dangling")
    await files.write(box.channel, "link", pieces(NEW))
    assert await box.content("kept/file") == NEW
    assert (await box.sh("stat -c '%a %F' kept/file link")).stdout == b"750 regular file\n777 symbolic link\n"
    await files.write(box.channel, "dangling", pieces(NEW))
    assert await box.content("nowhere") == NEW


async def test_file_with_two_names_is_written_in_place(box: Box) -> None:
    await files.write(box.channel, "one", pieces(OLD))
    await box.sh("ln one two")
    await files.write(box.channel, "one", pieces(NEW))
    assert await box.content("two") == NEW


async def test_programs_see_the_old_file_or_the_new_one(box: Box) -> None:
    await files.write(box.channel, "seen", pieces(OLD))
    sizes = f"{len(OLD)}|{len(NEW)}"
    reader = await box.start(
        "sh", "-c", f"until [ -e done ]; do case $(stat -c %s seen) in {sizes}) ;; *) exit 1;; esac; done"
    )
    for _ in range(10):
        await files.write(box.channel, "seen", pieces(NEW))
        await files.write(box.channel, "seen", pieces(OLD))
    await box.channel.write("done", b"")
    assert (await reader.wait()).code == 0


async def test_what_cannot_be_replaced_is_refused_as_ever(box: Box) -> None:
    await box.sh("mkdir folder; mkfifo pipe")
    for path in ("folder", "pipe"):
        with pytest.raises(FileConflict):
            await files.write(box.channel, path, pieces(NEW))


async def test_writes_under_way_are_limited(box: Box) -> None:
    tasks = [await half(box.channel, f"many-{number}") for number in range(HANDLES_MAX)]
    with pytest.raises(LimitReached):
        await files.write(box.channel, "one-more", pieces(NEW))
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await files.write(box.channel, "one-more", pieces(NEW))
    assert await box.content("one-more") == NEW


@pytest.mark.parametrize("length", [READ_MAX, 50_000])
async def test_file_that_is_replaced_while_it_is_read_is_read_as_it_was(box: Box, length: int) -> None:
    await files.write(box.channel, "read", pieces(NEW))
    with contextlib.closing(files.Reader(box.channel, "read")) as reader:
        found = await reader.read(0, length)
        await box.sh("mv read moved; head -c 2000000 /dev/zero >read")
        assert await reader.size() == len(NEW)
        assert found + await rest(reader, length, length) == NEW
    await box.sh("rm read moved")


async def test_reads_under_way_are_limited_and_end_with_their_channel(site: Site) -> None:
    async with site.box() as box:
        await files.write(box.channel, "large", pieces(NEW))
        await box.channel.write("small", b"small")
        readers = [files.Reader(box.channel, "large") for _ in range(HANDLES_MAX + 1)]
        for reader in readers[:-1]:
            await reader.read(0, 1000)
        with pytest.raises(Busy):
            await readers[-1].read(0, 1000)
        small = files.Reader(box.channel, "small")
        assert await small.read(0, READ_MAX) == b"small"  # it is closed at once
        readers[0].close()
        assert await rest(files.Reader(box.channel, "large"), 0) == NEW
        # Read to its end, it is closed as well.
        assert await files.Reader(box.channel, "large").read(0, 1000) == NEW[:1000]
        old, box.channel = box.channel, await box.reconnect()
        await old.close()
        for reader in [files.Reader(box.channel, "large") for _ in range(HANDLES_MAX)]:
            assert await reader.read(0, 1000) == NEW[:1000]


async def test_file_that_is_replaced_while_it_is_written_to_at_an_offset_has_none_of_it(box: Box) -> None:
    await files.write(box.channel, "at", pieces(OLD))

    async def content() -> AsyncIterator[bytes]:
        yield NEW[: 2 * WRITE_MAX]
        # The first piece has been written when the next is asked for.
        await box.sh("mv at moved; echo other >at")
        yield NEW[2 * WRITE_MAX :]

    await files.write(box.channel, "at", content(), 3)
    assert await box.content("at") == b"other\n"
    assert await box.content("moved") == OLD[:3] + NEW + OLD[3 + len(NEW) :]


@needs("own_root")
async def test_without_room_for_both_the_old_content_stays(site: Site) -> None:
    limits = type(LIMITS)(memory=64 * MIB, disk=16 * MIB)
    async with site.box(limits) as box:
        enforced = {row.name: row.enforced for row in box.backend.enforced(box.id)}
        if not enforced["disk"]:
            pytest.skip("the limit of the disk does not hold here")
        old = OLD * 50  # 10 MB
        await files.write(box.channel, "large", pieces(old))
        await box.channel.write("small", b"old")
        with pytest.raises(DiskFull):
            await files.write(box.channel, "large", pieces(bytes(len(old))))
        assert await box.content("large") == old
        await box.sh("cat /dev/zero >fill")
        with pytest.raises(DiskFull):
            await box.channel.write("small", bytes(WRITE_MAX))
        assert await box.content("small") == b"old"
