"""The table of operations: what it promises is what the handlers take, and what the documents say."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from typing import Any

import jsonschema_rs
import pytest

from skerry.daemon.http import examples, openapi, page, table
from skerry.daemon.http.operations import Operation
from skerry.errors import BY_CODE

DOCUMENT = openapi.document(table.OPERATIONS)
IDS = [operation.name for operation in table.OPERATIONS]
each = pytest.mark.parametrize("operation", table.OPERATIONS, ids=IDS)


def described(operation: Operation) -> dict[str, Any]:
    found: dict[str, Any] = DOCUMENT["paths"][operation.path][operation.method.lower()]
    return found


def validate(schema: dict[str, Any], value: Any) -> None:
    jsonschema_rs.validator_for({**schema, "components": DOCUMENT["components"]}).validate(value)


@each
def test_a_handler_takes_what_the_table_gives(operation: Operation) -> None:
    in_path = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    in_query = [parameter.name for parameter in operation.query]
    body = ["body"] if operation.body is not None else []
    taken = list(inspect.signature(operation.handler).parameters)
    own = ["call", "websocket"] if operation.websocket else ["call"]
    assert taken == [*own, *in_path, *in_query, *body]


@each
def test_examples_are_what_they_are_examples_of(operation: Operation) -> None:
    body = described(operation).get("requestBody", {}).get("content", {}).get("application/json")
    if operation.body is not None:
        validate(body["schema"], operation.body_example)
        operation.body.model_validate(operation.body_example)
    for content in described(operation)["responses"][str(operation.status)].get("content", {}).values():
        schema = content.get("x-item-schema", content.get("schema"))
        if operation.answer_example is not None and schema.get("format") != "binary":
            validate(schema, operation.answer_example)


@each
def test_errors_have_one_status_and_one_form(operation: Operation) -> None:
    for status, response in described(operation)["responses"].items():
        if status >= "400":
            (content,) = response["content"].values()
            for code in content["schema"]["properties"]["code"]["enum"]:
                error = BY_CODE[code]("words", hint="what to do")
                assert str(error.status) == status
                validate(content["schema"], error.to_dict())


def test_names_and_places_are_unique() -> None:
    assert len(set(IDS)) == len(IDS)
    places = [(operation.method, operation.path) for operation in table.OPERATIONS]
    assert len(set(places)) == len(places)


def test_the_paths_of_the_environment_service() -> None:
    places = {f"{operation.method} {operation.path}" for operation in table.OPERATIONS}
    environment = "/environments/{environment_id}"
    assert places >= {
        "POST /environments",
        f"DELETE {environment}",
        f"POST {environment}/heartbeat",
        f"POST {environment}/execute",
        f"POST {environment}/files/write",
        f"GET {environment}/files/read",
    }
    result = DOCUMENT["components"]["schemas"]["Result"]
    assert {"error", "stdout", "stderr", "exit_code"} <= set(result["required"])


def test_every_schema_says_what_its_fields_are() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    assert "512m" in schemas["Create"]["properties"]["memory"]["description"]
    assert "124 after a timeout" in schemas["Result"]["properties"]["exit_code"]["description"]
    assert schemas["EnvironmentDetails"]["required"] == list(schemas["EnvironmentDetails"]["properties"])


def test_the_page_escapes_what_it_shows() -> None:
    hostile = json.loads(json.dumps(DOCUMENT).replace("Create an environment", "<script>`<b>`"))
    shown = page.render(hostile)
    assert "<script" not in shown
    assert "<b>`" not in shown


def test_examples_are_commands_for_a_shell() -> None:
    operation = DOCUMENT["paths"]["/environments/{environment_id}/files/read"]["get"]
    command = examples.curl("get", "/environments/{environment_id}/files/read", operation)
    assert command == (
        'curl --unix-socket "$SKERRY_HOME/daemon.sock" '
        "'http://skerry/environments/k3v9x1m2p7qa/files/read?path=src/main.py'"
    )


def test_documents_cost_nothing_until_somebody_asks() -> None:
    program = "import sys, skerry.daemon.app; print('skerry.daemon.http.openapi' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
