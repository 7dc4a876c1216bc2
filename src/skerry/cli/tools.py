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
    add_limits(parser)
    add_variables(parser)


def _mcp(args: SimpleNamespace) -> int:
    import json
    from importlib.util import find_spec

    wanted = environment_request(args)
    if args.environment and wanted:
        raise InvalidRequest(f"{args.environment} exists: it cannot be made otherwise")
    if find_spec("mcp") is None:
        raise InvalidRequest("the package mcp is not installed", hint="pip install 'skerry[mcp]'")
    request = {"environment": args.environment or "", "wanted": wanted, "listen": args.listen or ""}
    return become("skerry.tools.mcp", json.dumps(request))


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
        "All calls work in one environment; start one server for each agent. With --listen, clients need a\n"
        "token: that in $SKERRY_MCP_TOKEN, or the one that is printed.",
        "skerry mcp --memory 1g --allow python-packages",
        _mcp_arguments,
        _mcp,
    ),
}
