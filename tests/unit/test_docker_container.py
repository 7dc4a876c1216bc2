"""What the engine is asked for, and what is made of its answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skerry.backends.docker import container, report
from skerry.backends.docker.container import Bind, Container
from skerry.backends.docker.engine import DEFAULT_HOST, Endpoint, EngineRefused, _last
from skerry.backends.docker.images import _explained
from skerry.errors import Denied, DiskFull, ImageNotFound, RegistryUnavailable, SkerryError
from skerry.host import plan
from skerry.images.references import Reference
from skerry.policy import MIB, Limits

LIMITS = Limits(cpus=0.5, memory=256 * MIB, pids=77)


def body(**more: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "environment_id": "abcdefghijkl",
        "labels": {},
        "image": "image",
        "volume": "volume",
        "limits": LIMITS,
        "charged": LIMITS,
        "profile": "default",
        "orphan": 60.0,
        "memory": 64 * MIB,
    }
    return Container(**{**settings, **more}).body()


def test_a_container_has_no_privilege() -> None:
    asked = body()
    config = asked["HostConfig"]
    assert asked["User"] == "1000:1000"
    assert (config["CapDrop"], config["CapAdd"], config["Privileged"]) == (["ALL"], [], False)
    assert config["SecurityOpt"] == ["no-new-privileges"]
    assert config["ReadonlyRootfs"]
    assert (config["NetworkMode"], config["IpcMode"], config["PidMode"]) == ("none", "private", "")
    assert config["Memory"] == config["MemorySwap"] == 256 * MIB
    assert (config["CpuQuota"], config["CpuPeriod"], config["PidsLimit"]) == (50_000, 100_000, 77)
    masked = set(config["MaskedPaths"])
    assert {"/sys", "/proc/acpi", "/proc/kcore", *(f"/proc/{name}" for name in plan.MASKED)} <= masked
    assert [mount["Target"] for mount in config["Mounts"] if not mount.get("ReadOnly")] == ["/dev/pts"]
    assert "strangers=1" in asked["Entrypoint"]


def test_nothing_of_an_image_runs_by_itself_or_fills_the_engines_disk() -> None:
    asked = body(volumes=["/data/", "/tmp", "/workspace"])
    assert asked["Healthcheck"] == {"Test": ["NONE"]}
    assert (asked["Cmd"], asked["WorkingDir"]) == ([], "/")
    plain, made = body()["HostConfig"]["Tmpfs"], asked["HostConfig"]["Tmpfs"]
    assert made == {**plain, "/data": "ro,size=4k"}


@pytest.mark.parametrize(
    ("answer", "said", "kind"),
    [
        (500, "write /var/lib/docker/tmp/x: no space left on device", DiskFull),
        (500, "Get https://r/v2/: no basic auth credentials", Denied),
        (500, "unauthorized: authentication required", Denied),
        (
            404,
            "pull access denied for x, repository does not exist or may require 'docker login'",
            ImageNotFound,
        ),
        (500, "manifest for r/x:1 not found: manifest unknown: manifest unknown", ImageNotFound),
        (500, "Get https://r/v2/: dial tcp 192.0.2.1:443: connect: connection refused", RegistryUnavailable),
        (500, "toomanyrequests: You have reached your pull rate limit", RegistryUnavailable),
    ],
)
def test_the_error_of_a_pull_says_what_to_do(answer: int, said: str, kind: type[SkerryError]) -> None:
    found = _explained(Reference.parse("docker://r.example.com/x:1"), EngineRefused(answer, said))
    assert type(found) is kind
    assert said in found.message
    assert found.hint


def test_only_gvisor_begins_as_root_and_never_of_the_host() -> None:
    asked = body(gvisor=True, runtime="runsc")
    assert (asked["User"], asked["HostConfig"]["Runtime"]) == ("0:0", "runsc")
    assert "SYS_ADMIN" not in asked["HostConfig"]["CapAdd"]
    assert "mode=0700" in asked["HostConfig"]["Tmpfs"]["/.skerry/ctl"]


def test_directories_are_overlays_unless_something_is_mounted_in_them(tmp_path: Path) -> None:
    empty, file, odd = tmp_path / "empty", tmp_path / "file", tmp_path / "a:b"
    empty.mkdir()
    file.touch()
    odd.mkdir()
    [own] = container.binds_of(str(tmp_path), "/layer", str(empty))
    assert own == Bind(str(tmp_path), "/layer", str(empty))
    assert container.binds_of(str(odd), "/odd", str(empty)) == [Bind(str(odd), "/odd")]
    assert container.binds_of(str(file), "/file", str(empty)) == [Bind(str(file), "/file")]
    all_of_it = container.binds_of("/", "/host", str(empty))
    assert all_of_it[0] == Bind("/", "/host")
    assert Bind("/proc", "/host/proc") in all_of_it


@pytest.mark.parametrize(
    ("variables", "url", "tls"),
    [
        ({}, DEFAULT_HOST, False),
        ({"DOCKER_HOST": "tcp://there:2375"}, "http://there:2375", False),
        ({"DOCKER_HOST": "tcp://there:2376", "DOCKER_TLS_VERIFY": "1"}, "https://there:2376", True),
    ],
)
def test_the_engine_is_where_dockers_variables_say(variables: dict[str, str], url: str, tls: bool) -> None:
    found = Endpoint.from_environment(variables)
    assert (found.url(), found.certificates is not None) == (url, tls)


def test_errors_in_a_stream_of_progress_are_errors() -> None:
    assert _last(b'{"status":"one"}\r\n{"status":"two"}\r\n') == {"status": "two"}
    with pytest.raises(EngineRefused, match="no space left"):
        _last(b'{"status":"one"}\r\n{"error":"no space left"}\r\n')


def test_usage_is_told_in_our_words() -> None:
    blocks = [{"op": "Read", "value": 3}, {"op": "Write", "value": 4}, {"op": "Total", "value": 7}]
    usage = report.usage_of(
        {
            "cpu_stats": {"cpu_usage": {"total_usage": 2_500_000_000}},
            "memory_stats": {"usage": 5, "max_usage": 6},
            "pids_stats": {"current": 2},
            "blkio_stats": {"io_service_bytes_recursive": blocks},
        }
    )
    assert (usage.cpu_seconds, usage.memory_bytes, usage.memory_peak_bytes) == (2.5, 5, 6)
    assert (usage.pids, usage.io_read_bytes, usage.io_write_bytes) == (2, 3, 4)
    assert report.usage_of({}).memory_bytes is None


def test_limits_that_the_engine_does_not_have_are_reported_as_missing() -> None:
    rows = {row.name: row for row in report.limits_of({"Memory": 8, "MemorySwap": -1})}
    assert (rows["memory"].enforced, rows["swap"].enforced, rows["pids"].enforced) == (True, False, False)
