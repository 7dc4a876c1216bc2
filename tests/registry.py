"""A private registry of images on loopback, and images of an engine for it."""

from __future__ import annotations

import base64
import http.client
import json
import subprocess
import urllib.parse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests import support
from tests.dockerd import Dockerd

_AUTH = base64.urlsafe_b64encode(b"{}").decode()


class Registry:
    def __init__(self, port: int) -> None:
        self.port = port
        self.host = f"127.0.0.1:{port}"
        """An engine speaks plain HTTP with what is on loopback."""

    def answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        try:
            connection.request("GET", "/v2/")
            return connection.getresponse().status in (200, 401)
        except OSError:
            return False
        finally:
            connection.close()

    def push(self, engine: Dockerd, repository: str, tag: str, archive: bytes, *changes: str) -> str:
        """Give the registry an image that the engine makes and does not keep. Returns its digest."""
        name = f"{self.host}/{repository}"
        make(engine, name, tag, archive, *changes)
        engine.tell(f"/images/{name}/push?tag={tag}", headers={"X-Registry-Auth": _AUTH})
        [digest] = engine.ask("GET", f"/images/{name}:{tag}/json")["RepoDigests"]
        engine.ask("DELETE", f"/images/{name}:{tag}")
        return str(digest.partition("@")[2])


def make(engine: Dockerd, repository: str, tag: str, archive: bytes, *changes: str) -> None:
    """An image of the engine with what is in the archive, and with instructions of a Dockerfile."""
    query = [("fromSrc", "-"), ("repo", repository), ("tag", tag), *(("changes", each) for each in changes)]
    engine.tell(f"/images/create?{urllib.parse.urlencode(query)}", archive)


@contextmanager
def running(folder: Path, *settings: str) -> Iterator[Registry]:
    """A registry with its files below `folder`; `settings` are more lines of its configuration."""
    program = support.require("docker-registry")
    registry = Registry(support.free_port())
    lines: Sequence[str] = (
        "version: 0.1",
        "log: {level: error}",
        f"storage: {json.dumps({'filesystem': {'rootdirectory': str(folder / 'registry')}})}",
        f"http: {json.dumps({'addr': registry.host})}",
        *settings,
    )
    (folder / "registry.yml").write_text("\n".join(lines))
    with open(folder / "registry.log", "wb") as log:
        process = subprocess.Popen([program, "serve", folder / "registry.yml"], stdout=log, stderr=log)
    try:
        support.eventually(registry.answers)
        yield registry
    finally:
        process.terminate()
        process.wait()
