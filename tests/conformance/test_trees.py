"""Whole trees: listed, removed, packed, unpacked and watched."""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
import tarfile
from collections.abc import AsyncIterator, Callable

import pytest

from skerry.errors import FileConflict, FileMissing, InvalidRequest, PathOutside
from skerry.guest import files
from skerry.guest.channel import Channel
from skerry.models import FileEvent, FileInfo
from tests.conformance.harness import BIG, Box, expect
from tests.conformance.test_files import ODD_NAMES, OUTSIDE


async def listed(channel: Channel, path: str, recursive: bool = False) -> list[FileInfo]:
    found = await files.list_directory(channel, path, recursive)
    assert found is not None
    entries = list(found)
    assert len(found) == len(entries)
    return entries


async def packed(box: Box, path: str, contents: bool = False) -> tarfile.TarFile:
    data = b"".join([piece async for piece in files.tar(box.channel, path, contents)])
    return tarfile.open(fileobj=io.BytesIO(data), errors="surrogateescape")


async def pieces(data: bytes, size: int = 100_000) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


def archive(*members: tuple[str, bytes | str | None], mode: int = 0o644) -> bytes:
    """Of files (bytes), directories (None) and symlinks (their targets)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.mode = mode
            if content is None:
                info.type, info.mode = tarfile.DIRTYPE, 0o755
            elif isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
            else:
                info.size = len(content)
            tar.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)
    return out.getvalue()


# Listing and removing.


async def test_a_directory_is_listed_by_name(box: Box) -> None:
    await box.sh(
        "mkdir -p list/sub; printf 123 >list/b; ln -s b list/a; mkfifo list/p; touch list/.hidden list/sub/deep"
    )
    found = await listed(box.channel, "list")
    assert [(entry.path, entry.type) for entry in found] == [
        (".hidden", "file"),
        ("a", "symlink"),
        ("b", "file"),
        ("p", "fifo"),
        ("sub", "directory"),
    ]
    assert {entry.path: entry.size for entry in found}["b"] == 3
    assert {entry.path: entry.target for entry in found}["a"] == "b"


async def test_a_tree_is_listed_to_its_leaves_without_following_links(box: Box) -> None:
    await box.sh("mkdir -p all/x/y all/empty; touch all/x/y/z all/f; ln -s .. all/x/up; ln -s / all/root")
    found = await listed(box.channel, "all", recursive=True)
    assert [entry.path for entry in found] == ["empty", "f", "root", "x", "x/up", "x/y", "x/y/z"]


async def test_an_empty_directory_has_an_empty_list(box: Box) -> None:
    await box.channel.mkdir("empty")
    assert await listed(box.channel, "empty") == []


async def test_a_directory_with_very_many_entries_is_listed(box: Box) -> None:
    await box.sh("mkdir crowd; cd crowd; seq 3000 | xargs touch")
    assert len(await listed(box.channel, "crowd")) == 3000


async def test_odd_names_are_listed_as_they_are(box: Box) -> None:
    for name in ODD_NAMES.values():
        await box.channel.write(f"names/{name}", b"")
    assert {entry.path for entry in await listed(box.channel, "names")} == set(ODD_NAMES.values())


async def test_the_workspace_itself_is_listed(box: Box) -> None:
    await box.channel.write("seen", b"")
    for path in (".", box.instance.workspace_path):
        assert "seen" in {entry.path for entry in await listed(box.channel, path)}


async def test_a_deep_tree_is_listed_and_removed(box: Box) -> None:
    await box.channel.mkdir("/".join(["deep"] * 300))
    found = await listed(box.channel, "deep", recursive=True)
    assert len(found) == 299
    await files.remove_tree(box.channel, "deep")
    with pytest.raises(FileMissing):
        await box.channel.stat("deep")


async def test_a_tree_that_is_deeper_than_any_path_is_removed(box: Box) -> None:
    script = "import os\nfor n in range(3000): os.mkdir('dd'); os.chdir('dd')"
    assert (await box.sh(f'mkdir abyss && cd abyss && exec python3 -c "{script}"')).code == 0
    await files.remove_tree(box.channel, "abyss")
    assert (await box.sh("ls -d abyss 2>/dev/null")).stdout == b""


async def test_removing_a_tree_spares_what_its_links_point_to(box: Box) -> None:
    await box.sh(
        "mkdir -p spare/target doomed/x; touch spare/target/f doomed/x/f; ln -s ../../spare/target doomed/x/link"
    )
    await files.remove_tree(box.channel, "doomed")
    assert await box.channel.read("spare/target/f") == b""
    with pytest.raises(FileMissing):
        await box.channel.stat("doomed")


async def test_removing_a_tree_takes_what_its_owner_may_not_even_read(box: Box) -> None:
    await box.sh("mkdir -p locked/a/b; touch locked/a/b/c; chmod 0 locked/a/b locked/a; chmod 500 locked")
    await files.remove_tree(box.channel, "locked")
    with pytest.raises(FileMissing):
        await box.channel.stat("locked")


async def test_removing_the_workspace_empties_it(box: Box) -> None:
    await box.sh("mkdir -p some/thing; touch else .hidden")
    await files.remove_tree(box.channel, ".")
    assert await listed(box.channel, ".") == []
    await box.channel.write("usable", b"")


async def test_a_single_file_or_link_is_removed_too(box: Box) -> None:
    await box.sh("touch single; ln -s /etc single-link")
    await files.remove_tree(box.channel, "single")
    await files.remove_tree(box.channel, "single-link")
    with pytest.raises(FileMissing):
        await files.remove_tree(box.channel, "single")


# Archives.


async def test_a_tree_comes_down_as_an_archive(box: Box) -> None:
    await box.sh(
        "mkdir -p tree/sub tree/empty; printf data >tree/file; printf x >tree/sub/tool; chmod 750 tree/sub/tool;"
        " ln -s sub/tool tree/link; ln tree/file tree/hard; mkfifo tree/fifo; : >tree/nothing"
    )
    tar = await packed(box, "tree")
    members = {member.name: member for member in tar.getmembers()}
    assert set(members) == {"tree"} | {
        f"tree/{name}" for name in ("sub", "empty", "file", "sub/tool", "link", "hard", "nothing")
    }
    assert members["tree/link"].linkname == "sub/tool"
    assert members["tree/sub/tool"].mode == 0o750
    assert members["tree/nothing"].size == 0
    for name in ("tree/file", "tree/hard"):
        file = tar.extractfile(name)
        assert file is not None
        assert file.read() == b"data"


async def test_the_contents_of_a_tree_come_without_its_name(box: Box) -> None:
    await box.sh("mkdir -p inner/sub; touch inner/sub/f")
    names = (await packed(box, "inner", contents=True)).getnames()
    assert {name.removeprefix("./").rstrip("/") for name in names} - {"", "."} == {"sub", "sub/f"}


async def test_a_single_file_comes_down_as_an_archive(box: Box) -> None:
    await box.channel.write("one/file", b"alone")
    tar = await packed(box, "one/file")
    assert tar.getnames() == ["file"]


async def test_odd_names_survive_the_way_down_and_up(box: Box) -> None:
    for name in ODD_NAMES.values():
        await box.channel.write(f"down/{name}", name.encode("utf-8", "surrogateescape"))
    data = b"".join([piece async for piece in files.tar(box.channel, "down", contents=True)])
    await files.untar(box.channel, "up", pieces(data))
    for name in ODD_NAMES.values():
        assert await box.channel.read(f"up/{name}") == name.encode("utf-8", "surrogateescape")


async def test_an_archive_goes_up(box: Box) -> None:
    data = archive(
        ("a", None), ("a/file", b"content"), ("a/link", "file"), ("b/made/for/it", b""), ("tool", b"#!")
    )
    await files.untar(box.channel, "unpacked/here", pieces(data, 1000))
    assert await box.channel.read("unpacked/here/a/file") == b"content"
    assert (await box.channel.stat("unpacked/here/a/link")).target == "file"
    assert (await box.channel.stat("unpacked/here/b/made/for/it")).size == 0
    assert (await box.sh("test -O unpacked/here/a/file && echo mine")).stdout == b"mine\n"


async def test_a_tree_survives_the_way_down_and_up(box: Box) -> None:
    await box.sh(
        "mkdir -p way/a/b way/empty; printf data >way/a/file; ln way/a/file way/a/b/hard; chmod 640 way/a/file;"
        " ln -s ../file way/a/b/link; ln -s missing way/dangling; chmod 700 way/empty"
    )
    data = b"".join([piece async for piece in files.tar(box.channel, "way", contents=True)])
    await files.untar(box.channel, "way-back", pieces(data))
    before, after = [await listed(box.channel, path, True) for path in ("way", "way-back")]
    assert [(e.path, e.type, e.mode, e.target) for e in before] == [
        (e.path, e.type, e.mode, e.target) for e in after
    ]
    assert await box.channel.read("way-back/a/b/hard") == b"data"
    assert await box.channel.read("way-back/a/b/link") == b"data"


async def test_hard_links_go_up(box: Box) -> None:
    out = io.BytesIO(archive(("file", b"shared")))
    with tarfile.open(fileobj=out, mode="a") as tar:
        link = tarfile.TarInfo("linked")
        link.type, link.linkname = tarfile.LNKTYPE, "file"
        tar.addfile(link)
    await files.untar(box.channel, "hard", pieces(out.getvalue()))
    assert (await box.sh("test hard/file -ef hard/linked && cat hard/linked")).stdout == b"shared"


async def test_modes_go_up(box: Box) -> None:
    await files.untar(box.channel, "modes", pieces(archive(("tool", b"#!/bin/sh\necho ran\n"), mode=0o751)))
    assert (await box.channel.stat("modes/tool")).mode == 0o751
    assert (await box.run(box.path("modes/tool"))).stdout == b"ran\n"


async def test_large_archives_pass_both_ways(box: Box) -> None:
    data = random.Random(4).randbytes(BIG)
    await files.untar(box.channel, "bulk", pieces(archive(("big", data))))
    assert await box.content("bulk/big") == data
    file = (await packed(box, "bulk")).extractfile("bulk/big")
    assert file is not None
    assert file.read() == data


async def test_an_archive_replaces_what_is_there(box: Box) -> None:
    await box.channel.write("over/file", b"old")
    await files.untar(box.channel, "over", pieces(archive(("file", b"new"))))
    assert await box.channel.read("over/file") == b"new"


@pytest.mark.parametrize(
    "members",
    [
        [("../escaped", b"x")],
        [("/tmp/escaped", b"x")],
        [("way", "/tmp"), ("way/escaped", b"x")],
        [("way", "../.."), ("way/escaped", b"x")],
    ],
    ids=["dots", "absolute", "absolute-link", "relative-link"],
)
async def test_an_archive_does_not_reach_beyond_its_directory(
    box: Box, members: list[tuple[str, bytes | str | None]]
) -> None:
    with contextlib.suppress(FileConflict, InvalidRequest, PathOutside):
        await files.untar(box.channel, "jail/inner", pieces(archive(*members)))
    found = await box.sh("ls -d escaped jail/escaped ../escaped /tmp/escaped 2>/dev/null")
    assert found.stdout == b""


async def test_half_an_archive_is_told(box: Box) -> None:
    data = archive(("file", b"x" * 100_000))
    with pytest.raises(InvalidRequest):
        await files.untar(box.channel, "half", pieces(data[:50_000]))
    with pytest.raises(InvalidRequest):
        await files.untar(box.channel, "noise", pieces(b"no archive at all" * 1000))


async def test_a_caller_that_goes_away_ends_the_work(box: Box) -> None:
    async def idle() -> bool:
        return not [info for info in await box.channel.processes() if info.running]

    await box.sh("mkdir source; head -c 20000000 /dev/zero >source/file")
    async with contextlib.aclosing(files.tar(box.channel, "source")) as stream:
        await anext(stream)
        assert not await idle()
    assert await idle()
    asked = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        yield archive(("file", b"x" * 100_000))[:50_000]
        asked.set()
        await asyncio.Event().wait()

    unpacking = asyncio.ensure_future(files.untar(box.channel, "abandoned", endless()))
    await asked.wait()
    assert not await idle()
    unpacking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await unpacking
    assert await idle()


async def test_an_upload_that_fails_early_does_not_wait_for_the_rest(box: Box) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"no archive" * 1000

    with pytest.raises(InvalidRequest):
        await files.untar(box.channel, "early", endless())


# What cannot be.


async def test_what_is_missing_is_missing(box: Box) -> None:
    for call in (
        files.list_directory(box.channel, "missing"),
        files.remove_tree(box.channel, "missing"),
        packed(box, "missing"),
        first_event(box, "missing"),
    ):
        with pytest.raises(FileMissing, match="missing"):
            await call


async def test_a_file_is_not_a_directory(box: Box) -> None:
    await box.channel.write("plain", b"")
    for call in (
        files.list_directory(box.channel, "plain"),
        files.list_directory(box.channel, "plain/x"),
        files.untar(box.channel, "plain", pieces(archive(("x", b"")))),
    ):
        with pytest.raises(FileConflict):
            await call


@pytest.mark.parametrize("path", OUTSIDE.values(), ids=OUTSIDE)
async def test_paths_that_lead_outside_are_refused(box: Box, path: str) -> None:
    for call in (
        files.list_directory(box.channel, path),
        files.remove_tree(box.channel, path),
        packed(box, path),
        files.untar(box.channel, path, pieces(archive(("x", b"")))),
        first_event(box, path),
    ):
        with pytest.raises(PathOutside):
            await call


async def test_links_that_lead_outside_are_refused(box: Box) -> None:
    await box.sh("ln -sfn /etc way-out")
    for call in (
        files.list_directory(box.channel, "way-out"),
        files.remove_tree(box.channel, "way-out/hostname"),
        packed(box, "way-out/hostname"),
        files.untar(box.channel, "way-out", pieces(archive(("x", b"")))),
        first_event(box, "way-out"),
    ):
        with pytest.raises(PathOutside):
            await call


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 5000], ids=["empty", "nul", "long"])
async def test_what_cannot_be_a_path_is_the_callers_fault(box: Box, path: str) -> None:
    for call in (
        files.list_directory(box.channel, path),
        files.remove_tree(box.channel, path),
        packed(box, path),
        first_event(box, path),
    ):
        with pytest.raises(InvalidRequest):
            await call


async def test_a_path_that_looks_like_a_flag_is_a_path(box: Box) -> None:
    for name in ("-r", "--contents"):
        await box.channel.write(f"{name}/file", b"")
        assert [entry.path for entry in await listed(box.channel, name)] == ["file"]
        assert f"{name}/file" in (await packed(box, name)).getnames()
        await files.remove_tree(box.channel, name)


# Watching.


async def first_event(box: Box, path: str) -> FileEvent:
    async with contextlib.aclosing(files.watch(box.channel, path)) as events:
        return await anext(events)


class Watch:
    """Events of one watch, looked through for the one that is expected."""

    def __init__(self, box: Box, path: str, recursive: bool = True) -> None:
        self.events = files.watch(box.channel, path, recursive)
        self.seen: list[FileEvent] = []

    async def __aenter__(self) -> Watch:
        assert (await anext(self.events)).kind == "ready"
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.events.aclose()

    async def until(self, wanted: Callable[[FileEvent], bool]) -> FileEvent:
        async with asyncio.timeout(20):
            async for event in self.events:
                self.seen.append(event)
                if wanted(event):
                    return event
        raise AssertionError(f"not among {self.seen}")

    async def event(self, kind: str, path: str) -> FileEvent:
        return await self.until(lambda event: (event.kind, event.path) == (kind, path))


async def test_a_watch_sees_files_come_change_and_go(box: Box) -> None:
    await box.channel.mkdir("watched")
    async with Watch(box, "watched") as watch:
        await box.channel.write("watched/file", b"")
        await watch.event("created", "file")
        await box.sh("echo more >>watched/file")
        await watch.event("modified", "file")
        await box.sh("chmod 600 watched/file")
        await watch.event("attributes", "file")
        await box.channel.remove("watched/file")
        await watch.event("deleted", "file")


async def test_a_watch_sees_both_ends_of_a_move(box: Box) -> None:
    await box.sh("mkdir -p moves/a moves/b; touch moves/a/f")
    async with Watch(box, "moves") as watch:
        await box.channel.rename("moves/a/f", "moves/b/g")
        left = await watch.event("moved_from", "a/f")
        came = await watch.event("moved_to", "b/g")
        assert left.cookie == came.cookie != 0


async def test_a_watch_follows_into_new_directories(box: Box) -> None:
    await box.channel.mkdir("growing")
    async with Watch(box, "growing") as watch:
        await box.sh("mkdir -p growing/x/y/z; touch growing/x/y/z/leaf")
        await watch.event("created", "x")
        await watch.event("created", "x/y/z/leaf")
        await box.sh("mv growing/x growing/w; touch growing/w/y/later")
        await watch.event("created", "w/y/later")


async def test_a_watch_of_one_level_sees_one_level(box: Box) -> None:
    await box.channel.mkdir("flat/sub")
    async with Watch(box, "flat", recursive=False) as watch:
        await box.channel.write("flat/sub/unseen", b"")
        await box.channel.write("flat/seen", b"")
        await watch.event("created", "seen")
        assert "sub/unseen" not in {event.path for event in watch.seen}


async def test_a_watch_tells_odd_names_as_they_are(box: Box) -> None:
    await box.channel.mkdir("odd-watch")
    async with Watch(box, "odd-watch") as watch:
        for name in ODD_NAMES.values():
            await box.channel.write(f"odd-watch/{name}", b"")
            await watch.event("created", name)


async def test_a_watch_ends_with_its_caller(box: Box) -> None:
    await box.channel.mkdir("left-alone")
    async with Watch(box, "left-alone"):
        assert [info.name for info in await box.channel.processes()] == ["watch"]
    assert [info for info in await box.channel.processes() if info.running] == []


async def test_several_watches_see_the_same(box: Box) -> None:
    await box.channel.mkdir("shared-watch")
    async with Watch(box, "shared-watch") as one, Watch(box, "shared-watch") as two:
        await box.channel.write("shared-watch/file", b"")
        await one.event("created", "file")
        await two.event("created", "file")


async def test_work_on_files_and_programs_go_on_side_by_side(box: Box) -> None:
    process = await box.start("sh", "-c", "read x; echo done", stdin=True)
    await files.untar(box.channel, "beside", pieces(archive(("big", bytes(BIG)))))
    assert len(await listed(box.channel, "beside")) == 1
    await process.write(b"\n")
    await expect(process, b"done")
