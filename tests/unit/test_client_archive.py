"""Local files to tar and back; and tars that are out for harm."""

from __future__ import annotations

import errno
import io
import os
import random
import subprocess
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.client import archive as client_archive
from skerry.client.archive import LEVELS_MAX, Notes, is_contents, pack
from skerry.errors import LimitReached, PlatformError
from skerry.models import LeftOut
from tests import support


def tar(*members: tarfile.TarInfo | tuple[str, bytes]) -> io.BytesIO:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member in members:
            if isinstance(member, tuple):
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                archive.addfile(info, io.BytesIO(member[1]))
            else:
                archive.addfile(member, io.BytesIO(bytes(member.size)))
    buffer.seek(0)
    return buffer


def unpack(stream: IO[bytes], local: str, contents: bool = False) -> list[str]:
    """The names that were left out."""
    return [each.path for each in client_archive.unpack(stream, local, contents)]


def packed(local: Path, name: str) -> bytes:
    left_out = Notes()
    data = b"".join(pack(str(local), name, left_out))
    assert left_out == []
    return data


def special(name: str, kind: bytes, link: str = "", **values: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    for key, value in values.items():
        setattr(info, key, value)
    return info


def tree(root: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        found[name] = (
            os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        )
    return found


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Something that must stay as it is."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_bytes(b"precious")
    return tmp_path / "outside"


def untouched(outside: Path) -> bool:
    return tree(outside) == {"file": b"precious"}


def test_round_trip(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "a" / ("deep" * 30) / ("deeper" * 30)).mkdir(parents=True)
    (source / "a" / ("deep" * 30) / ("deeper" * 30) / "f").write_bytes(b"x" * 300_000)
    (source / "empty").write_bytes(b"")
    (source / "link").symlink_to("a")
    (source / "tool").write_bytes(b"#!")
    (source / "tool").chmod(0o755)
    Path(os.fsdecode(os.fsencode(source) + b"/odd\xff\n\x1b")).write_bytes(b"odd")
    os.mkfifo(source / "fifo")
    left_out = Notes()
    data = io.BytesIO(b"".join(pack(str(source), "source", left_out)))
    assert left_out == [LeftOut("source/fifo", "not a file, directory or link")]
    assert unpack(data, str(tmp_path / "target")) == []
    os.unlink(source / "fifo")
    assert tree(tmp_path / "target") == tree(source)
    assert (tmp_path / "target" / "tool").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "target" / "tool").stat().st_mtime == int((source / "tool").stat().st_mtime)


def test_one_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"new")
    (tmp_path / "g").write_bytes(b"old and longer")
    assert unpack(io.BytesIO(packed(tmp_path / "f", "f")), str(tmp_path / "g")) == []
    assert (tmp_path / "g").read_bytes() == b"new"


def test_contents(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "f").write_bytes(b"1")
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "kept").write_bytes(b"2")
    assert unpack(io.BytesIO(packed(tmp_path / "s", ".")), str(tmp_path / "t"), contents=True) == []
    assert tree(tmp_path / "t") == {"f": b"1", "kept": b"2"}
    assert [is_contents(path) for path in ("", ".", "/", "a/.", "a/..", "..", "./")] == [True] * 7
    assert [is_contents(path) for path in ("a", "a/", "/a", "a/.b", "...", "a/./")] == [False] * 5 + [True]


def test_a_file_that_changes_its_size_meanwhile(tmp_path: Path) -> None:
    for size in (0, 10, 700_000):
        (tmp_path / "f").write_bytes(b"x" * 400_000)
        stream = pack(str(tmp_path / "f"), "f", Notes())
        data = next(stream)
        os.truncate(tmp_path / "f", size)
        data += b"".join(stream)
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            assert archive.getmember("f").size == 400_000


@pytest.mark.parametrize("name", ["/abs", "x/../../y", "../y", "x/..", "/../y"])
def test_names_that_lead_out(tmp_path: Path, outside: Path, name: str) -> None:
    assert unpack(tar((name, b"evil")), str(tmp_path / "in")) == [name]
    assert not (tmp_path / "in").exists()
    assert untouched(outside)


