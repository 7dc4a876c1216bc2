"""`net`: the network of an environment."""

from __future__ import annotations

import time

from skerry.cli.options import add_environment, add_json, add_parameters, path_of
from skerry.cli.parser import Verb
from skerry.cli.terminal import ago, show_json, show_table
from skerry.client.sync.transport import Transport
from skerry.errors import InvalidRequest
from skerry.parameters import CREATE
from skerry.policy import format_size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import SimpleNamespace
    from typing import Any

    from skerry.cli.parser import Parser


def _change_arguments(parser: Parser) -> None:
    add_environment(parser)
    parser.argument("rules", "RULE", "api.example.com, *.example.com, example.com:8443", count="+")
    add_json(parser)


def _show_arguments(parser: Parser) -> None:
    add_environment(parser)
    add_json(parser)


def _set_arguments(parser: Parser) -> None:
    add_environment(parser)
    parser.argument("network", "KIND", "none, allowlist or public", count="?")
    add_parameters(parser, CREATE["connections"], CREATE["traffic"])
    add_json(parser)


def _allow(args: SimpleNamespace) -> int:
    return _change(args, "POST", "/allow", {"rules": args.rules})


def _deny(args: SimpleNamespace) -> int:
    return _change(args, "POST", "/deny", {"rules": args.rules})


def _set(args: SimpleNamespace) -> int:
    wanted = {"network": args.network, "connections": args.connections, "traffic": args.traffic}
    if all(value is None for value in wanted.values()):
        raise InvalidRequest("nothing to change", hint="give KIND, --connections or --traffic")
    return _change(args, "PUT", "", wanted)


def _change(args: SimpleNamespace, method: str, path: str, body: dict[str, Any]) -> int:
    found = Transport().call(method, f"{path_of(args.environment)}/network{path}", json=body)
    if args.json:
        show_json(found)
    return 0


def _show(args: SimpleNamespace) -> int:
    found = Transport().call("GET", f"{path_of(args.environment)}/network")
    if args.json:
        show_json(found)
        return 0
    print(f"network   {found['network']}")
    if found["allow"]:
        print(f"allowed   {', '.join(found['allow'])}")
    limits = found["limits"]
    print(
        f"traffic   {found['connections']} connections, {format_size(found['sent_bytes'])} sent,"
        f" {format_size(found['received_bytes'])} received"
    )
    print(f"at most   {limits['connections']} connections, {format_size(limits['traffic'])}")
    if found["denials"]:
        print()
        show_table(
            ("REFUSED", "PORT", "TIMES", "LAST", "WHY"),
            (
                (
                    denial["host"],
                    denial["port"] or "",
                    denial["count"],
                    f"{ago(time.time() - denial['at'])} ago",
                    denial["reason"],
                )
                for denial in found["denials"]
            ),
        )
    return 0


VERBS = {
    "net show": Verb(
        "skerry net show [--json] ENV",
        "Show the network of an environment: rules, limits, traffic and denied connections.",
        "skerry net show web",
        _show_arguments,
        _show,
    ),
    "net allow": Verb(
        "skerry net allow ENV RULE...",
        "Add rules to an environment's allowlist. A network of kind none becomes an allowlist.",
        "skerry net allow web api.example.com '*.example.org:443'",
        _change_arguments,
        _allow,
    ),
    "net deny": Verb(
        "skerry net deny ENV RULE...",
        "Remove rules from an environment's allowlist and close the connections they allowed.",
        "skerry net deny web api.example.com",
        _change_arguments,
        _deny,
    ),
    "net set": Verb(
        "skerry net set [--connections NUMBER] [--traffic SIZE] ENV [KIND]",
        "Change the kind of an environment's network (none, allowlist or public) or its limits.",
        "skerry net set web --traffic 10g",
        _set_arguments,
        _set,
    ),
}
