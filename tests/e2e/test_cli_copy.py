"""`skerry cp` with a real daemon."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Cli


@pytest.fixture
def ref(cli: Cli) -> Iterator[str]:
    made = cli.ok("create")
    yield made
    cli.ok("rm", made)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub" / "tool").write_bytes(bytes(range(256)) * 2000)
    (tree / "sub" / "tool").chmod(0o755)
    (tree / "link").symlink_to("sub/tool")
    Path(os.fsdecode(os.fsencode(tree) + b"/odd \xff\n\x1b")).write_text("odd")
    return tree


def listing(tree: Path) -> dict[str, object]:
    return {
        str(path.relative_to(tree)): os.readlink(path)
        if path.is_symlink()
        else (path.stat().st_mode & 0o777, path.is_file() and path.read_bytes())
        for path in sorted(tree.rglob("*"))
    }


def test_a_tree_there_and_back(cli: Cli, ref: str, tree: Path, tmp_path: Path) -> None:
    cli.ok("cp", str(tree), f"{ref}:copy")
    cli.ok("exec", ref, "--", "sh", "-c", "test -x copy/sub/tool && test -L copy/link")
    cli.ok("cp", f"{ref}:copy", str(tmp_path / "back"))
    assert listing(tmp_path / "back") == listing(tree)


def test_into_directories_that_exist(cli: Cli, ref: str, tree: Path, tmp_path: Path) -> None:
    cli.ok("exec", ref, "mkdir", "d")
    cli.ok("cp", str(tree), f"{ref}:d")
    cli.ok("cp", str(tree / "sub" / "tool"), f"{ref}:d")
    cli.ok("cp", str(tree) + "/.", f"{ref}:d/contents")
    assert cli.ok("exec", ref, "--", "ls", "d", "d/tree/sub", "d/contents/sub").split() == [
        *("d:", "contents", "tool", "tree", "d/contents/sub:", "tool", "d/tree/sub:", "tool")
    ]
    (tmp_path / "here").mkdir()
    cli.ok("cp", f"{ref}:d/tree/sub", str(tmp_path / "here"))
    cli.ok("cp", f"{ref}:d/tool", str(tmp_path / "here"))
    cli.ok("cp", f"{ref}:d/tree/.", str(tmp_path / "here" / "contents"))
    assert sorted(os.listdir(tmp_path / "here")) == ["contents", "sub", "tool"]
    assert listing(tmp_path / "here" / "contents") == listing(tree)


def test_tar_streams(cli: Cli, ref: str) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        info = tarfile.TarInfo("a/b")
        info.size = 3
        tar.addfile(info, io.BytesIO(b"123"))
    assert cli("cp", "-", f"{ref}:in", input=stream.getvalue())[0] == 0
    code, out, _ = cli("cp", f"{ref}:in/a", "-")
    assert code == 0
    with tarfile.open(fileobj=io.BytesIO(out)) as tar:
        assert [name.rstrip("/") for name in tar.getnames()] == ["a", "a/b"]


def test_what_leads_out_is_left_out(cli: Cli, ref: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    program = "mkdir d; cd d; ln -s /etc/passwd abs; ln -s ../../secret up; echo 1 > ok"
    cli.ok("exec", ref, "--", "sh", "-c", program)
    code, _, err = cli("cp", f"{ref}:d", str(tmp_path / "out"))
    assert code == 1
    assert os.listdir(tmp_path / "out") == ["ok"]
    assert err.count(b"left out") == 2


HARD_TO_COPY = (
    "mkdir -p d/sub d/closed; echo 1 > d/ok; echo 2 > d/secret; chmod 0 d/secret d/closed; mkfifo d/fifo;"
    " python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('d/socket')\";"
    " truncate -s 1G d/sub/sparse; printf middle | dd of=d/sub/sparse bs=1 seek=500000000 conv=notrunc status=none"
)
LEFT_OUT = {
    "d/secret": "Permission denied",
    "d/closed": "Permission denied",
    "d/fifo": "not a file, directory or link",
    "d/socket": "not a file, directory or link",
}


def test_what_can_be_read_arrives_and_the_rest_is_named(cli: Cli, ref: str, tmp_path: Path) -> None:
    cli.ok("exec", ref, "--", "sh", "-c", HARD_TO_COPY)
    code, out, err = cli("cp", "--json", f"{ref}:d", str(tmp_path / "out"))
    assert (code, err) == (1, b"")
    assert {each["path"]: each["reason"] for each in json.loads(out)["left_out"]} == LEFT_OUT
    assert (tmp_path / "out" / "ok").read_text() == "1\n"
    sparse = (tmp_path / "out" / "sub" / "sparse").stat()
    assert (sparse.st_size, sparse.st_blocks * 512 < 1 << 20) == (1 << 30, True)
    with open(tmp_path / "out" / "sub" / "sparse", "rb") as file:
        file.seek(500_000_000)
        assert file.read(8) == b"middle\0\0"
    # The evidence of SECURITY.md: a tar for others, which tells the same beside it.
    code, out, err = cli("cp", f"{ref}:/workspace/d", "-")
    assert code == 1
    assert len(out) < 1 << 20
    for name, reason in LEFT_OUT.items():
        assert f"left out {name}: {reason}" in err.decode()
    with tarfile.open(fileobj=io.BytesIO(out)) as tar:
        assert "d/ok" in tar.getnames()
        assert tar.getmember("d/sub/sparse").size == 1 << 30
    code, _, err = cli("cp", "--json", f"{ref}:/workspace/d", "-")
    assert {each["path"]: each["reason"] for each in json.loads(err)["left_out"]} == LEFT_OUT
    # And back inside.
    assert cli("cp", str(tmp_path / "out" / "sub"), f"{ref}:back")[0] == 0
    told = cli.ok(
        "exec",
        ref,
        "--",
        "sh",
        "-c",
        "du -k back/sparse; stat -c %s back/sparse; cmp d/sub/sparse back/sparse",
    )
    used, size = told.split()[0], told.split()[2]
    assert (int(used) < 1024, int(size)) == (True, 1 << 30)


def test_one_file_that_cannot_be_read_is_an_error(cli: Cli, ref: str, tmp_path: Path) -> None:
    cli.ok("exec", ref, "--", "sh", "-c", "touch none; chmod 0 none")
    for target in (str(tmp_path / "x"), "-"):
        code, out, err = cli("cp", f"{ref}:none", target)
        assert (code, out) == (2, b"")
        assert b"none" in err


def test_a_copy_has_a_bound(cli: Cli, ref: str, tmp_path: Path) -> None:
    cli.ok("exec", ref, "--", "sh", "-c", "head -c 3000000 /dev/urandom > big")
    for target in (str(tmp_path / "x"), "-"):
        code, _, err = cli("cp", "--max-size", "1m", f"{ref}:big", target)
        assert code != 0
        assert b"larger than this download may be" in err
    assert not (tmp_path / "x").exists()
    assert cli("cp", "--max-size", "4m", f"{ref}:big", str(tmp_path / "x"))[0] == 0


@pytest.mark.parametrize("path", ["../../etc/shadow", "/etc/shadow", "/root/x", "nothing"])
def test_places_that_are_not_there(cli: Cli, ref: str, tmp_path: Path, path: str) -> None:
    code, _, err = cli("cp", f"{ref}:{path}", str(tmp_path / "x"))
    assert code == 2
    assert err.startswith(b"skerry: ")
    assert not (tmp_path / "x").exists()


def test_a_local_file_that_is_not_there(cli: Cli, ref: str, tmp_path: Path) -> None:
    code, _, err = cli("cp", str(tmp_path / "nothing"), f"{ref}:x")
    assert (code, b"No such file" in err) == (2, True)