@pytest.mark.parametrize(
    "target",
    [
        "/etc/passwd",
        "../outside/file",
        "../../outside/file",
        "sub/../../outside",
        "s/../../outside",
        "..",
        "./../x",
    ],
)
def test_links_that_lead_out(tmp_path: Path, outside: Path, target: str) -> None:
    archive = tar(
        special("x/s", tarfile.SYMTYPE, "."), special("x/l", tarfile.SYMTYPE, target), ("x/ok", b"1")
    )
    assert unpack(archive, str(tmp_path / "in")) == ["x/l"]
    assert tree(tmp_path / "in") == {"ok": b"1", "s": "."}


@pytest.mark.parametrize("target", ["ok", "./ok", "d/ok", "../in/ok"])
def test_links_that_stay(tmp_path: Path, target: str) -> None:
    archive = tar(special("x/d/l", tarfile.SYMTYPE, target))
    assert unpack(archive, str(tmp_path / "in")) == []
    assert os.readlink(tmp_path / "in" / "d" / "l") == target


def test_a_link_is_never_written_through(tmp_path: Path, outside: Path) -> None:
    """Not one from the archive, and not one that was there before."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "old").symlink_to(outside)
    (tmp_path / "in" / "oldfile").symlink_to(outside / "file")
    archive = tar(
        special("x/new", tarfile.SYMTYPE, "old"),
        ("x/new/file", b"evil"),
        ("x/old/file", b"evil"),
        ("x/oldfile", b"fine"),
        special("x/old", tarfile.DIRTYPE),
    )
    assert unpack(archive, str(tmp_path / "in")) == ["x/new/file", "x/old/file", "x/old"]
    assert untouched(outside)
    assert (tmp_path / "in" / "oldfile").read_bytes() == b"fine"
    assert not (tmp_path / "in" / "oldfile").is_symlink()


def test_hard_links(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "mine").symlink_to(outside / "file")
    archive = tar(
        ("x/a", b"1"),
        special("x/d/b", tarfile.LNKTYPE, "x/a"),
        special("x/c", tarfile.LNKTYPE, "../outside/file"),
        special("x/e", tarfile.LNKTYPE, "x/mine"),
        special("x/a", tarfile.LNKTYPE, "x/a"),
        ("x/d/b", b"2"),
    )
    assert unpack(archive, str(tmp_path / "in")) == ["x/c", "x/e", "x/a"]
    assert tree(tmp_path / "in") == {"a": b"1", "d": None, "d/b": b"2", "mine": str(outside / "file")}
    assert untouched(outside)


def test_devices_are_left_out(tmp_path: Path) -> None:
    archive = tar(
        special("x/null", tarfile.CHRTYPE, devmajor=1, devminor=3),
        special("x/sda", tarfile.BLKTYPE, devmajor=8),
        special("x/fifo", tarfile.FIFOTYPE),
        ("x/ok", b"1"),
    )
    assert unpack(archive, str(tmp_path / "in")) == ["x/null", "x/sda", "x/fifo"]
    assert tree(tmp_path / "in") == {"ok": b"1"}


def with_holes(path: Path, size: int, *pieces: tuple[int, bytes]) -> None:
    with open(path, "wb") as file:
        file.truncate(size)
        for offset, data in pieces:
            file.seek(offset)
            file.write(data)


@pytest.mark.parametrize(
    ("size", "offsets"),
    [
        (1 << 30, [0]),
        (1 << 30, [1 << 29]),
        (1 << 30, [(1 << 30) - 4096]),
        (3 << 40, [0, 5 << 20, 1 << 40, (3 << 40) - 9000]),
        ((1 << 30) + 1, []),
        (70_000, [0]),
    ],
)
def test_holes_stay_holes(tmp_path: Path, size: int, offsets: list[int]) -> None:
    pieces = [(offset, random.Random(offset).randbytes(4096)) for offset in offsets]
    with_holes(tmp_path / "f", size, *pieces)
    data = packed(tmp_path / "f", "f")
    assert len(data) < 10_000 + 4096 * len(offsets)
    assert unpack(io.BytesIO(data), str(tmp_path / "g")) == []
    found = (tmp_path / "g").stat()
    assert found.st_size == size
    assert found.st_blocks * 512 <= 4096 * (2 * len(offsets) + 1)
    with open(tmp_path / "g", "rb") as file:
        for offset, piece in pieces:
            file.seek(offset)
            assert file.read(4096) == piece


def test_a_sparse_file_that_cannot_be_here_is_left_out(tmp_path: Path) -> None:
    """The first is more than an offset can be, the second more than this file system takes."""
    for size in (9_999_999_999_999_999_999, (1 << 63) - 1):
        info = tarfile.TarInfo("x/big")
        info.pax_headers = {
            "GNU.sparse.map": "0,1",
            "GNU.sparse.size": str(size),
            "GNU.sparse.numblocks": "1",
        }
        info.size = 1
        (left_out,) = client_archive.unpack(tar(info, ("x/ok", b"1")), str(tmp_path / "in"))
        assert left_out.path == "x/big"
        assert left_out.reason.startswith("cannot be written here")
        assert tree(tmp_path / "in") == {"ok": b"1"}


@pytest.mark.parametrize("numbers", ["0,1,0,1", "5,1", "0,9223372036854775807", "2,1,1,1"])
def test_a_map_that_does_not_fit_is_damage(tmp_path: Path, numbers: str) -> None:
    info = tarfile.TarInfo("x/f")
    info.pax_headers = {"GNU.sparse.map": numbers, "GNU.sparse.size": "4", "GNU.sparse.numblocks": "1"}
    info.size = 1
    with pytest.raises(PlatformError, match="damaged"):
        unpack(tar(info), str(tmp_path / "in"))


def skipped(*records: tuple[str, str]) -> io.BytesIO:
    """An archive with a list at its end, as the guest writes it."""
    data = tar(("x/ok", b"1")).getvalue()[: 2 * 512]
    body = b""
    for key, value in records:
        record = f" comment={key} {value}\n".encode(errors="surrogateescape")
        length = next(n for n in range(len(record), len(record) + 9) if n == len(record) + len(str(n)))
        body += str(length).encode() + record
    header = special("h", tarfile.XHDTYPE, size=len(body)).tobuf()
    directory = special("x", tarfile.DIRTYPE).tobuf()
    return io.BytesIO(data + header + body + bytes(-len(body) % 512) + directory + bytes(1024))


def test_what_the_guest_left_out_is_told(tmp_path: Path) -> None:
    archive = skipped(
        ("SKERRY.skipped", f"{errno.EACCES} x/secret\nfile"),
        ("SKERRY.skipped", f"{errno.ENOTSUP} x/fifo\udcff"),
        ("SKERRY.skipped.more", "12"),
    )
    assert client_archive.unpack(archive, str(tmp_path / "in")) == [
        LeftOut("x/secret\nfile", "Permission denied"),
        LeftOut("x/fifo\udcff", "not a file, directory or link"),
        LeftOut("", "12 more"),
    ]
    assert tree(tmp_path / "in") == {"ok": b"1"}


@pytest.mark.parametrize("value", ["x", "", "-1 x", "9" * 30 + " x"])
def test_a_list_that_makes_no_sense_is_damage(tmp_path: Path, value: str) -> None:
    with pytest.raises(PlatformError, match="damaged"):
        unpack(skipped(("SKERRY.skipped", value)), str(tmp_path / "in"))


def test_a_long_list_is_counted(tmp_path: Path) -> None:
    archive = tar(*(special(f"x/{number}", tarfile.FIFOTYPE) for number in range(10_050)))
    left_out = client_archive.unpack(archive, str(tmp_path / "in"))
    assert len(left_out) == 10_001
    assert left_out[-1] == LeftOut("", "50 more")


def test_a_deep_tree_takes_time_in_proportion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in directories that are opened: from the top each time it would be 540,000 for this tree."""
    opened = 0

    def counting(*args: Any, **options: Any) -> int:
        nonlocal opened
        opened += 1
        return real(*args, **options)

    depth, real = 600, os.open
    path = "x"
    members: list[tarfile.TarInfo | tuple[str, bytes]] = []
    for _ in range(depth):
        path += "/d"
        members += [special(path, tarfile.DIRTYPE), (f"{path}/f", b"1")]
    # On the way back up as well: files of a directory may come after what is below it.
    for number in range(depth, 0, -1):
        members.append(("x" + "/d" * number + "/g", b"2"))
    monkeypatch.setattr(os, "open", counting)
    assert unpack(tar(*members), str(tmp_path / "in")) == []
    files = 2 * depth
    assert opened < files + 40 * depth
    opened = 0
    left_out = Notes()
    data = b"".join(pack(str(tmp_path / "in"), "in", left_out))
    assert left_out == []
    assert opened < files + 40 * depth
    monkeypatch.undo()
    assert unpack(io.BytesIO(data), str(tmp_path / "back")) == []
    for name in ("in", "back"):
        remove_deep(tmp_path, name)


