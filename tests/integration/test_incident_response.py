"""The commands that SECURITY.md lists for an incident do what it says."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest

import skerry

ROOT = Path(__file__).resolve().parents[2]
MARK = "what the attacker wrote"


def section(title: str) -> str:
    text = (ROOT / "SECURITY.md").read_text()
    found = re.search(rf"^## {title}\n((?:(?!## ).*\n)*)", text, re.MULTILINE)
    assert found, f"SECURITY.md has no section {title!r}"
    return found[1]


@pytest.mark.requirement("R114")
def test_evidence_is_kept_and_everything_ended(home: Path) -> None:
    documented = set(re.findall(r"`(skerry [^`]+)`", section("Incident response")))

    def run(command: str, **values: str) -> bytes:
        assert command in documented, documented
        for name, value in values.items():
            command = command.replace(name, value)
        argv = [sys.executable, "-m", "skerry.cli", *command.split()[1:]]
        env = {**os.environ, "SKERRY_HOME": str(home)}
        done = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    with skerry.Client(str(home)) as client:
        granted = client.create_token("agent", verbs=["create", "execute", "read"])
        with skerry.Client(url=f"unix://{home}/daemon.sock", token=granted["token"]) as agent:
            env = skerry.Environment(client=agent).create()
            other = skerry.Environment(client=agent).create()
            env.execute(f"echo {MARK} | tee file")
            assert MARK.encode() in run("skerry logs ENV", ENV=env.id)
            info = json.loads(run("skerry info ENV --json", ENV=env.id))
            enforced = {row["name"] for row in info["enforced"] if row["enforced"]}
            assert enforced >= {"no_new_privs", "seccomp", "memory", "pids"}
            assert MARK.encode() in run("skerry cp ENV:/workspace -", ENV=env.id)
            told = run("skerry audit search --environment ID", ID=env.id).decode()
            assert MARK in told
            assert granted["id"] in told
            run("skerry token revoke ID", ID=granted["id"])
            with pytest.raises(skerry.SkerryError, match="revoked"):
                agent.environments()
        run("skerry rm -f ENV", ENV=env.id)
        assert [each.environment_id for each in client.environments()] == [other.id]
        daemon = os.pidfd_open(client.version()["pid"])
        run("skerry stop --force")
    assert select.select([daemon], [], [], 30)[0]
    os.close(daemon)
    assert list((home / "instances").iterdir()) == []
    assert MARK not in (home / "daemon.log").read_text(), "the log holds no output"


@pytest.mark.requirement("R114")
@pytest.mark.parametrize("title", ["Layers", "Threat model", "Practices"])
def test_page_has_the_promised_section(title: str) -> None:
    assert len(section(title).split()) > 100
