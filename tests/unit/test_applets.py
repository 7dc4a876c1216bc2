"""The guest's file applets, run as ordinary programs: built here, with sanitizers and as they ship."""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from errno import (
    EACCES,
    EBADMSG,
    EBUSY,
    EFBIG,
    EINVAL,
    EISDIR,
    ELOOP,
    ENAMETOOLONG,
    ENOENT,
    ENOSPC,
    ENOTDIR,
    ENOTEMPTY,
    ENOTSUP,
    ENXIO,
    ESTALE,
    EXDEV,
)
from pathlib import Path
from typing import IO

import pytest

from skerry.tarstream import TarReader

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "native"
SOURCES = [
    *(NATIVE / name for name in ("paths.c", "applets.c", "applet_walk.c", "applet_watch.c")),
    *(NATIVE / name for name in ("tar_write.c", "tar_read.c")),
    ROOT / "tests/unit/native/applet_main.c",
]
WARNINGS = [
    *("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Wformat=2", "-Wvla"),
    *("-Wstrict-prototypes", "-Wmissing-prototypes", "-Werror"),
]
SANITIZERS = ["-g", "-DSK_TEST", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
NOBODY = 65534
OK, PARTIAL, BAD, FAILED = range(4)
LONG_NAME = b"x" * 255
NOT_UTF8 = b"\xff\xfe not utf-8"
ODD_NAMES = [b"new\nline", b"\x1b[31mred", NOT_UTF8, "grüße-日本".encode(), LONG_NAME, b" -r", b"\\"]


@dataclass(frozen=True)
class Result:
    status: int
    stdout: bytes
    stderr: str

    @property
    def errnos(self) -> list[int]:
        return [int(n) for n in re.findall(r"^errno=(\d+) ", self.stderr, re.MULTILINE)]


@dataclass(frozen=True)
class Applets:
    """The test program on a workspace and a temp directory of its own."""

    program: Path
    workspace: Path
    tmp: Path
    environ: dict[str, str]
    user: int | None = None
    prefix: tuple[str, ...] = ()

    def command(self, *args: str | bytes) -> list[str | bytes]:
        return [*self.prefix, str(self.program), str(self.workspace), str(self.tmp), *args]

    def __call__(self, *args: str | bytes, stdin: bytes = b"") -> Result:
        done = subprocess.run(
            self.command(*args), input=stdin, capture_output=True, env=self.environ, timeout=60,
            user=self.user, group=self.user, extra_groups=None if self.user is None else [],
        )  # fmt: skip
        return Result(done.returncode, done.stdout, done.stderr.decode("ascii"))

    def start(self, *args: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.command(*args), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=self.environ,
        )  # fmt: skip


@pytest.fixture(scope="session")
def build() -> Iterator[Callable[[str], Path]]:
    """Compiles the test program once for each variant, where any user can execute it."""
    with tempfile.TemporaryDirectory(prefix="skerry-applets-") as folder:
        os.chmod(folder, 0o755)

        def build(variant: str) -> Path:
            program = Path(folder) / variant
            if variant == "musl" and shutil.which("musl-gcc") is None:
                pytest.skip("musl-gcc is not installed")
            if not program.exists():
                command = ["musl-gcc", "-static"] if variant == "musl" else ["cc", *SANITIZERS]
                subprocess.run([*command, *WARNINGS, *SOURCES, "-o", program], check=True)
            return program

        yield build


@pytest.fixture(params=["sanitized", "sanitized-by-hand", "musl"])
def applets(request: pytest.FixtureRequest, build: Callable[[str], Path], tmp_path: Path) -> Applets:
    return make_applets(str(request.param), build, tmp_path)


def make_applets(variant: str, build: Callable[[str], Path], folder: Path) -> Applets:
    environ = {"PATH": os.environ["PATH"]} | dict.fromkeys(
        ("ASAN_OPTIONS", "UBSAN_OPTIONS"), "abort_on_error=1"
    )
    if variant == "sanitized-by-hand":
        environ["SK_TEST_NO_OPENAT2"] = "1"
    workspace, tmp = folder / "workspace", folder / "tmp"
    workspace.mkdir()
    tmp.mkdir()
    return Applets(build(variant.removesuffix("-by-hand")), workspace, tmp, environ)


@pytest.fixture
def plain(build: Callable[[str], Path]) -> Iterator[Applets]:
    """Applets of a user to whom permissions mean something, in a folder that this user owns."""
    with tempfile.TemporaryDirectory(prefix="skerry-plain-", ignore_cleanup_errors=True) as folder:
        applets = make_applets("sanitized", build, Path(folder))
        if os.geteuid() == 0:
            for path in (Path(folder), applets.workspace, applets.tmp):
                os.chown(path, NOBODY, NOBODY)
            applets = replace(applets, user=NOBODY)
        yield applets
        subprocess.run(["rm", "-rf", folder], check=True)  # Python's own does not go deep enough


def own(applets: Applets, *paths: Path) -> None:
    """Gives what the test made to the user of the applets."""
    if applets.user is not None:
        for path in paths:
            os.chown(path, applets.user, applets.user, follow_symlinks=False)


def make_deep(top: Path, levels: int, name: str = "d") -> None:
    """Makes directories below each other, further down than a path can tell."""
    fd = os.open(top, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir(name, dir_fd=fd)
        below = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(os.open("bottom", os.O_CREAT, dir_fd=fd))
    os.close(fd)


@pytest.fixture
def deep_folder() -> Iterator[Path]:
    """A folder for trees that pytest could not remove."""
    folder = Path(tempfile.mkdtemp(prefix="skerry-deep-"))
    yield folder
    subprocess.run(["rm", "-rf", folder], check=True)


# ---- Paths ----


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a/file", b"a"),
        ("a//./file", b"a"),
        ("missing/../a/file", b"a"),
        ("/workspace/a/file", b"a"),
        ("//workspace///a/file/", b"a"),
        ("/tmp/file", b"t"),
        ("../tmp/file", b"t"),
        ("/workspace/../tmp/./file", b"t"),
        ("inside", b"a"),
        ("a/up", b"a"),
        ("chain", b"a"),
        ("hop39", b"a"),
        ("hop40", ELOOP),
        ("", EINVAL),
        ("x" * 4096, EINVAL),
        ("/", EXDEV),
        ("..", EXDEV),
        ("/etc/passwd", EXDEV),
        ("a/../../etc/passwd", EXDEV),
        ("/workspace/../etc/passwd", EXDEV),
        ("/workspaces/file", EXDEV),
        ("../workspace", EISDIR),
        ("outside", EXDEV),
        ("absolute", EXDEV),
        ("outside-dir/file", EXDEV),
        ("a/up-and-out", EXDEV),
        ("loop", ELOOP),
        ("dangling", ENOENT),
        ("a/file/x", ENOTDIR),
        ("a", EISDIR),
        ("x" * 256, ENAMETOOLONG),
        ("fifo", ENXIO),
        ("socket", ENXIO),
    ],
)
def test_where_a_path_leads(applets: Applets, path: str, expected: bytes | int) -> None:
    workspace = applets.workspace
    (workspace / "a").mkdir()
    (workspace / "a/file").write_bytes(b"a")
    (applets.tmp / "file").write_bytes(b"t")
    links = {
        "inside": "a/file", "a/up": "../chain", "chain": "inside", "outside": "../tmp/file", "loop": "loop",
        "absolute": str(workspace / "a/file"), "outside-dir": "../tmp", "dangling": "nothing",
        "a/up-and-out": "../../tmp/file",
    }  # fmt: skip
    links |= {f"hop{i}": f"hop{i - 1}" if i else "a/file" for i in range(41)}
    for name, target in links.items():
        (workspace / name).symlink_to(target)
    os.mkfifo(workspace / "fifo")
    with contextlib.chdir(workspace), socket.socket(socket.AF_UNIX) as unix:
        unix.bind("socket")
    result = applets("read", path)
    if isinstance(expected, bytes):
        assert (result.status, result.stdout) == (OK, expected)
    else:
        assert (result.status, result.errnos, result.stdout) == (FAILED, [expected], b"")


