"""The build of the native program: static or nothing, and only when something changed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts import build_native
from tests import support

HELLO = '#include <stdio.h>\nint main(void) { puts("one"); return 0; }\n'


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "native"
    folder.mkdir()
    (folder / "hello.c").write_text(HELLO)
    monkeypatch.setattr(build_native, "SOURCES", folder)
    return folder


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "made" / "program"


def said(program: Path) -> str:
    return subprocess.run([program], capture_output=True, text=True, check=True).stdout


def test_every_compiler_here_makes_a_static_program(sources: Path, tmp_path: Path) -> None:
    support.require("cc", "gcc")
    for toolchain in build_native.toolchains():
        program = tmp_path / toolchain.name
        assert toolchain.compile([sources / "hello.c"], program).returncode == 0
        assert build_native._is_static(program)
        assert said(program) == "one\n"


def test_a_dynamic_program_is_not_static(sources: Path, tmp_path: Path) -> None:
    cc = support.require("cc", "gcc")
    program = tmp_path / "dynamic"
    subprocess.run([cc, sources / "hello.c", "-o", program], check=True)
    assert not build_native._is_static(program)
    assert not build_native._works(build_native.Toolchain("cc", (cc,), ()))


def test_the_same_sources_are_not_compiled_again(
    sources: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    support.require("cc", "gcc")
    build_native.build(output)
    with monkeypatch.context() as patch:
        patch.setattr(build_native, "toolchains", lambda: pytest.fail("looked for a compiler"))
        assert build_native.build(output) == output
    (sources / "hello.c").write_text(HELLO.replace("one", "two"))
    assert said(build_native.build(output)) == "two\n"
    (sources / "header.h").write_text("/* headers count too */\n")
    before = output.stat().st_ino
    assert build_native.build(output).stat().st_ino != before


def test_a_program_that_runs_can_be_replaced(sources: Path, output: Path) -> None:
    support.require("cc", "gcc")
    (sources / "hello.c").write_text("#include <stdio.h>\nint main(void) { return getchar() != EOF; }\n")
    with subprocess.Popen([build_native.build(output)], stdin=subprocess.PIPE) as running:
        (sources / "hello.c").write_text(HELLO)
        assert said(build_native.build(output)) == "one\n"
        running.communicate(timeout=30)
    assert running.returncode == 0


def test_without_a_compiler_the_message_says_what_to_install(
    sources: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_native, "_candidates", lambda: iter(()))
    assert build_native.requires() == ["ziglang>=0.13"]
    with pytest.raises(build_native.BuildError, match=r"musl-tools(.|\n)*pip install ziglang"):
        build_native.build(output)
    assert not output.exists()


def test_a_warning_fails_the_check_but_not_the_build(sources: Path, output: Path) -> None:
    support.require("cc", "gcc")
    (sources / "hello.c").write_text("int main(void) { int unused; return 0; }\n")
    with pytest.raises(build_native.BuildError, match="could not compile"):
        build_native.check()
    assert said(build_native.build(output)) == ""
