"""Definitions are read strictly, and users' own are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from skerry.errors import ImageNotFound, InvalidRequest
from skerry.images.definition import available, find, load, user_folder


def write(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.toml").write_text(text)
    return folder / f"{name}.toml"


def test_dev_comes_with_skerry(tmp_path: Path) -> None:
    dev = find("dev", tmp_path)
    assert {"git", "python3", "python3-pip", "python3-venv", "nodejs", "npm", "build-essential"} <= set(
        dev.packages
    )
    assert {"tree", "golang-go", "curl", "ca-certificates", "python-is-python3"} <= set(dev.packages)
    assert dev.suite == "bookworm"
    assert "/usr/bin" in dev.env["PATH"]


def test_everything_in_a_definition(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "mine",
        'description = "d"\nbase = "debian"\nsuite = "trixie"\npackages = ["g++", "libc6-dev"]\n'
        'commands = [["sh", "-c", "echo $HOME"]]\n[env]\nA = "1 2"\n',
    )
    mine = load(path)
    assert (mine.name, mine.description, mine.suite) == ("mine", "d", "trixie")
    assert mine.packages == ("g++", "libc6-dev")
    assert mine.commands == (("sh", "-c", "echo $HOME"),)
    assert mine.env == {"A": "1 2"}


def test_a_users_own_hides_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    write(user_folder(), "dev", 'base = "debian"\npackages = ["jq"]')
    write(user_folder(), "other", 'base = "debian"')
    assert user_folder() == tmp_path / "skerry/images"
    assert set(available()) >= {"dev", "other"}
    assert find("dev").packages == ("jq",)


def test_an_unknown_one(tmp_path: Path) -> None:
    with pytest.raises(ImageNotFound) as caught:
        find("nope", tmp_path)
    assert "dev" in caught.value.hint
    assert f"{tmp_path}/nope.toml" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "base must be"),
        ('base = "alpine"', "base must be"),
        ('base = "debian"\nfoo = 1\nbar = 2', "unknown keys 'bar', 'foo'"),
        ('base = "debian"\npackages = "git"', "packages must be"),
        ('base = "debian"\npackages = ["git,--evil"]', "packages: .* does not match"),
        ('base = "debian"\npackages = ["--evil"]', "packages: .* does not match"),
        ('base = "debian"\npackages = ["./evil.deb"]', "packages: .* does not match"),
        ('base = "debian"\npackages = ["?true"]', "packages: .* does not match"),
        ('base = "debian"\nsuite = "--evil"', "suite must match"),
        ('base = "debian"\nsuite = 12', "suite must be"),
        ('base = "debian"\ncommands = "true"', "commands must be"),
        ('base = "debian"\ncommands = ["true"]', "commands, number 1, must be"),
        ('base = "debian"\ncommands = [[]]', "commands, number 1, is empty"),
        ('base = "debian"\ncommands = [["a\\u0000b"]]', "commands, number 1, contains a NUL"),
        ('base = "debian"\nenv = "A=1"', "env must be"),
        ('base = "debian"\n[env]\n"A B" = "1"', "cannot be the name of an environment variable"),
        ('base = "debian"\n[env]\nA = 1', r"\[env\] A must be a string"),
        ('base = "debian"\ndescription = 1', "description must be"),
        ("not toml", "is not valid TOML"),
        ("\udcff", "cannot read"),
    ],
)
def test_wrong_ones(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(InvalidRequest, match=message):
        load(path)