def test_writing_never_hangs_nor_goes_outside(applets: Applets) -> None:
    workspace = applets.workspace
    os.mkfifo(workspace / "fifo")
    (workspace / "out").symlink_to("../tmp/new")
    (workspace / "in").symlink_to("new")
    assert applets("write", "fifo").errnos == [ENXIO]
    assert applets("write", "out", stdin=b"x").errnos == [EXDEV]
    assert not (applets.tmp / "new").exists()
    assert applets("write", "in", stdin=b"x").status == OK
    assert (workspace / "new").read_bytes() == b"x"


def test_mkdirs(applets: Applets) -> None:
    workspace = applets.workspace
    (workspace / "real").mkdir()
    (workspace / "link").symlink_to("real")
    (workspace / "out").symlink_to("../tmp")
    (workspace / "file").touch()
    (workspace / "dangling").symlink_to("nothing")
    assert applets("mkdirs", "a/b/c").status == OK
    assert applets("mkdirs", "a/b/c").status == OK
    assert (workspace / "a/b/c").is_dir()
    assert applets("mkdirs", ".").status == OK
    assert applets("mkdirs", "link/x/y").status == OK
    assert (workspace / "real/x/y").is_dir()
    assert applets("mkdirs", "out/x").errnos == [EXDEV]
    assert applets("mkdirs", "file/x").errnos == [ENOTDIR]
    assert applets("mkdirs", "dangling/x").errnos == [ENOENT]
    assert list(applets.tmp.iterdir()) == []


def test_the_walk_by_hand_agrees_with_the_kernel(build: Callable[[str], Path], tmp_path: Path) -> None:
    applets = make_applets("sanitized", build, tmp_path)
    rng = random.Random(5)
    names = ["a", "b", "c", "l", "m"]
    folders = [applets.workspace]
    for _ in range(40):
        place = rng.choice(folders) / rng.choice(names)
        if place.is_symlink() or place.exists():
            continue
        kind = rng.random()
        if kind < 0.45:
            place.mkdir()
            folders.append(place)
        elif kind < 0.9:
            place.symlink_to(
                "/".join(rng.choice([*names, "..", "..", "."]) for _ in range(rng.randint(1, 5)))
            )
        else:
            place.touch()
    paths = ["/".join(rng.choice([*names, "..", "."]) for _ in range(rng.randint(1, 9))) for _ in range(3000)]
    stdin = "".join(f"{path}\n" for path in paths).encode()
    kernel = applets("resolve", stdin=stdin).stdout.split()
    by_hand = make_by_hand(applets)("resolve", stdin=stdin).stdout.split()
    assert len(kernel) == len(paths)
    assert list(zip(paths, by_hand, strict=True)) == list(zip(paths, kernel, strict=True))
    assert len(set(kernel)) > 8  # several files and several errors


def make_by_hand(applets: Applets) -> Applets:
    return replace(applets, environ=applets.environ | {"SK_TEST_NO_OPENAT2": "1"})


# ---- list ----


@dataclass(frozen=True)
class Entry:
    type: str
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    target: bytes


def parse_list(stdout: bytes) -> dict[bytes, Entry]:
    entries: dict[bytes, Entry] = {}
    stream = io.BytesIO(stdout)
    while head := stream.read(4):
        body = stream.read(struct.unpack("<I", head)[0])
        kind, mode, uid, gid, size, mtime_ns, name_len = struct.unpack_from("<cIIIQqH", body)
        name = body[31 : 31 + name_len]
        (target_len,) = struct.unpack_from("<H", body, 31 + name_len)
        target = body[33 + name_len :]
        assert len(target) == target_len
        assert name not in entries
        entries[name] = Entry(kind.decode(), mode, uid, gid, size, mtime_ns, target)
    return entries


def test_list_tells_what_lstat_tells(applets: Applets) -> None:
    top = os.fsencode(applets.workspace / "top")
    os.mkdir(top)
    for name in ODD_NAMES:
        Path(os.fsdecode(os.path.join(top, name))).write_bytes(name)
    os.mkdir(top + b"/sub", 0o1751)
    os.symlink(b"../\xff", top + b"/sub/link")
    os.mkfifo(top + b"/sub/fifo")
    os.utime(top + b"/sub/fifo", ns=(0, -1_500_000_000))

    flat = parse_list(applets("list", "top").stdout)
    assert set(flat) == {*ODD_NAMES, b"sub"}
    result = applets("list", "top", "-r")
    assert (result.status, result.stderr) == (OK, "")
    entries = parse_list(result.stdout)
    assert set(entries) == {*flat, b"sub/link", b"sub/fifo"}
    for name, entry in entries.items():
        st = os.lstat(os.path.join(top, name))
        target = os.readlink(os.path.join(top, name)) if entry.type == "l" else b""
        assert entry == Entry(
            entry.type, st.st_mode & 0o7777, st.st_uid, st.st_gid, st.st_size, st.st_mtime_ns, target
        )
    kinds = [entries[name].type for name in (b"sub", b"sub/link", b"sub/fifo", ODD_NAMES[0])]
    assert kinds == ["d", "l", "p", "f"]


@pytest.mark.parametrize(
    ("path", "errno"), [("file", ENOTDIR), ("none", ENOENT), ("out", EXDEV), ("/etc", EXDEV)]
)
def test_list_refuses(applets: Applets, path: str, errno: int) -> None:
    (applets.workspace / "file").touch()
    (applets.workspace / "out").symlink_to("../tmp")
    result = applets("list", path)
    assert (result.status, result.errnos, result.stdout) == (FAILED, [errno], b"")


def test_list_does_not_follow_links_in_a_tree(applets: Applets) -> None:
    (applets.tmp / "secret").touch()
    (applets.workspace / "link").symlink_to(applets.tmp)
    assert set(parse_list(applets("list", ".", "-r").stdout)) == {b"link"}


def test_list_goes_on_past_what_it_cannot_read(plain: Applets) -> None:
    for name in ("locked", "open"):
        (plain.workspace / name).mkdir()
        (plain.workspace / name / "file").touch()
        own(plain, plain.workspace / name)
    (plain.workspace / "locked").chmod(0)
    result = plain("list", ".", "-r")
    assert (result.status, result.errnos) == (PARTIAL, [EACCES])
    assert set(parse_list(result.stdout)) == {b"locked", b"open", b"open/file"}


@pytest.mark.parametrize("args", [[], ["x", "-x"], ["x", "-r", "-r"], ["x", "y"]])
def test_usage(applets: Applets, args: list[str]) -> None:
    assert applets("list", *args).status == BAD
    assert applets("nonsense", "x").status == BAD
    assert applets("untar", "x", "-r").status == BAD


def test_names_in_errors_are_escaped(applets: Applets) -> None:
    result = applets("list", b"a\n\x1b\xff\\")
    assert result.stderr == "errno=2 No such file or directory: a\\x0a\\x1b\\xff\\x5c\n"


# ---- remove ----


