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
from collections.abc import Sequence

from skerry import failpoints
from skerry.errors import PlatformError, SkerryError
from skerry.settings import Home

IDLE_EXIT = 60.0
SWITCH_SECONDS = 0.0005
"""After which a thread that waits for the interpreter gets it. The store's thread waits a dozen times for each row:
with Python's own 5 ms, a busy event loop would make every request take tenths of a second."""


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
        "--listen",
        action="append",
        metavar="HOST:PORT",
        help="serve others too, with tokens (and SKERRY_LISTEN)",
    )
    parser.add_argument("--grpc", metavar="HOST:PORT", help="serve gRPC, with tokens (or SKERRY_GRPC)")
    parser.add_argument(
        "--host-name", action="append", default=[], metavar="NAME", help="another name of ours"
    )
    parser.add_argument("--tls-cert", metavar="FILE", help="our certificate, and those between it and the CA")
    parser.add_argument("--tls-key", metavar="FILE", help="the key of the certificate")
    parser.add_argument(
        "--ready-fd", type=int, metavar="N", help="where to write 'ready', or why it did not start"
    )
    return parser


def _run(options: argparse.Namespace) -> None:
    failpoints.arm(os.environ.get(failpoints.VARIABLE, ""))
    home = Home(options.home)
    home.prepare()
    # What is made on the host must not depend on the shell that happened to start the daemon.
    os.umask(0o022)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    import uvloop

    from skerry.daemon import app, listening, logs, server

    logs.configure()

    def ready(grpc_served: Sequence[str]) -> None:
        if options.foreground:
            urls = (*(door.url for door in doors), *(f"grpc://{address}" for address in grpc_served))
            for url in (f"unix://{home.socket}", *urls):
                print(f"skerry: listening on {url}", file=sys.stderr, flush=True)
        _tell(options, b"ready\n")

    sys.setswitchinterval(SWITCH_SECONDS)
    gc.freeze()  # what is loaded by now stays: the collector need not look at it again and again
    lock = server.take_lock(home)
    try:
        # With the lock: an earlier daemon that is on its way out, or a process that it was just starting, has the
        # addresses as long as it has the lock.
        doors = listening.open_doors(
            options.listen or os.environ.get("SKERRY_LISTEN", "").replace(",", " ").split(),
            *(options.host_name, options.tls_cert, options.tls_key),
        )
        place = options.grpc or os.environ.get("SKERRY_GRPC", "")
        grpc = listening.grpc_addresses(place, secure=bool(options.tls_cert)) if place else []
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(
                app.serve(
                    home,
                    ready,
                    doors=doors,
                    backend=options.backend,
                    idle_exit=None if options.foreground or doors or grpc else options.idle_exit,
                    grpc=grpc,
                    tls=(options.tls_cert, options.tls_key) if options.tls_cert else None,
                )
            )
    finally:
        os.close(lock)


def _fail(options: argparse.Namespace, error: SkerryError) -> int:
    print(f"skerry: {error}", file=sys.stderr)
    _tell(options, json.dumps(error.to_dict()).encode() + b"\n")
    return error.exit_code


def _tell(options: argparse.Namespace, word: bytes) -> None:
    """Once: whoever waits reads until the end of the line or of the pipe."""
    if options.ready_fd is not None:
        with contextlib.suppress(OSError):
            os.write(options.ready_fd, word)
        os.close(options.ready_fd)
        options.ready_fd = None


if __name__ == "__main__":
    sys.exit(main())