def remove_deep(above: Path, name: str) -> None:
    """Python's own removal runs into its limit of recursion, and into that of paths."""
    subprocess.run(["rm", "-rf", name], cwd=above, check=True)


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (left_out,) = client_archive.unpack(tar(("x" + "/d" * (LEVELS_MAX + 1), b"1")), str(tmp_path / "in"))
    assert left_out.reason == f"more than {LEVELS_MAX} levels"
    monkeypatch.setattr(client_archive, "ENTRIES_MAX", 5)
    with pytest.raises(LimitReached, match="more than 5 names"):
        unpack(tar(*((f"x/{number}", b"") for number in range(6))), str(tmp_path / "in"))


def test_what_cannot_be_read_here_is_left_out_of_an_upload(as_nobody: support.Nobody) -> None:
    script = (
        "import os, sys\nfrom skerry.client.archive import Notes, pack\n"
        "os.mkdir('s'); open('s/ok', 'w').write('1'); open('s/secret', 'w').write('2')\n"
        "os.chmod('s/secret', 0); os.mkdir('s/closed', 0)\n"
        "notes = Notes(); data = b''.join(pack('s', '.', notes))\n"
        "os.chmod('s/closed', 0o700)\n"
        "print(b'ok' in data, sorted(note.path + ': ' + note.reason for note in notes))"
    )
    done = as_nobody.run([as_nobody.python, "-c", script])
    assert done.stdout == "True ['./closed: Permission denied', './secret: Permission denied']\n", done.stderr


