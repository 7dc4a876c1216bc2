"""Archives written by an enemy: nothing outside the root is read, written, linked or changed."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from skerry.errors import DiskFull, InvalidRequest, LimitReached, PathOutside
from skerry.images import unpack as unpack_module
from skerry.images.unpack import Unpacker, UnpackLimits

ROOT = os.geteuid() == 0


def header(name: bytes, size: int, kind: bytes, link: bytes, mode: int, uid: int, mtime: int) -> bytes:
    raw = bytearray(512)
    raw[: len(name)] = name
    raw[100:107] = b"%07o" % mode
    raw[108:124] = (uid | 1 << 63).to_bytes(8, "big") * 2
    raw[124:135] = b"%011o" % size
    raw[136:147] = b"%011o" % mtime
    raw[156:157] = kind
    raw[157 : 157 + len(link)] = link
    raw[257:265] = b"ustar\x0000"
    raw[148:156] = b"        "
    raw[148:155] = b"%06o\0" % sum(raw)
    return bytes(raw)


def extended(kind: bytes, body: bytes) -> bytes:
    return header(b"extended", len(body), kind, b"", 0, 0, 0) + body + bytes(-len(body) % 512)


def pax(key: bytes, value: bytes) -> bytes:
    record = b" " + key + b"=" + value + b"\n"
    length = len(record)
    while len(b"%d" % length + record) != length:
        length += 1
    return extended(b"x", b"%d" % length + record)


def file(name: bytes, data: bytes = b"evil", mode: int = 0o644, uid: int = 0, mtime: int = 0) -> bytes:
    long = extended(b"L", name + b"\0") if len(name) > 100 else b""
    body = data + bytes(-len(data) % 512)
    return long + header(name[:100], len(data), b"0", b"", mode, uid, mtime) + body


def directory(name: bytes, mode: int = 0o755, uid: int = 0) -> bytes:
    return header(name, 0, b"5", b"", mode, uid, 0)


def symlink(name: bytes, target: bytes | Path) -> bytes:
    target = os.fsencode(target)
    return extended(b"K", target + b"\0") + header(name, 0, b"2", b"", 0o777, 0, 0)


def hardlink(name: bytes, target: bytes | Path) -> bytes:
    target = os.fsencode(target)
    return extended(b"K", target + b"\0") + header(name, 0, b"1", b"", 0o644, 0, 0)


def special(name: bytes, kind: bytes) -> bytes:
    return header(name, 0, kind, b"", 0o666, 0, 0)


class Place:
    """A root to unpack into, and beside it what must stay as it is."""

    def __init__(self, base: Path) -> None:
        self.root = base / "root"
        self.outside = base / "outside"
        self.root.mkdir()
        self.outside.mkdir(mode=0o750)
        (self.outside / "secret").write_text("secret")
        self._before = self._state()

    def _state(self) -> object:
        return [
            (p, s.st_mode, s.st_uid, s.st_nlink, s.st_mtime_ns, p.read_bytes() if p.is_file() else b"")
            for p in [self.outside, *sorted(self.outside.rglob("*"))]
            for s in [p.lstat()]
        ]

    def unpack(self, *layers: bytes, limits: UnpackLimits | None = None, layer: bool = False) -> None:
        try:
            with Unpacker(self.root, limits or UnpackLimits()) as unpacker:
                for data in layers:
                    unpacker.unpack(io.BytesIO(data + bytes(1024)), layer=layer or len(layers) > 1)
        finally:
            assert self._state() == self._before
            assert sorted(p.name for p in self.root.parent.iterdir()) == ["outside", "root"]

    def names(self) -> list[str]:
        return sorted(str(p.relative_to(self.root)) for p in self.root.rglob("*"))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


# Paths


@pytest.mark.parametrize(
    "name", [b"../outside/evil", b"a/../../outside/evil", b"..", b"/../evil", b"a/b/../../../x", b"./.."]
)
def test_climbing_names_are_refused(place: Place, name: bytes) -> None:
    with pytest.raises(PathOutside):
        place.unpack(file(name))
    with pytest.raises(PathOutside):
        place.unpack(directory(name))
    with pytest.raises(PathOutside):
        place.unpack(symlink(name, b"x"))
    with pytest.raises(PathOutside):
        place.unpack(pax(b"path", name) + file(b"fine"))
    assert place.names() == []


def test_absolute_names_are_taken_from_the_root(place: Place) -> None:
    place.unpack(file(os.fsencode(place.outside / "evil")) + file(b"//etc/evil"))
    assert (place.root / "etc" / "evil").read_text() == "evil"
    assert (place.root / str(place.outside)[1:] / "evil").is_file()


def test_names_of_the_root_itself_change_nothing(place: Place) -> None:
    mode = place.root.stat().st_mode
    place.unpack(directory(b"./", 0o000) + directory(b"/", 0o777) + file(b".") + symlink(b"./.", b"/outside"))
    assert place.root.stat().st_mode == mode
    assert place.names() == []


def test_a_nul_in_a_name_is_refused(place: Place) -> None:
    with pytest.raises(PathOutside):
        place.unpack(pax(b"path", b"a\0b") + file(b"x"))


@pytest.mark.parametrize("name", [b"n" * 256, b"d/" * 2100 + b"f"])
def test_names_too_long_are_refused(place: Place, name: bytes) -> None:
    with pytest.raises(InvalidRequest, match="too long"):
        place.unpack(file(name))


def test_odd_names_are_kept(place: Place) -> None:
    place.unpack(file(b"\xff\xfe") + file(b"a\nb\x1b[1m") + file(b" ") + file(b"-rf") + file("é".encode()))
    assert sorted(os.listdir(os.fsencode(place.root))) == sorted(
        [b"\xff\xfe", b"a\nb\x1b[1m", b" ", b"-rf", "é".encode()]
    )


def test_long_names_arrive(place: Place) -> None:
    name = b"/".join([b"part" * 20] * 20)
    place.unpack(file(name) + pax(b"path", name + b"2") + file(b"short"))
    assert (place.root / os.fsdecode(name)).is_file()
    assert (place.root / os.fsdecode(name + b"2")).is_file()


# Symlinks


@pytest.mark.parametrize("relative", [False, True])
def test_writing_through_a_symlink_stays_inside(place: Place, relative: bool) -> None:
    target = Path("../outside") if relative else place.outside
    place.unpack(
        symlink(b"link", target) + file(b"link/evil") + file(b"link/secret") + directory(b"link/d", 0o777)
    )
    inside = place.root / ("outside" if relative else str(place.outside)[1:])
    assert (inside / "evil").read_text() == "evil"
    assert (inside / "d").is_dir()


def test_a_file_replaces_a_symlink_instead_of_following_it(place: Place) -> None:
    place.unpack(symlink(b"link", place.outside / "secret") + file(b"link"))
    assert not (place.root / "link").is_symlink()
    assert (place.root / "link").read_text() == "evil"


def test_a_directory_replaces_a_symlink_instead_of_following_it(place: Place) -> None:
    place.unpack(symlink(b"link", place.outside) + directory(b"link", 0o777) + file(b"link/secret"))
    assert not (place.root / "link").is_symlink()
    assert (place.root / "link" / "secret").read_text() == "evil"


def test_a_symlink_replaces_a_directory_with_its_content(place: Place) -> None:
    place.unpack(file(b"d/e/f") + symlink(b"d", b"elsewhere"))
    assert os.readlink(place.root / "d") == "elsewhere"


def test_chains_and_loops_of_symlinks(place: Place) -> None:
    place.unpack(symlink(b"a", b"b") + symlink(b"b", place.outside) + file(b"a/evil"))
    with pytest.raises(InvalidRequest):
        place.unpack(symlink(b"x", b"y") + symlink(b"y", b"x") + file(b"x/evil"))


def test_dangling_symlinks_that_grow_are_refused(place: Place) -> None:
    with pytest.raises(InvalidRequest):
        place.unpack(symlink(b"a", b"a/a/b") + file(b"a/evil"))
    endless = b"".join(symlink(b"l%d" % i, b"m%d/../l%d" % (i, i + 1)) for i in range(2000))
    with pytest.raises(InvalidRequest):
        place.unpack(endless + file(b"l0/evil"))


def test_proc_magic_links_lead_nowhere(place: Place) -> None:
    place.unpack(symlink(b"up", b"/proc/self/root/tmp") + file(b"up/skerry-evil"))
    assert not Path("/tmp/skerry-evil").exists()
    assert (place.root / "proc/self/root/tmp/skerry-evil").exists()


def test_a_merged_usr_is_written_through(place: Place) -> None:
    """Debian's /bin is a symlink; a later layer that writes bin/tool means usr/bin/tool."""
    base = directory(b"usr/bin") + symlink(b"bin", b"usr/bin") + symlink(b"sbin", b"/usr/sbin")
    place.unpack(base, file(b"bin/tool") + file(b"sbin/daemon"))
    assert (place.root / "bin").is_symlink()
    assert (place.root / "usr/bin/tool").is_file()
    assert (place.root / "usr/sbin/daemon").is_file()


