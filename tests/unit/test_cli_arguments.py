"""What the CLI makes of its command lines, with a server that does as it is told."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import skerry
from skerry.cli import VERBS, load, main
from skerry.cli.completion import candidates
from skerry.cli.parser import Parser
from skerry.cli.terminal import clean, clean_text
from skerry.errors import ImageBuildFailed, InvalidRequest, SkerryError
from tests.unit.scripted_server import Peer, every_request, serving

ENV = {
    "environment_id": "abc123abc123",
    "name": "web",
    "state": "running",
    "image": "host",
    "isolation": "namespace",
    "created_at": 0.0,
    "expires_at": 9e9,
    "ended_reason": "",
}


def parse(verb: str, *words: str) -> dict[str, Any]:
    return vars(Parser(verb, load(verb)).parse(list(words)))


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["true"], ["true"]),
        (["--", "true"], ["true"]),
        (["-i", "sh", "-c", "x", "-i", "--memory", "1g"], ["sh", "-c", "x", "-i", "--memory", "1g"]),
        (["-it", "--memory", "1g", "sh"], ["sh"]),
        (["-m", "1g", "--", "-x", "--", "y"], ["-x", "--", "y"]),
        (["--", "--", "y"], ["--", "y"]),
        (["--env", "A=1", "-eB=2", "env", "-e", "C=3"], ["env", "-e", "C=3"]),
        (["ls", "-la", "--json", "--help"], ["ls", "-la", "--json", "--help"]),
        (["ls", "--unknown=1", "-zz", "-"], ["ls", "--unknown=1", "-zz", "-"]),
    ],
)
def test_options_end_at_the_command(words: list[str], command: list[str]) -> None:
    args = parse("run", *words)
    assert args["command"] == command
    assert not args["json"]
    assert args["interactive"] == ("-i" in words[:1] or "-it" in words[:1])


def test_ways_to_write_options() -> None:
    for words in (["--memory", "1g"], ["--memory=1g"], ["-m", "1g"], ["-m1g"]):
        assert parse("run", *words, "x")["memory"] == "1g"
    args = parse("run", "-tie", "A=1", "--env=B=2", "-eC", "--timeout", "-5", "--name=", "x")
    assert (args["interactive"], args["tty"], args["env"]) == (True, True, ["A=1", "B=2", "C"])
    assert (args["timeout"], args["name"]) == (-5.0, "")
    assert parse("rm", "a", "-f", "b", "--", "-c")["environments"] == ["a", "b", "-c"]
    assert parse("cp", "-", "web:x")["source"] == "-"


@pytest.mark.parametrize(
    ("verb", "words", "message"),
    [
        ("cp", ["a"], "TARGET is missing"),
        ("cp", ["a", "b", "c"], "unexpected argument 'c'"),
        ("image rm", [], "NAME is missing"),
        ("run", ["--mem", "1g"], "unknown option --mem"),
        ("run", ["-ix"], "unknown option -x"),
        ("run", ["--cpus=many"], "--cpus takes NUMBER, not 'many'"),
    ],
)
def test_words_that_do_not_fit(verb: str, words: list[str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse(verb, *words)


def test_options_of_exec_end_at_the_command_too() -> None:
    for words in (["-i", "web", "ls", "-la", "-t"], ["-i", "web", "--", "ls", "-la", "-t"]):
        args = parse("exec", *words)
        assert (args["environment"], args["interactive"], args["tty"]) == ("web", True, False)
        assert args["command"] == ["ls", "-la", "-t"]


@pytest.mark.parametrize(
    "words",
    [
        ["--memory"],
        ["--cpus", "many", "x"],
        ["--pids", "1.5", "x"],
        ["--json=1", "x"],
        ["--timeout", "soon", "x"],
    ],
)
def test_bad_options(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidRequest):
        parse("run", *words)
    assert main(["run", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "skerry run --help" in captured.err


@pytest.mark.parametrize("verb", [name for name, (_, words) in VERBS.items() if words])
def test_every_verb_has_help_with_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*verb.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: skerry {verb}")
    assert "example: " in text
    assert max(len(line) for line in text.splitlines()) <= 110


@pytest.mark.parametrize(
    ("word", "close"), [("rnu", "run"), ("lss", "ls"), ("imag ls", "image ls"), ("image bild", "image build")]
)
def test_unknown_verbs_suggest_the_closest(word: str, close: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(word.split() if word.startswith("image ") else [word]) == 2
    assert f"did you mean {close!r}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [[], ["--help"], ["help"], ["image"], ["image", "--help"], ["help", "image"]]
)
def test_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert "image build" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (skerry.InvalidRequest("bad memory", hint="write 512m"), 2),
        (skerry.EnvironmentNotFound("no x"), 2),
        (skerry.EnvironmentEnded("over"), 2),
        (skerry.Busy("later"), 2),
        (skerry.LaunchFailed("mount: EPERM"), 125),
        (skerry.IsolationUnavailable("no gvisor"), 125),
        (skerry.DiskFull("disk"), 125),
    ],
)
def test_exit_codes_of_errors(error: SkerryError, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(every_request(lambda *_: (error.to_dict(), error.status))):
        assert main(["run", "true"]) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err == f"skerry: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else "")
        assert main(["create", "--json"]) == code
        assert json.loads(capsys.readouterr().err)["error"]["code"] == error.code


def test_a_command_s_own_json_option_is_not_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(every_request(lambda *_: (skerry.InvalidRequest("no").to_dict(), 400))):
        main(["run", "--", "tool", "--json"])
    assert capsys.readouterr().err == "skerry: no\n"


def test_escapes_in_messages_and_names_are_shown_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "a\x1b[2Jb\rc\x9b\u202ed\udcff\x07"
    shown = "a\\x1b[2Jb\\rc\\x9b\\u202ed\\udcff\\x07"
    assert clean(evil) == shown
    assert clean("a\nb") == "a\\nb"
    assert clean_text("a\r\nb\tc\rd") == "a\nb\tc\\rd"
    with serving(every_request(lambda *_: (skerry.InvalidRequest(evil, hint=evil).to_dict(), 400))):
        assert main(["ls"]) == 2
    assert capsys.readouterr().err == f"skerry: {shown}\nhint: {shown}\n"
    with serving(every_request(lambda *_: {"environments": [{**ENV, "name": evil}]})):
        assert main(["ls"]) == 0
    assert shown in capsys.readouterr().out
    told: dict[str, Any] = {
        "environment_id": evil,
        "execution_id": evil,
        "token": evil,
        "tenant": "",
        "verbs": [],
    }
    told |= {"intact": True, "seq": 1, "hash": evil, "id": "", "version": evil, "pid": 1, "home": ""}
    with serving(every_request(lambda *_: told)):
        for words in (
            ["create"],
            ["exec", "-d", "web", "true"],
            ["token", "create", "x"],
            ["audit", "verify"],
        ):
            assert main(words) == 0
            assert shown in capsys.readouterr().out, words
        main(["version"])
        assert evil not in capsys.readouterr().out


def test_create_sends_what_was_given(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies: list[Any] = []
    monkeypatch.setenv("HERE", "yes")
    monkeypatch.delenv("NOT_HERE", raising=False)

    def answer(method: str, target: str, body: bytes) -> Any:
        bodies.append(json.loads(body))
        return ENV, 201

    with serving(every_request(answer)):
        options = (
            "--image dev --name web -m 1g --cpus 0.5 --pids 9 --fds 64 --disk 2g --inodes 99 --lifetime 5"
        )
        options += " --connections 7 --traffic 3g"
        options += " --idle 6 --isolation gvisor --profile strict --network none --workspace memory"
        assert main(["create", *options.split(), "-e", "A=1=2", "-e", "HERE", "-e", "NOT_HERE"]) == 0
        assert capsys.readouterr().out == "abc123abc123\n"
        assert main(["create", "-e", "=x"]) == 2
    assert bodies == [
        {
            "image": "dev",
            "name": "web",
            "memory": "1g",
            "cpus": 0.5,
            "pids": 9,
            "fds": 64,
            "disk": "2g",
            "inodes": 99,
            "connections": 7,
            "traffic": "3g",
            "lifetime": 5.0,
            "idle": 6.0,
            "isolation": "gvisor",
            "profile": "strict",
            "network": "none",
            "workspace": "memory",
            "env": {"A": "1=2", "HERE": "yes"},
        }
    ]


def test_ls(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []

    def answer(method: str, target: str, body: bytes) -> Any:
        asked.append(target)
        return {"environments": [ENV], "next": "1.5_abc" if len(asked) == 4 else None}

    with serving(every_request(answer)):
        main(["ls", "-q"])
        assert capsys.readouterr().out == "abc123abc123\n"
        main(["ls", "-a"])
        assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
            ["ID", "NAME"],
            ["abc123abc123", "web"],
        ]
        main(["ls", "--json"])
        assert json.loads(capsys.readouterr().out) == [ENV]
        main(["ls", "--state", "running", "--image", "host", "--name", "web", "-q"])
        assert capsys.readouterr().out == "abc123abc123\n" * 2
    filtered = "/environments?state=running&name=web&image=host"
    assert asked[:3] == ["/environments", "/environments?all=1", "/environments"]
    assert asked[3:] == [filtered, f"{filtered}&after=1.5_abc"]


def test_rm(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(method: str, target: str, body: bytes) -> Any:
        if method == "GET":
            return {"environments": [ENV]}
        if target == "/environments/gone":
            return skerry.EnvironmentNotFound("no gone").to_dict(), 404
        if target == "/environments/stuck":
            return skerry.PlatformError("stuck").to_dict(), 500
        return {"environment_id": target.rpartition("/")[2], "deleted": True}

    with serving(every_request(answer)):
        assert main(["rm", "a", "gone", "b"]) == 2
        assert capsys.readouterr().out == "a\nb\n"
        assert main(["rm", "-f", "a", "gone", "b"]) == 0
        assert capsys.readouterr().err == ""
        assert main(["rm", "-f", "stuck"]) == 125
        assert main(["rm", "--all", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"deleted": ["abc123abc123"]}
        assert main(["rm"]) == main(["rm", "--all", "a"]) == main(["rm", ""]) == 2


def test_logs_go_where_they_came_from(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    rows = [
        {"t": 1, "execution_id": "e", "stream": "stdout", "data": "out\x1b\n", "encoding": "utf-8"},
        {"t": 1, "execution_id": "e", "stream": "stderr", "data": "/w==", "encoding": "base64"},
    ]
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    with serving(every_request(lambda *_: lines)):
        assert main(["logs", "web"]) == 0
    captured = capfdbinary.readouterr()
    assert (captured.out, captured.err) == (b"out\x1b\n", b"\xff")


def test_logs_on_a_terminal_are_harmless(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr(os, "isatty", lambda fd: True)
    rows = [
        {"stream": "stdout", "data": "w6k=", "encoding": "base64"},
        {"stream": "stdout", "data": "ww==", "encoding": "base64"},
        {"stream": "stdout", "data": "qQ==", "encoding": "base64"},
        {"stream": "stdout", "data": "\x1b]0;x\x07\r\nok", "encoding": "utf-8"},
    ]
    lines = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    with serving(every_request(lambda *_: lines)):
        assert main(["logs", "web"]) == 0
    assert capfdbinary.readouterr().out.decode() == "éé\\x1b]0;x\\x07\nok"


IMAGE = {
    "name": "dev",
    "digest": "sha256:0123456789abcdef",
    "kind": "rootfs",
    "size": 1 << 20,
    "created_at": 1.0,
    "description": "d",
}


def test_images(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    steps = [("fetch", 0), ("fetch", 0.2), ("unpack", 0.5)]
    rows: list[Any] = [{"step": step, "fraction": fraction} for step, fraction in steps]
    built = b"".join(json.dumps(row).encode() + b"\n" for row in [*rows, {"image": IMAGE}])

    def answer(method: str, target: str, body: bytes) -> Any:
        if target == "/images":
            return {"images": [IMAGE], "definitions": ["dev", "tiny"]}
        return built if method == "POST" else IMAGE if method == "GET" else {}

    (tmp_path / "a.tar").write_bytes(b"x")
    with serving(every_request(answer)):
        assert main(["image", "ls"]) == 0
        rows = capsys.readouterr().out.splitlines()
        assert rows[1].split()[:4] == ["dev", "0123456789ab", "1.0", "MiB"]
        assert "skerry image build tiny" in rows[2]
        assert main(["image", "build", "dev"]) == 0
        captured = capsys.readouterr()
        assert captured.out == "dev sha256:0123456789abcdef\n"
        *told, next_one = captured.err.splitlines()
        assert told == ["  0% fetch", " 50% unpack"]
        assert next_one.startswith("built in ")
        assert next_one.endswith(", 1.0 MiB; use it: skerry run --image dev -it -- sh")
        assert main(["image", "import", str(tmp_path / "a.tar"), "dev", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["digest"] == IMAGE["digest"]
        assert main(["image", "pull", "docker://dev"]) == 0
        captured = capsys.readouterr()
        assert captured.out == "dev sha256:0123456789abcdef\n"
        assert captured.err.splitlines() == ["  0% fetch", " 50% unpack"]
        assert main(["image", "pull", "docker://dev", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == IMAGE
        assert main(["image", "inspect", "dev"]) == 0
        assert json.loads(capsys.readouterr().out) == IMAGE
        assert main(["image", "rm", "dev"]) == 0
        assert main(["image", "import", str(tmp_path / "none.tar"), "dev"]) == 2
        assert "none.tar: No such file" in capsys.readouterr().err


def test_a_build_that_fails_shows_what_was_said_last(capsys: pytest.CaptureFixture[str]) -> None:
    failed = ImageBuildFailed(
        "mmdebstrap ended with 25", detail={"output": ["E: no such package", "\x1b[2J"]}
    )

    def answer(method: str, target: str, body: bytes) -> Any:
        return json.dumps({"error": failed.to_dict()}).encode() + b"\n"

    with serving(every_request(answer)):
        assert main(["image", "build", "dev"]) == failed.exit_code
        said = capsys.readouterr().err.splitlines()
        assert said == ["  E: no such package", "  \\x1b[2J", "skerry: mmdebstrap ended with 25"]
        assert main(["image", "build", "dev", "--json"]) == failed.exit_code
        assert json.loads(capsys.readouterr().err)["error"]["code"] == "image_build_failed"


def test_version_does_not_start_a_daemon(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == main(["--version"]) == main(["stop"]) == 0
    captured = capsys.readouterr()
    assert f"skerry {skerry.__version__}\ndaemon: not running\n" in captured.out
    assert captured.err == "no daemon is running\n"
    assert list(home.iterdir()) == []


@pytest.mark.parametrize(
    ("before", "current", "some"),
    [
        ([], "", {"run", "image", "completion"}),
        (["image"], "", {"ls", "build", "import", "inspect", "rm"}),
        (["run"], "--", {"--memory", "-t", "--json"}),
        (["exec"], "", {"abc123abc123", "web"}),
        (["exec", "-e", "A=1"], "", {"abc123abc123", "web"}),
        (["rm", "web"], "", {"abc123abc123", "web"}),
        (["cp"], "", {"abc123abc123:", "web:"}),
        (["run", "--image"], "", {"dev"}),
        (["run", "-i", "--image"], "", {"dev"}),
        (["image", "rm"], "", {"dev"}),
        (["image", "build"], "", {"tiny"}),
        (["--context"], "", {"default"}),
        (["--context", "x", "--tenant", "y", "image"], "", {"ls", "build"}),
        (["completion"], "", {"bash", "zsh", "fish"}),
    ],
)
def test_completion(before: list[str], current: str, some: set[str]) -> None:
    answers = {
        "/environments": {"environments": [ENV]},
        "/images": {"images": [IMAGE], "definitions": ["tiny"]},
    }
    with serving(every_request(lambda method, target, body: answers[target])):
        found = set(candidates(before, current))
    assert some <= found
    assert "__complete" not in found


@pytest.mark.parametrize(
    "before",
    [
        ["nonsense"],
        ["run", "ls"],
        ["exec", "web", "ls"],
        ["run", "--memory"],
        ["ls"],
        ["image", "x"],
    ],
)
def test_completion_knows_nothing(before: list[str], home: Path) -> None:
    assert candidates(before, "") == []
    assert list(home.iterdir()) == []


def test_complete_prints_what_fits(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    assert main(["__complete", "im"]) == 0
    assert capsys.readouterr().out == "image\n"
    assert main(["__complete", "run", "--mem"]) == 0
    assert capsys.readouterr().out == "--memory\n"
    assert main(["__complete"]) == 0
    assert main(["__complete", "exec", ""]) == 0


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["cp", "a", "b"], "ENV:PATH"),
        (["cp", "web:a", "web:b"], "ENV:PATH"),
        (["run"], "-- python3"),
        (["run", "--"], "-- python3"),
        (["exec", "web"], "-- python3"),
        (["shell", "--memory", "1g", "web"], "leave out ENV"),
        (["run", "-it", "sh"], "leave out -t"),
    ],
)
def test_mistakes_that_need_no_daemon(
    words: list[str], hint: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert hint in capsys.readouterr().err
    assert list(home.iterdir()) == []


def test_cp_with_tar_streams(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str, bytes]] = []

    def answer(method: str, target: str, body: bytes) -> Any:
        seen.append((method, target, body))
        return empty if method == "GET" else {}

    empty = bytes(1024)

    read, write = os.pipe()
    os.write(write, b"tar?")
    os.close(write)
    stdin = os.dup(0)
    os.dup2(read, 0)
    try:
        with serving(every_request(answer)):
            assert main(["cp", "web:src", "-"]) == 0
            assert main(["cp", "web:.", "-"]) == 0
            assert main(["cp", "-", "web:dst"]) == 0
    finally:
        os.dup2(stdin, 0)
        os.close(stdin)
        os.close(read)
    archive = "/environments/web/files/archive"
    assert capfdbinary.readouterr().out == 2 * empty
    assert seen == [
        ("GET", f"{archive}?path=src", b""),
        ("GET", f"{archive}?path=.&contents=1", b""),
        ("PUT", f"{archive}?path=dst", b"tar?"),
    ]


def test_cp_keeps_names_as_docker_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []

    def answer(method: str, target: str, body: bytes) -> Any:
        seen.append((method, target.partition("/files/")[2]))
        if "stat" in target:
            directory = target.endswith(("dir", "dir%2F"))
            if not directory:
                return skerry.FileMissing("no").to_dict(), 404
            return {"path": "dir", "type": "directory", "size": 0, "mode": 0, "modified_at": 0}
        return {}

    (tmp_path / "f").write_text("1")
    monkeypatch.chdir(tmp_path)
    with serving(every_request(answer)):
        for source, target in (("f", "dir"), ("f", "new"), ("f", "x/"), (".", "dir"), ("./f", "dir")):
            assert main(["cp", source, f"web:{target}"]) == 0
    puts = [target for method, target in seen if method == "PUT"]
    assert puts == [
        "archive?path=dir",
        "archive?path=.",
        "archive?path=x",
        "archive?path=dir",
        "archive?path=dir",
    ]


def test_the_documentation_is_what_the_parser_says() -> None:
    import subprocess
    import sys

    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, root / "scripts" / "generate_cli_docs.py", "--check"], check=True)


def hang_up(peer: Peer) -> None:
    peer.request()


def test_a_daemon_that_hangs_up(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(hang_up):
        assert main(["ls"]) == 125
    assert "the daemon closed the connection" in capsys.readouterr().err


def test_home_that_is_too_long_for_a_socket_is_a_mistake_of_the_caller(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for length in (96, 105, 300):
        home = str(tmp_path).ljust(length, "x")
        monkeypatch.setenv("SKERRY_HOME", home)
        assert main(["ls"]) == 2
        message, hint = capsys.readouterr().err.splitlines()
        assert message.startswith("skerry: socket path too long")
        assert home in message
        assert hint == "hint: set SKERRY_HOME to a shorter path"
        assert not os.path.exists(home)
