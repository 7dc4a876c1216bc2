"""The file routes: bytes and names as they are, streams in both directions."""

from __future__ import annotations

import io
import json
import tarfile
from typing import Any
from urllib.parse import quote

import pytest

from tests.integration.daemon import Connection, Daemon

OCTETS = {"content-type": "application/octet-stream"}


def at(environment: str, route: str, **parameters: object) -> str:
    pairs = [
        f"{name}={quote(str(value).encode('utf-8', 'surrogateescape'))}" for name, value in parameters.items()
    ]
    return f"/environments/{environment}/files{route}?{'&'.join(pairs)}"


def read(daemon: Daemon, environment: str, **parameters: object) -> bytes:
    accept = {"accept": "application/octet-stream"}
    status, headers, body = daemon.raw("GET", at(environment, "/read", **parameters), None, accept)
    assert status == 200, body
    assert headers["content-type"] == "application/octet-stream"
    return body


def write(daemon: Daemon, environment: str, data: bytes, **parameters: object) -> Any:
    status, _, body = daemon.raw("POST", at(environment, "/write", **parameters), data, OCTETS)
    assert status == 200, body
    return json.loads(body)


@pytest.mark.requirement("R30", "R31")
def test_write_and_read(daemon: Daemon, environment: str) -> None:
    path = f"/environments/{environment}/files/write"
    answer = daemon.call("POST", path, {"path": "a/b.txt", "content": "grüße"})
    assert answer == {"error": False, "message": "File saved successfully.", "size": 7}
    assert read(daemon, environment, path="a/b.txt") == "grüße".encode()
    daemon.call("POST", path, {"path": "a/b.txt", "content": "AAH/", "encoding": "base64"})
    assert read(daemon, environment, path="a/b.txt") == b"\x00\x01\xff"
    daemon.call("POST", path, {"path": "a/b.txt", "content": ""})
    assert read(daemon, environment, path="a/b.txt") == b""
    daemon.call("POST", path, {"path": "a/b.txt", "content": "%", "encoding": "base64"}, expect=400)
    assert daemon.execute(environment, "stat -c %U a/b.txt")["stdout"].strip() in (
        "appuser",
        "nobody",
        "root",
    )


def test_read_as_json(daemon: Daemon, environment: str) -> None:
    write(daemon, environment, "grüße".encode(), path="text")
    answer = daemon.call("GET", at(environment, "/read", path="text"))
    assert answer == {"error": False, "content": "grüße", "encoding": "utf-8", "size": 7}
    answer = daemon.call("GET", at(environment, "/read", path="text", offset=3, length=1))
    assert answer == {"error": False, "content": "vA==", "encoding": "base64", "size": 1}
    missing = daemon.call("GET", at(environment, "/read", path="missing"), expect=404)
    assert (missing["error"], missing["code"]) == (True, "file_missing")
    daemon.execute(environment, f"truncate -s {(16 << 20) + 1} large")
    too_large = daemon.call("GET", at(environment, "/read", path="large"), expect=413)
    assert "application/octet-stream" in too_large["hint"]
    assert daemon.call("GET", at(environment, "/read", path="large", length=3))["content"] == "\0\0\0"


def test_a_json_body_names_its_path_alone(daemon: Daemon, environment: str) -> None:
    body = {"path": "a", "content": ""}
    assert (
        daemon.call("POST", at(environment, "/write", path="b"), body, expect=400)["code"]
        == "invalid_request"
    )
    assert (
        daemon.call("POST", at(environment, "/write", offset=1), body, expect=400)["code"]
        == "invalid_request"
    )
    status, _, _ = daemon.raw("POST", f"/environments/{environment}/files/write", b"x", OCTETS)
    assert status == 400


def test_large_files_at_any_offset(daemon: Daemon, environment: str) -> None:
    data = bytes(range(256)) * 12_000
    assert write(daemon, environment, data, path="big")["size"] == len(data)
    assert read(daemon, environment, path="big") == data
    assert (
        read(daemon, environment, path="big", offset=1_000_001, length=300_000) == data[1_000_001:1_300_001]
    )
    assert read(daemon, environment, path="big", offset=len(data)) == b""
    assert read(daemon, environment, path="big", length=0) == b""
    write(daemon, environment, b"NEW", path="big", offset=500_000)
    assert read(daemon, environment, path="big") == data[:500_000] + b"NEW" + data[500_003:]
    write(daemon, environment, b"short", path="big")
    assert read(daemon, environment, path="big") == b"short"
    write(daemon, environment, b"", path="empty")
    assert daemon.call("GET", at(environment, "/stat", path="empty"))["size"] == 0


@pytest.mark.parametrize(
    "name", ["new\nline", "esc\x1b[31m", "not-utf8-\udcff\udc80", "ünï cödé", "a+b&c=d%20", "-rf"]
)
def test_odd_names_come_back_as_they_are(daemon: Daemon, environment: str, name: str) -> None:
    write(daemon, environment, b"data", path=name)
    assert read(daemon, environment, path=name) == b"data"
    assert [row["path"] for row in daemon.call("GET", at(environment, "/list"))["entries"]] == [name]
    assert daemon.call("GET", at(environment, "/stat", path=name))["path"] == name
    body = {"source": name, "target": f"moved {name}"}
    assert daemon.call("POST", f"/environments/{environment}/files/rename", body) == {}
    assert daemon.execute(environment, ["cat", "--", f"moved {name}"])["stdout"] == "data"
    assert daemon.call("DELETE", at(environment, "", path=f"moved {name}")) == {}
    assert daemon.call("GET", at(environment, "/list"))["entries"] == []