def test_a_file_as_parent_is_refused(place: Place) -> None:
    with pytest.raises(InvalidRequest, match="Not a directory"):
        place.unpack(file(b"f") + file(b"f/evil"))


# Hard links


def test_hard_links_out_are_refused(place: Place) -> None:
    with pytest.raises(PathOutside):
        place.unpack(hardlink(b"evil", b"../outside/secret"))
    with pytest.raises(InvalidRequest):
        place.unpack(hardlink(b"evil", place.outside / "secret"))
    with pytest.raises(InvalidRequest):
        place.unpack(symlink(b"d", place.outside) + hardlink(b"evil", b"d/secret"))
    with pytest.raises(InvalidRequest):
        place.unpack(symlink(b"d2", b"../outside") + hardlink(b"evil", b"d2/secret"))


def test_a_hard_link_to_a_symlink_links_the_symlink(place: Place) -> None:
    place.unpack(symlink(b"s", place.outside / "secret") + hardlink(b"h", b"s") + file(b"other", b"x"))
    assert (place.root / "h").is_symlink()
    place.unpack(file(b"h"))
    assert (place.root / "h").read_text() == "evil"


def test_hard_links_inside_work(place: Place) -> None:
    place.unpack(file(b"d/a") + hardlink(b"b", b"/d/a") + hardlink(b"b", b"b") + hardlink(b"d/c", b"./b"))
    assert (place.root / "b").stat().st_nlink == 3
    place.unpack(file(b"b", b"new"))
    assert (place.root / "d/a").read_text() == "evil"


