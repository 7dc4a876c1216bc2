"""Daemons to attack: root's, and one of a user without any rights; with the helper that was built, or another.

with serve("rootless") as home: ...
with serve("rootful", helper=mutate(...)) as home: ...
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from tests import support
from tests.conformance.kinds import RUNGS
from tests.security.box import NoControl

# The daemon with another helper than the one that was built.
PATCHED = """
import pathlib, runpy, sys
from skerry.host import launcher
launcher.Helper.__init__.__defaults__ = (pathlib.Path(sys.argv.pop(1)),)
sys.argv[0] = "skerry.daemon"
runpy.run_module("skerry.daemon", run_name="__main__", alter_sys=True)
"""


class Serve(Protocol):
    def __call__(self, mode: str, helper: Path | None = None) -> AbstractContextManager[Path]: ...


def server(python_for_nobody: Callable[[], tuple[str, Path | None]]) -> Serve:
    @contextmanager
    def serve(mode: str, helper: Path | None = None) -> Iterator[Path]:
        """The home of a fresh daemon, which ends with all its environments."""
        if mode != "rootless" and os.geteuid() != 0:
            support.missing("needs root")
        other = mode == "rootless" and os.geteuid() == 0
        if other:
            support.require("setpriv", "util-linux")
        with support.temporary_home(support.NOBODY if other else None) as home:
            argv, env, cwd = [sys.executable], dict(os.environ), None
            if other:
                nobody = support.Nobody(home, *python_for_nobody())
                argv, env, cwd = nobody.argv([nobody.python]), nobody.env, home
            if mode in RUNGS and helper:
                raise NoControl(f"on {mode} no defence is taken away: see the same test on namespace")
            module = ["-c", PATCHED, str(helper)] if helper else ["-m", "skerry.daemon"]
            backend = []
            if mode in RUNGS:
                backend = ["--backend", mode]
                env |= RUNGS[mode].variables()
            ready, tell = os.pipe()
            with subprocess.Popen(
                [*argv, *module, "--home", str(home), "--foreground", "--ready-fd", str(tell), *backend],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[tell],
                env=env,
                cwd=cwd,
            ) as process:
                os.close(tell)
                try:
                    with open(ready) as word:
                        assert word.readline() == "ready\n"
                    yield home
                finally:
                    process.send_signal(signal.SIGINT)  # SIGTERM would leave its environments to the next

    return serve
