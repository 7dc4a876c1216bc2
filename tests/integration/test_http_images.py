"""The image routes: what is there, what comes in, what goes."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator
from typing import Any

import pytest

from tests import support
from tests.integration.daemon import Connection, Daemon, started


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """Images do not depend on the backend: the fake one is enough."""
    with support.temporary_home() as home, started(home, "--backend", "fake") as running:
        yield running


def archive(**files: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return packed.getvalue()


def import_image(daemon: Daemon, name: str, data: bytes) -> list[dict[str, Any]]:
    status, headers, body = daemon.raw("POST", f"/images/import?name={name}", data)
    assert (status, headers["content-type"]) == (200, "application/x-ndjson"), body
    return [json.loads(row) for row in body.splitlines()]


def test_the_host_and_the_definitions_are_always_there(daemon: Daemon) -> None:
    found = daemon.call("GET", "/images")
    assert [(image["name"], image["kind"]) for image in found["images"]] == [("host", "host")]
    assert "dev" in found["definitions"]
    host = daemon.call("GET", "/images/host")
    assert host["digest"].startswith("sha256:")
    assert "PATH" in host["env"]
    assert daemon.call("DELETE", "/images/host", expect=400)["code"] == "invalid_request"


def test_an_image_from_import_to_removal(daemon: Daemon) -> None:
    *steps, last = import_image(daemon, "mine", archive(hello=b"x" * 100))
    assert [step["fraction"] for step in steps] == sorted(step["fraction"] for step in steps)
    assert last["image"]["name"] == "mine"
    info = daemon.call("GET", "/images/mine")
    assert (info["digest"], info["environments"]) == (last["image"]["digest"], [])
    environment = daemon.create(image="mine")
    assert daemon.call("GET", "/images/mine")["environments"] == [environment]
    assert daemon.call("DELETE", "/images/mine", expect=409)["code"] == "conflict"
    daemon.call("DELETE", f"/environments/{environment}")
    assert daemon.call("DELETE", "/images/mine") == {}
    daemon.call("GET", "/images/mine", expect=404)


@pytest.mark.parametrize("name", ["", "host", "a/b", "UPPER", "..%2fx"])
def test_a_wrong_name_is_refused_before_anything_is_read(daemon: Daemon, name: str) -> None:
    assert daemon.call("POST", f"/images/import?name={name}", b"", expect=400)["code"] == "invalid_request"


def test_a_wrong_archive_is_an_error_in_the_last_line(daemon: Daemon) -> None:
    for data in (b"", b"no archive at all" * 100, archive(**{"../outside": b"x"})):
        assert import_image(daemon, "wrong", data)[-1]["error"]["status"] == 400
    assert len(daemon.call("GET", "/images")["images"]) == 1
    assert staging(daemon) == []


def test_an_upload_that_breaks_off_leaves_nothing(daemon: Daemon) -> None:
    connection = Connection(daemon.socket)
    connection.putrequest("POST", "/images/import?name=half")
    connection.putheader("content-length", "1000000")
    connection.endheaders(b"x" * 1000)
    while not staging(daemon):
        pass
    connection.close()
    while staging(daemon):
        pass


def test_an_unknown_definition(daemon: Daemon) -> None:
    assert daemon.call("POST", "/images/build", {"name": "nothing"}, expect=404)["code"] == "image_not_found"


def staging(daemon: Daemon) -> list[str]:
    return [name for name in os.listdir(daemon.home / "images") if name.startswith(".staging")]
