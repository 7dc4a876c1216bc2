"""`skerry token`, `quota`, `audit`, and secrets, with a real daemon."""

from __future__ import annotations

import json
import sqlite3
from datetime import datetime

import pytest

from tests.e2e.conftest import Cli


@pytest.fixture(scope="module")
def environment(cli: Cli) -> str:
    return cli.ok("create", "--name", "box")


def audited(cli: Cli, *words: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in cli.ok("audit", *words, "--json").splitlines()]


def test_a_token_from_its_making_to_its_end(cli: Cli) -> None:
    code, out, err = cli("token", "create", "--for", "acme", "--verb", "read", "--verb", "execute", "ci")
    assert code == 0
    text = out.decode().strip()
    assert text.startswith("skt_")
    assert text not in err.decode()
    (listed,) = json.loads(cli.ok("token", "ls", "--for", "acme", "--json"))
    assert (listed["name"], listed["tenant"], listed["verbs"]) == ("ci", "acme", ["execute", "read"])
    assert listed["id"] in cli.ok("token", "ls")
    assert cli.ok("token", "revoke", listed["id"]) == ""
    assert json.loads(cli.ok("token", "ls", "--for", "acme", "--json")) == []
    assert "revoked" in cli.ok("token", "ls", "-a", "--for", "acme")
    code, _, err = cli("token", "revoke", "nosuchtoken1")
    assert (code, b"skerry token ls" in err) == (2, True)
    code, _, err = cli("token", "create", "--verb", "fly", "x")
    assert (code, b"known: read" in err) == (2, True)


def test_quotas(cli: Cli) -> None:
    cli.ok("quota", "set", "--environments", "2", "--memory", "1g", "acme")
    shown = cli.ok("quota", "show", "acme").split()
    assert shown[shown.index("environments") :][:3] == ["environments", "0", "2"]
    assert json.loads(cli.ok("quota", "show", "--json", "acme"))["memory"] == 1 << 30
    code, _, err = cli("quota", "set", "--memory", "much", "acme")
    assert (code, b"much" in err) == (2, True)


def test_acting_for_another_tenant(cli: Cli, environment: str) -> None:
    assert cli.ok("ls", "-q") == environment
    assert cli.ok("--tenant", "acme", "ls", "-q") == ""
    theirs = cli.ok("--tenant=acme", "create")
    assert cli.ok("ls", "-q") == environment
    assert cli("info", theirs)[0] == 2
    cli.ok("--tenant", "acme", "rm", theirs)


def test_the_audit(cli: Cli, environment: str) -> None:
    assert cli("exec", environment, "--", "sh", "-c", "exit 3")[0] == 3
    rows = audited(cli, "tail", "-n", "2")
    assert [(row["kind"], row["outcome"]) for row in rows] == [("intent", ""), ("result", "failed")]
    assert "exit 3" in cli.ok("audit", "tail")
    found = audited(
        cli, "search", "--action", "execution", "--outcome", "failed", "--environment", environment
    )
    assert found == rows[1:]
    assert audited(cli, "search", "--until", "2000-01-01") == []
    assert audited(cli, "search", "--since", "2000-01-01", "--kind", "intent") != []
    code, _, err = cli("audit", "search", "--since", "yesterday")
    assert (code, b"2026-01-31T12:00:00" in err) == (2, True)
    exported = [json.loads(line) for line in cli.ok("audit", "export").splitlines()]
    assert [row["seq"] for row in exported] == list(range(1, len(exported) + 1))


def test_the_audit_as_it_grows(cli: Cli, environment: str) -> None:
    with cli.start("audit", "tail", "-f", "-n", "1", "--json") as tail:
        try:
            assert tail.stdout is not None
            tail.stdout.readline()
            cli.ok("exec", environment, "--", "true")
            row = json.loads(tail.stdout.readline())
            assert (row["kind"], row["detail"]["argv"]) == ("intent", ["true"])
        finally:
            tail.kill()


def test_secrets(cli: Cli, environment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.env, "API_KEY", "s3cr3t-value")
    show = ["--", "sh", "-c", "echo $API_KEY"]
    assert cli.ok("exec", "--secret", "API_KEY", environment, *show) == "s3cr3t-value"
    assert cli.ok("run", "--secret", "API_KEY", *show) == "s3cr3t-value"
    exported = cli.ok("audit", "export")
    assert "API_KEY" in exported
    assert "s3cr3t-value" not in exported
    code, _, err = cli("exec", "--secret", "NO_SUCH", environment, "--", "true")
    assert (code, b"NO_SUCH" in err) == (2, True)


def test_prune(cli: Cli) -> None:
    acme = ("--tenant", "acme", "audit")
    cli.ok("--tenant", "acme", "rm", cli.ok("--tenant", "acme", "create"))
    assert cli(*acme, "prune")[0] == 2
    assert cli(*acme, "prune", "--before", "2000-01-01")[2].startswith(b"0 rows removed")
    now = datetime.now().astimezone().isoformat()
    told = json.loads(cli.ok(*acme, "prune", "--before", now, "--json"))
    assert told["removed"] > 0
    code, _, err = cli(*acme, "verify")
    assert (code, f"of which the first {told['seq']} were pruned" in err.decode()) == (0, True)


def test_verify(cli: Cli, environment: str) -> None:
    code, out, err = cli("audit", "verify")
    assert (code, err.startswith(b"intact: ")) == (0, True)
    seq, hash = out.decode().split()
    cli.ok("exec", environment, "--", "true")
    assert cli("audit", "verify", "--seq", seq, "--hash", hash)[0] == 0
    with sqlite3.connect(cli.home / "state.db") as database:
        database.execute("UPDATE audit SET outcome = 'completed' WHERE outcome = 'failed'")
    database.close()
    code, out, err = cli("audit", "verify")
    assert (code, out) == (1, b"")
    assert err.startswith(b"BROKEN at row ")
    assert json.loads(cli("audit", "verify", "--json")[1])["intact"] is False
