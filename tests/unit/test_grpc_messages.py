"""Requests and answers of the API as messages of gRPC."""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from skerry.daemon.grpc import messages
from skerry.daemon.grpc.messages import to_message
from skerry.daemon.grpc.methods import SERVICES, Method, methods, request
from skerry.daemon.http import table
from skerry.errors import FileMissing, InvalidRequest, LimitReached
from skerry.v1 import environments_pb2, executions_pb2, files_pb2
from skerry.v1.executions_pb2 import ExecuteRequest
from skerry.v1.problem_pb2 import Problem

METHODS = {method.name: method for service in SERVICES for method in methods(service, table.OPERATIONS)}


def asked(message: Message) -> tuple[str, str, dict[bytes, bytes], Any]:
    """Method and target, headers and JSON of the request that a message becomes."""
    name = type(message).__name__.removesuffix("Request")
    scope, body = request(METHODS[name], message)
    target = scope["raw_path"].decode() + (
        f"?{scope['query_string'].decode()}" if scope["query_string"] else ""
    )
    return scope["method"], target, dict(scope["headers"]), json.loads(body) if body else None


def test_a_number_that_an_enum_does_not_have() -> None:
    message = environments_pb2.ListEnvironmentsRequest()
    field = message.DESCRIPTOR.fields_by_name["state"]
    broken = type(message).FromString(bytes((field.number << 3, 127)))
    with pytest.raises(InvalidRequest, match="state cannot be 127"):
        asked(broken)


def test_a_body_has_what_was_given_and_nothing_else() -> None:
    message = environments_pb2.CreateEnvironmentRequest(
        name="", memory=64 << 20, env={"A": "ä"}, idempotency_key="k1"
    )
    headers = {b"content-type": b"application/json", b"idempotency-key": b"k1"}
    body = {"name": "", "memory": 64 << 20, "env": {"A": "ä"}}
    assert asked(message) == ("POST", "/environments", headers, body)


def test_bytes_travel_as_base64() -> None:
    message = executions_pb2.ExecuteRequest(environment_id="e1", argv=["cat"], stdin=b"\xff\0")
    _, target, _, body = asked(message)
    assert target == "/environments/e1/execute"
    assert body == {"argv": ["cat"], "stdin": "/wA=", "stdin_encoding": "base64"}
    assert asked(executions_pb2.ExecuteRequest(environment_id="e1", stdin=b""))[3]["stdin"] == ""


def test_what_is_in_a_path_or_a_query_cannot_leave_it() -> None:
    message = files_pb2.RemoveFileRequest(
        environment_id="../x?y#%2f", path="a&recursive=1 +\n", recursive=False
    )
    _, target, _, _ = asked(message)
    assert target == ("/environments/..%2Fx%3Fy%23%252f/files?path=a%26recursive%3D1%20%2B%0A")


def test_a_query_tells_false_from_nothing_where_it_matters() -> None:
    watch = files_pb2.WatchFilesRequest(environment_id="e1", path="a", recursive=False)
    assert asked(watch)[1] == "/environments/e1/files/watch?path=a&recursive=0"
    watch.ClearField("recursive")
    assert asked(watch)[1] == "/environments/e1/files/watch?path=a"


def test_a_word_stands_for_a_value_of_an_enum() -> None:
    message = environments_pb2.ListEnvironmentsRequest(state=environments_pb2.STATE_ENDED, limit=3)
    assert asked(message)[1] == "/environments?state=ended&limit=3"
    found = to_message(
        executions_pb2.Result, {"outcome": "oom_killed", "stdout": "", "stdout_encoding": "utf-8"}
    )
    assert found.outcome == executions_pb2.OUTCOME_OOM_KILLED
    assert to_message(executions_pb2.Execution, {"outcome": ""}).outcome == executions_pb2.OUTCOME_UNSPECIFIED


def test_names_that_are_not_utf8_have_twins() -> None:
    message = files_pb2.RenameFileRequest(environment_id="e1", source_bytes=b"a\xff", target="b")
    assert asked(message)[3] == {"source": "a\udcff", "target": "b"}
    stat = files_pb2.StatFileRequest(environment_id="e1", path_bytes=b"a\xff/%")
    assert asked(stat)[1] == "/environments/e1/files/stat?path=a%FF%2F%25"
    found = to_message(files_pb2.ListFilesResponse, {"entries": [{"path": "a\udcff"}, {"path": "ä"}]})
    assert [(entry.path, entry.path_bytes) for entry in found.entries] == [("a?", b"a\xff"), ("ä", b"")]


def test_null_is_nothing() -> None:
    found = to_message(executions_pb2.Execution, {"pid": 7, "exit_code": None, "result": None})
    assert MessageToDict(found) == {"pid": 7}
    assert not found.HasField("exit_code")
    assert to_message(executions_pb2.Execution, {"exit_code": 0}).HasField("exit_code")


def test_a_problem_keeps_its_details() -> None:
    error = FileMissing("no 'a\udcff'", hint="look", detail={"path": "a\udcff", "sizes": [1, None]})
    found = to_message(Problem, error.to_dict())
    assert (found.code, found.message, found.hint, found.retryable) == (
        "file_missing",
        "no 'a?'",
        "look",
        False,
    )
    assert MessageToDict(found.detail) == {"path": "a?", "sizes": [1, None]}


@pytest.mark.parametrize("name", sorted(METHODS))
def test_what_a_path_needs_must_be_given(name: str) -> None:
    method: Method = METHODS[name]
    message = method.request()
    if "{" not in method.operation.path:
        return
    with pytest.raises(InvalidRequest, match="is missing"):
        request(method, message.opening if method.operation.websocket else message)  # type: ignore[attr-defined]


def test_fields_are_counted_before_a_large_message_is_parsed() -> None:
    few = messages.FIELDS_MAX // 4
    for many in (
        ExecuteRequest(argv=[""] * (messages.SMALL + 1)),
        ExecuteRequest(env={f"variable {number}": "" for number in range(messages.FIELDS_MAX)}),
    ):
        data = many.SerializeToString()
        with pytest.raises(LimitReached, match=f"more than {messages.FIELDS_MAX} fields"):
            messages.parse(ExecuteRequest, data)
    large = ExecuteRequest(
        argv=["x" * 20] * few, env={str(i): "v" for i in range(few // 3)}, stdin=bytes(1 << 20)
    )
    assert messages.parse(ExecuteRequest, large.SerializeToString()) == large


@pytest.mark.parametrize("piece", [b"\xff", b"\x1a\xff\xff\xff\xff\xff", b"\x1b", b"\x06"])
def test_counting_ends_on_malformed_messages(piece: bytes) -> None:
    with pytest.raises((InvalidRequest, LimitReached)):
        messages.parse(ExecuteRequest, piece * 2 * messages.SMALL)
