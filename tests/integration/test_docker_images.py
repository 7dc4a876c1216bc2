"""Images of a Docker Engine by reference, from a real registry on loopback."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from skerry.backends.docker.containers import Containers
from skerry.backends.docker.engine import Endpoint, EngineClient
from skerry.backends.docker.images import EngineImages
from skerry.backends.docker.stock import Stock
from skerry.errors import ImageNotFound
from skerry.images.references import Allowed
from tests import dockerd, registry, support
from tests.dockerd import Dockerd
from tests.integration.daemon import Daemon, started
from tests.integration.roots import rootfs
from tests.registry import Registry

pytestmark = [pytest.mark.root, pytest.mark.slow]
KINDS = ["docker", "docker-runsc"]
CHANGES = (
    "ENV GREETING=hello PATH=/tools:/bin HOME=/root",
    "USER 33",
    "WORKDIR /usr",
    'ENTRYPOINT ["/bin/false"]',
    "VOLUME /data /tmp",
    'HEALTHCHECK --interval=1s CMD ["/bin/false"]',
    "LABEL skerry.environment=other skerry.home=other",
)
HELLO = '#include <stdio.h>\nint main(void) { puts("hello from musl"); }\n'


@pytest.fixture(scope="module")
def engine() -> Dockerd:
    return dockerd.shared.get()


@pytest.fixture(scope="module")
def place() -> Iterator[Registry]:
    with (
        tempfile.TemporaryDirectory(prefix="skerry-test-") as folder,
        registry.running(Path(folder)) as found,
    ):
        yield found


@pytest.fixture(scope="module")
def digest(engine: Dockerd, place: Registry) -> str:
    """Of `team/tool:1`, which the registry has and the engine lacks."""
    archive = io.BytesIO(
        rootfs(sh="/bin/sh", bash="/bin/bash", cat="/bin/cat", id="/usr/bin/id", ls="/bin/ls")
    )
    with tarfile.open(fileobj=archive, mode="a") as tar:
        for name, mode in (("data", 0o777), ("data/file", 0o666), ("tools/tool", 0o755)):
            entry = tarfile.TarInfo(name)
            entry.mode = mode
            content = b"#!/bin/sh\necho a tool\n"
            if name == "data":
                entry.type, content = tarfile.DIRTYPE, b""
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return place.push(engine, "team/tool", "1", archive.getvalue(), *CHANGES)


@pytest.fixture
def tool(engine: Dockerd, place: Registry, digest: str) -> Iterator[str]:
    """The reference of `team/tool:1`, which the engine lacks before and after the test."""
    yield f"docker://{place.host}/team/tool:1"
    for image in engine.ask("GET", "/images/json?all=1"):
        if any(
            name.startswith(place.host) for name in (image["RepoTags"] or []) + (image["RepoDigests"] or [])
        ):
            engine.ask("DELETE", f"/images/{image['Id']}?force=1")


@pytest.fixture(scope="module")
def variables(engine: Dockerd, place: Registry) -> dict[str, str]:
    """Of a daemon."""
    patterns = f"{place.host}/team/*, 127.0.0.1:1/team/tool"
    return {"DOCKER_HOST": engine.host, "SKERRY_DOCKER_IMAGES": patterns}


@pytest.fixture(scope="module")
def daemon(variables: dict[str, str]) -> Iterator[Daemon]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        with support.temporary_home() as home, started(home) as running:
            patch.undo()
            yield running


def pulled(daemon: Daemon, image: str) -> list[dict[str, Any]]:
    status, _, answer = daemon.raw("POST", "/images/pull", {"image": image})
    assert status == 200, answer
    return [json.loads(line) for line in answer.splitlines()]


def refused(daemon: Daemon, image: str, status: int) -> str:
    """The code of the error, which says what to do next; the same for a create and a pull."""
    problem = daemon.call("POST", "/environments", {"image": image}, expect=status)
    assert problem["hint"], problem
    assert pulled(daemon, image)[-1]["error"]["code"] == problem["code"]
    return str(problem["code"])


@pytest.mark.parametrize("kind", support.first_of(KINDS))
def test_a_missing_image_is_pulled_with_progress_and_runs(daemon: Daemon, tool: str, kind: str) -> None:
    if kind == "docker-runsc":
        support.require("runsc")
    *steps, last = pulled(daemon, tool)
    assert {step["step"] for step in steps} == {f"pulling {tool}"}
    assert [step["fraction"] for step in steps] == sorted(step["fraction"] for step in steps)
    assert (last["image"]["name"], last["image"]["kind"]) == (tool, "docker")
    assert pulled(daemon, tool) == [last]  # it is there now
    isolation = {"docker": "namespace", "docker-runsc": "gvisor"}[kind]
    info = daemon.call("POST", "/environments", {"image": tool, "isolation": isolation}, expect=201)
    id_ = info["environment_id"]
    try:
        assert (info["backend"], info["image"], info["image_digest"]) == (kind, tool, last["image"]["digest"])
        said = daemon.execute(id_, "tool; echo $GREETING $PATH $HOME $PWD; id -u; ls -A /data")["stdout"]
        assert said.splitlines()[::2] == ["a tool", "1000"]  # and nothing is in /data
        greeting, path, *places = said.splitlines()[1].split()
        assert (greeting, path.split(":")[-2:], places) == ("hello", ["/tools", "/bin"], ["/workspace"] * 2)
        for path in ("/tools/tool", "/etc/new", "/data/new"):
            assert daemon.execute(id_, f": > {path}")["exit_code"] != 0, path
        assert daemon.execute(id_, ": > /tmp/new; : > /workspace/new")["exit_code"] == 0
    finally:
        daemon.call("DELETE", f"/environments/{id_}")


def test_a_create_pulls_and_leaves_no_volume(daemon: Daemon, engine: Dockerd, tool: str, digest: str) -> None:
    before = {each for each in engine.belongings() if not each.startswith("image ")}
    by_digest = f"{tool.removesuffix(':1')}@{digest}"
    id_ = daemon.create(image=by_digest)
    try:
        config = engine.ask("GET", f"/containers/skerry-{id_}/json")
        assert config["State"].get("Health") is None  # nothing runs the image's health check
        assert config["Config"]["Labels"]["skerry.environment"] == id_
        points = {each["Destination"]: each["RW"] for each in config["Mounts"]}
        assert points == {"/.skerry/guest": False, "/dev/pts": True}  # and /data is not on the engine's disk
        assert daemon.execute(id_, "tool")["stdout"] == "a tool\n"
    finally:
        daemon.call("DELETE", f"/environments/{id_}")
    after = {each for each in engine.belongings() if not each.startswith("image ")}
    assert {each for each in after - before if not each.startswith("volume skerry-")} == set()


def test_an_environment_keeps_its_variables_after_a_restart(
    home: Path, tool: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with started(home) as daemon:
        daemon.create(name="kept", image=tool)
        daemon.kill()
    monkeypatch.delenv("SKERRY_DOCKER_IMAGES")  # which is about new environments alone
    with started(home) as daemon:
        assert daemon.execute("kept", "tool; echo $GREETING")["stdout"] == "a tool\nhello\n"
        daemon.call("DELETE", "/environments/kept")


def test_only_images_that_the_operator_lists(
    daemon: Daemon, engine: Dockerd, place: Registry, tool: str
) -> None:
    for name in ("other/secret", "team/listed"):
        registry.make(engine, f"{place.host}/{name}", "1", rootfs(sh="/bin/sh"))
    assert refused(daemon, f"docker://{place.host}/other/secret:1", 403) == "denied"
    denial = json.loads(daemon.raw("GET", "/audit?action=image.find")[2].splitlines()[-1])
    assert denial["detail"]["image"] == f"docker://{place.host}/other/secret:1"
    id_ = daemon.create(image=f"docker://{place.host}/team/listed:1")
    daemon.call("DELETE", f"/environments/{id_}")


def test_the_id_of_an_image_is_no_name_for_it(engine: Dockerd, place: Registry, tool: str) -> None:
    registry.make(engine, f"{place.host}/other/secret", "1", rootfs(sh="/bin/sh"))
    image = engine.ask("GET", f"/images/{place.host}/other/secret:1/json")["Id"].removeprefix("sha256:")

    async def found(name: str) -> str:
        client = EngineClient(Endpoint(engine.host))
        try:
            return (await EngineImages(client, Allowed("*")).find(f"docker://{name}")).digest
        finally:
            await client.close()

    assert asyncio.run(found(f"{place.host}/other/secret:1")) == f"sha256:{image}"
    for short in (image[:12], f"sha256:{image}", f"{place.host}/team/tool@sha256:{image}"):
        if "/" not in short:  # the engine itself would find it
            assert engine.ask("GET", f"/images/{short}/json")
        with pytest.raises(ImageNotFound):
            asyncio.run(found(short))


def test_labels_of_an_image_make_no_environment(engine: Dockerd, place: Registry, tool: str) -> None:
    """Of the container that fills the volume with the guest: a sweep would remove what its labels name."""
    labels = "LABEL skerry.environment=other skerry.backend=docker"
    registry.make(engine, f"{place.host}/team/labels", "1", rootfs(sh="/bin/sh"), labels)
    seen: list[list[str]] = []

    class Client(EngineClient):
        async def call(self, method: str, path: str, **options: Any) -> Any:
            if method == "PUT":
                seen.append(await Containers(self, "home").list("docker"))
            return await super().call(method, path, **options)

    async def fill() -> None:
        client = Client(Endpoint(engine.host))
        stock = Stock(client, "home", gvisor=False)
        try:
            await stock.volume(f"{place.host}/team/labels:1")
        finally:
            await stock.close()
            await client.close()

    asyncio.run(fill())
    assert seen == [[]]


def test_an_image_that_cannot_be_pulled(daemon: Daemon, place: Registry, tool: str) -> None:
    assert refused(daemon, f"{tool}-missing", 404) == "image_not_found"
    assert refused(daemon, f"docker://{place.host}/team/missing", 404) == "image_not_found"
    assert refused(daemon, "docker://127.0.0.1:1/team/tool", 503) == "registry_unavailable"
    with tempfile.TemporaryDirectory(prefix="skerry-test-") as folder:
        settings = f"auth: {{htpasswd: {{realm: nobody, path: {folder}/passwords}}}}"
        with registry.running(Path(folder), settings) as locked, pytest.MonkeyPatch.context() as patch:
            patch.setenv("DOCKER_HOST", dockerd.shared.get().host)
            patch.setenv("SKERRY_DOCKER_IMAGES", locked.host + "/*")
            with support.temporary_home() as home, started(home) as other:
                assert refused(other, f"docker://{locked.host}/tool", 403) == "denied"


def test_an_image_of_an_engine_takes_a_backend_of_an_engine(daemon: Daemon, tool: str) -> None:
    body = {"image": tool, "backend": "namespace"}
    problem = daemon.call("POST", "/environments", body, expect=400)
    assert "cannot run docker://" in problem["message"]
    assert "'docker'" in problem["hint"]
    problem = daemon.call("POST", "/environments", {"image": tool, "isolation": "microvm"}, expect=501)
    assert "docker save" in problem["hint"]


@pytest.mark.soak
def test_an_engine_without_space(
    home: Path, engine: Dockerd, place: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        entry = tarfile.TarInfo("large")
        entry.size = 96 << 20
        tar.addfile(entry, io.BytesIO(os.urandom(entry.size)))
    place.push(engine, "team/large", "latest", archive.getvalue())
    with tempfile.TemporaryDirectory(prefix="skerry-test-", dir="/tmp") as folder, ExitStack() as undo:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", folder], check=True)
        undo.callback(subprocess.run, ["umount", folder], check=True)
        try:
            small = undo.enter_context(dockerd.running(Path(folder)))
        except dockerd.Unavailable as error:
            support.missing(f"no Docker Engine for the tests: {error}")
        monkeypatch.setenv("DOCKER_HOST", small.host)
        monkeypatch.setenv("SKERRY_DOCKER_IMAGES", f"{place.host}/*")
        with started(home) as daemon:
            assert refused(daemon, f"docker://{place.host}/team/large", 507) == "disk_full"


@pytest.mark.soak
def test_a_program_runs_in_an_image_of_the_engine(daemon: Daemon, tool: str) -> None:
    body = {"language": "bash", "code": "echo $GREETING", "image": tool}
    result = daemon.call("POST", "/execute", body)
    assert (result["outcome"], result["stdout"]) == ("completed", "hello\n")
    support.eventually(lambda: daemon.call("GET", "/environments")["environments"] == [])


@pytest.mark.parametrize("kind", support.first_of(KINDS))
def test_an_image_with_musl_and_without_a_shell(
    daemon: Daemon, engine: Dockerd, place: Registry, kind: str
) -> None:
    support.require("musl-gcc", "musl-tools")
    with tempfile.TemporaryDirectory(prefix="skerry-test-") as folder:
        subprocess.run(
            ["musl-gcc", "-x", "c", "-", "-o", f"{folder}/hello"], input=HELLO.encode(), check=True
        )
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w", dereference=True) as tar:
            tar.add(f"{folder}/hello", "hello")
            tar.add("/lib/ld-musl-x86_64.so.1", "lib/ld-musl-x86_64.so.1")
    name = f"{place.host}/team/{kind}-musl"
    registry.make(engine, name, "latest", archive.getvalue())
    isolation = {"docker": "namespace", "docker-runsc": "gvisor"}[kind]
    id_ = daemon.create(image=f"docker://{name}", isolation=isolation)
    try:
        assert daemon.execute(id_, ["/hello"])["stdout"] == "hello from musl\n"
    finally:
        daemon.call("DELETE", f"/environments/{id_}")
        engine.ask("DELETE", f"/images/{name}:latest")


def test_the_command_shows_the_progress(daemon: Daemon, tool: str) -> None:
    argv = [sys.executable, "-m", "skerry.cli", "run", "--image", tool, "--", "tool"]
    done = subprocess.run(
        argv, env={"SKERRY_HOME": str(daemon.home)}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "a tool\n"
    assert done.stderr == f"  0% pulling {tool}\n"


def test_the_command_pulls_nothing_for_a_backend_that_cannot_run_it(daemon: Daemon, tool: str) -> None:
    argv = ["create", "--backend", "namespace", "--image", f"{tool}-missing"]
    environ = {**os.environ, "SKERRY_HOME": str(daemon.home)}
    done = subprocess.run(
        [sys.executable, "-m", "skerry.cli", *argv], env=environ, capture_output=True, text=True, check=False
    )
    assert (done.returncode, "backend 'namespace' cannot run" in done.stderr) == (2, True), done.stderr


@pytest.mark.soak
def test_a_pool_of_an_image_of_the_engine(
    home: Path, tool: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (home / "pools.toml").write_text(f'[tools]\nimage = "{tool}"\n')
    with started(home) as daemon:
        daemon.call("POST", "/pools/tools/warmup", {"count": 1})
        id_ = daemon.create(image=tool)
        [pool] = daemon.call("GET", "/pools")["pools"][:1]
        assert (pool["pool"], pool["hits"]) == ("tools", 1)
        assert daemon.execute(id_, "tool; echo $GREETING")["stdout"] == "a tool\nhello\n"
        daemon.call("DELETE", f"/environments/{id_}")