@pytest.mark.parametrize("target", [b"missing", b"", b"d"])
def test_hard_links_to_nothing_or_a_directory_are_refused(place: Place, target: bytes) -> None:
    with pytest.raises(InvalidRequest):
        place.unpack(directory(b"d") + hardlink(b"h", target))


# Kinds, modes and owners


def test_devices_and_fifos_are_left_out(place: Place) -> None:
    place.unpack(special(b"char", b"3") + special(b"block", b"4") + special(b"fifo", b"6") + file(b"f"))
    assert place.names() == ["f"]


def test_setuid_setgid_and_capabilities_are_dropped(place: Place) -> None:
    capability = b"\x01\0\0\x02\xff\xff\xff\xff\0\0\0\0\0\0\0\0\0\0\0\0"
    place.unpack(
        pax(b"SCHILY.xattr.security.capability", capability)
        + file(b"f", mode=0o7755)
        + directory(b"d", 0o7777)
        + directory(b"s", 0o2755)
    )
    assert stat.S_IMODE((place.root / "f").stat().st_mode) == 0o755
    assert stat.S_IMODE((place.root / "d").stat().st_mode) == 0o1777
    assert stat.S_IMODE((place.root / "s").stat().st_mode) == 0o755
    assert os.listxattr(place.root / "f") == []


