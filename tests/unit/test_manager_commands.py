"""Commands: what is refused, and what the guest is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from skerry.egress.presets import install_variables
from skerry.errors import InvalidRequest
from skerry.manager.executions.commands import Command, base_variables


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"argv": ["a"], "text": "a"},
        {"argv": []},
        {"argv": [""]},
        {"argv": ["a", "b\0"]},
        {"argv": ["a", "\ud800"]},
        {"text": "a\0b"},
        {"text": "a", "shell": "../x"},
        {"text": "a", "shell": "x" * 25},
        {"text": "a", "shell": "main", "env": {"A;id": "x"}},
        {"text": "a", "shell": "main@root"},
        {"text": "a", "cwd": "\0"},
        {"text": "a", "user": "nobody"},
        {"text": "a", "timeout": 0},
        {"text": "a", "timeout": float("nan")},
        {"text": "a", "output_limit": -1},
        {"text": "a", "output_limit": (64 << 20) + 1},
        {"text": "a", "pty": (0, 80)},
        {"text": "a", "pty": (24, 65536)},
        {"text": "a", "env": {"": "x"}},
        {"text": "a", "env": {"A=B": "x"}},
        {"text": "a", "env": {"A": "x\0"}},
    ],
)
def test_what_makes_no_sense_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        Command(**bad)


def test_variables_of_the_call_stand_above_those_of_the_environment_and_those_above_the_images() -> None:
    base = base_variables(
        {"PATH": "/image/bin", "HOME": "/root", "GOPATH": "/go"}, "/workspace", {"B": "env"}
    )
    start = Command(text="x", env={"B": "call", "C": "call"}).start(base)
    assert start.env == {
        **install_variables("/workspace", "/image/bin"),
        "LC_CTYPE": "C.UTF-8",
        "GOPATH": "/go",
        "HOME": "/workspace",
        "USER": "appuser",
        "LOGNAME": "appuser",
        "SHELL": "/bin/bash",
        "B": "call",
        "C": "call",
    }
    assert base["B"] == "env"
    assert start.uid is None


@pytest.mark.parametrize(("image", "environment", "call"), [("x", "", ""), ("", "x", ""), ("", "", "x")])
def test_whoever_says_which_language_means_all_of_it(image: str, environment: str, call: str) -> None:
    def said(value: str) -> dict[str, str]:
        return {"LANG": value} if value else {}

    start = Command(text="x", env=said(call)).start(
        base_variables(said(image), "/workspace", said(environment))
    )
    assert start.env["LANG"] == "x"
    assert "LC_CTYPE" not in start.env
    kept = base_variables({"LC_CTYPE": "mine"}, "/workspace", {"LANG": "x"})
    assert (kept["LANG"], kept["LC_CTYPE"]) == ("x", "mine")


def test_root_is_root() -> None:
    start = Command(text="x", user="root").start(base_variables({}, "/workspace", {}))
    assert (start.uid, start.env["USER"], start.env["LOGNAME"]) == (0, "root", "root")


def test_names_that_are_not_utf8_pass() -> None:
    assert Command(argv=["cat", "\udcff"]).start({}).argv == ["cat", "\udcff"]


def test_what_does_not_fit_into_a_frame_is_refused_with_a_way_out() -> None:
    Command(argv=["echo", "x" * 100_000]).start({}).encode()
    given: dict[str, Any]
    for given in (
        {"argv": ["echo", "x" * 140_000]},
        {"text": "x" * 140_000, "shell": "main"},
        {"text": "x", "env": {"A": "x" * 140_000}},
    ):
        with pytest.raises(InvalidRequest, match="to a file"):
            Command(**given)
    with pytest.raises(InvalidRequest, match="to a file"):  # with the environment's variables it does not fit
        Command(argv=["echo", "x" * 100_000]).start({"A": "x" * 40_000}).encode()


def test_a_shell_keeps_its_own_variables_and_exports_those_of_the_call() -> None:
    start = Command(text="x", shell="main", env={"B": "call"}).start({"A": "base", "B": "base"})
    assert (start.env, start.exports) == ({"A": "base", "B": "base"}, {"B": "call"})


def test_each_user_has_shells_of_their_own() -> None:
    assert Command(text="x", shell="main").shell_id == "main"
    assert Command(text="x", shell="main", user="root").shell_id == "main@root"
