"""Packages that are installed before the code runs, from the test's own registries, by root's daemon and another's."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from skerry.client.sync.environment import Environment
from skerry.errors import Denied, InstallFailed, InvalidRequest, RegistryUnavailable, from_dict
from tests import support
from tests.integration import agreement
from tests.integration.daemon import Daemon, started
from tests.integration.shelves import Shelves, World
from tests.integration.test_installs import need

pytestmark = [pytest.mark.root, pytest.mark.timeout(200), pytest.mark.needs("network")]
IMPORT = "import tiny, os; tiny.main(); print(os.path.dirname(tiny.__file__)); os.system('tiny-pip')"
REACH = """
import socket, tiny
try:
    print("reached", socket.create_connection(("skerry.test", 443), timeout=5))
except OSError as error:
    print("not reached:", error)
"""
WRITE = """
import os, tiny
for act in (lambda: open(tiny.__file__, "a"), lambda: os.unlink(tiny.__file__), lambda: os.chmod(tiny.__file__, 0o777)):
    try:
        act()
        print("done")
    except OSError as error:
        print(error.strerror)
"""
HOSTILE = """
import stat, subprocess
place = os.environ["PYTHONUSERBASE"] + "/deeds"
os.makedirs(place)
os.symlink("/etc/shadow", place + "/absolute")
os.symlink("../../../../../../etc/shadow", place + "/relative")
os.mkfifo(place + "/fifo")
open(place + "/setuid", "w").write("#!/bin/sh\\n")
os.chmod(place + "/setuid", 0o6777)
open(place + "/hidden", "w").write("hidden")
os.chmod(place + "/hidden", 0o400)
os.link(place + "/setuid", place + "/hardlink")
open(os.fsencode(place) + b"/bytes\\xff\\n", "w").close()
"""
SECRET = """
place = os.environ["PYTHONUSERBASE"]
os.makedirs(place)
os.close(os.open(place + "/secret", os.O_CREAT, 0))
"""
LOOK = """
import os, stat
for name in sorted(os.listdir(b"/run/pip-packages/deeds")):
    found = os.lstat(b"/run/pip-packages/deeds/" + name)
    print(name, stat.filemode(found.st_mode))
    try:
        print(open(b"/run/pip-packages/deeds/" + name).read(7))
    except OSError as error:
        print(error.strerror)
