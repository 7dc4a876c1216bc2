"""Every door takes the parameters of `skerry.parameters`, with its types, defaults and bounds, and no others."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from pydantic import BaseModel

import skerry
from skerry.cli import load
from skerry.cli.options import environment_request
from skerry.cli.parser import Parser
from skerry.client.sync import process
from skerry.client.sync.transport import Transport
from skerry.daemon import pools
from skerry.daemon.http.code import ExecuteCode
from skerry.daemon.http.environments import Create
from skerry.daemon.http.executions import Execute, Start
from skerry.daemon.http.network import NewNetwork
from skerry.daemon.http.sessions import OpenSession, RunCode
from skerry.errors import InvalidRequest
from skerry.host import seccomp
from skerry.parameters import CREATE, EXECUTE, PROGRAM, SESSION, SESSION_CALL, START, ParameterSpec
from skerry.policy import Limits, Policy, at_least, preferences
from skerry.settings import Home
from skerry.v1 import code_pb2, environments_pb2, executions_pb2, network_pb2, sessions_pb2

TABLES = {
    "CREATE": CREATE,
    "EXECUTE": EXECUTE,
    "START": START,
    "SESSION": SESSION,
    "SESSION_CALL": SESSION_CALL,
    "PROGRAM": PROGRAM,
}
ROWS = [(table, row) for table, rows in TABLES.items() for row in rows.values()]
NETWORK = {name: row for name, row in CREATE.items() if "network" in row.where}
LIMITS = [row for row in CREATE.values() if "limits" in row.where]

Rows = dict[str, ParameterSpec]


def names(rows: Rows, door: str) -> set[str]:
    return {name for name, row in rows.items() if door in row.where}


def same(door: str, found: Iterable[str], wanted: Iterable[str]) -> None:
    """The door has these parameters, and no others."""
    found, wanted = set(found), set(wanted)
    missing, unknown = wanted - found, found - wanted
    assert not missing, f"{door} lacks {', '.join(sorted(missing))}, which skerry.parameters has"
    assert not unknown, f"{door} takes {', '.join(sorted(unknown))}, which skerry.parameters lacks"


BODIES: list[tuple[type[BaseModel], Rows, str]] = [
    (Create, CREATE, "rest"),
    (NewNetwork, NETWORK, "network"),
    (Execute, EXECUTE, "rest"),
    (Start, START, "rest"),
    (OpenSession, SESSION, "rest"),
    (RunCode, SESSION_CALL, "rest"),
    (ExecuteCode, PROGRAM, "rest"),
]
JSON_TYPES: dict[str, list[Any]] = {
    "size": [["integer", "string"]],
    "number": ["number"],
    "count": ["integer"],
    "seconds": ["number"],
    "text": ["string", None],
    "texts": ["array"],
    "variables": ["object"],
    "content": ["string"],
    "flag": ["boolean"],
    "terminal": ["object", None],
}


@pytest.mark.parametrize(("body", "rows", "door"), BODIES, ids=[body.__name__ for body, _, _ in BODIES])
def test_rest_body(body: type[BaseModel], rows: Rows, door: str) -> None:
    fields = body.model_json_schema()["properties"]
    same(f"the REST body {body.__name__}", fields.keys() - {"stdin_encoding"}, names(rows, door))
    for name in names(rows, door):
        row, field = rows[name], fields[name]
        schema = next((one for one in field.get("anyOf", ()) if one.get("type") != "null"), field)
        assert schema.get("type") in JSON_TYPES[row.kind], f"{body.__name__}.{name}"
        if "enum" in schema:
            assert set(schema["enum"]) == set(row.choices), f"{body.__name__}.{name}"
        for key, bound in (("minimum", row.low), ("maximum", row.high)):
            assert schema.get(key, bound) == bound, f"{body.__name__}.{name}: {key}"


MESSAGES: list[tuple[Descriptor, Rows, str, set[str]]] = [
    (environments_pb2.CreateEnvironmentRequest.DESCRIPTOR, CREATE, "grpc", {"idempotency_key"}),
    (network_pb2.SetNetworkRequest.DESCRIPTOR, NETWORK, "network", {"environment_id"}),
    (executions_pb2.ExecuteRequest.DESCRIPTOR, EXECUTE, "grpc", {"environment_id"}),
    (executions_pb2.StartExecutionRequest.DESCRIPTOR, START, "grpc", {"environment_id"}),
    (executions_pb2.Opening.DESCRIPTOR, START, "grpc", {"environment_id", "execution_id"}),
    (sessions_pb2.OpenSessionRequest.DESCRIPTOR, SESSION, "grpc", {"environment_id"}),
    (sessions_pb2.RunCodeRequest.DESCRIPTOR, SESSION_CALL, "grpc", {"environment_id", "session_id"}),
    (code_pb2.ExecuteCodeRequest.DESCRIPTOR, PROGRAM, "grpc", set()),
]
FIELD = FieldDescriptor
PROTO_TYPES = {
    "size": {FIELD.TYPE_INT64},
    "number": {FIELD.TYPE_DOUBLE},
    "count": {FIELD.TYPE_INT64},
    "seconds": {FIELD.TYPE_DOUBLE},
    "text": {FIELD.TYPE_STRING},
    "texts": {FIELD.TYPE_STRING, FIELD.TYPE_MESSAGE},
    "variables": {FIELD.TYPE_MESSAGE},
    "content": {FIELD.TYPE_STRING, FIELD.TYPE_BYTES},
    "flag": {FIELD.TYPE_BOOL},
    "terminal": {FIELD.TYPE_MESSAGE},
}


@pytest.mark.parametrize(
    ("message", "rows", "door", "others"), MESSAGES, ids=[message.name for message, *_ in MESSAGES]
)
def test_proto_message(message: Descriptor, rows: Rows, door: str, others: set[str]) -> None:
    fields = message.fields_by_name
    same(f"the proto message {message.name}", set(fields.keys()) - others, names(rows, door))
    for name in names(rows, door):
        assert fields[name].type in PROTO_TYPES[rows[name].kind], f"{message.name}.{name}"


SAMPLES = {
    "size": 64 << 20,
    "number": 0.5,
    "count": 100,
    "seconds": 5.0,
    "text": "text",
    "texts": ["a.example"],
    "variables": {"A": "1"},
    "content": "text",
    "flag": True,
    "terminal": (24, 80),
}
OBJECTS = {"client", "url", "token", "on_stdout", "on_stderr", "self"}


def value_of(row: ParameterSpec) -> Any:
    return row.choices[-1] if row.choices else SAMPLES[row.kind]


class Sent(Exception):
    """What a method of the SDK is about to send."""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> skerry.Environment:
    """One that exists, whose requests are raised as `Sent`."""

    def send(transport: Any, *args: Any, **request: Any) -> Any:
        raise Sent(request["json"])

    def open_process(transport: Any, path: str, request: dict[str, Any]) -> Any:
        raise Sent(request)

    monkeypatch.setattr(Transport, "call", send)
    monkeypatch.setattr(process.Process, "open", open_process)
    env = skerry.Environment(client=skerry.Client(str(tmp_path)))
    env._id = "abc123abc123"
    return env


def method(env: skerry.Environment, name: str) -> Callable[..., Any]:
    if name == "create":
        return lambda **given: skerry.Environment(**given, client=env.client).create()
    if name == "network.set":
        return env.network.set
    if name == "client.execute_code":
        return env.client.execute_code
    if name == "Session.run":
        info = skerry.SessionInfo("main", env.id, "python", "idle", 0.0)
        return skerry.Session(env.client.transport, "/environments/x", info, {}).run
    found: Callable[..., Any] = getattr(env, name)
    return found


SDK: list[tuple[str, Rows, str, set[str]]] = [
    ("create", CREATE, "sdk", set()),
    ("network.set", NETWORK, "network", set()),
    ("execute", EXECUTE, "sdk", {"argv", "profile"}),  # a stateful shell would keep the profile
    ("run", EXECUTE, "sdk", {"command", "shell"}),
    ("start", START, "sdk", {"argv"}),
    ("session", SESSION, "sdk", set()),
    ("Session.run", SESSION_CALL, "sdk", set()),
    ("client.execute_code", PROGRAM, "sdk", set()),
]
"""Method, table, door, and the parameters that only its sibling has."""


@pytest.mark.parametrize(("name", "rows", "door", "others"), SDK, ids=[name for name, *_ in SDK])
def test_sdk_method(
    name: str, rows: Rows, door: str, others: set[str], environment: skerry.Environment
) -> None:
    signature = inspect.signature(skerry.Environment if name == "create" else method(environment, name))
    wanted = names(rows, door) - others
    given = {each: value_of(rows[each]) for each in wanted}
    if name == "create":
        others = {"secrets"}
    if name == "session":
        given["id"] = given.pop("session_id")
    same(f"the SDK method {name}()", signature.parameters.keys() - OBJECTS - others, given)
    with pytest.raises(Sent) as sent:
        method(environment, name)(**given)
    request = sent.value.args[0]
    same(f"the request of the SDK method {name}()", request.keys() - {"stdin_encoding"}, wanted)


def options(verb: str) -> set[str]:
    parser = Parser(verb, load(verb))
    return {argument.key for argument in (*parser.options, *parser.positional)}


CLI = [
    ("create", CREATE, set()),
    ("run", CREATE, set()),
    ("run", EXECUTE, {"command"}),
    ("exec", EXECUTE, {"command"}),
    ("exec", START, {"command"}),
    ("mcp", CREATE, set()),
    ("session run", SESSION, set()),
    ("session run", SESSION_CALL, set()),
    ("code run", PROGRAM, set()),
    ("net set", NETWORK, {"allow"}),
]
"""Verb, table, and the parameters that it takes in another way."""


@pytest.mark.parametrize(("verb", "rows", "others"), CLI)
def test_cli_verb(verb: str, rows: Rows, others: set[str]) -> None:
    wanted = {rows[name].option[-1].lstrip("-").replace("-", "_") for name in names(rows, "cli") - others}
    missing = wanted - options(verb)
    assert not missing, f"skerry {verb} lacks {', '.join(sorted(missing))}, which skerry.parameters has"


def test_cli_sends_every_parameter_of_a_create() -> None:
    words = []
    for row in CREATE.values():
        value = "A=1" if row.kind == "variables" else "a.example" if row.kind == "texts" else value_of(row)
        words += [row.option[-1], str(value)]
    args = Parser("create", load("create")).parse(words)
    sent = environment_request(args)
    same("the request of skerry create", sent, CREATE)
    for name, row in CREATE.items():
        assert sent[name] == (str(value_of(row)) if row.kind == "size" else value_of(row))


@pytest.mark.parametrize("row", CREATE.values(), ids=CREATE)
def test_pools_file(row: ParameterSpec, tmp_path: Path) -> None:
    value = value_of(row)
    shown = f'"{value}"' if isinstance(value, str) else str(value).replace("'", '"').replace(":", " =")
    (tmp_path / "pools.toml").write_text(f"[default]\n{row.name} = {shown}\n")
    home = Home(str(tmp_path))
    if "pools" not in row.where:
        with pytest.raises(InvalidRequest, match="unknown key"):
            pools.load(home, [])
        return
    (settings,) = pools.load(home, [])
    found = settings.image if row.name == "image" else None
    if found is None:
        owner = settings.policy.limits if "limits" in row.where else settings.policy
        found = getattr(owner, row.name)
    assert found == value, f"pools.toml ignores {row.name}"


def test_policy_has_every_limit_with_its_default() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(Limits)}
    same("policy.Limits", fields, (row.name for row in LIMITS))
    assert fields == {row.name: row.default for row in LIMITS}
    limits = environments_pb2.Limits.DESCRIPTOR.fields_by_name
    same("the proto message Limits", limits.keys(), fields)
    policy = {field.name: field.default for field in dataclasses.fields(Policy) if field.name in CREATE}
    assert policy == {name: CREATE[name].default or () for name in policy}


@pytest.mark.parametrize("row", LIMITS, ids=lambda row: row.name)
def test_limits_are_checked_against_their_bounds(row: ParameterSpec) -> None:
    step = 0.001 if row.kind == "number" else 1
    for value in (row.low - step, row.high + step):
        if value != float("inf"):
            with pytest.raises(InvalidRequest, match=f"^{row.name} must be"):
                Limits.parse({row.name: value})
    for value in (row.low, row.high):
        if 0 < value < float("inf"):
            assert getattr(Create.model_validate({row.name: value}).policy().limits, row.name) == value


@pytest.mark.parametrize("name", ["isolation", "network", "workspace"])
def test_choices_are_checked(name: str) -> None:
    for choice in CREATE[name].choices:
        assert getattr(Create.model_validate({name: choice}).policy(), name) == choice
    with pytest.raises(InvalidRequest, match=f"unknown {name}"):
        Create.model_validate({name: "other"}).policy()


def test_profiles_are_those_of_the_compiler() -> None:
    assert set(CREATE["profile"].choices) == set(seccomp.profile_names())


@pytest.mark.parametrize("row", [row for _, row in ROWS], ids=[f"{table}-{row.name}" for table, row in ROWS])
def test_help_names_every_choice(row: ParameterSpec) -> None:
    assert all(choice in row.help for choice in row.choices)


def test_isolations_are_preferences_in_an_order() -> None:
    assert preferences("microvm, gvisor") == ("microvm", "gvisor")
    for wrong in ("", "gvisor,", "gvisor;microvm", "none"):
        with pytest.raises(InvalidRequest, match="unknown isolation"):
            Policy(isolation=wrong)


@pytest.mark.parametrize(
    ("asked", "least", "gets"),
    [
        ("namespace", "namespace", "namespace"),
        ("namespace", "gvisor", "gvisor"),
        ("microvm", "gvisor", "microvm"),
        ("microvm,gvisor,namespace", "gvisor", "microvm,gvisor"),
        ("gvisor,namespace", "microvm", "microvm"),
    ],
)
def test_preferences_weaker_than_the_least_are_dropped(asked: str, least: str, gets: str) -> None:
    assert at_least(asked, least) == gets
