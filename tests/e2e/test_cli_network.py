"""`skerry net` with a real daemon. Nothing is sent anywhere: what is reached is looked at in tests/integration."""

from __future__ import annotations

import json

import pytest

from tests.e2e.conftest import Cli


@pytest.fixture
def environment(cli: Cli) -> object:
    found = cli.ok("create", "--allow", "example.com", "--allow", "*.example.org:443")
    yield found
    cli.ok("rm", found)


def shown(cli: Cli, environment: str) -> tuple[str, list[str]]:
    found = json.loads(cli.ok("net", "show", "--json", environment))
    return found["network"], found["allow"]


def test_an_allowlist_from_its_making_to_its_end(cli: Cli, environment: str) -> None:
    assert shown(cli, environment) == ("allowlist", ["example.com", "*.example.org:443"])
    assert cli.ok("net", "deny", environment, "example.com") == ""
    assert cli.ok("net", "allow", environment, "203.0.113.7:22", "example.net") == ""
    assert shown(cli, environment) == ("allowlist", ["*.example.org:443", "203.0.113.7:22", "example.net"])
    text = cli.ok("net", "show", environment)
    assert "allowed   *.example.org:443, 203.0.113.7:22, example.net" in text
    cli.ok("net", "set", environment, "none")
    assert shown(cli, environment) == ("none", [])
    cli.ok("net", "set", environment, "public")
    info = json.loads(cli.ok("info", "--json", environment))
    assert info["network"] == "public"


def test_limits(cli: Cli) -> None:
    environment = cli.ok("create", "--allow", "example.com", "--connections", "7", "--traffic", "1g")
    try:
        assert "at most   7 connections, 1.0 GiB" in cli.ok("net", "show", environment)
        cli.ok("net", "set", environment, "--traffic", "2g")
        cli.ok("net", "set", "--connections", "8", environment, "public")
        found = json.loads(cli.ok("net", "show", "--json", environment))
        assert (found["network"], found["limits"]) == ("public", {"connections": 8, "traffic": 2 << 30})
        rows = json.loads(cli.ok("info", "--json", environment))["enforced"]
        told = {row["name"]: (row["value"], row["enforced"]) for row in rows}
        assert (told["connections"], told["traffic"]) == (("8", True), (str(2 << 30), True))
    finally:
        cli.ok("rm", environment)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["net", "allow", "ENV", "http://example.com"], "api.example.com"),
        (["net", "deny", "ENV", "example.net"], "in it: example.com"),
        (["net", "set", "ENV", "everything"], "none, allowlist, public"),
        (["net", "allow", "ENV"], "RULE is missing"),
        (["net", "set", "ENV"], "nothing to change"),
        (["net", "set", "ENV", "--connections", "0"], "connections must be between 1 and 65536"),
        (["create", "--traffic", "much"], "'much' is not a size"),
        (["create", "--network", "public", "--allow", "example.com"], "allowlist"),
        (["create", "--allow", "pyton-packages"], "python-packages"),
    ],
)
def test_mistakes(cli: Cli, environment: str, words: list[str], says: str) -> None:
    code, _, err = cli(*(environment if word == "ENV" else word for word in words))
    assert code == 2, err
    assert says in err.decode()
    assert shown(cli, environment) == ("allowlist", ["example.com", "*.example.org:443"])