def test_remove(applets: Applets) -> None:
    workspace = applets.workspace
    (workspace / "file").touch()
    (workspace / "link").symlink_to("file")
    (workspace / "empty").mkdir()
    (workspace / "full/sub").mkdir(parents=True)
    (workspace / "full/out").symlink_to(applets.tmp)
    (applets.tmp / "kept").touch()
    os.mkfifo(workspace / "full/sub/fifo")
    assert applets("remove", "link").status == OK
    assert applets("remove", "empty").status == OK
    assert sorted(path.name for path in workspace.iterdir()) == ["file", "full"]
    assert applets("remove", "full").errnos == [ENOTEMPTY]
    assert applets("remove", "full", "-r").status == OK
    assert applets("remove", "file", "-r").status == OK
    assert list(workspace.iterdir()) == []
    assert (applets.tmp / "kept").exists()
    missing = applets("remove", "file")
    assert (missing.status, missing.errnos) == (FAILED, [ENOENT])


def test_remove_of_a_root_empties_it(applets: Applets) -> None:
    (applets.workspace / "a/b").mkdir(parents=True)
    assert applets("remove", ".").errnos == [EBUSY]
    assert applets("remove", "/workspace", "-r").status == OK
    assert list(applets.workspace.iterdir()) == []


def test_remove_unlocks_its_own_directories(plain: Applets) -> None:
    tree = plain.workspace / "tree"
    for path, mode in (
        (tree, 0o500),
        (tree / "none", 0),
        (tree / "noread", 0o300),
        (tree / "noenter", 0o600),
    ):
        path.mkdir()
        (path / "file").touch()
        own(plain, path, path / "file")
        (path / "mode").write_text(oct(mode))
    for path in (tree / "none", tree / "noread", tree / "noenter", tree):
        path.chmod(int((path / "mode").read_text(), 8))
    result = plain("remove", "tree", "-r")
    assert (result.status, result.stderr) == (OK, "")
    assert not tree.exists()


@pytest.mark.root
def test_remove_goes_on_past_what_it_cannot_remove(plain: Applets) -> None:
    if plain.user is None:
        pytest.skip("needs a directory of another user: run as root")
    tree = plain.workspace / "tree"
    for name in ("foreign", "mine"):
        (tree / name).mkdir(parents=True)
        (tree / name / "file").touch()
    own(plain, tree, tree / "mine")
    result = plain("remove", "tree", "-r")
    assert (result.status, result.errnos[0]) == (PARTIAL, EACCES)
    assert list(tree.rglob("*")) == [tree / "foreign", tree / "foreign/file"]


def test_depth_is_no_limit(build: Callable[[str], Path], deep_folder: Path) -> None:
    """3,000 levels, far beyond PATH_MAX and with few descriptors, through every applet."""
    applets = make_applets("sanitized", build, deep_folder)
    make_deep(applets.workspace, 3000)
    (applets.workspace / "d" / "beside").touch()
    few_files = replace(applets, prefix=("prlimit", "--nofile=100", "--"))
    listed = few_files("list", ".", "-r")
    entries = parse_list(listed.stdout)
    assert (listed.status, len(entries)) == (OK, 3002)
    assert b"d/" * 3000 + b"bottom" in entries
    archive = few_files("tar", ".", "--contents")
    assert (archive.status, len(members(archive.stdout))) == (OK, 3002)
    assert few_files("untar", "/tmp/copy", stdin=archive.stdout) == Result(OK, b"", "")
    assert set(parse_list(applets("list", "/tmp/copy", "-r").stdout)) == set(entries)
    assert few_files("remove", ".", "-r") == Result(OK, b"", "")
    assert make_by_hand(few_files)("remove", "/tmp/copy", "-r") == Result(OK, b"", "")
    assert [*applets.workspace.iterdir(), *applets.tmp.iterdir()] == []


def test_paths_beyond_any_buffer(build: Callable[[str], Path], deep_folder: Path) -> None:
    """A path of 255,000 bytes: not listed nor archived to its end, which is told, but removed."""
    applets = make_applets("sanitized", build, deep_folder)
    make_deep(applets.workspace, 1000, "n" * 255)
    for args in (["list", ".", "-r"], ["tar", "."]):
        result = applets(*args)
        assert (result.status, result.errnos) == (PARTIAL, [ENAMETOOLONG])
    assert applets("remove", ".", "-r") == Result(OK, b"", "")
    assert list(applets.workspace.iterdir()) == []


def test_a_directory_that_is_moved_away_is_not_the_way_back(
    build: Callable[[str], Path], tmp_path: Path
) -> None:
    """The ".." of a moved directory is another one: the walk must not go on there."""
    applets = make_applets("sanitized", build, tmp_path)
    middle, bottom = applets.workspace.joinpath(*"d" * 50), applets.workspace.joinpath(*"d" * 100)
    bottom.mkdir(parents=True)
    for i in range(5000):  # more than the pipe holds: the walk waits for its reader here
        (bottom / f"{i:050}").touch()
    for i in range(500):
        (applets.tmp / f"canary {i}").touch()
    process = applets.start("list", ".", "-r")
    assert process.stdout is not None
    head = process.stdout.read(100_000)
    middle.rename(applets.tmp / "moved")
    rest = process.stdout.read()
    _, stderr = process.communicate()
    assert (process.returncode, stderr[:9]) == (PARTIAL, b"errno=%d" % ESTALE)
    entries = parse_list(head + rest)
    assert len(entries) == 5100
    assert b"canary" not in head + rest


# ---- tar ----


