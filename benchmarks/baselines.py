"""What Skerry is compared with. Each function returns subjects or raises Unavailable."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.dockerd import IMAGE, Docker, Unavailable, require, root_filesystem
from benchmarks.measure import Subject, command, first_output, timed

PYTHON = os.path.realpath(sys.executable)
"""Not the one of the virtual environment, which starts more slowly."""


def bare() -> list[Subject]:
    return [command("true", ["/bin/true"]), command("python", [PYTHON, "-c", "pass"])]


BUBBLEWRAP = [*("bwrap", "--unshare-all", "--ro-bind", "/", "/"), *("--proc", "/proc", "--dev", "/dev")]


def bubblewrap() -> list[Subject]:
    require("bwrap")
    return [command("bubblewrap", [*BUBBLEWRAP, "/bin/true"])]


def runc(folder: Path) -> list[Subject]:
    """`runc run` of a bundle below `folder`, with the settings of `runc spec`."""
    require("runc")
    root = folder / "rootfs"
    root.mkdir()
    subprocess.run(["tar", "-xf", root_filesystem(), "-C", root, "--exclude=./dev/*"], check=True)
    subprocess.run(["runc", "spec"], cwd=folder, check=True)
    config = json.loads((folder / "config.json").read_text())
    config["process"].update(terminal=False, args=["echo", "x"])
    (folder / "config.json").write_text(json.dumps(config))
    numbers = itertools.count()

    def once() -> dict[str, float]:
        name = f"skerry-bench-{os.getpid()}-{next(numbers)}"
        argv = ["runc", "--root", str(folder / "state"), "run", "--bundle", str(folder), name]
        return dict(first_output("runc", argv).once())

    return [Subject(once)]


@contextmanager
def docker(daemon: Docker) -> Iterator[list[Subject]]:
    """`docker run` and `docker exec` with the docker command."""
    name = "bench"
    daemon.output("run", "--detach", "--name", name, "--network=none", IMAGE, "sleep", "infinity")
    try:
        yield [
            first_output("docker_run", daemon.argv("run", "--rm", "--network=none", IMAGE, "echo", "x")),
            command("docker_exec", daemon.argv("exec", name, "true")),
        ]
    finally:
        daemon.output("rm", "--force", name)


@contextmanager
def llm_sandbox(daemon: Docker) -> Iterator[list[Subject]]:
    """llm-sandbox with everything at its fastest: the same local image, no package set-up, no network."""
    try:
        import docker as docker_sdk
        from llm_sandbox import SandboxSession
    except ImportError:
        raise Unavailable("llm-sandbox is not installed (pip install 'llm-sandbox[docker]')") from None

    client = docker_sdk.DockerClient(base_url=daemon.host)
    options = {"skip_environment_setup": True, "runtime_configs": {"network_mode": "none"}}

    def opened() -> SandboxSession:
        session = SandboxSession(client=client, image=IMAGE, lang="python", keep_template=True, **options)
        session.open()
        return session

    def fresh(key: str, use: Callable[[SandboxSession], str]) -> Subject:
        def once() -> dict[str, float]:
            start = time.perf_counter()
            session = opened()
            output = use(session)
            seconds = time.perf_counter() - start
            # Not session.close(): it waits ten seconds for a shell that ignores SIGTERM.
            session.container.remove(force=True)
            if output != "x\n":
                raise RuntimeError(f"llm-sandbox gave {output!r}")
            return {key: seconds}

        return Subject(once)

    live = opened()
    try:
        yield [
            fresh("llm_sandbox_fresh", lambda session: session.execute_command("echo x").stdout),
            fresh("llm_sandbox_code", lambda session: session.run("print('x')").stdout),
            Subject(lambda: {"llm_sandbox_command": timed(lambda: live.execute_command("true"))}),
            Subject(lambda: {"llm_sandbox_python": timed(lambda: live.run("print(1)"))}),
        ]
    finally:
        live.container.remove(force=True)
        client.close()
