"""Requests of the OpenAPI document as commands that can be pasted into a shell."""

from __future__ import annotations

import json
import shlex
from typing import Any
from urllib.parse import quote, urlencode

CURL = 'curl --unix-socket "$SKERRY_HOME/daemon.sock"'


def curl(method: str, path: str, operation: dict[str, Any]) -> str:
    """One operation with its examples as a curl command; "" for a WebSocket, which curl cannot speak."""
    if "101" in operation["responses"]:
        return ""
    parameters = operation.get("parameters", [])
    pairs = {}
    for parameter in parameters:
        if parameter["in"] == "path":
            path = path.replace(f"{{{parameter['name']}}}", quote(parameter["example"]))
        elif parameter["in"] == "query" and "example" in parameter:
            pairs[parameter["name"]] = _text(parameter["example"])
    words = [f"http://skerry{path}" + (f"?{urlencode(pairs, safe='/')}" if pairs else "")]
    if method not in ("get", "post") or (method == "post" and "requestBody" not in operation):
        words = ["-X", method.upper(), *words]
    content: dict[str, Any] = operation.get("requestBody", {}).get("content", {})
    if "application/json" in content:
        words += ["--json", json.dumps(content["application/json"]["example"])]
    elif content:
        words += ["-H", f"content-type: {next(iter(content))}", "--data-binary", "@file"]
    return f"{CURL} {shlex.join(words)}"


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
