"""Write docs/api.md from the table of operations.

python scripts/generate_api_docs.py            write it
python scripts/generate_api_docs.py --check    fail when it is not what would be written
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from skerry.daemon.http import openapi, table  # noqa: E402
from skerry.daemon.http.examples import CURL, curl  # noqa: E402
from skerry.errors import BY_CODE  # noqa: E402

TARGET = ROOT / "docs" / "api.md"
HEAD = """\
# The REST API

<!-- Written by scripts/generate_api_docs.py. -->

{introduction}

A running daemon serves this as a page at `/docs`, with the schema of every body and answer, and for programs at
`/openapi.json`.

```
{example}
```
"""


def section(method: str, path: str, operation: dict[str, Any]) -> str:
    needs = f" (needs `{operation['x-verb']}`)" if "x-verb" in operation else ""
    parts = [f"### {operation['summary']}", f"`{method.upper()} {path}`{needs}"]
    if text := operation.get("description"):
        parts.append(text)
    lines = []
    for parameter in operation.get("parameters", ()):
        if parameter["in"] != "path":
            required = ", required" if parameter.get("required") else ""
            where = "header" if parameter["in"] == "header" else "query"
            lines.append(f"- `{parameter['name']}` ({where}{required}): {parameter['description']}")
    if lines:
        parts.append("\n".join(lines))
    if command := curl(method, path, operation):
        parts.append(f"```\n{command.replace(CURL, 'curl ...')}\n{answer(operation)}```")
    codes = [
        code
        for status, response in operation["responses"].items()
        if status >= "400"
        for code in response["content"][openapi.PROBLEM]["schema"]["properties"]["code"]["enum"]
        if code not in ("denied", "internal", "unauthorized")
    ]
    if codes:
        parts.append("Fails with " + ", ".join(f"`{code}`" for code in codes) + ".")
    return "\n\n".join(parts)


def answer(operation: dict[str, Any]) -> str:
    for status, response in operation["responses"].items():
        for content in response.get("content", {}).values() if status < "300" else ():
            if "example" in content:
                example = content["example"]
                return example if isinstance(example, str) else json.dumps(example) + "\n"
    return ""


def errors() -> str:
    rows = sorted((error.status, code, error.grpc) for code, error in BY_CODE.items())
    lines = "\n".join(f"| `{code}` | {status} | `{grpc}` |" for status, code, grpc in rows)
    return f"## Errors\n\n| code | HTTP | gRPC |\n|---|---|---|\n{lines}"


def document() -> str:
    described = openapi.document(table.OPERATIONS)
    create = curl("post", "/environments", described["paths"]["/environments"]["post"])
    parts = [HEAD.format(introduction=described["info"]["description"], example=create)]
    for tag in described["tags"]:
        parts.append(f"## {tag['name'].capitalize()}\n\n{tag['description']}")
        parts += [
            section(method, path, operation)
            for path, methods in described["paths"].items()
            for method, operation in methods.items()
            if operation["tags"] == [tag["name"]]
        ]
    return "\n\n".join(part.strip() for part in [*parts, errors()]) + "\n"


def main() -> int:
    wanted = document()
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(wanted)
        return 0
    if TARGET.exists() and TARGET.read_text() == wanted:
        return 0
    print("docs/api.md is stale; run python scripts/generate_api_docs.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