"""


@pytest.fixture
def shelves(tmp_path: Path, user: support.Nobody | None, monkeypatch: pytest.MonkeyPatch) -> Shelves:
    return _shelves(tmp_path, user, monkeypatch)


@pytest.fixture
def of_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelves:
    return _shelves(tmp_path, None, monkeypatch)


def _shelves(folder: Path, user: support.Nobody | None, monkeypatch: pytest.MonkeyPatch) -> Shelves:
    need("git", "git")
    need("pip", "python3-pip")
    return Shelves(folder, user, monkeypatch)


@pytest.mark.requirement("R8", "F4")
def test_a_program_has_its_packages(shelves: Shelves) -> None:
    def body(world: World) -> None:
        def run(code: str, *packages: str) -> str:
            result = world.client.execute_code("python", code, packages=packages or ["tiny>=1"])
            assert result.ok, result.stderr
            return result.stdout

        site = "/run/pip-packages/lib/python"
        said = run(IMPORT).splitlines()
        assert (said[0], said[1].startswith(site), said[2]) == ("from pip", True, "from pip")
        assert any(path.endswith(".whl") for path in world.asked)
        world.forget()
        assert run(IMPORT, " Tiny >= 1 ", "tiny>=1").splitlines() == said
        assert run(REACH).startswith("not reached: ")
        refused = run(WRITE).splitlines()  # in gVisor by the user's rights, before the file system is asked
        assert len(refused) == 3
        assert set(refused) <= {"Read-only file system", "Permission denied", "Operation not permitted"}
        assert (world.asked, len(world.kept)) == ([], 1)
        assert {info.network for info in world.client.environments()} <= {
            "none"
        }  # that of a program may take a moment
        refused_and_unknown(world)
        plain = world.client.execute_code("python", "import tiny")
        assert "No module named 'tiny'" in plain.stderr

    shelves.run(body)


def refused_and_unknown(world: World) -> None:
    with pytest.raises(InstallFailed, match="No matching distribution found for skerry-no-such-thing"):
        world.client.execute_code("python", "print('ran')", packages=["tiny", "skerry-no-such-thing"])
    world.forget()
    for bad in (
        "--index-url=https://skerry.test/simple",
        "-rfile",
        "git+https://skerry.test/x",
        "./x",
        "x @ file:///x",
    ):
        with pytest.raises(InstallFailed, match="is not a package that pip can be asked for"):
            world.client.execute_code("python", "print('ran')", packages=[bad])
    with pytest.raises(InvalidRequest, match="there are no packages for bash"):
        world.client.execute_code("bash", "echo ran", packages=["tiny"])
    assert (world.asked, len(world.kept)) == ([], 1)


@pytest.mark.requirement("F4")
def test_a_program_in_javascript_has_its_packages(shelves: Shelves) -> None:
    need("npm", "npm")

    def body(world: World) -> None:
        code = "console.log(require('tiny')); console.log(require('child_process').execSync('tiny-npm') + '')"
        for _ in range(2):
            result = world.client.execute_code("nodejs", code, packages=["tiny@^1.0.0"])
            assert (result.stdout, result.stderr) == ("required\nfrom npm\n\n", "")
        module = "import tiny from 'tiny'; console.log(tiny)"
        files = {"package.json": '{"type": "module"}'}
        result = world.client.execute_code("nodejs", module, packages=["tiny@^1.0.0"], files=files)
        assert (result.stdout, result.stderr) == ("required\n", "")
        assert world.asked.count("/npm/tiny-1.0.0.tgz") == 1
        with pytest.raises(InstallFailed, match=r"404.*skerry-no-such-thing"):
            world.client.execute_code("nodejs", code, packages=["skerry-no-such-thing"])
        for bad in ("file:/x", "x/y", "git+ssh://skerry.test/x", "a@npm:b", "../x", "x.tgz", "--registry=x"):
            with pytest.raises(InstallFailed, match="is not a package that npm can be asked for"):
                world.client.execute_code("nodejs", code, packages=[bad])
        session(world)

    def session(world: World) -> None:
        world.forget()
        with Environment(client=world.client) as env, env.session("nodejs", packages=["tiny@^1.0.0"]) as node:
            assert node.run("require('tiny')").value == "'required'"
        assert world.asked == []

    shelves.run(body)


@pytest.mark.requirement("R8", "F4")
def test_a_session_gets_packages_and_keeps_its_variables(shelves: Shelves) -> None:
    def body(world: World) -> None:
        with Environment(client=world.client) as env:
            session = env.session("python", id="one")
            assert "No module named 'tiny'" in str(session.run("x = 1\nimport tiny").raised)
            again = env.session("python", id="one", packages=["tiny"])
            assert again.run("import tiny\ntiny.main()\nx").stdout == "from pip\n"
            assert again.run("x").value == "1"
            assert env.execute("tiny-pip").stdout == "from pip\n"
            assert env.info().network == "none"
            world.forget()
            other = env.session("python", packages=["tiny"])
            assert "/workspace/.local/" in str(other.run("import tiny\ntiny.__file__").value)
            with pytest.raises(InstallFailed, match="No matching distribution found"):
                env.session("python", id="two", packages=["skerry-no-such-thing"])
            assert [info.session_id for info in env.sessions()] == ["one", other.id]
            assert not any("tiny" in path for path in world.asked)
            env.session("python", id="one", packages=["other"])
            assert again.run("import other, tiny\nx").value == "1"
            assert any("tiny" in path for path in world.asked)  # both are resolved together
            world.forget()
        with Environment(client=world.client) as env, env.session("python", packages=["tiny"]) as session:
            assert session.run("import tiny").ok
        assert world.asked == []

    shelves.add("other", "pass")
    shelves.run(body)


def test_tenants_share_nothing(of_root: Shelves) -> None:
    def body(world: World) -> None:
        request = {"language": "python", "code": "import tiny; print('here')", "packages": ["tiny"]}
        # Room for one environment: that of the installation is gone before that of the program is made.
        world.daemon.call("PUT", "/quotas/acme", {"environments": 1})
        for tenant in ("acme", "acme", "other", "acme"):
            status, _, answer = world.daemon.raw("POST", "/execute", request, {"skerry-tenant": tenant})
            assert (status, json.loads(answer)["stdout"]) == (200, "here\n")
        assert sum(path.endswith(".whl") for path in world.asked) == 2
        assert len(world.kept) == 2
        token = world.daemon.call("POST", "/tokens", {"name": "t", "verbs": ["execute", "read"]}, expect=201)
        environment = world.daemon.create()
        status, _, answer = world.daemon.raw(
            "POST",
            f"/environments/{environment}/sessions",
            {"language": "python", "packages": ["tiny"]},
            {"authorization": f"Bearer {token['token']}"},
        )
        assert status == 403
        assert isinstance(from_dict(json.loads(answer)), Denied)

    of_root.run(body)


def pause(begun: threading.Event, until: threading.Event) -> Callable[[str], None]:
    """Lets whoever asks the registry wait."""

    def seen(path: str) -> None:
        begun.set()
        until.wait(60)

    return seen


def test_many_who_ask_at_once_wait_for_one_installation(of_root: Shelves) -> None:
    def body(world: World) -> None:
        begun, waiting = threading.Event(), threading.Event()
        world.shelves.seen = pause(begun, waiting)

        def run(number: int) -> str:
            code = f"import tiny; print({number})"
            return world.client.execute_code("python", code, packages=["tiny"]).stdout

        with ThreadPoolExecutor(4) as pool:
            running = [pool.submit(run, number) for number in range(4)]
            assert begun.wait(60)
            waiting.set()
            assert [future.result() for future in running] == [f"{number}\n" for number in range(4)]
        assert sum(path.endswith(".whl") for path in world.asked) == 1
        assert len(world.kept) == 1

    of_root.run(body)


def test_a_registry_that_cannot_be_reached(of_root: Shelves) -> None:
    def body(world: World) -> None:
        world.outside.names = {}
        with pytest.raises(RegistryUnavailable, match="pip cannot reach its registry") as caught:
            world.client.execute_code("python", "print('ran')", packages=["tiny"])
        assert caught.value.retryable
        assert (world.kept, world.client.environments()) == ([], [])

    of_root.run(body)


def test_a_hostile_package_stays_inside(shelves: Shelves, user: support.Nobody | None) -> None:
    def body(world: World) -> None:
        result = world.client.execute_code("python", LOOK, packages=["hostile"])
        assert result.ok, result.stderr
        said = result.stdout.splitlines()
        names = {line.split("'")[1]: line for line in said if line.startswith("b'")}
        assert sorted(names) == ["absolute", "bytes\\xff\\n", "hardlink", "hidden", "relative", "setuid"]
        assert (names["setuid"].split()[1], names["hardlink"].split()[1]) == ("-rwxr-xr-x", "-rwxr-xr-x")
        after = dict(zip(said[::2], said[1::2], strict=False))
        assert after[names["hidden"]] == "hidden"
        assert after[names["absolute"]] in ("Permission denied", "No such file or directory")
        mine = os.geteuid() if user is None else user.uid
        (place,) = world.kept
        for folder, folders, files in os.walk(place / "tree" / "deeds"):
            for name in (*folders, *files):
                found = os.lstat(os.path.join(folder, name))
                assert (found.st_uid, found.st_mode & 0o7022 & ~0o777 * stat.S_ISLNK(found.st_mode)) == (
                    mine,
                    0,
                )
        with Environment(client=world.client) as env, env.session("python", packages=["hostile"]) as session:
            assert session.run("import hostile\nhostile.here").value == "True"
        with pytest.raises(InstallFailed, match=r"cannot be kept: .*Permission denied: secret"):
            world.client.execute_code("python", "print('ran')", packages=["secret"])
        assert len(world.kept) == 1

    shelves.add("hostile", HOSTILE)
    shelves.add("secret", SECRET)
    shelves.run(body)


def test_a_daemon_that_is_killed_during_an_installation_leaves_nothing(of_root: Shelves) -> None:
    def body(world: World) -> None:
        begun, waiting = threading.Event(), threading.Event()
        world.shelves.seen = pause(begun, waiting)
        request: dict[str, Any] = {"language": "python", "code": "print(1)", "packages": ["tiny"]}
        try:
            with world.daemon.asked("POST", "/execute", request):
                assert begun.wait(60)
                (installing,) = world.daemon.call("GET", "/environments")["environments"]
                assert installing["network"] == "allowlist"
                world.daemon.kill()
            with started(world.daemon.home) as daemon:
                assert Daemon.call(daemon, "GET", "/environments")["environments"] == []
                assert world.kept == []
        finally:
            waiting.set()
        assert agreement.check(world.daemon.home) == set()

    of_root.run(body)
