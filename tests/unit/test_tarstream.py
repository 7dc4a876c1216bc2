"""The tar reader agrees with other programs on honest archives and refuses the rest, whatever they hold."""

from __future__ import annotations

import io
import random
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.errors import InvalidRequest
from skerry.tarstream import EXTENDED_MAX, Entry, Kind, TarReader


def header(name: bytes, size: int = 0, kind: bytes = b"0") -> bytes:
    raw = bytearray(512)
    raw[: len(name)] = name
    raw[100:107] = b"0000644"
    raw[124:135] = b"%011o" % size
    raw[156:157] = kind
    raw[257:265] = b"ustar\x0000"
    raw[148:156] = b"        "
    raw[148:155] = b"%06o\0" % sum(raw)
    return bytes(raw)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def pax(**values: bytes) -> bytes:
    body = b""
    for key, value in values.items():
        record = key.replace("_", ".").encode() + b"=" + value + b"\n"
        length = len(record) + 2
        while len(b"%d " % length + record) != length:
            length += 1
        body += b"%d " % length + record
    return header(b"pax", len(body), b"x") + padded(body)


def content(entry: Entry) -> bytes:
    data = bytearray(entry.size)
    for offset, piece in entry.chunks():
        data[offset : offset + len(piece)] = piece
    return bytes(data)


def read(data: bytes) -> list[tuple[Entry, bytes]]:
    return [(entry, content(entry)) for entry in TarReader(io.BytesIO(data))]


_NAMES = st.lists(st.text("aé\udcff. -\n", min_size=1, max_size=60), min_size=1, max_size=8).map("/".join)


@given(
    members=st.lists(
        st.tuples(
            _NAMES,
            st.binary(max_size=1500),
            st.integers(0, 0o777),
            st.integers(0, 2**40),
            st.integers(-(2**40), 2**40),
        ),
        max_size=5,
    ),
    form=st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_agrees_with_the_standard_library(members: list[tuple[str, bytes, int, int, int]], form: int) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form, errors="surrogateescape") as tar:
        for name, data, mode, uid, mtime in members:
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.uid, info.mtime = len(data), mode, uid, mtime
            tar.addfile(info, io.BytesIO(data))
    out.seek(0)
    with tarfile.open(fileobj=io.BytesIO(out.getvalue()), errors="surrogateescape") as tar:
        expected = [
            (m.name.encode(errors="surrogateescape"), tar.extractfile(m).read(), m.mode, m.uid, m.mtime)  # type: ignore[union-attr]
            for m in tar.getmembers()
        ]
    got = [
        (e.name.rstrip(b"/"), data, e.mode, e.uid, e.mtime)
        for e, data in read(out.getvalue())
        if e.kind is Kind.FILE
    ]
    wanted = [
        row for row, (entry, _) in zip(expected, read(out.getvalue()), strict=True) if entry.kind is Kind.FILE
    ]
    assert got == wanted


def test_kinds_and_links() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for kind, name in (
            (tarfile.DIRTYPE, "d"),
            (tarfile.SYMTYPE, "s"),
            (tarfile.LNKTYPE, "h"),
            (tarfile.FIFOTYPE, "f"),
            (tarfile.CHRTYPE, "c"),
            (tarfile.BLKTYPE, "b"),
        ):
            info = tarfile.TarInfo(name)
            info.type = kind
            info.linkname = "x" * 150 if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
            tar.addfile(info)
    entries = [entry for entry, _ in read(out.getvalue())]
    assert [e.kind.value for e in entries] == [
        "directory",
        "symlink",
        "hardlink",
        "special",
        "special",
        "special",
    ]
    assert entries[1].link == entries[2].link == b"x" * 150


@pytest.mark.skipif(shutil.which("tar") is None, reason="no tar program")
@pytest.mark.parametrize(
    "options",
    [["--format=gnu"], *(["--format=pax", f"--sparse-version={v}"] for v in ("0.0", "0.1", "1.0"))],
    ids=lambda options: options[-1],
)
@pytest.mark.parametrize("holes", [1, 100])
def test_sparse_files_of_the_tar_program(tmp_path: Path, options: list[str], holes: int) -> None:
    with open(tmp_path / "sparse", "wb") as file:
        for i in range(holes):
            file.seek(i * 1_000_000 + 500_000)
            file.write(b"piece %d" % i)
        file.truncate(holes * 1_000_000)
    expected = (tmp_path / "sparse").read_bytes()
    (tmp_path / "after").write_text("next")
    subprocess.run(["tar", "-cSf", "out.tar", *options, "sparse", "after"], cwd=tmp_path, check=True)
    data = (tmp_path / "out.tar").read_bytes()
    assert len(data) < len(expected) or holes == 1
    got = {entry.name: (entry, body) for entry, body in read(data)}
    assert got[b"sparse"][1] == expected
    assert len(got[b"sparse"][0].segments) >= holes
    assert got[b"after"][1] == b"next"


def test_old_directories_end_in_a_slash() -> None:
    assert read(header(b"dir/", 0, b"\0") + bytes(1024))[0][0].kind is Kind.DIRECTORY