def test_directories(daemon: Daemon, environment: str) -> None:
    base = f"/environments/{environment}/files"
    assert daemon.call("POST", f"{base}/mkdir", {"path": "a/b/c"}) == {}
    assert daemon.call("POST", f"{base}/mkdir", {"path": "a/b/c"}) == {}
    write(daemon, environment, b"x", path="a/b/file")
    listed = daemon.call("GET", at(environment, "/list", path="a", recursive=1))["entries"]
    assert {(row["path"].split("a/", 1)[-1], row["type"]) for row in listed} == {
        ("b", "directory"),
        ("b/c", "directory"),
        ("b/file", "file"),
    }
    assert daemon.call("DELETE", at(environment, "", path="a"), expect=409)["code"] == "file_conflict"
    assert daemon.call("DELETE", at(environment, "", path="a", recursive=1)) == {}
    assert daemon.call("GET", at(environment, "/stat", path="a"), expect=404)["code"] == "file_missing"


def test_a_long_listing(daemon: Daemon, environment: str) -> None:
    daemon.execute(environment, "mkdir many; cd many; touch $(seq 1 2500)")
    listed = daemon.call("GET", at(environment, "/list", path="many"))["entries"]
    assert {row["path"].rsplit("/", 1)[-1] for row in listed} == {str(number) for number in range(1, 2501)}


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("missing", 404, "file_missing"),
        (".", 409, "file_conflict"),
        ("../../etc/passwd", 400, "path_outside"),
        ("/etc/passwd", 400, "path_outside"),
        ("a\0b", 400, "invalid_request"),
        ("x" * 5000, 400, "invalid_request"),
        ("", 400, "invalid_request"),
    ],
)
def test_paths_that_cannot_be_read(
    daemon: Daemon, environment: str, path: str, status: int, code: str
) -> None:
    assert daemon.call("GET", at(environment, "/read", path=path), expect=status)["code"] == code


def test_wrong_parameters(daemon: Daemon, environment: str) -> None:
    for parameters in (
        {},
        {"path": "a", "offset": "x"},
        {"path": "a", "offset": "-1"},
        {"path": "a", "other": "1"},
    ):
        assert (
            daemon.call("GET", at(environment, "/read", **parameters), expect=400)["code"]
            == "invalid_request"
        )
    daemon.call("GET", f"/environments/{environment}/files/read?path=a&path=b", expect=400)


def test_archives_go_both_ways(daemon: Daemon, environment: str) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, data in (("one", b"1"), ("sub/two", b"2" * 300_000)):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    answer = daemon.call("PUT", at(environment, "/archive", path="in"), packed.getvalue())
    assert answer["message"]
    assert daemon.execute(environment, "cat in/one; wc -c <in/sub/two")["stdout"] == "1300000\n"
    for contents, top in ((0, "in/"), (1, "")):
        status, headers, body = daemon.raw("GET", at(environment, "/archive", path="in", contents=contents))
        assert (status, headers["content-type"]) == (200, "application/x-tar")
        with tarfile.open(fileobj=io.BytesIO(body)) as archive:
            member = archive.extractfile(f"{top}sub/two")
            assert member is not None
            assert member.read() == b"2" * 300_000
    daemon.call("GET", at(environment, "/archive", path="missing"), expect=404)
    status, _, body = daemon.raw("PUT", at(environment, "/archive", path="in"), b"not a tar archive" * 100)
    assert status == 400, body


def test_a_watch_tells_what_changes(daemon: Daemon, environment: str) -> None:
    daemon.call("POST", f"/environments/{environment}/files/mkdir", {"path": "seen"})
    daemon.call("GET", at(environment, "/watch", path="missing"), expect=404)
    before = processes(daemon, environment)
    with daemon.stream(at(environment, "/watch", path="seen")) as events:
        assert json.loads(events.readline())["kind"] == "ready"
        daemon.execute(environment, "echo x > seen/new")
        kinds = [json.loads(events.readline())]
        while kinds[-1]["kind"] != "modified":
            kinds.append(json.loads(events.readline()))
        assert kinds[0]["kind"] == "created"
        assert kinds[0]["path"].endswith("new")
    if daemon.call("GET", f"/environments/{environment}")["isolation"] != "none":
        # The reader has gone: so goes the program that watched for it.
        while processes(daemon, environment) > before:
            pass


def processes(daemon: Daemon, environment: str) -> int:
    return int(daemon.execute(environment, "set -- /proc/[0-9]*; echo $#")["stdout"])


@pytest.mark.parametrize("old", [b"", b"old" * 100_000])
def test_broken_off_upload_leaves_the_old_content(daemon: Daemon, environment: str, old: bytes) -> None:
    write(daemon, environment, old, path="kept/file")
    for path in ("kept/file", "kept/fresh"):
        connection = Connection(daemon.socket)
        connection.putrequest("POST", at(environment, "/write", path=path))
        for name, value in (*OCTETS.items(), ("content-length", "10000000")):
            connection.putheader(name, value)
        connection.endheaders()
        connection.send(b"new" * 1_000_000)
        connection.close()
        # The daemon notices it in its own time; a request for the same file comes behind.
        names = daemon.execute(environment, "ls -A kept")["stdout"].split()
        assert names == ["file"]
        assert read(daemon, environment, path="kept/file") == old