def test_owners_can_read_and_enter_what_they_have(place: Place) -> None:
    old = os.umask(0o077)
    try:
        place.unpack(directory(b"d", 0o000) + file(b"d/f", mode=0o000) + file(b"implied/f", mode=0o664))
    finally:
        os.umask(old)
    assert stat.S_IMODE((place.root / "d").stat().st_mode) == 0o700
    assert stat.S_IMODE((place.root / "d/f").stat().st_mode) == 0o400
    assert stat.S_IMODE((place.root / "implied").stat().st_mode) == 0o755
    assert stat.S_IMODE((place.root / "implied/f").stat().st_mode) == 0o664


def test_times_of_files_are_kept(place: Place) -> None:
    place.unpack(file(b"f", mtime=1_234_567_890) + pax(b"mtime", b"99999999999999") + file(b"future"))
    assert (place.root / "f").stat().st_mtime == 1_234_567_890


@pytest.mark.root
@pytest.mark.skipif(not ROOT, reason="only root can give files away")
@pytest.mark.parametrize(
    ("uid", "expected"), [(0, 0), (1000, 1000), (65535, 65535), (65536, 65534), (1 << 40, 65534)]
)
def test_owners_are_kept_within_a_range(place: Place, uid: int, expected: int) -> None:
    place.unpack(file(b"f", uid=uid) + directory(b"d", uid=uid))
    assert (place.root / "f").stat().st_uid == (place.root / "f").stat().st_gid == expected
    assert (place.root / "d").stat().st_uid == expected


_AS_NOBODY = """
import io, os, sys
from pathlib import Path
from skerry.images.digest import tree_digest
from skerry.images.unpack import Unpacker, UnpackLimits
os.setgroups([]); os.setgid(65534); os.setuid(65534)
root = Path(sys.argv[1]) / "mine"
root.mkdir()
with Unpacker(root, UnpackLimits()) as unpacker:
    unpacker.unpack(sys.stdin.buffer)
assert (root / "d/f").read_text() == "evil"
assert (root / "d/f").stat().st_uid == 65534
tree_digest(root)
"""


