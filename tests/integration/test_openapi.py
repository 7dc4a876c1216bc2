"""The API does what its document says: thousands of requests made from it, right ones and wrong ones.

No answer may be a server error, or have a status, a media type, a body or a code that is not in the document. What
runs is confined: the requests hold arbitrary commands and paths.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import jsonschema_rs
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis import checks

from skerry.daemon.http import openapi, table
from tests import support
from tests.integration.daemon import Daemon, started
from tests.integration.relay import relayed

CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.unsupported_method,
]
SMALL = {"memory": "64m", "disk": "16m", "workspace": "memory", "pids": 64}
FILE = "there"
STREAM_SECONDS = 0.1
ENDLESS = {"watch_files", "read_logs", "execution_events", "read_audit"}


def strict_document() -> dict[str, Any]:
    """The document, with objects that may hold nothing but what is described."""
    document = openapi.document(table.OPERATIONS)
    for schema in document["components"]["schemas"].values():
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
    return document


# All tests that Schemathesis makes have one name, of which pytest-xdist would run the first alone.
pytestmark = pytest.mark.alone
Case = schemathesis.Case[Any]
DOCUMENT = strict_document()
schema = schemathesis.openapi.from_dict(DOCUMENT)


@schemathesis.serializer("application/x-tar")
def serialize_tar(ctx: schemathesis.SerializationContext, value: Any) -> bytes:
    """An empty archive, or none at all; real ones have their own tests."""
    data = value if isinstance(value, bytes) else str(value).encode()
    return data if len(data) % 2 else bytes(1024)


def no_server_error(ctx: schemathesis.CheckContext, response: schemathesis.Response, case: Case) -> None:
    """A wish that this machine cannot grant, and a full workspace, are honest answers of 500 and more."""
    if response.status_code >= 500:
        assert response.json()["code"] in ("isolation_unavailable", "disk_full"), response.content


def every_item_is_in_the_document(
    ctx: schemathesis.CheckContext, response: schemathesis.Response, case: Case
) -> None:
    """Lines and events, as far as they came, are what the document says."""
    described = (
        case.operation.definition.raw["responses"].get(str(response.status_code), {}).get("content", {})
    )
    kind = response.headers["content-type"][0].partition(";")[0] if "content-type" in response.headers else ""
    item = described.get(kind, {}).get("x-item-schema")
    if item is not None:
        validator = jsonschema_rs.validator_for({**item, "components": DOCUMENT["components"]})
        for line in response.content.decode().split("\n")[:-1]:
            if kind == "application/x-ndjson" or line.startswith("data: "):
                validator.validate(json.loads(line.removeprefix("data: ")))


class Target:
    """A daemon under test with an environment that is made again whenever a request has ended it."""

    def __init__(self, daemon: Daemon, url: str) -> None:
        self.daemon = daemon
        self.url = url
        self.session = requests.Session()
        self._environment = ""
        self._execution = ""
        self.succeeded: set[str] = set()

    def prepare(self, case: Case) -> None:
        """Make most requests meet something that exists, and none of them take long."""
        parameters = case.path_parameters or {}
        known: dict[str, Callable[[], str]] = {
            "environment_id": self.environment,
            "execution_id": self.execution,
            "session_id": self.python,
            "token_id": self.token,
            "tenant": lambda: "acme",
        }
        for name, value in known.items():
            if name in parameters and len(str(parameters[name])) % 5:
                parameters[name] = value()
        body: dict[str, Any] = case.body if isinstance(case.body, dict) else {}
        for values, name in ((case.query or {}, "path"), (body, "source")):
            if name in values and len(str(values[name])) % 2:
                values[name] = FILE if case.operation.method != "put" else "."
        if case.operation.label == "POST /images/build" and isinstance(body.get("name"), str):
            body["name"] += "-unknown"  # a known one would be built
        if case.operation.label.endswith("/warmup"):
            for name in ("count", "maximum"):  # each of them is made before the answer
                if isinstance(body.get(name), int):
                    body[name] = min(body[name], 10)
        if case.operation.label.endswith(("/execute", "/executions", "/run", "/stream")) and body:
            body.setdefault("timeout", 2)
            if "command" in body and len(body) % 2:
                for name in ("argv", "cwd", "timeout_seconds"):
                    body.pop(name, None)

    def environment(self) -> str:
        status, _, _ = self.daemon.raw("POST", f"/environments/{self._environment or 'none'}/heartbeat")
        if status != 200:
            self._environment = self.daemon.create(**SMALL)
            self._execution = ""
        self.daemon.raw(
            "POST", f"/environments/{self._environment}/files/write", {"path": FILE, "content": "0"}
        )
        return self._environment

    def execution(self) -> str:
        path = f"/environments/{self.environment()}/executions"
        status, _, found = self.daemon.raw("GET", f"{path}/{self._execution or 'none'}")
        if status != 200 or json.loads(found)["state"] != "running":
            body = {"command": "echo hello; cat", "stdin": True, "timeout": 20}
            self._execution = self.daemon.call("POST", path, body, expect=201)["execution_id"]
        return self._execution

    def python(self) -> str:
        """A session that can be used."""
        path = f"/environments/{self.environment()}/sessions"
        wanted = {"language": "python", "session_id": "python"}
        if self.daemon.call("POST", path, wanted, expect=201)["state"] == "crashed":
            self.daemon.call("POST", f"{path}/python/restart")
        return "python"

    def token(self) -> str:
        made: dict[str, Any] = self.daemon.call("POST", "/tokens", {"name": "test"}, expect=201)
        return str(made["id"])

    def send(self, case: Case) -> requests.Response:
        """The answer; of one without an end, what came in a moment."""
        arguments = case.as_transport_kwargs(base_url=self.url)
        response = self.session.request(**arguments, stream=True, timeout=30)
        enough = threading.Event()

        def stop() -> None:
            enough.set()
            response.raw.shutdown()

        cut = threading.Timer(STREAM_SECONDS, stop)
        if case.operation.definition.raw.get("operationId") in ENDLESS:
            cut.start()
        received = bytearray()
        try:
            for chunk in response.iter_content(None):
                received += chunk
        except requests.RequestException:
            assert enough.is_set(), "the answer broke off"
        finally:
            cut.cancel()
            if cut.ident is not None:
                cut.join()
            response.close()
        response._content = bytes(received)
        if response.ok:
            self.succeeded.add(case.operation.definition.raw["operationId"])
        return response

    def clean(self, case: Case, response: requests.Response) -> None:
        if response.status_code == 201 and case.operation.label == "POST /environments":
            self.daemon.call("DELETE", f"/environments/{response.json()['environment_id']}")
        if response.status_code == 201 and case.operation.label.endswith("/sessions"):
            made = response.json()
            self.daemon.call(
                "DELETE", f"/environments/{made['environment_id']}/sessions/{made['session_id']}"
            )


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with support.temporary_home() as home, started(home) as daemon, relayed(daemon.socket) as url:
        target = Target(daemon, url)
        yield target
        target.session.close()


@schema.exclude(operation_id="stop").parametrize()
@hypothesis.settings(
    max_examples=12,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_every_answer_is_in_the_document(case: Case, target: Target) -> None:
    target.prepare(case)
    response = target.send(case)
    case.validate_response(response, checks=[*CHECKS, no_server_error, every_item_is_in_the_document])
    target.clean(case, response)


def test_every_operation_has_succeeded_at_least_once(target: Target) -> None:
    """Else the test above would have seen nothing but refusals of some."""
    if not target.succeeded:
        pytest.skip("it looks at what the tests above did")
    never = {"stop", "attach", "build_image", "remove_image"}
    assert {operation.name for operation in table.OPERATIONS} - target.succeeded == never
