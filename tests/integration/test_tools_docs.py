"""The examples of docs/tools.md run as they are, and what can be called says what it does."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from pathlib import Path

import pytest
from langchain.agents import create_agent

import skerry
from tests.integration.test_langchain import Script

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tools.md").read_text(), re.DOTALL)
MODULES = [
    path
    for path in sorted((ROOT / "src" / "skerry" / "tools").rglob("*.py"))
    if "sync" not in path.parts and not path.name.startswith("_")
]


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
@pytest.mark.requirement("R116")
def test_examples(number: int, home: Path) -> None:
    code = compile(EXAMPLES[number], "tools.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names = {"skerry": skerry, "create_agent": create_agent, "model": Script(answers=[])}
    done = eval(code, names)
    if inspect.iscoroutine(done):
        asyncio.run(done)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
@pytest.mark.requirement("R116")
def test_what_can_be_called_says_what_it_does(path: Path) -> None:
    module = ast.parse(path.read_text())
    assert ast.get_docstring(module)
    for function in ast.walk(module):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            given = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
            untyped = [
                each.arg for each in given if each.annotation is None and each.arg not in ("self", "cls")
            ]
            assert (function.returns is not None, untyped) == (True, []), f"{function.name} in {path.name}"
    for node in module.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name[0] == "_":
            continue
        inner = node.body if isinstance(node, ast.ClassDef) else []
        methods = [part for part in inner if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
        documented = ast.get_docstring(node) or any(ast.get_docstring(method) for method in methods)
        assert documented, f"{node.name} in {path.name}"
