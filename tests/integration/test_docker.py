"""Environments of a real Docker Engine: what is kept from them, what they leave, and what outlives the daemon."""

from __future__ import annotations

import http.client
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import dockerd, leaks, support
from tests.dockerd import Dockerd
from tests.integration.daemon import Daemon, started
from tests.integration.roots import rootfs

pytestmark = [pytest.mark.root, pytest.mark.slow]
KINDS = ["docker", "docker-runsc"]
CYCLES = [5, pytest.param(100, marks=pytest.mark.soak)]
PYTHON = "import sys; print(sys.version_info.major)"
STRANGER = """
import socket
s = socket.socket(socket.AF_UNIX)
s.connect("/.skerry/ctl/guest.sock")
s.settimeout(10)
s.sendall((9).to_bytes(4, "little") + bytes([1]) + bytes(4) + (1).to_bytes(4, "little"))
print(repr(s.recv(1)))
"""


@pytest.fixture(scope="module")
def engine() -> Dockerd:
    return dockerd.shared.get()


@pytest.fixture(scope="module")
def daemon(engine: Dockerd) -> Iterator[Daemon]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", engine.host)
        with support.temporary_home() as home, started(home) as running:
            patch.undo()
            yield running


@pytest.fixture
def host(engine: Dockerd, monkeypatch: pytest.MonkeyPatch) -> Dockerd:
    """The engine, for daemons that a test starts by itself."""
    monkeypatch.setenv("DOCKER_HOST", engine.host)
    return engine


def created(daemon: Daemon, **body: Any) -> dict[str, Any]:
    body = {"backend": "docker", **body}
    if body["backend"] == "docker-runsc":
        body["isolation"] = "gvisor"
    info: dict[str, Any] = daemon.call("POST", "/environments", body, expect=201)
    return info


def inspected(engine: Dockerd, environment: str) -> dict[str, Any]:
    found: dict[str, Any] = engine.ask("GET", f"/containers/skerry-{environment}/json")
    return found


@pytest.mark.requirement("R55", "R56")
def test_what_the_engine_was_asked_for_is_in_force_inside(daemon: Daemon, engine: Dockerd) -> None:
    id_ = created(daemon)["environment_id"]
    try:
        status = daemon.execute(id_, "cat /proc/self/status; cat /proc/1/status; id -u; hostname")["stdout"]
        for name, wanted in {"CapEff": 0, "CapPrm": 0, "CapBnd": 0, "CapInh": 0, "CapAmb": 0}.items():
            assert [int(value, 16) for value in fields(status, name)] == [wanted, wanted]
        assert fields(status, "NoNewPrivs") == ["1", "1"]
        assert fields(status, "Seccomp") == ["2", "2"]
        assert fields(status, "Seccomp_filters") == ["2", "2"]  # the engine's and ours
        assert status.splitlines()[-2:] == ["1000", "skerry"]
        for path in ("/file", "/usr/file", "/etc/file", "/.skerry/guest/file", "/proc/sys/kernel/hostname"):
            refused = daemon.execute(id_, ["sh", "-c", f": > {path}"])
            assert refused["exit_code"] != 0, path
        assert daemon.execute(id_, "touch /workspace/file /tmp/file")["exit_code"] == 0
        assert daemon.execute(id_, "ls -A /sys; cat /proc/kallsyms /proc/keys")["stdout"] == ""
        devices = daemon.execute(id_, "cut -d: -f1 /proc/net/dev | tail -n +3")["stdout"].split()
        assert devices == ["lo"]
        assert daemon.execute(id_, "cat /etc/resolv.conf")["stdout"].split()[:2] != []
        config = inspected(engine, id_)["HostConfig"]
        assert config["Privileged"] is False
        assert config["RestartPolicy"]["Name"] == "no"
        assert config["LogConfig"]["Type"] == "none"
        rows = {row["name"]: row for row in daemon.call("GET", f"/environments/{id_}")["enforced"]}
        for name in ("cpu", "memory", "pids", "disk", "no_new_privs", "seccomp", "capabilities"):
            assert rows[name]["enforced"], rows[name]
    finally:
        daemon.call("DELETE", f"/environments/{id_}")


