"""What a daemon tells its operator: /metrics, and the log."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.daemon import Daemon

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def scrape(daemon: Daemon) -> dict[tuple[str, ...], float]:
    status, headers, body = daemon.raw("GET", "/metrics")
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


@pytest.mark.requirement("F9")
def test_metrics_tell_what_happened(daemon: Daemon) -> None:
    before = scrape(daemon)
    environment = daemon.create()
    daemon.execute(environment, "exit 3")
    base = f"/environments/{environment}"
    daemon.call("POST", f"{base}/files/write", {"path": "a", "content": "b"})
    daemon.call("GET", f"{base}/files/read?path=none", expect=404)
    there = scrape(daemon)
    daemon.call("DELETE", base)
    after = scrape(daemon)

    def more(*key: str) -> float:
        return after[key] - before.get(key, 0)

    (backend,) = {key[2] for key in there if key[:2] == ("skerry_environments", "running")}
    assert there["skerry_environments", "running", backend] == 1
    assert more("skerry_requests_total", "create_environment", "201") == 1
    assert more("skerry_requests_total", "read_file", "404") == 1
    assert more("skerry_request_seconds_count", "execute") == 1
    assert more("skerry_actions_total", "environment.create", "completed") == 1
    assert more("skerry_actions_total", "execution", "failed") == 1
    assert more("skerry_actions_total", "file.write", "completed") == 1
    assert more("skerry_environments_ended_total", "deleted") == 1
    assert more("skerry_execution_seconds_count") == 1
    assert more("skerry_audit_rows_total", "intent") >= 4
    assert more("skerry_store_write_seconds_count") >= 4
    assert after["skerry_store_failures_total",] == 0
    assert after["skerry_requests_under_way",] == 1  # this one
    assert after["skerry_instances_prepared", backend] >= 0
    assert 1e6 < after["process_resident_memory_bytes",] < 1e9
    assert after["process_open_fds",] > 5
    assert abs(after["process_start_time_seconds",] - before["process_start_time_seconds",]) < 1


def test_what_is_documented_is_what_there_is(daemon: Daemon) -> None:
    text = (Path(__file__).parents[2] / "docs" / "observability.md").read_text()
    documented = dict(re.findall(r"^\| `(\w+)` \|([^|]*)\|", text, re.MULTILINE))
    _, _, body = daemon.raw("GET", "/metrics")
    found = re.findall(r"^# TYPE (\w+) ", body.decode(), re.MULTILINE)
    assert sorted(documented) == sorted(found)
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            name = sample.name if sample.name in documented else sample.name.rpartition("_")[0]
            labels = re.findall(r"`(\w+)`", documented[name])
            assert [label for label in sample.labels if label != "le"] == labels


def test_nobody_can_make_new_rows(daemon: Daemon) -> None:
    def ask(name: str) -> None:
        daemon.call("GET", f"/{name}", expect=404)
        daemon.call("GET", f"/environments/{name}", expect=404)
        daemon.call("DELETE", f"/{name}", expect=404)

    ask("once")
    rows = scrape(daemon).keys()
    ask("twice")
    assert scrape(daemon).keys() == rows


def test_the_log_has_what_changes_something_or_fails(daemon: Daemon, environment: str) -> None:
    def ask(method: str, path: str, body: Any = None) -> str:
        headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
        return daemon.raw(method, path, body, headers)[1]["x-request-id"]

    body = {"command": "echo hidden-command", "env": {"V": "hidden-value"}, "secrets": {"S": "hidden-secret"}}
    executed = ask("POST", f"/environments/{environment}/execute", body)
    looked = ask("GET", f"/environments/{environment}")
    failed = ask("GET", "/environments/nowhere")
    daemon.call("GET", "/healthz")  # the line comes after the answer
    log = (daemon.home / "daemon.log").read_text()
    rows = [row for row in map(json.loads, log.splitlines()) if row["event"] == "request"]
    found = {row["request"]: row for row in rows}
    assert found[executed]["ms"] > 0
    told = {
        "operation": "execute",
        "status": 200,
        "trace": TRACE,
        "tenant": "default",
        "who": f"uid {os.geteuid()}",
    }
    assert found[executed].items() >= told.items()
    assert found[failed].items() >= {"operation": "get_environment", "status": 404}.items()
    assert looked not in found
    assert "hidden" not in log


@pytest.mark.parametrize(
    "rubbish",
    [
        "GET /healthz?no=1 HTTP/1.1\r\nhost: skerry\r\nconnection: close\r\n\r\n",
        "rubbish\r\n\r\n",
        "GET /healthz HTTP/1.1\r\nhost: skerry\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
        "GET /environments/x/attach HTTP/1.1\r\nhost: skerry\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        "sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        "authorization: Bearer no\r\n\r\n",
    ],
)
def test_strangers_cannot_fill_the_log(daemon: Daemon, rubbish: str) -> None:
    def lines() -> list[str]:
        rows = (daemon.home / "daemon.log").read_text().splitlines()
        return [row for row in rows if '"event": "refused"' not in row]  # one a second

    daemon.call("GET", "/healthz")  # what others asked before has its line by then
    before = lines()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(daemon.socket)
        connection.sendall(rubbish.encode())
        assert connection.recv(65536)
    daemon.call("GET", "/healthz")
    assert lines() == before
