"""Environments to attack, whole ones and ones with a defence taken away: see box.py and keeper.py."""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import skerry
from scripts import build_native
from skerry.client import autostart
from tests import support
from tests.conformance.kinds import RUNGS, given, parameters, skip_unless_given
from tests.security.box import MODES, Boxes, Keeper, NoControl
from tests.security.daemons import Serve, server
from tests.security.sanitized import edited

KEEPER = Path(__file__).parent / "keeper.py"
ROOT = Path(__file__).parents[2]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test of `mode` or of a daemon's `client`: as root, as another user, and on each rung.

    `make test` takes the first, and of tests marked `each_rung` the rungs too.
    """
    each = metafunc.definition.get_closest_marker("each_rung") is not None
    modes = [*support.first_of(MODES), *parameters(each)]
    for name in ("mode", "client"):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, modes, indirect=True, scope="module" if name == "client" else None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    callspec = getattr(item, "callspec", None)
    params = {} if callspec is None else callspec.params
    mode = params.get("mode") or params.get("client")
    if mode is not None:
        skip_unless_given(item, mode, given(mode))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """On a rung, a test ends where it would take a defence of `namespace` away."""
    boxes = pyfuncitem.funcargs.get("boxes")
    if isinstance(boxes, Boxes):
        boxes.shown = False
    try:
        return (yield)
    except NoControl as end:
        if not (isinstance(boxes, Boxes) and boxes.shown):
            pytest.skip(str(end))
        return True  # type: ignore[return-value]


class _Keepers(dict[str, Keeper]):
    """One for each mode, started when first asked for."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def __missing__(self, mode: str) -> Keeper:
        if mode != "rootless" and os.geteuid() != 0:
            support.missing("needs root")
        other = mode == "rootless" and os.geteuid() == 0
        home = self._stack.enter_context(support.temporary_home(support.NOBODY if other else None))
        support.require("setpriv", "util-linux")
        if other:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="skerry-test-", dir="/tmp"))
            nobody = support.Nobody(home, *support.python_for_nobody(Path(folder)))
            argv, env, cwd = nobody.argv([nobody.python]), nobody.env, str(home)
        else:
            # Further groups, which are not to be seen inside.
            more = ["setpriv", "--groups=0,1234"] if os.geteuid() == 0 else []
            argv, env, cwd = [*more, sys.executable], {**os.environ, "SKERRY_HOME": str(home)}, os.getcwd()
        # As text, since the file may be out of the other user's reach.
        rung = [mode] if mode in RUNGS else []
        if mode in RUNGS:
            env |= RUNGS[mode].variables()
        keeper = Keeper([*argv, "-c", KEEPER.read_text(), str(home), *rung], env, cwd)
        self._stack.callback(keeper.close)
        if reason := keeper.call("unavailable"):
            support.missing(f"{mode} is not available here: {reason}")
        self[mode] = keeper
        return keeper


@pytest.fixture(scope="session")
def boxes() -> Iterator[Boxes]:
    with ExitStack() as stack:
        yield Boxes(_Keepers(stack))


@pytest.fixture
def mode(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="session")
def serve(request: pytest.FixtureRequest) -> Serve:
    """See daemons.py."""
    return server(lambda: request.getfixturevalue("_python_for_nobody"))


@pytest.fixture(scope="module")
def client(request: pytest.FixtureRequest, serve: Serve) -> Iterator[skerry.Client]:
    """Of a daemon of root's, of one of `nobody`'s, and of root's with each rung."""
    with serve(request.param) as home, pytest.MonkeyPatch.context() as patch:
        # Every daemon serves root too; it is the client that trusts none of another user's.
        peer = autostart._peer
        patch.setattr(autostart, "_peer", lambda sock: (peer(sock)[0], os.geteuid()))
        with skerry.Client(str(home)) as client:
            yield client


Edit = tuple[str, str, str]
Mutate = Callable[..., Path]


@pytest.fixture(scope="session")
def mutate() -> Iterator[Mutate]:
    """The helper with a defence edited out of its source: `mutate(("guest.c", "what is there", "instead"), ...)`."""
    made: dict[tuple[Edit, ...], Path] = {}
    numbers = itertools.count()
    toolchain = next(build_native.toolchains(), None)
    with tempfile.TemporaryDirectory(prefix="skerry-test-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)

        def build(*edits: Edit) -> Path:
            if toolchain is None:
                support.missing("no C compiler that links statically")
            assert toolchain is not None
            if edits not in made:
                number = next(numbers)
                native, program = folder / str(number), folder / f"helper-{number}"
                edited(native, *edits)
                done = toolchain.compile(sorted(native.glob("*.c")), program, "-O0", "-U_FORTIFY_SOURCE")
                assert done.returncode == 0, done.stderr
                made[edits] = program
            return made[edits]

        yield build