def fields(status: str, name: str) -> list[str]:
    return [line.partition(":")[2].strip() for line in status.splitlines() if line.startswith(f"{name}:")]


def test_limits_hold(daemon: Daemon) -> None:
    id_ = created(daemon, pids=40, memory="96m")["environment_id"]
    try:
        large = daemon.execute(id_, ["python3", "-c", "x = 'x' * (1 << 30)"])
        assert (large["outcome"], large["exit_code"]) == ("oom_killed", 137)
        full = daemon.execute(id_, "head -c 64m /dev/zero > full; stat -c %s full; rm full")
        assert "No space left on device" in full["stderr"]
        assert int(full["stdout"]) <= 48 << 20
        usage = daemon.execute(id_, ["true"])["usage"]
        assert usage["cpu_seconds"] > 0
        assert usage["memory_peak_bytes"] > 0
        forks = "import os, signal\nfor _ in range(80):\n    if os.fork() == 0: signal.pause()"
        refused = daemon.execute(id_, ["python3", "-c", forks])
        assert "Resource temporarily unavailable" in refused["stderr"]
    finally:
        daemon.call("DELETE", f"/environments/{id_}")


def test_a_program_inside_is_refused_by_the_guest(daemon: Daemon) -> None:
    id_ = created(daemon)["environment_id"]
    try:
        assert daemon.execute(id_, ["python3", "-c", STRANGER])["stdout"] in ("b''\n", "")
        assert daemon.execute(id_, ["true"])["outcome"] == "completed"
    finally:
        daemon.call("DELETE", f"/environments/{id_}")


@pytest.mark.requirement("R74")
def test_the_runtime_runsc_gives_a_kernel_of_its_own(daemon: Daemon) -> None:
    support.require("runsc")
    info = created(daemon, backend="docker-runsc")
    id_ = info["environment_id"]
    try:
        assert info["isolation"] == "gvisor"
        version = daemon.execute(id_, "cat /proc/version")["stdout"]
        assert os.uname().release not in version
        refused = daemon.call("DELETE", f"/environments/{id_}")
        problem = daemon.call(
            "POST",
            "/environments",
            {"backend": "docker-runsc", "isolation": "gvisor", "network": "public"},
            expect=501,
        )
        assert "backend 'oci'" in problem["hint"]
        assert refused is not None
    finally:
        daemon.raw("DELETE", f"/environments/{id_}")


@pytest.mark.parametrize("kind", support.first_of(KINDS))
@pytest.mark.parametrize("cycles", CYCLES)
def test_cycles_leave_nothing(daemon: Daemon, engine: Dockerd, kind: str, cycles: int) -> None:
    for each in KINDS:  # of which the daemon probes one later by itself
        daemon.call("DELETE", f"/environments/{created(daemon, backend=each)['environment_id']}")
    before = engine.belongings(), leaks.Snapshot.take(), files_of(daemon)
    for _ in range(cycles):
        id_ = created(daemon, backend=kind)["environment_id"]
        assert daemon.execute(id_, "echo $((6 * 7)) > file; cat file; sleep 1000 &")["stdout"] == "42\n"
        daemon.call("DELETE", f"/environments/{id_}")
    assert engine.belongings() == before[0]
    support.eventually(lambda: not [each for each in leaks.on_host(before[1]) if engine.cgroup in each])
    assert files_of(daemon) == before[2]


def files_of(daemon: Daemon) -> set[str]:
    """What the daemon has in its home, but for the instances that are kept ready and what probes of others make."""
    return {
        str(Path(where, name))
        for where, below, names in os.walk(daemon.home)
        for name in below + names
        if not {"instances", "microvm", "oci"} & set(Path(where, name).relative_to(daemon.home).parts[:1])
    }


