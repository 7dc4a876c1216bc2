"""Programs in images: each has the languages that it brings along, and a new version of an image is another one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import support
from tests.integration.daemon import Daemon, started
from tests.integration.roots import rootfs

NODE = Path(__file__).resolve().parents[2] / ".cache" / "inspector" / "node_modules" / "node" / "bin" / "node"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with support.temporary_home() as home, started(home) as running:
        yield running


def load(daemon: Daemon, name: str, **programs: str) -> None:
    status, _, answer = daemon.raw("POST", f"/images/import?name={name}", rootfs(**programs))
    assert (status, b'"error"' in answer) == (200, False), answer[-500:]


def execute(daemon: Daemon, language: str, code: str, image: str, expect: int = 200) -> dict[str, Any]:
    body = {"language": language, "code": code, "image": image}
    found: dict[str, Any] = daemon.call("POST", "/execute", body, expect=expect)
    return found


def test_a_language_that_an_image_has_not(daemon: Daemon) -> None:
    load(daemon, "tiny", bash="/bin/bash")
    result = execute(daemon, "bash", "echo $BASH_VERSION; echo /bin/*", "tiny")
    assert result["stdout"].splitlines()[1] == "/bin/bash"
    assert result["stdout"].startswith(result["version"])
    problem = execute(daemon, "python", "", "tiny", expect=404)
    assert problem["code"] == "language_not_found"
    assert problem["message"] == "the image 'tiny' cannot run python: it has no python3"
    assert problem["hint"] == "name an image that has python3"


def test_what_is_known_of_an_image_is_not_known_of_the_next_with_its_name(daemon: Daemon) -> None:
    load(daemon, "changing", bash="/bin/bash")
    assert execute(daemon, "ruby", "", "changing", expect=404)["code"] == "language_not_found"
    (daemon.home / "languages.toml").write_text(
        '[ruby]\ncommand = ["true"]\nversion = ["bash", "--version"]\n'
    )
    try:
        load(daemon, "changing", bash="/bin/bash", true="/bin/true")
        assert execute(daemon, "ruby", "", "changing")["outcome"] == "completed"
    finally:
        (daemon.home / "languages.toml").unlink()


def test_an_operator_gives_a_language_another_image(daemon: Daemon) -> None:
    load(daemon, "other", bash="/bin/bash")
    (daemon.home / "languages.toml").write_text('[bash]\nimage = "other"\n')
    try:
        body = {"language": "bash", "code": "echo /bin/*"}
        assert daemon.call("POST", "/execute", body)["stdout"] == "/bin/bash\n"
    finally:
        (daemon.home / "languages.toml").unlink()


@pytest.mark.requirement("F2")
def test_typescript_where_the_image_is_new_enough(daemon: Daemon) -> None:
    if not NODE.exists():
        support.missing("Node.js 22 is not installed (scripts/setup_test_deps.sh does, with npm)")
    load(daemon, "node", node=str(NODE))
    code = "interface Named { name: string }\nconst it: Named = { name: 'hello' };\nconsole.log(it.name as string);\n"
    result = execute(daemon, "ts", code, "node")
    assert (result["stdout"], result["stderr"], result["language"]) == ("hello\n", "", "typescript")
    assert int(result["version"].split(".")[0]) >= 22
