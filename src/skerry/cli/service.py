"""`doctor`, `serve`, `stop`, `version`: the daemon and its machine."""

from __future__ import annotations

import os
import sys

from skerry import __version__
from skerry.cli.options import add_json
from skerry.cli.parser import Verb
from skerry.cli.terminal import clean, say, show_json, show_table
from skerry.errors import DaemonUnavailable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import SimpleNamespace

    from skerry.cli.parser import Parser


def become(module: str, *arguments: str) -> int:
    """Replace this process with another part of Skerry, which the CLI may not import."""
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])  # noqa: S606


def _doctor_arguments(parser: Parser) -> None:
    add_json(parser)


def _doctor(args: SimpleNamespace) -> int:
    from skerry.client import endpoint

    if endpoint.find().home is not None:
        return become("skerry.daemon.doctor", *(["--json"] if args.json else []))
    from skerry.client.sync.client import Client

    report = Client().doctor()
    checks = report["checks"]
    if args.json:
        show_json(report)
    else:
        rows = [(check["status"], check["name"], check["found"], check["fix"]) for check in checks]
        show_table(("STATUS", "CHECK", "FOUND", "FIX"), rows)
    return 1 if any(check["status"] == "failure" for check in checks) else 0


def _serve_arguments(parser: Parser) -> None:
    option = parser.option
    option(
        "--listen",
        takes="HOST:PORT",
        repeated=True,
        help="serve TCP clients that have a token (default: $SKERRY_LISTEN); port 0: any",
    )
    option("--grpc", takes="HOST:PORT", help="serve gRPC to clients with a token (default: $SKERRY_GRPC)")
    option(
        "--tls-cert", takes="FILE", help="certificate in PEM form, followed by its intermediate certificates"
    )
    option("--tls-key", takes="FILE", help="private key of the certificate, without a password")
    option("--host-name", takes="NAME", repeated=True, help="host name that clients use for this machine")


def _serve(args: SimpleNamespace) -> int:
    options = [f"--listen={place}" for place in args.listen]
    options += [f"--host-name={name}" for name in args.host_name]
    for name in ("grpc", "tls_cert", "tls_key"):
        if value := getattr(args, name):
            options.append(f"--{name.replace('_', '-')}={value}")
    return become("skerry.daemon", "--foreground", *options)


def _stop_arguments(parser: Parser) -> None:
    parser.option("-f", "--force", help="delete running environments first")


def _stop(args: SimpleNamespace) -> int:
    from skerry.client.sync.client import Client

    if not Client().stop(args.force):
        say("no daemon is running")
    return 0


def _version(args: SimpleNamespace) -> int:
    from skerry.client.sync.transport import Transport

    transport = Transport()
    try:
        daemon = transport.call("GET", "/version", start=False)
    except DaemonUnavailable:
        if transport.endpoint.home is None:
            raise
        daemon = None
    if args.json:
        show_json({"version": __version__, "daemon": daemon})
        return 0
    print(f"skerry {__version__}")
    if daemon is None:
        print("daemon: not running")
    else:
        print(clean(f"daemon: {daemon['version']}, pid {daemon['pid']}, {daemon['home']}"))
    return 0


VERBS = {
    "doctor": Verb(
        "skerry doctor [--json]",
        "Check what isolation needs on the daemon's machine, and how to fix what is missing.",
        "skerry doctor",
        _doctor_arguments,
        _doctor,
    ),
    "serve": Verb(
        "skerry serve [OPTIONS]",
        "Run the daemon in the foreground. Otherwise the first command starts it in the background.\n"
        "With --listen it also serves TCP clients: they need a token (skerry token create), and TLS unless\n"
        "the address is a loopback address.",
        "skerry serve --listen 0.0.0.0:7443 --tls-cert cert.pem --tls-key key.pem --host-name box.example",
        _serve_arguments,
        _serve,
    ),
    "stop": Verb(
        "skerry stop [--force]",
        "Stop the daemon. Refused while environments are running, unless forced.",
        "skerry stop",
        _stop_arguments,
        _stop,
    ),
    "version": Verb(
        "skerry version [--json]",
        "Show the versions of this program and of the running daemon.",
        "skerry version",
        add_json,
        _version,
    ),
}
