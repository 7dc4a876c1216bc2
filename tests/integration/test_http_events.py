"""Output as server-sent events: all of it, again after a break, and within bounds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from typing import Any, NamedTuple

import pytest

from tests.integration.daemon import Connection, Daemon


class Event(NamedTuple):
    id: str
    kind: str
    body: dict[str, Any]

    @property
    def at(self) -> int:
        """How much had been written at its end."""
        return int(self.id.partition("-")[2])

    def id_at(self, at: int) -> str:
        """The id of an event of the same daemon, which ends there."""
        return f"{self.id.partition('-')[0]}-{at}"


def start(daemon: Daemon, environment: str, **body: Any) -> str:
    """Start something; the path of its execution."""
    info = daemon.call("POST", f"/environments/{environment}/executions", body, expect=201)
    return f"/environments/{environment}/executions/{info['execution_id']}"


@contextmanager
def listening(daemon: Daemon, path: str, last: str = "") -> Iterator[HTTPResponse]:
    connection = Connection(daemon.socket)
    headers = {"accept": "text/event-stream", **({"last-event-id": last} if last else {})}
    try:
        connection.request("GET", f"{path}/events", None, headers)
        yield connection.getresponse()
    finally:
        connection.close()


def events(response: HTTPResponse) -> Iterator[Event]:
    assert (response.status, response.getheader("content-type")) == (200, "text/event-stream; charset=utf-8")
    fields: dict[str, str] = {}
    for line in response:
        if line == b"\n":
            if fields:
                yield Event(fields.get("id", ""), fields["event"], json.loads(fields["data"]))
            fields = {}
        elif not line.startswith(b":"):
            name, _, value = line.decode().rstrip("\n").partition(": ")
            fields[name] = value


def text(found: list[Event], stream: str = "stdout") -> str:
    return "".join(event.body["data"] for event in found if event.body.get("stream") == stream)


def test_output_as_it_comes_and_how_it_ended(daemon: Daemon, environment: str) -> None:
    path = start(daemon, environment, command="echo one; read x; echo two >&2; exit 3", stdin=True)
    with listening(daemon, path) as response:
        stream = events(response)
        first = next(stream)
        assert (first.at, first.kind, first.body["data"]) == (4, "output", "one\n")
        daemon.raw("POST", f"{path}/stdin", b"\n")
        second, ended = stream
    assert (second.at, second.body["stream"], second.body["data"]) == (8, "stderr", "two\n")
    assert (ended.id, ended.kind, ended.body["result"]["exit_code"]) == ("end", "ended", 3)
    assert "stdout" not in ended.body["result"]


def test_resuming_where_a_connection_broke(daemon: Daemon, environment: str) -> None:
    path = start(daemon, environment, command="printf 0123456789; read x; printf abc", stdin=True)
    with listening(daemon, path) as response:
        first = next(events(response))
        assert first.at == 10
    with listening(daemon, path, first.id_at(4)) as response:
        stream = events(response)
        assert next(stream).body["data"] == "456789"
        daemon.raw("POST", f"{path}/stdin", b"\n")
        assert text(list(stream)) == "abc"
    with listening(daemon, path, first.id_at(13)) as response:
        assert [event.kind for event in events(response)] == ["ended"]
    with listening(daemon, path, first.id_at(11)) as response:
        assert text(list(events(response))) == "bc"
    with listening(daemon, path, "00000000-13") as response:
        dropped, output, _ = events(response)
    assert (dropped.kind, output.body["data"]) == ("dropped", "0123456789abc")
    assert "restarted" in dropped.body["message"]
    with listening(daemon, path, "end") as response:
        assert (response.status, response.read()) == (204, b"")


def test_what_is_kept_no_more_is_said(daemon: Daemon, environment: str) -> None:
    path = start(daemon, environment, command="head -c 1000000 /dev/zero | tr '\\0' x")
    while daemon.call("GET", path)["state"] == "running":
        pass
    with listening(daemon, path) as response:
        dropped, *output, ended = events(response)
    assert (dropped.kind, ended.kind) == ("dropped", "ended")
    assert dropped.at + len(text(output)) == 1_000_000
    assert dropped.body["message"].startswith(f"{dropped.at} bytes")
    with listening(daemon, path, dropped.id_at(999_990)) as response:
        assert text(list(events(response))) == "x" * 10


@pytest.mark.parametrize("last", ["x", "7", "0123456x-1", "01234567-", "01234567-" + "9" * 19])
def test_a_wrong_id(daemon: Daemon, environment: str, last: str) -> None:
    path = start(daemon, environment, command="true")
    with listening(daemon, path, last) as response:
        assert (response.status, json.loads(response.read())["code"]) == (400, "invalid_request")


def test_bytes_that_are_no_text(daemon: Daemon, environment: str) -> None:
    path = start(daemon, environment, command="printf '\\377\\n\\n'")
    with listening(daemon, path) as response:
        output, _ = events(response)
    assert (output.body["data"], output.body["encoding"]) == ("/woK", "base64")


def test_a_reader_that_stalls_stops_the_program_and_not_the_daemon(daemon: Daemon, environment: str) -> None:
    path = start(daemon, environment, command="head -c 200000000 /dev/zero | tr '\\0' x; echo done >&2")
    with listening(daemon, path) as response:
        stream = events(response)
        next(stream)
        for _ in range(20):
            assert daemon.execute(environment, "true")["exit_code"] == 0
        assert daemon.call("GET", path)["state"] == "running"
        size = sum(len(event.body["data"]) for event in stream if event.body.get("stream") == "stdout")
        assert size > 150_000_000


def test_an_end_of_the_environment_ends_the_stream(daemon: Daemon) -> None:
    environment = daemon.create()
    path = start(daemon, environment, command="echo begun; exec sleep 34567")
    with listening(daemon, path) as response:
        stream = events(response)
        next(stream)
        daemon.call("DELETE", f"/environments/{environment}")
        (ended,) = stream
    assert ended.body["result"]["outcome"] == "canceled"
