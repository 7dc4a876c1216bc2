"""`python -m skerry.daemon`: started by clients when none runs, or by hand with `--foreground`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import resource
import sys
import traceback

from skerry.errors import PlatformError, SkerryError
from skerry.settings import Home

IDLE_EXIT = 60.0


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.ready_fd is not None:
        os.set_inheritable(options.ready_fd, False)
    try:
        _run(options)
    except SkerryError as error:
        return _fail(options, error)
    except Exception as error:
        traceback.print_exc()
        return _fail(options, PlatformError(f"the daemon failed: {type(error).__name__}: {error}"))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m skerry.daemon", description="The Skerry daemon.")
    parser.add_argument("--home", help="the directory of this daemon (default: $SKERRY_HOME)")
    parser.add_argument("--foreground", action="store_true", help="stay when idle")
    parser.add_argument(
        "--idle-exit", type=float, default=IDLE_EXIT, metavar="SECONDS", help="end when idle for this long"
    )
    parser.add_argument(
        "--backend", help="serve every request with this backend, whatever isolation it gives"
    )
    parser.add_argument(
        "--grpc",
        metavar="HOST:PORT",
        default=os.environ.get("SKERRY_GRPC"),
        help="serve gRPC there, too (default: $SKERRY_GRPC)",
    )
    parser.add_argument(
        "--ready-fd", type=int, metavar="N", help="where to write 'ready', or why it did not start"
    )
    return parser


def _run(options: argparse.Namespace) -> None:
    home = Home(options.home)
    home.prepare()
    # What is made on the host must not depend on the shell that happened to start the daemon.
    os.umask(0o022)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    import uvloop

    from skerry.daemon import app, logs, server

    logs.configure()
    gc.freeze()  # what is loaded by now stays: the collector need not look at it again and again
    lock = server.take_lock(home)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(
                app.serve(
                    home,
                    lambda: _tell(options, b"ready\n"),
                    backend=options.backend,
                    # Only who is on this machine can start a daemon.
                    idle_exit=None if options.foreground or options.grpc else options.idle_exit,
                    grpc=[options.grpc] if options.grpc else [],
                )
            )
    finally:
        os.close(lock)


def _fail(options: argparse.Namespace, error: SkerryError) -> int:
    print(f"skerry: {error}", file=sys.stderr)
    _tell(options, json.dumps(error.to_dict()).encode() + b"\n")
    return 1


def _tell(options: argparse.Namespace, word: bytes) -> None:
    """Once: whoever waits reads until the end of the line or of the pipe."""
    if options.ready_fd is not None:
        with contextlib.suppress(OSError):
            os.write(options.ready_fd, word)
        os.close(options.ready_fd)
        options.ready_fd = None


if __name__ == "__main__":
    sys.exit(main())
