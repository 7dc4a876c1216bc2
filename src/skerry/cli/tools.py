"""`tools`, `mcp`: the tools that agents call."""

from __future__ import annotations

from skerry.cli.options import add_create_options, add_variables, environment_request
from skerry.cli.parser import Verb
from skerry.cli.service import become
from skerry.cli.terminal import show_json
from skerry.errors import InvalidRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import SimpleNamespace

    from skerry.cli.parser import Parser


def _schema_arguments(parser: Parser) -> None:
    parser.option("--format", takes="FORMAT", help="openai, anthropic, or json (default)")


def _schema(args: SimpleNamespace) -> int:
    from skerry.tools.schema import schemas

    show_json(schemas(args.format or "json"))
    return 0


def _mcp_arguments(parser: Parser) -> None:
    parser.argument(
        "environment",
        "ENV",
        "existing environment (default: a new one, deleted at the end)",
        count="?",
        completes="environment",
    )
    parser.option(
        "--listen",
        takes="HOST:PORT",
        help="serve streamable HTTP on a loopback address; port 0: any free port",
    )
    parser.option("--per-session", help="use one environment per HTTP session, deleted with it")
    parser.option(
        "--session-idle",
        takes="SECONDS",
        convert=float,
        help="end an HTTP session this time after its last request (default: 1800)",
    )
    add_create_options(parser)
    add_variables(parser)


def _mcp(args: SimpleNamespace) -> int:
    import json
    import math
    import os
    from importlib.util import find_spec

    wanted = environment_request(args)
    if args.environment and wanted:
        raise InvalidRequest(
            f"options for a new environment do not apply to {args.environment}", hint="leave out ENV"
        )
    if not args.listen and (args.per_session or args.session_idle is not None):
        raise InvalidRequest(
            "--per-session and --session-idle need --listen", hint="give --listen 127.0.0.1:PORT"
        )
    if args.per_session and args.environment:
        raise InvalidRequest(
            f"--per-session cannot share environment {args.environment}", hint=f"leave out {args.environment}"
        )
    if args.session_idle is not None and not (args.session_idle > 0 and math.isfinite(args.session_idle)):
        raise InvalidRequest("--session-idle must be more than 0")
    if find_spec("mcp") is None:
        raise InvalidRequest("package mcp is not installed", hint="pip install 'skerry[mcp]'")
    request = {
        "environment": args.environment or "",
        "wanted": wanted,
        "listen": args.listen or "",
        "per_session": args.per_session,
        "idle": args.session_idle,
    }
    # Not as an argument: other users of the machine can read those, and the request holds values of variables.
    fd = os.memfd_create("skerry-mcp-request", 0)
    os.write(fd, json.dumps(request).encode())
    os.lseek(fd, 0, os.SEEK_SET)
    return become("skerry.tools.mcp", str(fd))


VERBS = {
    "tools schema": Verb(
        "skerry tools schema [--format FORMAT]",
        "Print all tools with the JSON Schema of their arguments, as plain JSON or in the format of a model API.",
        "skerry tools schema --format anthropic",
        _schema_arguments,
        _schema,
    ),
    "mcp": Verb(
        "skerry mcp [OPTIONS] [ENV]",
        "Serve the tools over the Model Context Protocol: on stdin and stdout, or as streamable HTTP.\n"
        "All calls share one environment: start one server per agent, or serve several agents with --listen\n"
        "and --per-session. With --listen, clients need the token in $SKERRY_MCP_TOKEN, or the printed one.",
        "skerry mcp --memory 1g --allow python-packages",
        _mcp_arguments,
        _mcp,
    ),
}