def members(archive: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
        return {member.name: member for member in tar}


def make_tree(top: Path) -> None:
    top.mkdir(parents=True)
    (top / "plain.txt").write_bytes(b"hello\n")
    (top / "empty").touch(mode=0o600)
    (top / "blocks").write_bytes(os.urandom(1024))
    (top / "big").write_bytes(bytes(range(256)) * 1000)
    (top / "run").write_bytes(b"#!/bin/sh\n")
    (top / "run").chmod(0o755)
    (top / "again").hardlink_to(top / "big")
    (top / "sub" / "deeper").mkdir(parents=True)
    (top / "sub").chmod(0o751)
    (top / "sub/link").symlink_to("../plain.txt")
    (top / "sub/long").symlink_to("t/" * 1500)
    long = top / ("p" * 90) / ("q" * 90)
    long.mkdir(parents=True)
    (long / "r").write_bytes(b"long path")
    for name in ODD_NAMES:
        Path(os.fsdecode(os.path.join(os.fsencode(top), name))).write_bytes(name)
    for path in (*top.rglob("*"), top):
        os.utime(path, (1_600_000_000, 1_600_000_123), follow_symlinks=False)


def describe(top: Path) -> dict[str, tuple[object, ...]]:
    """What an archive must keep of a tree."""
    tree: dict[str, tuple[object, ...]] = {}
    for path in top.rglob("*"):
        st = path.lstat()
        if path.is_symlink():
            facts: tuple[object, ...] = (os.readlink(path),)
        else:
            facts = (st.st_mode, int(st.st_mtime), st.st_nlink, path.read_bytes() if path.is_file() else b"")
        tree[str(path.relative_to(top))] = facts
    return tree


def test_tar_names_and_round_trip(applets: Applets) -> None:
    make_tree(applets.workspace / "top")
    result = applets("tar", "top")
    assert (result.status, result.stderr) == (OK, "")
    assert len(result.stdout) % 512 == 0
    found = members(result.stdout)
    assert {name.split("/")[0] for name in found} == {"top"}
    assert found["top"].isdir()
    assert found[f"top/{os.fsdecode(NOT_UTF8)}"].pax_headers["hdrcharset"] == "BINARY"
    assert "path" in found["top/grüße-日本"].pax_headers
    assert found["top/plain.txt"].pax_headers == {}
    assert {found["top/big"].type, found["top/again"].type} == {tarfile.REGTYPE, tarfile.LNKTYPE}
    contents = applets("tar", "top", "--contents").stdout
    assert {f"top/{name}" for name in members(contents)} == set(found) - {"top"}
    assert applets("untar", "copy/here", stdin=contents).status == OK
    assert describe(applets.workspace / "copy/here") == describe(applets.workspace / "top")


def test_tar_is_read_by_python_and_gnu_tar(applets: Applets, tmp_path: Path) -> None:
    make_tree(applets.workspace / "top")
    archive = applets("tar", "top").stdout
    by_python, by_gnu = tmp_path / "python", tmp_path / "gnu"
    by_gnu.mkdir()
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extraction_filter = lambda info, _: info
        tar.extractall(by_python)
    subprocess.run(
        ["tar", "-xpf", "-", "-C", by_gnu, "--warning=no-unknown-keyword"], input=archive, check=True
    )
    assert describe(by_python / "top") == describe(applets.workspace / "top")
    assert describe(by_gnu / "top") == describe(applets.workspace / "top")


@pytest.mark.parametrize("format", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_untar_reads_gnu_tar(applets: Applets, tmp_path: Path, format: str) -> None:
    make_tree(tmp_path / "top")
    if format in ("v7", "ustar"):
        (tmp_path / "top/sub/long").unlink()  # these cannot hold a link's target of 3,000 bytes
    if format == "v7":
        shutil.rmtree(tmp_path / "top" / ("p" * 90))
        (tmp_path / "top" / LONG_NAME.decode()).unlink()
    elif format == "ustar":
        (tmp_path / "top" / LONG_NAME.decode()).unlink()
    os.utime(tmp_path / "top/sub", (0, 1_600_000_123))
    made = subprocess.run(
        ["tar", f"--format={format}", "-C", tmp_path / "top", "-cf", "-", "."], capture_output=True
    )
    assert made.returncode == 0, made.stderr
    result = applets("untar", ".", stdin=made.stdout)
    assert (result.status, result.stderr) == (OK, "")
    assert describe(applets.workspace) == describe(tmp_path / "top")


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_untar_reads_python(applets: Applets, tmp_path: Path, format: int) -> None:
    make_tree(tmp_path / "top")
    if format == tarfile.USTAR_FORMAT:
        (tmp_path / "top/sub/long").unlink()
        (tmp_path / "top" / LONG_NAME.decode()).unlink()
    (tmp_path / "top" / os.fsdecode(NOT_UTF8)).unlink()  # Python writes it wrongly in pax
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        tar.add(tmp_path / "top", arcname=".")
    result = applets("untar", ".", stdin=buffer.getvalue())
    assert (result.status, result.stderr) == (OK, "")
    assert describe(applets.workspace) == describe(tmp_path / "top")


def test_tar_of_a_file_a_link_and_a_root(applets: Applets) -> None:
    (applets.workspace / "sub").mkdir()
    (applets.workspace / "sub/file").write_bytes(b"x")
    (applets.workspace / "out").symlink_to(applets.tmp)
    (applets.tmp / "t").touch()
    assert set(members(applets("tar", "sub/file").stdout)) == {"file"}
    link = members(applets("tar", "out").stdout)
    assert (set(link), link["out"].linkname) == ({"out"}, str(applets.tmp))
    assert applets("tar", "out", "--contents").errnos == [EXDEV]
    assert set(members(applets("tar", "/tmp").stdout)) == {"tmp", "tmp/t"}
    assert set(members(applets("tar", ".").stdout)) == {
        f"workspace{x}" for x in ("", "/sub", "/sub/file", "/out")
    }
    assert applets("tar", "nothing").errnos == [ENOENT]


def test_tar_leaves_out_what_is_no_file(applets: Applets) -> None:
    os.mkfifo(applets.workspace / "fifo")
    (applets.workspace / "file").touch()
    result = applets("tar", ".", "--contents")
    assert (result.status, result.errnos, set(members(result.stdout))) == (OK, [ENOTSUP], {"file", "."})


def test_tar_goes_on_past_what_it_cannot_read(plain: Applets) -> None:
    for name in ("a", "locked", "z"):
        (plain.workspace / name).write_text(name)
        own(plain, plain.workspace / name)
    (plain.workspace / "locked").chmod(0)
    result = plain("tar", ".", "--contents")
    assert (result.status, result.errnos) == (PARTIAL, [EACCES])
    assert "locked" in result.stderr
    assert set(members(result.stdout)) == {"a", "z", "."}


def test_tar_numbers_beyond_octal(applets: Applets) -> None:
    with (applets.workspace / "huge").open("wb") as file:
        file.truncate(9 << 30)
    os.utime(applets.workspace / "huge", (0, -5))
    if os.geteuid() == 0:
        os.chown(applets.workspace / "huge", 3_000_000_000, 3_000_000_001)
    info = members(applets("tar", "huge").stdout)["huge"]
    st = (applets.workspace / "huge").stat()
    assert (info.size, info.mtime, info.uid, info.gid) == (9 << 30, -5, st.st_uid, st.st_gid)


@pytest.mark.parametrize("new_size", [1 << 20, 8 << 20])
def test_tar_of_a_file_that_changes_its_size(applets: Applets, new_size: int) -> None:
    size = 4 << 20
    (applets.workspace / "file").write_bytes(b"x" * size)
    (applets.workspace / "zlast").write_bytes(b"fine")
    process = applets.start("tar", "file")
    assert process.stdout is not None
    head = process.stdout.read(512)  # from here on it waits for us, long before the file's end
    os.truncate(applets.workspace / "file", new_size)
    archive = head + process.stdout.read()
    process.communicate()
    assert process.returncode == OK
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        (member,) = tar.getmembers()
        file = tar.extractfile(member)
        assert file is not None
        kept = min(size, new_size)
        assert file.read() == b"x" * kept + b"\0" * (size - kept)


def with_holes(path: Path, size: int, *pieces: tuple[int, bytes]) -> None:
    with open(path, "wb") as file:
        file.truncate(size)
        for offset, data in pieces:
            file.seek(offset)
            file.write(data)


PIECE = bytes(range(256)) * 16
HOLES = [
    (1 << 30, [0]),
    (1 << 30, [1 << 29]),
    (1 << 30, [(1 << 30) - 4096]),
    (1 << 40, [0, 12288, 1 << 33, (1 << 40) - 5000]),
    ((1 << 30) + 77, []),
]


@pytest.mark.parametrize(("size", "offsets"), HOLES)
def test_tar_leaves_holes_out(applets: Applets, tmp_path: Path, size: int, offsets: list[int]) -> None:
    """Python and GNU tar read it, and so does untar; a file with holes takes no more room than its data."""
    (applets.workspace / "d").mkdir()
    source = applets.workspace / "d" / "nämlich"
    with_holes(source, size, *((offset, PIECE) for offset in offsets))
    (applets.workspace / "d" / "zlast").write_bytes(b"after")
    result = applets("tar", "d")
    assert (result.status, result.stderr) == (OK, "")
    assert len(result.stdout) < 20_000 + 8192 * len(offsets)
    with tarfile.open(fileobj=io.BytesIO(result.stdout)) as tar:
        found = tar.getmember("d/nämlich")
        assert found.size == size
        assert "d/zlast" in tar.getnames()
    (tmp_path / "gnu").mkdir()
    subprocess.run(["tar", "-x", "-C", tmp_path / "gnu"], input=result.stdout, check=True)
    assert applets("untar", "back", stdin=result.stdout) == Result(OK, b"", "")
    for copy in (tmp_path / "gnu" / "d" / "nämlich", applets.workspace / "back" / "d" / "nämlich"):
        assert (copy.stat().st_size, copy.stat().st_mtime_ns // 10**9) == (size, int(source.stat().st_mtime))
        assert copy.stat().st_blocks * 512 <= 4096 * (2 * len(offsets) + 1)
        with open(copy, "rb") as file:
            for offset in offsets:
                file.seek(offset)
                assert file.read(4096) == PIECE
        assert (copy.parent / "zlast").read_bytes() == b"after"


def test_tar_of_the_largest_file_there_can_be(applets: Applets) -> None:
    """Of 8 EiB, which ends in a hole: on a tmpfs, which takes it."""
    script = 'mount -t tmpfs none "$2" && truncate -s 9223372036854771712 "$2/huge" && exec "$@"'
    applets = replace(applets, prefix=("unshare", "-rm", "sh", "-c", script, "sh"))
    result = applets("tar", "huge")
    if result.stderr.startswith("unshare"):
        pytest.skip("needs user namespaces")
    assert (result.status, result.stderr) == (OK, "")
    assert len(result.stdout) < 10_000
    assert members(result.stdout)["huge"].size == 9223372036854771712


def test_tar_lists_what_it_leaves_out(plain: Applets, tmp_path: Path) -> None:
    workspace = plain.workspace / "d"
    workspace.mkdir()
    (workspace / "ok").touch()
    (workspace / "secret\n").touch(0)
    (workspace / "closed").mkdir(0)
    os.mkfifo(workspace / "fifo")
    for path in (workspace, workspace / "secret\n", workspace / "closed"):
        os.chown(path, NOBODY if plain.user else -1, -1)
    for args in (["d"], ["d", "--contents"]):
        result = plain("tar", *args)
        assert result.status == PARTIAL
        top = "." if "--contents" in args else "d"
        before = "" if top == "." else "d/"
        reader = TarReader(io.BytesIO(result.stdout))
        names = [entry.name.decode().rstrip("/") for entry in reader]
        assert (names[-1], f"{before}ok" in names) == (top, True)
        assert dict(reader.skipped) == {
            f"{before}secret\n".encode(): EACCES,
            f"{before}closed".encode(): EACCES,
            f"{before}fifo".encode(): ENOTSUP,
        }
        assert f"{before}ok" in members(result.stdout)
        target = tmp_path / f"gnu{len(args)}"
        target.mkdir()
        done = subprocess.run(["tar", "-x", "-C", target], input=result.stdout, capture_output=True)
        assert (done.returncode, done.stderr) == (0, b"")
    (workspace / "closed").chmod(0o700)


def test_a_long_list_of_what_is_left_out_is_counted(applets: Applets) -> None:
    (applets.workspace / "d").mkdir()
    for number in range(2500):
        os.mkfifo(applets.workspace / "d" / f"{number:0>250}")
    result = applets("tar", "d")
    assert result.status == OK
    reader = TarReader(io.BytesIO(result.stdout))
    assert [entry.name for entry in reader] == [b"d/", b"d/"]
    assert 800 < len(reader.skipped) < 1000
    assert len(reader.skipped) + reader.skipped_more == 2500


def test_tar_of_one_file_that_cannot_be_read_fails(plain: Applets) -> None:
    (plain.workspace / "secret").touch(0)
    os.mkfifo(plain.workspace / "fifo")
    for name, errno in (("secret", EACCES), ("fifo", ENXIO)):
        result = plain("tar", name)
        assert (result.status, result.stdout, result.errnos[-1]) == (FAILED, b"", errno)


# ---- untar ----


def member(name: str, data: bytes = b"", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    info.mode = 0o644
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def make_archive(*entries: tuple[tarfile.TarInfo, bytes], format: int = tarfile.GNU_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for info, data in entries:
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def raw_header(
    name: bytes, size: bytes = b"00000000000\0", kind: bytes = b"0", checksum: int | None = None
) -> bytes:
    block = bytearray(name.ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + size + b"00000000000\0")
    block += b" " * 8 + kind + b"\0" * 100 + b"ustar\x0000"
    block = block.ljust(512, b"\0")
    block[148:156] = b"%06o\0 " % (sum(block) if checksum is None else checksum)
    return bytes(block)


def with_pax(records: bytes, data: bytes = b"data") -> bytes:
    header = raw_header(b"pax", b"%011o\0" % len(records), b"x")
    body = records.ljust(-(-len(records) // 512) * 512, b"\0")
    return header + body + raw_header(b"file", b"%011o\0" % len(data)) + data.ljust(512, b"\0") + bytes(1024)


def with_sparse(map: bytes, data: bytes = b"", name: bytes = b"file", size: bytes = b"100") -> bytes:
    """GNU's sparse format 1.0."""
    records = b""
    for key, value in ((b"major", b"1"), (b"minor", b"0"), (b"name", name), (b"realsize", size)):
        record = b" GNU.sparse." + key + b"=" + value + b"\n"
        records += b"%d" % (len(record) + 2) + record
    padded = map.ljust(-(-len(map) // 512) * 512, b"\0") + data
    header = raw_header(b"pax", b"%011o\0" % len(records), b"x")
    entry = raw_header(b"GNUSparseFile.0/file", b"%011o\0" % len(padded))
    return (
        header
        + records.ljust(-(-len(records) // 512) * 512, b"\0")
        + entry
        + padded.ljust(-(-len(padded) // 512) * 512, b"\0")
        + bytes(1024)
    )


def test_untar_reads_sparse_files(applets: Applets) -> None:
    archive = with_sparse(b"3\n2\n4\n50\n3\n100\n0\n", b"1234567", name=b"a/sparse")
    assert applets("untar", ".", stdin=archive) == Result(OK, b"", "")
    assert (applets.workspace / "a" / "sparse").read_bytes() == (
        b"\0\0" + b"1234" + bytes(44) + b"567" + bytes(47)
    )
    huge = with_sparse(b"0\n", size=b"9223372036854775807")
    result = applets("untar", ".", stdin=huge)
    assert (result.status, result.errnos) in ((PARTIAL, [EFBIG]), (OK, []))


def test_untar_replaces_files_and_keeps_directories(applets: Applets) -> None:
    workspace = applets.workspace
    (workspace / "kept").mkdir()
    (workspace / "kept/other").touch()
    (workspace / "kept/file").write_bytes(b"old")
    (workspace / "elsewhere").write_bytes(b"untouched")
    (workspace / "link").symlink_to("elsewhere")
    (workspace / "twin").hardlink_to(workspace / "elsewhere")
    archive = make_archive(
        member("kept", type=tarfile.DIRTYPE, mode=0o700, mtime=77),
        member("kept/file", b"new", mode=0o6755, mtime=88),
        member("link", b"a file now"),
        member("twin", b"on its own"),
        member("./made/on/the/way", b"x"),
    )
    assert applets("untar", ".", stdin=archive) == Result(OK, b"", "")
    assert (workspace / "kept/other").exists()
    assert (workspace / "kept/file").read_bytes() == b"new"
    assert (workspace / "kept/file").stat().st_mode & 0o7777 == 0o755
    assert (workspace / "kept/file").stat().st_mtime == 88
    assert (workspace / "kept").stat().st_mtime == 77
    assert (workspace / "kept").stat().st_mode & 0o777 == 0o700
    assert (workspace / "elsewhere").read_bytes() == b"untouched"
    assert not (workspace / "link").is_symlink()
    assert (workspace / "made/on/the").stat().st_mode & 0o777 == 0o755


def test_untar_fills_read_only_directories(plain: Applets) -> None:
    archive = make_archive(
        member("sealed", type=tarfile.DIRTYPE, mode=0o555),
        member("sealed/in", type=tarfile.DIRTYPE, mode=0o500),
        member("sealed/in/file", b"x", mode=0o400),
    )
    assert plain("untar", ".", stdin=archive) == Result(OK, b"", "")
    assert (plain.workspace / "sealed").stat().st_mode & 0o777 == 0o555
    assert (plain.workspace / "sealed/in/file").read_bytes() == b"x"


def test_untar_many_directories(build: Callable[[str], Path], tmp_path: Path) -> None:
    """More than the list of directories holds: each still gets its mode and time."""
    applets = make_applets("sanitized", build, tmp_path)
    name = "n" * 200
    archive = make_archive(
        *(member(f"{name}{i}", type=tarfile.DIRTYPE, mode=0o711, mtime=5) for i in range(20_000))
    )
    assert applets("untar", "/tmp/many", stdin=archive) == Result(OK, b"", "")
    entries = parse_list(applets("list", "/tmp/many").stdout)
    assert len(entries) == 20_000
    assert {(entry.mode, entry.mtime_ns) for entry in entries.values()} == {(0o711, 5_000_000_000)}


def test_untar_pax_details(applets: Applets) -> None:
    records = b"22 path=\xff/with spaces\n" + b"20 mtime=1234.56789\n" + b"17 SCHILY.x=y=z\n\n"
    result = applets("untar", ".", stdin=with_pax(records))
    assert result == Result(OK, b"", "")
    path = Path(os.fsdecode(os.fsencode(applets.workspace) + b"/\xff/with spaces"))
    assert path.read_bytes() == b"data"
    assert path.stat().st_mtime_ns == 1_234_567_890_000


def test_untar_tolerates_what_follows_the_end(applets: Applets) -> None:
    archive = make_archive(member("file", b"x")) + b"garbage" * 100_000
    assert applets("untar", ".", stdin=archive) == Result(OK, b"", "")


@pytest.mark.parametrize(
    ("name", "where"), [("/etc/x", "etc/x"), ("//x", "x"), ("./a//./x", "a/x"), (".../x", ".../x")]
)
def test_untar_takes_absolute_names_as_relative(applets: Applets, name: str, where: str) -> None:
    assert applets("untar", "to", stdin=make_archive(member(name, b"x"))).status == OK
    assert (applets.workspace / "to" / where).read_bytes() == b"x"


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=kind, linkname=target)


@pytest.mark.parametrize(
    ("entries", "errno"),
    [
        ([member("../canary", b"x")], EXDEV),
        ([member("a/../../canary", b"x")], EXDEV),
        ([member("..", type=tarfile.DIRTYPE)], EXDEV),
        ([member("a", type=tarfile.DIRTYPE), member("a/../inside", b"x")], EXDEV),
        ([link("out", ".."), member("out/canary", b"x")], EXDEV),
        ([link("out", "OUTSIDE"), member("out/canary", b"x")], EXDEV),
        ([link("out", "OUTSIDE"), member("out/new/dir", type=tarfile.DIRTYPE)], EXDEV),
        ([link("out", "OUTSIDE"), member("out", type=tarfile.DIRTYPE, mode=0o777)], EXDEV),
        ([link("a", "b"), link("b", ".."), member("a/canary", b"x")], EXDEV),
        ([link("hard", "../canary", tarfile.LNKTYPE)], EXDEV),
        ([link("hard", "OUTSIDE/canary", tarfile.LNKTYPE)], ENOENT),
        ([link("out", ".."), link("hard", "out/canary", tarfile.LNKTYPE)], EXDEV),
        ([link("out", ".."), link("out/new", "x")], EXDEV),
        ([link("out", ".."), link("out/new", "before", tarfile.LNKTYPE)], EXDEV),
        ([member("dev", type=tarfile.CHRTYPE)], ENOTSUP),
        ([member("dev", type=tarfile.BLKTYPE)], ENOTSUP),
        ([member("fifo", type=tarfile.FIFOTYPE)], ENOTSUP),
        ([member("odd", b"x" * 600, type=b"Z")], ENOTSUP),
        ([member("dir/x", b""), member("dir", b"x")], EISDIR),
        ([member("x", b""), member("x", type=tarfile.DIRTYPE)], ENOTDIR),
        ([member("x", b""), member("x/y", b"")], ENOTDIR),
        ([member("./", b"x")], EBUSY),
        ([member("n" * 256, b"x")], ENAMETOOLONG),
    ],
)
def test_untar_goes_on_past_hostile_entries(
    applets: Applets, entries: list[tuple[tarfile.TarInfo, bytes]], errno: int
) -> None:
    canary = applets.workspace / "canary"
    canary.write_bytes(b"sings")
    entries = [member("before", b"1"), *entries, member("after", b"2")]
    for info, _ in entries:
        info.linkname = info.linkname.replace("OUTSIDE", str(applets.workspace))
    result = applets("untar", "to", stdin=make_archive(*entries))
    assert (result.status, result.errnos) == (PARTIAL, [errno])
    assert (applets.workspace / "to/before").read_bytes() == b"1"
    assert (applets.workspace / "to/after").read_bytes() == b"2"
    assert canary.read_bytes() == b"sings"
    assert canary.stat().st_nlink == 1
    assert sorted(path.name for path in applets.workspace.iterdir()) == ["canary", "to"]
    assert applets.workspace.stat().st_mode & 0o777 == 0o755


def test_untar_writes_through_no_link(applets: Applets) -> None:
    canary = applets.workspace / "canary"
    canary.write_bytes(b"sings")
    archive = make_archive(
        link("soft", "../canary"),
        member("soft", b"x"),
        link("soft2", "../canary"),
        link("hard", "soft2", tarfile.LNKTYPE),
        member("hard", b"y"),
        link("self", "self", tarfile.LNKTYPE),
    )
    result = applets("untar", "to", stdin=archive)
    assert result.errnos == [ENOENT]
    assert canary.read_bytes() == b"sings"
    assert (applets.workspace / "to/hard").read_bytes() == b"y"


def test_a_hard_link_to_itself_keeps_the_file(applets: Applets) -> None:
    (applets.workspace / "file").write_bytes(b"dear")
    assert applets("untar", ".", stdin=make_archive(link("file", "./file", tarfile.LNKTYPE))).status == OK
    assert (applets.workspace / "file").read_bytes() == b"dear"


GOOD = make_archive(member("file", b"x" * 5000), member("second", b"y"))


@pytest.mark.parametrize(
    "archive",
    {
        "nothing": b"",
        "truncated header": GOOD[:100],
        "truncated data": GOOD[:2000],
        "truncated padding": GOOD[: 512 + 5000],
        "no end": GOOD[: 512 + 5120 + 1024],
        "no archive": b"PK\3\4" * 1000,
        "checksum": raw_header(b"x", checksum=1) + bytes(1024),
        "huge size": raw_header(b"x", b"77777777777\0") + bytes(1024),
        "base-256 beyond 64 bits": raw_header(b"x", b"\x80" + b"\xff" * 11) + bytes(1024),
        "base-256 of 63 bits": raw_header(b"x", b"\x80\0\0\0\x7f" + b"\xff" * 7) + bytes(1024),
        "negative base-256": raw_header(b"x", b"\xff" * 12) + bytes(1024),
        "size not octal": raw_header(b"x", b"0000000009x\0") + bytes(1024),
        "extended header too large": raw_header(b"x", b"77777777777\0", b"x") + bytes(1024),
        "long name too large": raw_header(b"x", b"%011o\0" % 70000, b"L") + b"n" * 70144 + GOOD,
        "pax length too large": with_pax(b"99 path=x\n"),
        "pax length too small": with_pax(b"3 path=x\n"),
        "pax length 0": with_pax(b"0 path=x\n"),
        "pax length of many digits": with_pax(b"000000000000000000000000000000000010 path=x\n"),
        "pax length overflows": with_pax(b"18446744073709551626 path=x\n"),
        "pax without a length": with_pax(b"path=x\n"),
        "pax without a value": with_pax(b"7 path\n"),
        "pax without an end": with_pax(b"10 path=xyz"),
        "pax name with NUL": with_pax(b"12 path=a\0b\n"),
        "pax size": with_pax(b"14 size=99999\n"),
        "pax size negative": with_pax(b"11 size=-1\n"),
        "pax size overflows": with_pax(b"31 size=9999999999999999999999\n"),
        "pax size is a word": with_pax(b"12 size=big\n"),
        "sparse": raw_header(b"x", kind=b"S") + bytes(1024),
        "pax sparse": with_pax(b"22 GNU.sparse.major=1\n"),
        "sparse of another version": with_pax(b"22 GNU.sparse.major=2\n27 GNU.sparse.realsize=100\n"),
        "sparse without a version": with_pax(b"27 GNU.sparse.realsize=100\n"),
        "sparse 0.1": with_pax(b"23 GNU.sparse.map=0,1\n23 GNU.sparse.size=100\n"),
        "sparse name with NUL": with_sparse(b"0\n", name=b"a\0b"),
        "sparse size negative": with_sparse(b"0\n", size=b"-1"),
        "sparse size overflows": with_sparse(b"0\n", size=b"99999999999999999999"),
        "map: nothing": with_sparse(b""),
        "map: a word": with_sparse(b"x\n"),
        "map: no digits": with_sparse(b"\n"),
        "map: cut": with_sparse(b"1\n0\n"),
        "map: without end": with_sparse(b"1\n" + b"0" * 600),
        "map: too many": with_sparse(b"999999999\n"),
        "map: overflow": with_sparse(b"99999999999999999999\n"),
        "map: pieces overlap": with_sparse(b"2\n0\n4\n3\n4\n", b"12345678"),
        "map: beyond the file": with_sparse(b"1\n99\n4\n", b"1234"),
        "map: beyond 64 bits": with_sparse(b"1\n9223372036854775807\n4\n", b"1234"),
        "map: more than there is": with_sparse(b"1\n0\n8\n", b"1234"),
        "map: less than there is": with_sparse(b"1\n0\n2\n", b"1234"),
    }.items(),
    ids=lambda item: item[0],
)
def test_untar_refuses_malformed_archives(applets: Applets, archive: tuple[str, bytes]) -> None:
    result = applets("untar", ".", stdin=archive[1])
    assert (result.status, result.errnos) == (BAD, [EBADMSG])


def test_untar_stops_when_the_disk_is_full(applets: Applets) -> None:
    script = 'mount -t tmpfs -o size=64k none "$2" && exec "$@"'
    applets = replace(applets, prefix=("unshare", "-rm", "sh", "-c", script, "sh"))
    archive = make_archive(member("small", b"x"), member("big", b"x" * 100_000), member("after", b"x"))
    result = applets("untar", ".", stdin=archive)
    if result.stderr.startswith("unshare"):
        pytest.skip("needs user namespaces")
    assert (result.status, result.errnos) == (FAILED, [ENOSPC])
    assert result.stderr == "errno=28 No space left on device: big\n"


def test_untar_goes_on_past_a_file_that_is_too_large(applets: Applets) -> None:
    applets = replace(applets, prefix=("prlimit", "--fsize=50000", "--"))
    archive = make_archive(member("big", b"x" * 100_000), member("after", b"x"))
    result = applets("untar", ".", stdin=archive)
    assert (result.status, result.errnos) == (PARTIAL, [EFBIG])
    assert (applets.workspace / "after").exists()


def test_complaints_are_bounded(applets: Applets) -> None:
    archive = make_archive(*(member(f"fifo {i}", type=tarfile.FIFOTYPE) for i in range(2000)))
    result = applets("untar", ".", stdin=archive + b"garbage")
    assert result.status == PARTIAL
    assert len(result.stderr) < 5 * 1024
    broken = applets("untar", ".", stdin=archive[: 512 * 1000])
    assert (broken.status, broken.errnos[-1]) == (BAD, EBADMSG)


def test_untar_survives_mutated_archives(build: Callable[[str], Path], tmp_path: Path) -> None:
    """Many damaged archives under the sanitizers: none does worse than to be refused."""
    applets = make_applets("sanitized", build, tmp_path)
    make_tree(tmp_path / "top")
    (tmp_path / "top/big").write_bytes(b"not so big")
    rng = random.Random(11)
    seeds = []
    for format in ("v7", "oldgnu", "gnu", "ustar", "posix"):
        command = ["tar", f"--format={format}", "-C", str(tmp_path), "-cf", "-", "top"]
        seeds.append(subprocess.run(command, capture_output=True).stdout)
    seeds.append(with_pax(b"22 path=\xff/with spaces\n" + b"20 mtime=1234.56789\n"))
    cases = b"".join(
        struct.pack("<I", len(case)) + case for case in (mutate(rng, seeds) for _ in range(1500))
    )
    (applets.workspace / "canary").write_bytes(b"sings")
    statuses = applets("each", "untar", "to", stdin=cases).stdout.split()
    assert len(statuses) == 1500
    assert set(statuses) <= {b"0", b"1", b"2", b"3"}
    assert {b"0", b"1", b"2"} <= set(statuses)
    assert sorted(path.name for path in applets.workspace.iterdir()) == ["canary", "to"]
    assert (applets.workspace / "canary").read_bytes() == b"sings"


def mutate(rng: random.Random, seeds: list[bytes]) -> bytes:
    """Damages blocks of an archive and, most often, makes the checksums of its headers right again."""
    seed = rng.choice(seeds)
    blocks = [bytearray(seed[at : at + 512]) for at in range(0, len(seed), 512)]
    for _ in range(rng.randint(1, 6)):
        block = rng.choice(blocks)
        kind = rng.random()
        if kind < 0.5:
            at = rng.choice(
                [rng.randrange(len(block)), rng.randrange(124, 136), 156, rng.randrange(257, 265)]
            )
            block[at % len(block)] = rng.choice([rng.randrange(256), *b"0123567xgLKS/.\0\xff\x80 "])
        elif kind < 0.7:
            text = rng.choice(
                [b"../", b"/etc/", b"12 path=../x\n", b"\x80" + bytes(10), b"7" * 11, b"99999999 "]
            )
            at = rng.choice([0, 124, 157, 345, rng.randrange(len(block))])
            block[at : at + len(text)] = text
            del block[512:]
        elif kind < 0.85:
            blocks.insert(rng.randrange(len(blocks)), bytearray(rng.choice(blocks)))
        else:
            blocks.remove(block)
            if not blocks:
                return b""
    for block in blocks:
        if (
            len(block) == 512
            and rng.random() < 0.9
            and (block[257:262] == b"ustar" or block[148:152].isdigit())
        ):
            block[148:156] = b" " * 8
            block[148:156] = b"%06o\0 " % sum(block)
    archive = b"".join(blocks)
    return archive[: rng.randrange(len(archive))] if rng.random() < 0.2 else archive + bytes(1024)


# ---- The race ----


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["musl", "sanitized-by-hand"])
def test_no_rename_race_leads_outside(build: Callable[[str], Path], tmp_path: Path, variant: str) -> None:
    """10,000 applets (500 of the slow build) on a tree in which a directory and a link swap places."""
    memory = Path("/dev/shm")  # the faster the file system, the tighter the race
    with tempfile.TemporaryDirectory(
        prefix="skerry-race-", dir=memory if memory.is_dir() else None
    ) as folder:
        applets = make_applets(variant, build, Path(folder))
        outside = tmp_path / "outside"
        (outside / "sub").mkdir(parents=True)
        canaries = {"canary": "CANARY 1", "sub/f": "CANARY 2"}
        for name, text in canaries.items():
            (outside / name).write_text(text)
        archive = make_archive(
            member("d", type=tarfile.DIRTYPE, mode=0o755), member("d/sub", type=tarfile.DIRTYPE, mode=0o755),
            member("d/sub/f", b"mine"), member("d/sub/g", b"mine"), member("d/canary", b"mine"),
        )  # fmt: skip
        (tmp_path / "archive").write_bytes(archive)
        rounds = 1000 if variant == "musl" else 50
        with (tmp_path / "stdout").open("w+b") as stdout:
            command = applets.command("race", str(rounds), str(outside), str(tmp_path / "archive"))
            done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, env=applets.environ)
            assert done.returncode == 0
            assert b"errno=%d " % EXDEV in done.stderr  # the link was met, and refused
            stdout.seek(0)
            assert b"CANARY" not in stdout.read()
    assert {str(p.relative_to(outside)): p.read_text() for p in outside.rglob("*") if p.is_file()} == canaries


# ---- watch ----


class Watch:
    """A running watch, read one record at a time."""

    def __init__(self, applets: Applets, *args: str) -> None:
        self.process = applets.start("watch", *args)

    def __enter__(self) -> Watch:
        assert self.next() == ("r", 0, b"")
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.communicate()

    @property
    def stdout(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def next(self) -> tuple[str, int, bytes]:
        (length,) = struct.unpack("<I", self.stdout.read(4))
        body = self.stdout.read(length)
        kind, cookie, name_len = struct.unpack_from("<cIH", body)
        assert len(body) == 7 + name_len
        return kind.decode(), cookie, body[7:]

    def until(self, kind: str, name: bytes) -> set[tuple[str, bytes]]:
        """The records up to and with the one that is asked for."""
        seen: set[tuple[str, bytes]] = set()
        while (kind, name) not in seen:
            found, _, found_name = self.next()
            seen.add((found, found_name))
        return seen


def test_watch_tells_what_happens(applets: Applets) -> None:
    workspace = applets.workspace
    (workspace / "sub").mkdir()
    with Watch(applets, ".") as watch:
        for name in ODD_NAMES:
            Path(os.fsdecode(os.path.join(os.fsencode(workspace), name))).write_bytes(b"x")
            assert [watch.next(), watch.next()] == [("c", 0, name), ("m", 0, name)]
        (workspace / " -r").rename(workspace / "new")
        (away, away_cookie, old), (to, to_cookie, new) = watch.next(), watch.next()
        assert (away, old, to, new) == ("f", b" -r", "t", b"new")
        assert away_cookie == to_cookie != 0
        (workspace / "new").chmod(0o600)
        assert watch.next() == ("a", 0, b"new")
        (workspace / "sub/unseen").touch()
        (workspace / "sub/unseen").unlink()
        (workspace / "new").unlink()
        assert watch.next() == ("d", 0, b"new")


def test_watch_follows_the_tree(applets: Applets) -> None:
    workspace = applets.workspace
    (workspace / "top/old/deep").mkdir(parents=True)
    with Watch(applets, "top", "-r") as watch:
        (workspace / "top/old/deep/file").touch()
        watch.until("m", b"old/deep/file")
        (workspace / "top/a/b/c").mkdir(parents=True)
        (workspace / "top/a/b/c/file").touch()
        assert ("c", b"a/b/c") in watch.until("c", b"a/b/c/file")
        (workspace / "top/a").rename(workspace / "top/old/moved")
        watch.until("t", b"old/moved")
        (workspace / "top/old/moved/b/c/other").touch()
        watch.until("m", b"old/moved/b/c/other")
        (workspace / "elsewhere/in").mkdir(parents=True)
        (workspace / "elsewhere/in/file").touch()
        (workspace / "elsewhere").rename(workspace / "top/came")
        assert ("t", b"came") in watch.until("c", b"came/in/file")
        shutil.rmtree(workspace / "top/came")
        watch.until("d", b"came")


def test_watch_forgets_what_left_the_tree(applets: Applets) -> None:
    workspace = applets.workspace
    (workspace / "top/a/b").mkdir(parents=True)
    with Watch(applets, "top", "-r") as watch:
        (workspace / "top/a").rename(workspace / "gone")
        (workspace / "gone/unseen").touch()
        (workspace / "gone/b/unseen").touch()
        (workspace / "top/end").touch()
        seen = watch.until("m", b"end")
        assert seen == {("f", b"a"), ("c", b"end"), ("m", b"end")}


def test_watch_ends_with_its_directory(applets: Applets) -> None:
    (applets.workspace / "top/sub").mkdir(parents=True)
    with Watch(applets, "top", "-r") as watch:
        shutil.rmtree(applets.workspace / "top")
        watch.until("d", b"")
        assert watch.process.wait() == OK


def test_watch_ends_with_its_reader(applets: Applets) -> None:
    with Watch(applets, ".") as watch:
        watch.stdout.close()
        assert watch.process.wait() == OK


def test_watch_does_not_follow_links(applets: Applets) -> None:
    (applets.workspace / "link").symlink_to(applets.tmp)
    with Watch(applets, ".", "-r") as watch:
        (applets.workspace / "later").symlink_to(applets.tmp)
        (applets.tmp / "unseen").touch()
        (applets.workspace / "end").touch()
        assert watch.until("m", b"end") == {("c", b"later"), ("c", b"end"), ("m", b"end")}
    assert applets("watch", "link").errnos == [EXDEV]
    assert applets("watch", "end").errnos == [ENOTDIR]


def test_watch_says_when_it_runs_out_of_watches(build: Callable[[str], Path], tmp_path: Path) -> None:
    applets = make_applets("sanitized", build, tmp_path)
    for i in range(8192):
        (applets.workspace / str(i)).mkdir()
    process = applets.start("watch", ".", "-r")
    assert process.stdout is not None
    first = process.stdout.read(11)
    process.terminate()
    _, stderr = process.communicate()
    assert first[4:5] == b"o"
    assert stderr == b"errno=28 No space left on device: too many directories to watch\n"


def test_watch_says_when_events_are_lost(applets: Applets) -> None:
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if limit > 100_000:
        pytest.skip("this kernel queues too many events to overflow it in a test")
    workspace = applets.workspace
    with Watch(applets, ".", "-r") as watch:
        watch.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, watch.process.pid, os.WSTOPPED)
        for i in range(limit // 3 + 100):
            (workspace / f"{i % 7}").touch()
            (workspace / f"{i % 7}").unlink()
        (workspace / "made/meanwhile").mkdir(parents=True)
        watch.process.send_signal(signal.SIGCONT)
        watch.until("o", b"")
        (workspace / "made/meanwhile/file").touch()
        watch.until("m", b"made/meanwhile/file")
        assert not select.select([watch.stdout], [], [], 0)[0]
