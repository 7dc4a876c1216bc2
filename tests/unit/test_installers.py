"""Requirements are data: what may be asked of an installer, and how it is written down."""

from __future__ import annotations

import pytest

from skerry.errors import InstallFailed
from skerry.languages import INSTALLERS as NAMES
from skerry.manager.code.installers import INSTALLERS, REQUIREMENT_MAX, REQUIREMENTS_MAX

PIP, NPM = INSTALLERS["pip"], INSTALLERS["npm"]


def test_languages_name_those_that_there_are() -> None:
    assert tuple(INSTALLERS) == NAMES


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("pandas", "pandas"),
        ("  pandas == 2.* ", "pandas==2.*"),
        ("Typing_Extensions>=4,<5", "typing-extensions<5,>=4"),
        ("requests[security , Socks]~=2.31", "requests[security,socks]~=2.31"),
        ("x===1.0+local", "x===1.0+local"),
        ("x!=1!2.0", "x!=1!2.0"),
        (
            "x; python_version < '3.12'  and sys_platform=='linux'",
            "x ; python_version < '3.12' and sys_platform=='linux'",
        ),
        (
            "x;'linux' in sys_platform and os_name not in 'nt'",
            "x ; 'linux' in sys_platform and os_name not in 'nt'",
        ),
        ("x>=1;(os_name=='nt' or extra == \"a\")", "x>=1 ; (os_name=='nt' or extra == \"a\")"),
    ],
)
def test_python_requirements(text: str, normal: str) -> None:
    assert PIP.normalized([text]) == (normal,)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("lodash", "lodash@latest"),
        ("lodash@^4.17.0", "lodash@^4.17.0"),
        ("@types/node@20.x", "@types/node@20.x"),
        ("@scope/name", "@scope/name@latest"),
        ("a@>=1.2.0  <2 || ~3", "a@>=1.2.0 <2 || ~3"),
        ("a@1.0.0-beta.1+build", "a@1.0.0-beta.1+build"),
        ("socket.io@next", "socket.io@next"),
    ],
)
def test_npm_requirements(text: str, normal: str) -> None:
    assert NPM.normalized([text]) == (normal,)


BAD = [
    *("", " ", "-", "--index-url=https://x", "-r", "-rfile", "-e", "--", "-e.", "–x", "x\n--pre", "x --pre"),
    *(
        ".",
        "..",
        "./x",
        "../x",
        "/x",
        "~/x",
        "x/",
        "a/b/c",
        "C:\\x",
        "file:x",
        "file:///x",
        "https://x/y.whl",
    ),
    *(
        "git+https://x/y",
        "git+ssh://git@x/y",
        "git://x",
        "x@git+https://y",
        "x @ https://y/z.whl",
        "x@file:y",
    ),
    *(
        "x.whl",
        "x.zip",
        "x.tar.gz",
        "x.tgz",
        "x.TGZ",
        "x@1.tgz",
        "$(id)",
        "x;$(id)",
        "x`id`",
        "x|y;",
        "\0",
        "x\0",
        "ä",
    ),
]


@pytest.mark.parametrize("installer", [PIP, NPM], ids=lambda one: str(one.name))
@pytest.mark.parametrize("text", BAD)
def test_whatever_is_not_a_name_with_versions_is_refused(installer: object, text: str) -> None:
    with pytest.raises(InstallFailed, match="is not a package"):
        INSTALLERS[getattr(installer, "name")].normalized([text])  # noqa: B009


@pytest.mark.parametrize(
    "text", ["user/repo", "a@user/repo", "a@npm:b", "a@http://x", "A", ".a", "_a", "a@", "a@.", "a@-x"]
)
def test_npm_takes_nothing_from_elsewhere(text: str) -> None:
    with pytest.raises(InstallFailed, match="is not a package"):
        NPM.normalized([text])


@pytest.mark.parametrize(
    "text", ["x==", "x=1", "x>1 2", "x[", "x[]", "x;", "x; __import__('os')", "x; a == 'b;c'", "x (1)"]
)
def test_pip_takes_no_half_of_a_requirement(text: str) -> None:
    with pytest.raises(InstallFailed, match="is not a package"):
        PIP.normalized([text])


def test_a_set_is_always_the_same() -> None:
    assert PIP.normalized(["b", "a>=1", "A >= 1", "b"]) == PIP.normalized(["a>=1", "B"]) == ("a>=1", "b")


def test_what_is_named_anew_replaces_what_was_said_before() -> None:
    before = PIP.normalized(["a==1", "b[x]>=1", "c ; os_name == 'nt'"])
    assert PIP.merged(before, ["A == 2", "d"]) == ("a==2", "b[x]>=1", "c ; os_name == 'nt'", "d")
    assert PIP.merged(before, ["b", "c"]) == ("a==1", "b", "c")
    assert PIP.merged((), ["a"]) == ("a",)
    assert NPM.merged(("@s/a@^1", "a@latest"), ["@s/a@2", "b"]) == ("@s/a@2", "a@latest", "b@latest")
    with pytest.raises(InstallFailed):
        PIP.merged(before, ["-r"])


def test_there_is_an_end_to_it() -> None:
    with pytest.raises(InstallFailed, match="too many"):
        PIP.normalized(["x"] * (REQUIREMENTS_MAX + 1))
    with pytest.raises(InstallFailed, match="more than"):
        PIP.normalized(["x" * (REQUIREMENT_MAX + 1)])
    with pytest.raises(InstallFailed):
        PIP.normalized([f"x;{'( ' * 115}"[:REQUIREMENT_MAX] + "!"])  # and it does not take long
    for _ in range(2000):  # nor does that, of which each took a tenth of a second
        with pytest.raises(InstallFailed):
            PIP.normalized([f"x{' ' * (REQUIREMENT_MAX - 2)}!"])


def test_what_programs_find_it_by() -> None:
    assert PIP.found_by("/p", "/bin") == {"PYTHONUSERBASE": "/p", "PATH": "/p/bin:/bin"}
    assert NPM.found_by("/p", "/bin") == {"NODE_PATH": "/p/node_modules", "PATH": "/p/node_modules/.bin:/bin"}
    assert (PIP.beside, NPM.beside) == ((), ("node_modules",))
    assert PIP.argv("/p", ("x",))[:2] == ["env", "PYTHONUSERBASE=/p"]
    assert PIP.argv("/p", ("x",))[-2:] == NPM.argv("/p", ("x",))[-2:] == ["--", "x"]
