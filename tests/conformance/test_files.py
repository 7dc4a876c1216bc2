"""Files, one short operation at a time: as the workload's user, in the instance's own view."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from skerry.errors import (
    DiskFull,
    FileConflict,
    FileDenied,
    FileMissing,
    InvalidRequest,
    PathOutside,
    SkerryError,
)
from skerry.guest.channel import READ_MAX, WRITE_MAX
from skerry.policy import MIB
from tests.conformance.harness import BIG, LIMITS, Box, Site, needs

ODD_NAMES = {
    "spaces": " a b ",
    "newline": "new\nline",
    "escape": "\x1b[31mred\x07",
    "not-utf-8": "\udcff\udcfe caf\udce9",
    "unicode": "grüße-日本-\U0001f3dd",
    "flag": "-rf",
    "quotes": "'\"`$(id)\\",
    "longest": "x" * 255,
    "dots": "...",
    "percent": "%2e%2e%2f",
    "backslash": "..\\..\\etc",
}
OUTSIDE = {
    "up": "..",
    "up-and-up": "../../../../etc/passwd",
    "up-within": "a/../../b",
    "absolute": "/etc/passwd",
    "root": "/",
    "device": "/dev/null",
    "proc": "/proc/self/environ",
}


def operations(box: Box, path: str) -> dict[str, object]:
    """Every operation on one path."""
    channel = box.channel
    return {
        "read": channel.read(path),
        "write": channel.write(path, b"x"),
        "write at": channel.write(path, b"x", 5),
        "stat": channel.stat(path),
        "mkdir": channel.mkdir(path),
        "rename from": channel.rename(path, "somewhere"),
        "rename to": channel.rename("there", path),
        "remove": channel.remove(path),
    }


async def outcomes(box: Box, path: str) -> dict[str, type[BaseException] | None]:
    """How each operation on the path ends: the class of its error, or None. All of them at once."""
    calls = operations(box, path)
    results = await asyncio.gather(*calls.values(), return_exceptions=True)  # type: ignore[call-overload]
    return {
        name: type(r) if isinstance(r, BaseException) else None
        for name, r in zip(calls, results, strict=True)
    }


async def test_what_was_written_is_read(box: Box) -> None:
    data = bytes(range(256)) * 100
    await box.channel.write("data", data)
    assert await box.channel.read("data") == data
    assert (await box.run("cat", "data")).stdout == data


async def test_what_a_program_wrote_is_read(box: Box) -> None:
    await box.sh("printf 'by a program' >made")
    assert await box.channel.read("made") == b"by a program"


async def test_writing_again_replaces(box: Box) -> None:
    await box.channel.write("again", b"long content")
    await box.channel.write("again", b"short")
    assert await box.channel.read("again") == b"short"
    await box.channel.write("again", b"")
    assert await box.channel.read("again") == b""


async def test_reading_takes_an_offset_and_a_length(box: Box) -> None:
    await box.channel.write("digits", b"0123456789")
    assert await box.channel.read("digits", 3) == b"3456789"
    assert await box.channel.read("digits", 3, 4) == b"3456"
    assert await box.channel.read("digits", 8, 100) == b"89"
    assert await box.channel.read("digits", 10) == b""
    assert await box.channel.read("digits", 1 << 40) == b""
    assert await box.channel.read("digits", 0, 0) == b""


async def test_writing_takes_an_offset(box: Box) -> None:
    await box.channel.write("parts", b"0123456789")
    await box.channel.write("parts", b"XY", 4)
    assert await box.channel.read("parts") == b"0123XY6789"
    await box.channel.write("parts", b"end", 12)
    assert await box.channel.read("parts") == b"0123XY6789\0\0end"
    await box.channel.write("fresh", b"at", 2)
    assert await box.channel.read("fresh") == b"\0\0at"


async def test_a_large_file_passes_in_pieces(box: Box) -> None:
    data = random.Random(3).randbytes(BIG)
    for at in range(0, BIG, WRITE_MAX):
        await box.channel.write("large", data[at : at + WRITE_MAX], None if at == 0 else at)
    assert await box.content("large") == data
    assert len(await box.channel.read("large", 0, 1 << 30)) == READ_MAX
    assert (await box.channel.stat("large")).size == BIG


async def test_many_operations_at_once(box: Box) -> None:
    names = [f"many/{n}" for n in range(200)]
    await asyncio.gather(*(box.channel.write(name, name.encode()) for name in names))
    assert await asyncio.gather(*(box.channel.read(name) for name in names)) == [n.encode() for n in names]


async def test_parents_are_made(box: Box) -> None:
    await box.channel.write("parents/for/file", b"x")
    await box.channel.mkdir("also/made")
    await box.channel.mkdir("also/made")
    await box.channel.rename("parents/for/file", "moved/to/file")
    assert await box.channel.read("moved/to/file") == b"x"


async def test_paths_may_be_absolute_below_the_workspace(box: Box) -> None:
    await box.channel.write(box.path("absolute/file"), b"x")
    assert await box.channel.read("absolute/file") == b"x"
    assert await box.channel.read("./absolute//./other/../file") == b"x"
    assert (await box.channel.stat(box.instance.workspace_path)).type == "directory"
    assert (await box.channel.stat(".")).type == "directory"


@needs("own_root")
async def test_temporary_files_are_within_reach(box: Box) -> None:
    await box.channel.write("/tmp/some/where", b"x")
    assert (await box.run("cat", "/tmp/some/where")).stdout == b"x"
    assert (await box.channel.stat("/tmp")).type == "directory"


@needs("own_root")
async def test_moving_between_workspace_and_tmp_is_refused_in_plain_words(box: Box) -> None:
    await box.channel.write("/tmp/from", b"x")
    with pytest.raises(FileConflict, match="/tmp/from"):
        await box.channel.rename("/tmp/from", "to")
    assert await box.channel.read("/tmp/from") == b"x"


@pytest.mark.parametrize("name", ODD_NAMES.values(), ids=ODD_NAMES)
async def test_odd_names_are_names_like_any_other(box: Box, name: str) -> None:
    await box.channel.write(f"odd/{name}", b"content")
    assert await box.channel.read(f"odd/{name}") == b"content"
    assert (await box.channel.stat(f"odd/{name}")).name == name
    assert (await box.run("cat", f"odd/{name}")).stdout == b"content"
    await box.channel.rename(f"odd/{name}", f"odd2/{name}")
    await box.channel.remove(f"odd2/{name}")
    with pytest.raises(FileMissing):
        await box.channel.stat(f"odd2/{name}")


async def test_deep_paths_are_paths_like_any_other(box: Box) -> None:
    path = "/".join(["deep"] * 300)
    await box.channel.mkdir(path)
    await box.channel.write(f"{path}/file", b"x")
    assert await box.channel.read(f"{path}/file") == b"x"
    assert (await box.channel.stat(path)).type == "directory"


async def test_files_are_described(box: Box) -> None:
    before = time.time()
    await box.sh("mkdir d; printf 12345 >d/f; chmod 4750 d/f; ln -s 'no where' d/l; mkfifo d/p; chmod 1777 d")
    file, link, fifo, folder = [await box.channel.stat(path) for path in ("d/f", "d/l", "d/p", "d")]
    assert (file.type, file.size, file.mode & 0o777, file.target) == ("file", 5, 0o750, "")
    assert (link.type, link.target) == ("symlink", "no where")
    assert fifo.type == "fifo"
    assert (folder.type, folder.mode) == ("directory", 0o1777)
    assert file.name == "f"
    assert abs(file.modified_at - before) < 60
    owner = int((await box.run("id", "-u")).stdout)
    assert {entry.uid for entry in (file, link, fifo, folder)} == {owner}


async def test_files_made_here_belong_to_the_workload(box: Box) -> None:
    await box.channel.write("owned/file", b"")
    assert (await box.sh("test -O owned && test -O owned/file && echo mine")).stdout == b"mine\n"
    assert (await box.channel.stat("owned/file")).mode == 0o644
    assert (await box.channel.stat("owned")).mode == 0o755


async def test_renaming_replaces_a_file_and_spares_what_is_in_the_way(box: Box) -> None:
    await box.channel.write("r/a", b"a")
    await box.channel.write("r/b", b"b")
    await box.channel.rename("r/a", "r/b")
    assert await box.channel.read("r/b") == b"a"
    await box.channel.write("r/dir/x", b"")
    await box.channel.mkdir("r/empty")
    for source, target in (
        ("r/b", "r/dir"),
        ("r/empty", "r/dir"),
        ("r/dir", "r/b"),
        ("r/dir", "r/dir/inside"),
    ):
        with pytest.raises((FileConflict, InvalidRequest)):
            await box.channel.rename(source, target)


async def test_removing(box: Box) -> None:
    await box.sh("mkdir -p rm/empty rm/full/x; touch rm/file; ln -s full rm/link")
    for name in ("empty", "file", "link"):
        await box.channel.remove(f"rm/{name}")
    with pytest.raises(FileConflict, match="not empty"):
        await box.channel.remove("rm/full")
    with pytest.raises(FileMissing):
        await box.channel.remove("rm/file")
    assert (await box.sh("ls rm")).stdout == b"full\n"


async def test_symlinks_within_are_followed_and_removed_as_themselves(box: Box) -> None:
    await box.sh(
        "mkdir -p links/real; printf x >links/real/file; ln -s real links/dir; ln -s dir/file links/file"
    )
    assert await box.channel.read("links/file") == b"x"
    await box.channel.write("links/dir/new", b"n")
    assert await box.channel.read("links/real/new") == b"n"
    await box.channel.remove("links/file")
    assert await box.channel.read("links/real/file") == b"x"


async def test_what_is_missing_is_missing(box: Box) -> None:
    assert await outcomes(box, "missing/file") == {
        "read": FileMissing,
        "write": None,
        "write at": None,
        "stat": None,
        "mkdir": FileConflict,
        "rename from": None,
        "rename to": FileMissing,
        "remove": FileMissing,
    }
    for call in (
        box.channel.read("nothing"),
        box.channel.stat("nothing/at/all"),
        box.channel.rename("nothing", "x"),
    ):
        with pytest.raises(FileMissing, match="nothing"):
            await call


async def test_a_directory_is_not_a_file(box: Box) -> None:
    await box.channel.write("dir/inside", b"")
    for call in (box.channel.read("dir"), box.channel.write("dir", b""), box.channel.write("dir", b"", 1)):
        with pytest.raises(FileConflict, match="dir"):
            await call


async def test_a_file_is_not_a_directory(box: Box) -> None:
    await box.channel.write("plain", b"")
    for call in (
        box.channel.read("plain/x"),
        box.channel.write("plain/x", b""),
        box.channel.stat("plain/x"),
        box.channel.mkdir("plain/x"),
        box.channel.mkdir("plain"),
        box.channel.remove("plain/x"),
    ):
        with pytest.raises(FileConflict):
            await call


@pytest.mark.parametrize("path", OUTSIDE.values(), ids=OUTSIDE)
async def test_paths_that_lead_outside_are_refused(box: Box, path: str) -> None:
    await box.channel.write("there", b"")
    assert set((await outcomes(box, path)).values()) == {PathOutside}
    await box.channel.stat("there")


@pytest.mark.parametrize("target", ["/etc", "../../../../../../etc", "/proc/self/root/etc", "/"])
async def test_symlinks_that_lead_outside_are_not_followed(box: Box, target: str) -> None:
    await box.channel.write("there", b"")
    await box.run("rm", "-f", "way-out")
    await box.run("ln", "-s", target, "way-out")
    for name, outcome in (await outcomes(box, "way-out/hostname")).items():
        assert outcome is PathOutside, name
    assert (await box.channel.stat("way-out")).type == "symlink"


async def test_a_symlink_to_a_file_outside_is_not_followed(box: Box) -> None:
    await box.sh("ln -sf /etc/hostname out-file; ln -sf /proc/self/exe out-magic")
    for name in ("out-file", "out-magic"):
        for call in (box.channel.read(name), box.channel.write(name, b"x")):
            with pytest.raises(PathOutside):
                await call


async def test_the_roots_themselves_are_neither_removed_nor_renamed(box: Box) -> None:
    for call in (
        box.channel.remove("."),
        box.channel.rename(".", "x"),
        box.channel.rename("there", "."),
        box.channel.write(".", b""),
    ):
        with pytest.raises((FileConflict, FileMissing)):
            await call
    await box.channel.mkdir(".")


@pytest.mark.parametrize(
    "path", ["", "a\0b", "x" * 5000, f"{'x' * 256}"], ids=["empty", "nul", "long", "long-name"]
)
async def test_what_cannot_be_a_path_is_the_callers_fault(box: Box, path: str) -> None:
    await box.channel.write("there", b"")
    for name, outcome in (await outcomes(box, path)).items():
        assert outcome is InvalidRequest, name


async def test_loops_of_symlinks_are_told(box: Box) -> None:
    await box.sh("ln -s loop2 loop1; ln -s loop1 loop2")
    for call in (box.channel.read("loop1"), box.channel.write("loop1/x", b"")):
        with pytest.raises(FileConflict):
            await call


SPECIAL = {
    "fifo": "mkfifo special",
    "fifo-with-a-reader": "mkfifo special; sh -c 'exec 0<>special; sleep 1000' & sleep 0.05",
    "socket": "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"special\")'",
}


@pytest.mark.parametrize("make", SPECIAL.values(), ids=SPECIAL)
async def test_what_is_no_file_gives_an_error_at_once(box: Box, make: str) -> None:
    await box.sh(f"rm -f special; {make}")
    for call in (
        box.channel.read("special"),
        box.channel.write("special", b"x"),
        box.channel.write("special", b"x", 0),
    ):
        with pytest.raises(FileConflict, match="not a regular file"):
            await asyncio.wait_for(call, 10)
    assert (await box.channel.stat("special")).type in ("fifo", "socket")
    await box.channel.rename("special", "renamed")
    await box.channel.remove("renamed")


@needs("plain_user")
async def test_what_is_denied_to_the_workload_is_denied(box: Box) -> None:
    await box.sh(
        "mkdir -p closed/in; echo x >closed/in/f; echo x >closed/unreadable; chmod 0 closed/unreadable closed/in"
    )
    await box.sh("mkdir -p fixed; echo x >fixed/f; chmod 555 fixed; echo x >readonly; chmod 444 readonly")
    for call in (
        box.channel.read("closed/unreadable"),
        box.channel.read("closed/in/f"),
        box.channel.write("fixed/new", b""),
        box.channel.write("readonly", b""),
        box.channel.mkdir("fixed/new"),
        box.channel.remove("fixed/f"),
        box.channel.rename("fixed/f", "elsewhere"),
    ):
        with pytest.raises(FileDenied):
            await call
    await box.sh("chmod 755 closed/in fixed")


async def test_errors_name_the_path_and_say_what_to_do(box: Box) -> None:
    with pytest.raises(SkerryError) as caught:
        await box.channel.read("no\nsuch\x1b[31m")
    assert "\n" not in caught.value.message
    assert "\x1b" not in caught.value.message
    assert "no" in caught.value.message
    with pytest.raises(PathOutside) as outside:
        await box.channel.read("/etc/passwd")
    assert outside.value.hint


@needs("own_root")
async def test_a_full_disk_is_told_and_can_be_made_empty_again(site: Site) -> None:
    limits = type(LIMITS)(memory=64 * MIB, disk=16 * MIB)
    async with site.box(limits) as box:
        enforced = {row.name: row.enforced for row in box.backend.enforced(box.id)}
        if not enforced["disk"]:
            pytest.skip("the limit of the disk does not hold here")
        writes = (box.channel.write(f"fill/{n}", bytes(WRITE_MAX)) for n in range(200))
        results = await asyncio.gather(*writes, return_exceptions=True)
        assert {type(result) for result in results} == {type(None), DiskFull}
        await box.sh("rm -r fill")
        await box.channel.write("after", b"x" * 1000)
        assert await box.channel.read("after") == b"x" * 1000