def test_an_archive_without_end_marker_is_read() -> None:
    assert [e.name for e, _ in read(header(b"a", 3) + padded(b"abc"))] == [b"a"]


def test_global_and_emptied_values() -> None:
    data = pax(comment=b"hi").replace(b"pax", b"pax", 1)
    glob = bytearray(pax(path=b"everywhere"))
    glob[156:157] = b"g"
    glob[148:156] = b"        "
    glob[148:155] = b"%06o\0" % sum(glob[:512])
    entries = read(bytes(glob) + data + header(b"own") + pax(path=b"") + header(b"own") + bytes(1024))
    assert [entry.name for entry, _ in entries] == [b"everywhere", b"own"]


_GOOD = header(b"a", 3) + padded(b"abc")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a tar archive"),
        (b"hello", "not a tar archive"),
        (b"hello" * 200, "not a tar archive"),
        (_GOOD[:700], "cut short"),
        (_GOOD + b"x" * 512, "wrong header checksum"),
        (_GOOD + b"x" * 100, "cut short"),
        (header(b"pax", EXTENDED_MAX + 1, b"x"), "extended header of"),
        (header(b"long", 1 << 33, b"L"), "extended header of"),
        (header(b"pax", 600, b"x") + padded(b"1" * 600), "cannot be read|number"),
        (header(b"pax", 9, b"x") + padded(b"99 a=b\n  ") + _GOOD, "cannot be read"),
        (header(b"pax", 7, b"x") + padded(b"0 a=b\n ") + _GOOD, "cannot be read"),
        (header(b"pax", 7, b"x") + padded(b"7 a b\n ") + _GOOD, "cannot be read"),
        (header(b"pax", 11, b"x") + padded(b"6 a=b\nrest\n") + _GOOD, "cannot be read"),
        (header(b"pax", 15, b"x") + padded(b"6 a=b\n0 x=y\n...") + _GOOD, "cannot be read"),
        (pax(size=b"-1") + _GOOD, "number that is none"),
        (pax(size=b"9" * 30) + _GOOD, "number that is none"),
        (pax(mtime=b"nan") + _GOOD, "time that is none"),
        (pax(mtime=b"1.1.1") + _GOOD, "time that is none"),
        (header(b"x", 0, b"Z"), "unknown type"),
        (pax(GNU_sparse_map=b"0,1,0,1", GNU_sparse_size=b"9") + header(b"a", 2) + padded(b"ab"), "overlap"),
        (pax(GNU_sparse_map=b"8,3", GNU_sparse_size=b"9") + _GOOD, "does not fit"),
        (pax(GNU_sparse_map=b"0,2", GNU_sparse_size=b"9") + _GOOD, "does not fit"),
        (pax(GNU_sparse_map=b"0,3") + _GOOD, "does not fit"),
        (pax(GNU_sparse_major=b"1", GNU_sparse_realsize=b"9") + _GOOD, "more than its member holds"),
        (
            pax(GNU_sparse_major=b"1", GNU_sparse_realsize=b"9") + header(b"a", 512) + padded(b"99999999\n"),
            "more than 262144 pieces",
        ),
    ],
)
def test_unsound_archives_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read(data)


class Endless:
    """Hands out an archive's beginning and then zeros without end, counting."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.given = 0
        self.largest = 0

    def read(self, size: int, /) -> bytes:
        self.largest = max(self.largest, size)
        piece, self.data = self.data[:size], self.data[size:]
        piece += bytes(size - len(piece))
        self.given += size
        assert self.given < 64 << 20, "read without end"
        return piece


def test_a_huge_header_is_not_taken_into_memory() -> None:
    stream = Endless(header(b"pax", 8 << 30, b"x"))
    with pytest.raises(InvalidRequest):
        list(TarReader(stream))
    assert stream.given < 1 << 20


@settings(max_examples=300)
@given(st.integers(0, 2**32))
def test_mutated_archives_are_read_or_refused(seed: int) -> None:
    chance = random.Random(seed)
    sparse = header(b"s", 515) + padded(b"1\n0\n3\n") + padded(b"abc")
    data = bytearray(
        pax(path=b"name", mtime=b"1.5")
        + _GOOD
        + pax(GNU_sparse_major=b"1", GNU_sparse_realsize=b"9")
        + sparse
        + header(b"L", 5, b"L")
        + padded(b"long\0")
        + _GOOD
        + header(b"old", 0, b"S")
        + bytes(1024)
    )
    for _ in range(chance.randrange(1, 6)):
        at = chance.randrange(len(data))
        data[at] = chance.randrange(256)
        block = at - at % 512
        if chance.random() < 0.9:  # with a good checksum the change gets further
            data[block + 148 : block + 156] = b"        "
            data[block + 148 : block + 155] = b"%06o\0" % sum(data[block : block + 512])
    try:
        for entry in TarReader(io.BytesIO(bytes(data))):
            for _, piece in entry.chunks():
                assert len(piece) <= len(data)
    except InvalidRequest:
        pass