def test_modes_are_tamed(tmp_path: Path) -> None:
    archive = tar(
        special("x", tarfile.DIRTYPE, mode=0o7777),
        special("x/f", tarfile.REGTYPE, mode=0o7777),
        special("x/g", tarfile.REGTYPE, mode=0),
        special("x/d", tarfile.DIRTYPE, mode=0),
    )
    assert unpack(archive, str(tmp_path / "in")) == []
    modes = {name: (tmp_path / "in" / name).stat().st_mode & 0o7777 for name in (".", "f", "g", "d")}
    assert modes == {".": 0o755, "f": 0o755, "g": 0o600, "d": 0o700}


def test_a_directory_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "in" / "d").mkdir(parents=True)
    (left_out,) = client_archive.unpack(tar(("x/d", b""), ("x/ok", b"1")), str(tmp_path / "in"))
    assert left_out == LeftOut("x/d", "cannot be written here: Is a directory")
    assert tree(tmp_path / "in") == {"d": None, "ok": b"1"}
    with pytest.raises(IsADirectoryError):
        unpack(tar(("x", b"")), str(tmp_path / "in"))


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_header_of_a_gigabyte(tmp_path: Path, kind: bytes) -> None:
    """It would have been read into memory."""
    header = special("x", kind, size=1 << 30).tobuf()

    class Endless(io.RawIOBase):
        read_so_far = 0

        def read(self, size: int = -1) -> bytes:
            self.read_so_far += size
            assert self.read_so_far < 1 << 22
            data = header if self.read_so_far == size else b""
            return data + b"x" * (size - len(data))

    with pytest.raises(PlatformError, match="extended header of"):
        unpack(Endless(), str(tmp_path / "in"))  # type: ignore[arg-type]


def test_a_negative_size(tmp_path: Path) -> None:
    header = bytearray(tarfile.TarInfo("x/f").tobuf())
    header[124:136] = b"\xff" * 12
    header[148:156] = b"%06o\0 " % tarfile.calc_chksums(header)[0]  # type: ignore[attr-defined]
    with pytest.raises(PlatformError, match="negative size"):
        unpack(io.BytesIO(bytes(header) + bytes(10240)), str(tmp_path / "in"))


@settings(max_examples=200)
@given(data=st.data())
def test_damage_is_an_error_or_nothing(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    place = tmp_path_factory.mktemp("t")
    archive = bytearray(
        tar(("x/a", b"1" * 600), special("x/l", tarfile.SYMTYPE, "a"), ("x/" + "n" * 150, b"2")).getvalue()
    )
    for _ in range(data.draw(st.integers(1, 8))):
        archive[data.draw(st.integers(0, 6000))] = data.draw(st.integers(0, 255))
    with suppress(PlatformError, OSError):
        unpack(io.BytesIO(bytes(archive[: data.draw(st.integers(0, len(archive)))])), str(place / "in"))
    assert sorted(os.listdir(place)) in ([], ["in"])
