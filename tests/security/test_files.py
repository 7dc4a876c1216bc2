"""Paths, names, special files and mounts: what the file API and the environment's view may and may not do."""

from __future__ import annotations

import io
import json
import os
import socket
import stat
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

import pytest

import skerry
from tests.integration.daemon import Connection
from tests.unit.scripted_server import every_request, serving

PYTHON = ["python3", "-I", "-S", "-c"]
REFUSED = (400, 403, 404, 409)


@pytest.fixture(scope="module")
def env(client: skerry.Client) -> Iterator[skerry.Environment]:
    with skerry.Environment(workspace="memory", client=client) as env:
        yield env


@pytest.fixture(autouse=True)
def _empty_workspace(env: skerry.Environment) -> Iterator[None]:
    yield
    env.run(["sh", "-c", "find /workspace /tmp /dev/shm -mindepth 1 -delete"])


class Raw:
    """The file API without a client that could tidy paths up."""

    def __init__(self, client: skerry.Client, environment_id: str) -> None:
        self._socket = f"{client.version()['home']}/daemon.sock"
        self._path = f"/environments/{environment_id}/files"

    def __call__(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        connection = Connection(self._socket)
        kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        data = body if isinstance(body, bytes | None) else json.dumps(body)
        try:
            connection.request(method, self._path + path, data, {"content-type": kind})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


@pytest.fixture
def raw(client: skerry.Client, env: skerry.Environment) -> Raw:
    return Raw(client, env.id)


def code(answer: bytes) -> str:
    return str(json.loads(answer)["code"])


def content(answer: tuple[int, bytes]) -> str:
    assert answer[0] == 200
    return str(json.loads(answer[1])["content"])


# Paths

OUTWARD = [
    "../etc/passwd",
    "/etc/passwd",
    "//etc//passwd",
    "/workspace/../etc/passwd",
    "/tmp/../../etc/passwd",
    "a/../../etc/passwd",
    "..%2fetc%2fpasswd",
    "%2e%2e/etc/passwd",
    "%2Fetc%2Fpasswd",
    "/proc/self/root/etc/passwd",
    "/proc/1/environ",
    "/dev/null",
    "/run/loop",
    "/workspaces/../etc/passwd",
    "/workspace2",
]
"""As they stand in a query string: all lead out of the two roots."""
LITERAL = [
    "..%5c..%5cetc%5cpasswd",
    "%252e%252e%252fetc%252fpasswd",
    "%c0%ae%c0%ae%c0%afetc%c0%afpasswd",
    "...",
    "~root",
    "$HOME",
    "*",
    "-rf",
]
"""Odd, and yet names like any other, below the workspace."""

WITH_A_PATH = [
    ("GET", "/read?path={}", None),
    ("GET", "/stat?path={}", None),
    ("GET", "/list?path={}", None),
    ("GET", "/list?recursive=1&path={}", None),
    ("POST", "/write?path={}", b"changed"),
    ("POST", "/write?offset=0&path={}", b"changed"),
    ("DELETE", "?path={}", None),
    ("DELETE", "?recursive=1&path={}", None),
    ("GET", "/archive?path={}", None),
    ("GET", "/watch?path={}", None),
]


@pytest.mark.parametrize("path", OUTWARD)
@pytest.mark.parametrize(
    ("method", "route", "body"), WITH_A_PATH, ids=[f"{m} {r}" for m, r, _ in WITH_A_PATH]
)
def test_no_path_leads_out(raw: Raw, path: str, method: str, route: str, body: bytes | None) -> None:
    status, answer = raw(method, route.format(path), body)
    assert (status, code(answer)) == (400, "path_outside"), answer


def test_no_path_in_a_body_leads_out(raw: Raw, env: skerry.Environment) -> None:
    env.files.write("a", "a")
    for path in ("../etc/x", "/etc/x", "/workspace/../etc/x", "/proc/self/cwd/x"):
        for route, body in (
            ("/mkdir", {"path": path}),
            ("/rename", {"source": path, "target": "b"}),
            ("/rename", {"source": "a", "target": path}),
            ("/write", {"path": path, "content": "x"}),
        ):
            status, answer = raw("POST", route, body)
            assert (status, code(answer)) == (400, "path_outside"), (route, body)
    status, answer = raw("PUT", "/archive?path=../etc", tar(("x", b"x")))
    assert (status, code(answer)) == (400, "path_outside")
    assert [info.name for info in env.files.list()] == ["a"]


def test_a_nul_is_refused_everywhere(raw: Raw, env: skerry.Environment) -> None:
    for method, route, body in WITH_A_PATH:
        status, answer = raw(method, route.format("a%00b"), body)
        assert (status, code(answer)) == (400, "invalid_request"), route
    for route, message in (("/mkdir", {"path": "a\0b"}), ("/rename", {"source": "a", "target": "a\0b"})):
        status, answer = raw("POST", route, message)
        assert (status, code(answer)) == (400, "invalid_request"), route
    with pytest.raises(skerry.InvalidRequest):
        env.files.read("a\0b")
    assert env.files.list() == []


@pytest.mark.parametrize("path", LITERAL)
def test_odd_paths_are_names_below_the_workspace(raw: Raw, env: skerry.Environment, path: str) -> None:
    assert raw("POST", f"/write?path={path}", b"odd")[0] == 200
    assert content(raw("GET", f"/read?path={path}")) == "odd"
    assert env.run(["find", "/workspace", "-type", "f", "-exec", "cat", "{}", "+"]).stdout == "odd"
    assert raw("DELETE", f"?path={path}")[0] == 200
    assert env.files.list() == []


def test_the_id_in_the_url_is_no_path(client: skerry.Client, env: skerry.Environment) -> None:
    for ref in (f"{env.id}%2f..%2f{env.id}", "..", "%2e%2e", f"{env.id}%00", "*"):
        assert Raw(client, ref)("GET", "/list?path=.")[0] in REFUSED


def test_the_roots_themselves_stay(env: skerry.Environment) -> None:
    for path in ("/workspace", ".", "/tmp", "/tmp/"):
        with pytest.raises(skerry.FileConflict):
            env.files.remove(path)
        with pytest.raises(skerry.FileConflict):
            env.files.rename(path, "elsewhere")
    assert env.files.stat("/workspace").type == env.files.stat("/tmp").type == "directory"


# Links


@pytest.mark.each_rung
@pytest.mark.parametrize(
    "target",
    [
        *("/etc", "../etc", "/proc/self/root/etc", "/proc/1/root/etc", "../proc/self/root/etc"),
        *("/proc/self/cwd/../etc", "/proc/thread-self/root/etc", "/dev/fd/../../etc"),
    ],
)
def test_a_symlink_does_not_lead_out(env: skerry.Environment, target: str, tmp_path: Path) -> None:
    env.run(["ln", "-s", target, "link"])
    files = env.files
    for call in (
        lambda: files.read("link/passwd"),
        lambda: files.stat("link/passwd"),
        lambda: files.list("link"),
        lambda: files.write("link/passwd", "changed"),
        lambda: files.mkdir("link/new"),
        lambda: files.remove("link/passwd"),
        lambda: files.rename("link/passwd", "stolen"),
        lambda: files.download("link/passwd", tmp_path / "passwd"),
        lambda: files.upload(__file__, "link/passwd"),
        lambda: files.watch("link"),
    ):
        with pytest.raises(skerry.PathOutside):
            call()
    assert files.stat("link").type == "symlink"
    assert not (tmp_path / "passwd").exists()
    files.remove("link", recursive=True)
    assert "appuser" in env.run(["cat", "/etc/passwd"]).stdout


def test_a_symlink_to_a_file_of_the_host(env: skerry.Environment, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.write_text("of the host")
    canary.chmod(0o666)
    env.run(["ln", "-s", str(canary), "link"])
    with pytest.raises(skerry.PathOutside):
        env.files.read("link")
    with pytest.raises(skerry.PathOutside):
        env.files.write("link", "changed")
    env.files.remove("link")
    assert canary.read_text() == "of the host"


@pytest.mark.each_rung
def test_descriptors_of_the_guest_are_out_of_reach(env: skerry.Environment) -> None:
    """Whatever the guest itself holds open: its sockets, its roots, its own program."""
    for number in range(12):
        for process in ("self", "1", "thread-self"):
            env.run(["ln", "-sf", f"/proc/{process}/fd/{number}", "link"])
            for call in (env.files.read, env.files.list):
                with pytest.raises(skerry.PathOutside):
                    call("link")
    env.run(["ln", "-sf", "/proc/self/exe", "link"])
    with pytest.raises(skerry.PathOutside):
        env.files.write("link", "changed")


def test_a_symlink_that_stays_inside_is_followed(env: skerry.Environment) -> None:
    env.run(["sh", "-c", "mkdir -p a/b; echo hi > a/f; ln -s ../f a/b/link; ln -s a/b d"])
    assert env.files.read("d/link") == "hi\n"


# Special files


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["fifo", "socket"])
def test_what_is_no_file_is_an_error_and_never_a_hang(
    env: skerry.Environment, kind: str, tmp_path: Path
) -> None:
    make = {
        "fifo": "import os; os.mkfifo('x')",
        "socket": "import socket; s = socket.socket(socket.AF_UNIX); s.bind('x'); s.listen()",
    }
    assert env.run([*PYTHON, make[kind]]).ok
    files = env.files
    for call in (
        lambda: files.read("x"),
        lambda: files.read_bytes("x", offset=5, length=1),
        lambda: files.write("x", "data"),
        lambda: files.write("x", "data", offset=0),
        lambda: files.list("x"),
        lambda: files.list("x", recursive=True),
        lambda: files.write("x/y", "data"),
    ):
        with pytest.raises(skerry.FileConflict):
            call()
    assert files.stat("x").type == kind
    assert [info.type for info in files.list()] == [kind]
    files.download(".", tmp_path / "all")
    assert not (tmp_path / "all" / "x").exists()
    files.remove("x")
    assert files.list() == []


@pytest.mark.timeout(20)
@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev/tty", "/dev/random"])
def test_a_device_is_no_file(env: skerry.Environment, device: str) -> None:
    env.run(["ln", "-s", device, "link"])
    for path in (device, "link"):
        with pytest.raises(skerry.PathOutside):
            env.files.read(path)
        with pytest.raises(skerry.PathOutside):
            env.files.write(path, "data")


@pytest.mark.timeout(20)
def test_no_device_is_made_by_an_upload(raw: Raw, env: skerry.Environment) -> None:
    node = tarfile.TarInfo("node")
    node.type, node.devmajor, node.devminor = tarfile.CHRTYPE, 1, 5
    suid = tarfile.TarInfo("suid")
    suid.mode, suid.size = 0o6777, 4
    status, answer = raw("PUT", "/archive?path=.", tar(suid, node))
    assert (status, code(answer)) == (409, "file_conflict")
    assert env.run(["sh", "-c", "find . -type c -o -type b -o -perm /6000"]).stdout == ""


# Names

NAMES = [
    b"new\nline",
    b"\x1b[31mred\x07",
    b"\xff\xfe\x80",
    "grüße 🏝".encode(),
    b" x ",
    b"-rf",
    b"a'\"\\$(id)`",
    b"x" * 255,
]


@pytest.mark.parametrize("name", NAMES, ids=[repr(name[:12]) for name in NAMES])
def test_names_round_trip(raw: Raw, env: skerry.Environment, tmp_path: Path, name: bytes) -> None:
    text = os.fsdecode(name)
    quoted = quote_from_bytes(name, safe="")
    assert raw("POST", f"/write?path=dir/{quoted}", b"by http")[0] == 200
    assert env.files.read(f"dir/{text}") == "by http"
    env.files.write(f"dir/{text}", "by the SDK")
    assert content(raw("GET", f"/read?path=dir/{quoted}")) == "by the SDK"
    for recursive in (False, True):
        assert [info.name for info in env.files.list("dir", recursive=recursive)] == [text]
    assert env.files.stat(f"dir/{text}").name == text
    look = "import os, sys; print(os.listdir(b'dir') == [os.fsencode(sys.argv[1])])"
    assert env.run([*PYTHON, look, text]).stdout == "True\n"
    env.files.download("dir", tmp_path / "down")
    assert os.listdir(os.fsencode(tmp_path / "down")) == [name]
    env.files.upload(tmp_path / "down", "up")
    assert env.files.read(f"up/{text}") == "by the SDK"
    env.files.rename(f"up/{text}", f"up/{text[:-1]}_")
    env.files.remove(f"up/{text[:-1]}_")
    assert env.files.list("up") == []


@pytest.mark.parametrize("name", NAMES, ids=[repr(name[:12]) for name in NAMES])
def test_names_round_trip_by_the_command_line(
    env: skerry.Environment, client: skerry.Client, tmp_path: Path, name: bytes
) -> None:
    home = client.version()["home"]
    if os.stat(home).st_uid != os.geteuid():
        pytest.skip("the command line trusts no daemon of another user's")
    there, back = tmp_path / "there", tmp_path / "back"
    there.mkdir()
    (there / os.fsdecode(name)).write_text("by the CLI")
    for source, target in ((str(there), f"{env.id}:up"), (f"{env.id}:up", str(back))):
        done = subprocess.run(
            [sys.executable, "-m", "skerry.cli", "cp", source, target],
            env={**os.environ, "SKERRY_HOME": home},
            capture_output=True,
        )
        assert (done.returncode, done.stderr) == (0, b"")
    assert env.files.read(f"up/{os.fsdecode(name)}") == "by the CLI"
    assert os.listdir(os.fsencode(back)) == [name]


# What comes back


def tar(*members: tuple[str, bytes] | tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for member in members:
            if isinstance(member, tuple):
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                archive.addfile(info, io.BytesIO(member[1]))
            else:
                archive.addfile(member, io.BytesIO(bytes(member.size)))
    return buffer.getvalue()


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def test_a_hostile_archive_writes_nothing_outside(tmp_path: Path) -> None:
    """A guest that was taken over sends what it likes, whatever the files inside are."""
    outside, target = tmp_path / "outside", tmp_path / "target"
    outside.mkdir()
    (outside / "file").write_text("precious")
    suid, node = tarfile.TarInfo("d/suid"), tarfile.TarInfo("d/node")
    suid.mode, suid.size = 0o6777, 1
    node.type, node.devmajor, node.devminor = tarfile.CHRTYPE, 1, 5
    evil = tar(
        *(("d/good", b"good"), ("../outside/file", b"evil"), ("d/../../outside/file", b"evil")),
        *((f"{outside}/file", b"evil"), ("d/./../../outside/new", b"evil")),
        *(link("d/up", ".."), link("d/abs", str(outside)), link("d/out", "../../outside")),
        *(("d/up/outside/new", b"evil"), ("d/abs/file", b"evil"), ("d/out/file", b"evil")),
        *(link("d/a", "b"), link("d/b", "../outside"), ("d/a/file", b"evil")),
        link("d/hard", f"{outside}/file", tarfile.LNKTYPE),
        link("d/hard2", "../outside/file", tarfile.LNKTYPE),
        *(suid, node, link("d/fifo", "", tarfile.FIFOTYPE)),
    )

    def answer(method: str, target: str, body: bytes) -> Any:
        return evil if "/archive" in target else {"environment_id": "abc"}

    with serving(every_request(answer)), skerry.Client() as client:
        with skerry.Environment.get("abc", client=client) as env:
            left_out = env.files.download("d", target)
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"file": "precious"}
    assert sorted(os.listdir(tmp_path)) == ["outside", "target"]
    assert (target / "good").read_text() == "good"
    assert "d/node" in [each.path for each in left_out]
    for path in target.rglob("*"):
        info = path.lstat()
        if path.is_symlink():
            assert path.resolve().is_relative_to(target.resolve())
            continue
        assert not info.st_mode & 0o6022
        assert stat.S_IFMT(info.st_mode) in (stat.S_IFREG, stat.S_IFDIR)
        assert info.st_nlink == 1 or path.is_dir()


def test_a_socket_of_the_host_is_not_inside(env: skerry.Environment, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0skerry-test-{os.getpid()}")
        listener.listen()
        connect = "import socket, sys; socket.socket(socket.AF_UNIX).connect('\\0' + sys.argv[1])"
        result = env.run([*PYTHON, connect, f"skerry-test-{os.getpid()}"])
        assert "ConnectionRefusedError" in result.stderr
    look = "find / /tmp /dev /run -xdev -type s 2>/dev/null"
    assert env.run(["sh", "-c", look]).stdout == ""