@pytest.mark.requirement("R24")
def test_environments_outlive_their_daemon(home: Path, host: Dockerd) -> None:
    with started(home) as daemon:
        kept = created(daemon, name="kept")["environment_id"]
        daemon.execute(kept, "mkdir deep; cd deep; export STATE=7; echo text > file")
        daemon.kill()
    with started(home) as daemon:
        assert daemon.execute("kept", "pwd; echo $STATE; cat file")["stdout"] == "/workspace/deep\n7\ntext\n"
        daemon.kill()
    with started(home) as daemon:
        daemon.call("DELETE", f"/environments/{kept}")
        assert not [each for each in host.belongings() if kept in each]


@pytest.mark.parametrize(
    "point", support.first_of(["create.sent", "create.kept", "create.taken", "delete.killed"])
)
def test_a_daemon_killed_at_a_step_leaves_nothing_in_the_engine(
    home: Path, host: Dockerd, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    with started(home) as daemon:  # the engine has the image from now on
        id_ = created(daemon)["environment_id"]
        daemon.call("DELETE", f"/environments/{id_}")
    before = host.belongings()
    monkeypatch.setenv("SKERRY_FAILPOINT", point)
    with started(home) as daemon:
        with pytest.raises((OSError, http.client.HTTPException)):
            daemon.call("DELETE", f"/environments/{created(daemon)['environment_id']}")
        daemon.process.wait()
    monkeypatch.delenv("SKERRY_FAILPOINT")
    with started(home) as daemon:
        left = daemon.call("GET", "/environments")["environments"]
        for id_ in [each["environment_id"] for each in left] + [created(daemon)["environment_id"]]:
            daemon.call(
                "DELETE", f"/environments/{id_}"
            )  # one that ran when its daemon was killed was taken over
        support.eventually(lambda: daemon.call("GET", "/environments")["environments"] == [])
    assert host.belongings() == before


def test_a_pool_and_programs(home: Path, host: Dockerd) -> None:
    (home / "pools.toml").write_text("[default]\nminimum = 1\n")
    with started(home, "--backend", "docker") as daemon:
        daemon.call("POST", "/pools/default/warmup", {"count": 1})
        id_ = daemon.create()
        [pool] = [each for each in daemon.call("GET", "/pools")["pools"] if each["pool"] == "default"]
        assert pool["hits"] == 1
        daemon.call("DELETE", f"/environments/{id_}")
        for language, code in (("python", PYTHON), ("bash", "echo 3")):
            result = daemon.call("POST", "/execute", {"language": language, "code": code})
            assert (result["outcome"], result["stdout"]) == ("completed", "3\n")


def test_images_of_ours_are_imported_once_and_again_when_removed(daemon: Daemon, engine: Dockerd) -> None:
    archive = rootfs(bash="/bin/bash", sh="/bin/sh", cat="/bin/cat")
    status, _, answer = daemon.raw("POST", "/images/import?name=tiny", archive)
    assert (status, b'"error"' in answer) == (200, False), answer[-500:]
    digest = daemon.call("GET", "/images/tiny")["digest"].removeprefix("sha256:")
    for _ in range(2):
        id_ = created(daemon, image="tiny")["environment_id"]
        assert daemon.execute(id_, "cd /; echo /bin/*")["stdout"] == "/bin/bash /bin/cat /bin/sh\n"
        daemon.call("DELETE", f"/environments/{id_}")
        engine.ask("DELETE", f"/images/skerry/{digest}:latest")


def test_disk_workspaces_are_refused_with_what_has_them(daemon: Daemon) -> None:
    body = {"backend": "docker", "workspace": "disk"}
    problem = daemon.call("POST", "/environments", body, expect=400)
    assert "no workspaces on disk" in problem["message"]
    assert "'namespace'" in problem["hint"]
