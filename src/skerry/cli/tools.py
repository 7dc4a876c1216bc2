"""`tools`, `mcp`: what agents call."""

from __future__ import annotations

from skerry.cli.options import add_limits, add_variables, environment_request
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
        "an environment that exists (default: one of its own, deleted at the end)",
        count="?",
        completes="environment",
    )
    parser.option(
        "--listen",
        takes="HOST:PORT",
        help="streamable HTTP on this machine instead; port 0 for any",
    )
    parser.option("--per-session", help="an environment for each HTTP session, deleted with it")
    parser.option(
        "--session-idle",
        takes="SECONDS",
        convert=float,
        help="end an HTTP session this long after its last request (default: 1800)",
    )
    add_limits(parser)
    add_variables(parser)


def _mcp(args: SimpleNamespace) -> int:
    import json
    import math
    import os
    from importlib.util import find_spec

    wanted = environment_request(args)
    if args.environment and wanted:
        raise InvalidRequest(f"{args.environment} exists: it cannot be made otherwise")
    if not args.listen and (args.per_session or args.session_idle is not None):
        raise InvalidRequest("there are sessions with --listen alone", hint="give --listen 127.0.0.1:PORT")
    if args.per_session and args.environment:
        raise InvalidRequest(
            "sessions with environments of their own cannot share one", hint=f"leave out {args.environment}"
        )
    if args.session_idle is not None and not (args.session_idle > 0 and math.isfinite(args.session_idle)):
        raise InvalidRequest("--session-idle must be more than 0")
    if find_spec("mcp") is None:
        raise InvalidRequest("the package mcp is not installed", hint="pip install 'skerry[mcp]'")
    request = {
        "environment": args.environment or "",
        "wanted": wanted,
        "listen": args.listen or "",
        "per_session": args.per_session,
        "idle": args.session_idle,
    }
    # Not as an argument: those can be read by every user of the machine, and there are values of variables in it.
    fd = os.memfd_create("skerry-mcp-request", 0)
    os.write(fd, json.dumps(request).encode())
    os.lseek(fd, 0, os.SEEK_SET)
    return become("skerry.tools.mcp", str(fd))


VERBS = {
    "tools schema": Verb(
        "skerry tools schema [--format FORMAT]",
        "Print all tools with the JSON Schema of their arguments: as the `tools` of a request to a model, or plainly.",
        "skerry tools schema --format anthropic",
        _schema_arguments,
        _schema,
    ),
    "mcp": Verb(
        "skerry mcp [OPTIONS] [ENV]",
        "Serve the tools by the Model Context Protocol: on standard input and output, or by streamable HTTP.\n"
        "All calls work in one environment; start one server for each agent, or serve several agents with\n"
        "--listen and --per-session. With --listen, clients need a token: that in $SKERRY_MCP_TOKEN, or the one\n"
        "that is printed.",
        "skerry mcp --memory 1g --allow python-packages",
        _mcp_arguments,
        _mcp,
    ),
}
