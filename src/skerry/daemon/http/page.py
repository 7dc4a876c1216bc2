"""The documentation as a page: one file without scripts, which works offline and in light and dark."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable
from html import escape
from typing import Any

from skerry.daemon.http.examples import curl

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --link: light-dark(#0b57a4, #7db8f7) }
* { box-sizing: border-box }
body { margin: 0; font: 16px/1.5 system-ui, sans-serif; background: Canvas; color: CanvasText }
main, header { max-width: 60rem; margin: auto; padding: 1rem }
a { color: var(--link); text-decoration: none } a:hover { text-decoration: underline }
h1 { margin: .5rem 0 } h2 { margin-top: 3rem; border-bottom: 1px solid var(--line); text-transform: capitalize }
h3 { margin: 0; font-size: 1.1rem } h4 { margin: 1rem 0 .25rem }
nav ul { columns: 18rem; padding: 0; list-style: none; margin: .25rem 0 1rem } nav b { text-transform: capitalize }
code, pre { font: .875em/1.5 ui-monospace, monospace }
pre { background: var(--soft); border: 1px solid var(--line); border-radius: 6px; padding: .75rem; margin: .25rem 0;
  overflow-x: auto }
section.operation, section.schema { border: 1px solid var(--line); border-radius: 8px; padding: 1rem; margin: 1rem 0 }
.method { display: inline-block; min-width: 4.5rem; font: 700 .8rem ui-monospace, monospace }
.path { overflow-wrap: anywhere }
table { border-collapse: collapse; width: 100%; font-size: .925rem }
th, td { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--line) }
td:first-child { white-space: nowrap }
"""
_digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; style-src 'sha256-{_digest}'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)


Member = tuple[str, str, dict[str, Any]]
"""Method, path and operation."""


def render(document: dict[str, Any]) -> str:
    """The page for an OpenAPI document."""
    info = document["info"]
    groups: dict[str, tuple[str, list[Member]]] = {
        tag["name"]: (tag["description"], []) for tag in document["tags"]
    }
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            groups[operation["tags"][0]][1].append((method, path, operation))
    links = [
        f"<b>{escape(tag)}</b><ul>{''.join(map(_link, members))}</ul>" for tag, (_, members) in groups.items()
    ]
    sections = [
        f'<h2 id="{escape(tag)}">{escape(tag)}</h2><p>{_words(text)}</p>{"".join(map(_operation, members))}'
        for tag, (text, members) in groups.items()
    ]
    schemas = [_schema(name, schema) for name, schema in document["components"]["schemas"].items()]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(info["title"])} API</title>'
        f"<style>{STYLE}</style></head><body><header><h1>{escape(info['title'])} API "
        f"{escape(info['version'])}</h1>{_paragraphs(info['description'])}"
        '<p>For programs: <a href="/openapi.json">openapi.json</a>.</p>'
        f"<nav>{''.join(links)}</nav></header><main>{''.join(sections)}"
        f'<h2 id="schemas">Schemas</h2>{"".join(schemas)}</main></body></html>'
    )


def _link(member: Member) -> str:
    _, _, operation = member
    return f'<li><a href="#{operation["operationId"]}">{escape(operation["summary"])}</a></li>'


def _operation(member: Member) -> str:
    method, path, operation = member
    parts = [
        f'<section class="operation" id="{operation["operationId"]}"><h3>{escape(operation["summary"])}</h3>',
        f'<p><span class="method">{method.upper()}</span><code class="path">{escape(path)}</code></p>',
        _paragraphs(operation.get("description", "")),
    ]
    if parameters := operation.get("parameters"):
        rows = [
            (
                f"<code>{escape(p['name'])}</code>",
                escape(p["in"]) + (", required" if p.get("required") and p["in"] != "path" else ""),
                _type(p["schema"]),
                _words(p["description"]),
            )
            for p in parameters
        ]
        parts.append(f"<h4>Parameters</h4>{_table(rows)}")
    if body := operation.get("requestBody"):
        kinds = ((f"<code>{media}</code>", _type(each["schema"])) for media, each in body["content"].items())
        parts.append(f"<h4>Body</h4>{_table(kinds)}")
    parts.append(f"<h4>Answers</h4>{_table(_answers(operation['responses']))}")
    if command := curl(method, path, operation):
        parts.append(f'<h4>Example</h4><pre class="curl">{escape(command)}</pre>{_example(operation)}')
    return "".join(parts) + "</section>"


def _answers(responses: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            f"<code>{status}</code>",
            "<br>".join(
                f"<code>{media}</code> {_type(each.get('x-item-schema', each['schema']))}"
                for media, each in response.get("content", {}).items()
            ),
            _words(response["description"]),
        )
        for status, response in responses.items()
    ]


def _example(operation: dict[str, Any]) -> str:
    """The first example of a success."""
    for status, response in operation["responses"].items():
        for each in response.get("content", {}).values() if status < "300" else ():
            if "example" in each:
                found = each["example"]
                text = found if isinstance(found, str) else json.dumps(found, indent=2)
                return f"<pre>{escape(text)}</pre>"
    return ""


def _schema(name: str, schema: dict[str, Any]) -> str:
    required = schema.get("required", [])
    rows = [
        (
            f"<code>{escape(key)}</code>",
            _type(value)
            + (", required" if key in required and schema.get("additionalProperties") is False else ""),
            _words(value.get("description", "")),
        )
        for key, value in schema.get("properties", {}).items()
    ]
    fields = _table(rows) if rows else f"<p>{_type(schema)}</p>"
    return (
        f'<section class="schema" id="schema-{escape(name)}"><h3>{escape(name)}</h3>'
        f"{_paragraphs(schema.get('description', ''))}{fields}</section>"
    )


def _type(schema: dict[str, Any]) -> str:
    """A schema in a few words, with links to those that have a name."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#schema-{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"])
    if "const" in schema:
        return f"<code>{escape(json.dumps(schema['const']))}</code>"
    if "enum" in schema:
        return " or ".join(f"<code>{escape(str(each))}</code>" for each in schema["enum"])
    if "items" in schema:
        return f"list of {_type(schema['items'])}"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties'])}"
    kind = schema.get("type", "anything")
    words = (
        "bytes"
        if schema.get("format") == "binary"
        else " or ".join([kind] if isinstance(kind, str) else kind)
    )
    default = schema.get("default")
    return escape(words) + (
        f", default <code>{escape(json.dumps(default))}</code>" if default is not None else ""
    )


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    return (
        "<table>"
        + "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
        + "</table>"
    )


def _paragraphs(text: str) -> str:
    return "".join(f"<p>{_words(part)}</p>" for part in text.split("\n\n") if part)


def _words(text: str) -> str:
    """Text in which `code` is marked as in Markdown."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
