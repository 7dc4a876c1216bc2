"""A Docker Engine that is missing, out of reach, killed, restarted or on another machine."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skerry.backends.docker.backend import DockerBackend, DockerGvisorBackend
from skerry.backends.docker.engine import Endpoint
from skerry.backends.machine import Machine
from tests import certificates, dockerd, support
from tests.dockerd import Dockerd
from tests.integration.daemon import Daemon, started
from tests.integration.roots import rootfs

pytestmark = pytest.mark.root
TROUBLE = """
from skerry.backends.docker.engine import Endpoint
print(Endpoint.from_environment().trouble())
"""


@contextmanager
def engine_of_its_own(*options: str) -> Iterator[Dockerd]:
    with tempfile.TemporaryDirectory(prefix="skerry-test-", dir="/tmp") as folder:
        try:
            with dockerd.running(Path(folder), options) as engine:
                yield engine
        except dockerd.Unavailable as error:
            support.missing(f"no Docker Engine for the tests: {error}")


def reason(home: Path, host: str, kind: type[DockerBackend] = DockerBackend) -> str:
    """Why it is not available there."""

    async def ask() -> str:
        backend = kind(Machine(str(home)), Endpoint(host))
        try:
            return (await backend.capabilities()).reason
        finally:
            await backend.close()

    return asyncio.run(ask())


@pytest.mark.requirement("R91")
def test_without_an_engine_the_reason_says_what_to_install(home: Path) -> None:
    assert "apt-get install docker.io" in reason(home, f"unix://{home}/nothing.sock")
    assert "use unix:// or tcp://" in reason(home, "ssh://somewhere")
    port = support.free_port()
    assert "is out of reach" in reason(home, f"tcp://127.0.0.1:{port}")


def test_without_permission_the_reason_says_how_to_get_it(as_nobody: support.Nobody) -> None:
    host = dockerd.shared.get().host
    said = as_nobody.run([as_nobody.python, "-c", TROUBLE], env={"DOCKER_HOST": host}).stdout
    assert "no permission to use" in said
    assert "usermod -aG docker" in said


def test_a_runtime_that_the_engine_lacks_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DockerGvisorBackend, "runtime", "nothing")
    said = reason(home, dockerd.shared.get().host, DockerGvisorBackend)
    assert "has no runtime nothing" in said
    assert "runsc install" in said


@pytest.mark.soak
@pytest.mark.requirement("R91")
def test_an_engine_that_is_killed_and_comes_back(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of_its_own() as engine:
        monkeypatch.setenv("DOCKER_HOST", engine.host)
        with started(home) as daemon:
            kept = daemon.create(backend="docker")
            engine.kill()
            assert daemon.execute(kept, "echo on")["stdout"] == "on\n"
            problem = daemon.call("POST", "/environments", {"backend": "docker"}, expect=501)
            assert "does not answer" in problem["message"]
            assert "systemctl status docker" in problem["hint"]
            engine.start()  # which ends what ran
            support.eventually(lambda: state(daemon, kept) == "ended")
            assert daemon.call("GET", f"/environments/{kept}")["ended_reason"]
            fresh = daemon.create(backend="docker")
            assert daemon.execute(fresh, "echo back")["stdout"] == "back\n"
            daemon.call("DELETE", f"/environments/{fresh}")
            assert not [each for each in engine.belongings() if each.startswith("container")]


def state(daemon: Daemon, ref: str) -> str:
    found: str = daemon.call("GET", f"/environments/{ref}")["state"]
    return found


def test_an_engine_elsewhere_over_tls(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, port, folder = certificates.make(), support.free_port(), home / "certificates"
    folder.mkdir()
    for name, path in (("ca", made.ca), ("cert", made.cert), ("key", made.key)):
        shutil.copy(path, folder / f"{name}.pem")
    tls = ("--tlsverify", f"--tlscacert={made.ca}", f"--tlscert={made.cert}", f"--tlskey={made.key}")
    with engine_of_its_own("-H", f"tcp://127.0.0.1:{port}", *tls) as engine:
        for name, value in {
            "DOCKER_HOST": f"tcp://127.0.0.1:{port}",
            "DOCKER_TLS_VERIFY": "1",
            "DOCKER_CERT_PATH": str(folder),
        }.items():
            monkeypatch.setenv(name, value)
        with started(home) as daemon:
            problem = daemon.call("POST", "/environments", {"backend": "docker"}, expect=400)
            assert "is on another machine" in problem["message"]
            archive = rootfs(bash="/bin/bash", sh="/bin/sh", cat="/bin/cat")
            assert daemon.raw("POST", "/images/import?name=tiny", archive)[0] == 200
            id_ = daemon.create(backend="docker", image="tiny")
            assert daemon.execute(id_, "state=7; echo hello | cat")["stdout"] == "hello\n"
            many = daemon.execute(id_, "printf '%300000s' x", output_limit=1_000_000)
            assert len(many["stdout"]) == 300_000
            usage = daemon.call("GET", f"/environments/{id_}")["usage"]
            assert usage["memory_bytes"] > 0
            daemon.kill()
        with started(home) as daemon:
            assert daemon.execute(id_, "echo $state")["stdout"] == "7\n"
            daemon.call("DELETE", f"/environments/{id_}")
            assert not [each for each in engine.belongings() if each.startswith("container")]
        monkeypatch.setenv("DOCKER_CERT_PATH", str(home))
        with started(home) as daemon:
            problem = daemon.call("POST", "/environments", {"backend": "docker"}, expect=501)
            assert "DOCKER_CERT_PATH" in problem["message"] + problem["hint"]