@pytest.mark.root
@pytest.mark.skipif(not ROOT, reason="becomes another user")
def test_a_plain_user_unpacks_what_is_closed(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder == Path("/tmp"):
            break
        folder.chmod(0o777)
    data = directory(b"d", 0o555) + file(b"d/f", mode=0, uid=12) + directory(b"e", 0) + file(b"e/f", uid=3)
    source = Path(unpack_module.__file__).parents[2]
    subprocess.run(
        [sys.executable, "-c", _AS_NOBODY, str(tmp_path)],
        input=data + bytes(1024),
        check=True,
        env={"PYTHONPATH": str(source)},
    )


def test_repeated_names_end_as_the_last_one(place: Place) -> None:
    place.unpack(
        file(b"a", b"one")
        + file(b"a", b"two")
        + file(b"b/c/d")
        + file(b"b", b"file")
        + file(b"e")
        + directory(b"e")
        + file(b"e/f")
        + directory(b"e", 0o700)
    )
    assert (place.root / "a").read_text() == "two"
    assert (place.root / "b").read_text() == "file"
    assert (place.root / "e/f").is_file()


# Bombs


def test_bytes_are_limited(place: Place) -> None:
    with pytest.raises(LimitReached, match="more than"):
        place.unpack(file(b"a", b"x" * 6000) + file(b"b", b"x" * 6000), limits=UnpackLimits(bytes=10_000))


def test_bytes_are_limited_across_layers(place: Place) -> None:
    with pytest.raises(LimitReached):
        place.unpack(file(b"a", b"x" * 6000), file(b"a", b"x" * 6000), limits=UnpackLimits(bytes=10_000))


def test_holes_count_as_bytes(place: Place) -> None:
    sparse = pax(b"GNU.sparse.map", b"0,4") + pax(b"GNU.sparse.size", b"8000000000000") + file(b"huge")
    with pytest.raises(LimitReached):
        place.unpack(sparse)


def test_headers_without_files_count_as_bytes(place: Place) -> None:
    with pytest.raises(LimitReached):
        place.unpack(extended(b"g", b"") * 1000, limits=UnpackLimits(bytes=100_000))


def test_what_follows_the_archive_counts_as_bytes(place: Place) -> None:
    with pytest.raises(LimitReached):
        place.unpack(file(b"a") + bytes(1 << 20), limits=UnpackLimits(bytes=100_000))


def test_entries_are_limited(place: Place) -> None:
    with pytest.raises(LimitReached, match="entries"):
        place.unpack(b"".join(special(b"%d" % i, b"6") for i in range(11)), limits=UnpackLimits(entries=10))


def test_implied_directories_count_as_entries(place: Place) -> None:
    with pytest.raises(LimitReached, match="entries"):
        place.unpack(file(b"d/" * 40 + b"f"), limits=UnpackLimits(entries=30))


def test_a_full_disk_is_told_apart(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DiskFull):
        place.unpack(file(b"f"))


# Layers


def test_whiteouts_hide_lower_layers(place: Place) -> None:
    lower = file(b"a") + file(b"d/x") + file(b"d/e/y") + file(b"gone/z")
    place.unpack(lower, file(b".wh.a") + file(b"d/.wh.e") + file(b".wh.gone") + file(b".wh.never"))
    assert place.names() == ["d", "d/x"]


def test_whiteouts_spare_their_own_layer_in_any_order(place: Place) -> None:
    lower = file(b"a", b"old") + file(b"d/old") + file(b"d/sub/old")
    upper = file(b"a", b"new") + file(b".wh.a") + directory(b"d") + file(b"d/sub/new") + file(b".wh.d")
    place.unpack(lower, upper)
    assert (place.root / "a").read_text() == "new"
    assert place.names() == ["a", "d", "d/sub", "d/sub/new"]


@pytest.mark.parametrize("first", [True, False])
def test_opaque_directories_hide_all_of_lower_layers(place: Place, first: bool) -> None:
    lower = file(b"d/x") + file(b"d/e/y") + file(b"d/kept/old") + file(b"other")
    opaque, new = file(b"d/.wh..wh..opq"), file(b"d/new") + file(b"d/kept/new")
    place.unpack(lower, opaque + new if first else new + opaque)
    assert place.names() == ["d", "d/kept", "d/kept/new", "d/new", "other"]


def test_whiteouts_through_symlinks_stay_inside(place: Place) -> None:
    links = symlink(b"l", place.outside) + symlink(b"r", b"../outside")
    upper = file(b"l/.wh.secret") + file(b"r/.wh.secret") + file(b"l/.wh..wh..opq") + file(b"r/.wh..wh..opq")
    place.unpack(links, upper)


def test_a_hidden_symlink_is_not_followed(place: Place) -> None:
    place.unpack(symlink(b"l", place.outside), file(b".wh.l"))
    assert place.names() == []


@pytest.mark.parametrize("name", [b".wh..", b".wh...", b".wh."])
def test_whiteouts_of_no_name_are_refused(place: Place, name: bytes) -> None:
    with pytest.raises(PathOutside):
        place.unpack(file(b"d/x"), file(b"d/" + name))


def test_whiteouts_are_plain_files_outside_layers(place: Place) -> None:
    place.unpack(file(b"a") + file(b".wh.a"))
    assert place.names() == [".wh.a", "a"]
