"""`token` and `quota`: access to a daemon, and limits per tenant."""

from __future__ import annotations

import time

from skerry.cli.options import add_json
from skerry.cli.parser import Verb
from skerry.cli.terminal import ago, clean, say, show_json, show_table
from skerry.client.sync.client import Client
from skerry.policy import format_size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import SimpleNamespace
    from typing import Any

    from skerry.cli.parser import Parser


def _create_arguments(parser: Parser) -> None:
    parser.option("--for", takes="TENANT", help="tenant of the token (default: your own)")
    parser.option(
        "--verb",
        takes="VERB",
        repeated=True,
        help="read, create, execute, write, delete (default: these), images, audit or admin",
    )
    parser.option(
        "--lifetime", takes="SECONDS", convert=float, help="let it expire after this time (default: never)"
    )
    parser.argument("name", "NAME", "label, e.g. its user or purpose")
    add_json(parser)


def _create(args: SimpleNamespace) -> int:
    tenant = getattr(args, "for")
    made = Client().create_token(args.name, tenant=tenant, verbs=args.verb or None, lifetime=args.lifetime)
    if args.json:
        show_json(made)
    else:
        say(f"token {made['id']} of {made['tenant']}: {', '.join(made['verbs'])}. It is not shown again.")
        print(clean(made["token"]))
    return 0


def _ls_arguments(parser: Parser) -> None:
    parser.option("--for", takes="TENANT", help="only tokens of this tenant")
    parser.option("-a", "--all", help="include expired and revoked tokens")
    add_json(parser)


def _ls(args: SimpleNamespace) -> int:
    now = time.time()
    found = [
        token for token in Client().tokens(getattr(args, "for")) if args.all or _state(token, now) == "valid"
    ]
    if args.json:
        show_json(found)
        return 0
    show_table(
        ("ID", "NAME", "TENANT", "VERBS", "STATE", "USED", "EXPIRES IN"),
        (
            (
                token["id"],
                token["name"],
                token["tenant"],
                ",".join(token["verbs"]),
                _state(token, now),
                f"{ago(now - token['last_used_at'])} ago" if token["last_used_at"] else "",
                ago(token["expires_at"] - now) if token["expires_at"] else "",
            )
            for token in found
        ),
    )
    return 0


def _state(token: dict[str, Any], now: float) -> str:
    if token["revoked_at"] is not None:
        return "revoked"
    return "expired" if token["expires_at"] is not None and token["expires_at"] <= now else "valid"


def _revoke_arguments(parser: Parser) -> None:
    parser.argument("tokens", "TOKEN", "ids", count="+")


def _revoke(args: SimpleNamespace) -> int:
    with Client() as client:
        for token in args.tokens:
            client.revoke_token(token)
    return 0


def _add_tenant(parser: Parser) -> None:
    parser.argument("tenant", "TENANT", "name of a tenant")
    add_json(parser)


def _set_arguments(parser: Parser) -> None:
    parser.option("--environments", takes="NUMBER", convert=int, help="maximum number of environments")
    parser.option("--cpus", takes="NUMBER", convert=float, help="CPU cores in total")
    parser.option("-m", "--memory", takes="SIZE", help="memory in total, e.g. 16g")
    parser.option("--disk", takes="SIZE", help="disk space of workspaces and packages in total, e.g. 100g")
    parser.option("--isolation", takes="KIND", help="least isolation: namespace, gvisor or microvm")
    _add_tenant(parser)


def _show(args: SimpleNamespace) -> int:
    return _shown(Client().quota(args.tenant), args)


def _set(args: SimpleNamespace) -> int:
    quota = Client().set_quota(
        args.tenant,
        environments=args.environments,
        cpus=args.cpus,
        memory=args.memory,
        disk=args.disk,
        isolation=args.isolation,
    )
    return _shown(quota, args)


def _shown(quota: dict[str, Any], args: SimpleNamespace) -> int:
    if args.json:
        show_json(quota)
        return 0

    def text(what: str, value: Any) -> str:
        if value is None:
            return "unlimited"
        return format_size(value) if what in ("memory", "disk") else f"{value:g}"

    names = ("environments", "cpus", "memory", "disk")
    rows = [(name, text(name, quota["used"][name]), text(name, quota[name])) for name in names]
    show_table(("WHAT", "IN USE", "QUOTA"), rows)
    print(f"\nleast isolation: {quota['isolation'] or 'any'}\n")
    caused = [
        (
            name.replace("_", " "),
            format_size(value)
            if name.endswith("_bytes")
            else f"{value:.3f}"
            if name == "loop_seconds"
            else str(value),
        )
        for name, value in quota["caused"].items()
    ]
    show_table(("SINCE THE DAEMON STARTED", ""), caused)
    return 0


VERBS = {
    "token create": Verb(
        "skerry token create [OPTIONS] NAME",
        "Create an access token and print it. It cannot be shown again: the daemon stores only its hash.",
        "skerry token create --for acme --lifetime 2592000 ci",
        _create_arguments,
        _create,
    ),
    "token ls": Verb(
        "skerry token ls [--for TENANT] [-a] [--json]",
        "List tokens.",
        "skerry token ls -a",
        _ls_arguments,
        _ls,
    ),
    "token revoke": Verb(
        "skerry token revoke TOKEN...",
        "Revoke tokens and close their open requests and streams.",
        "skerry token revoke t4n8q2r6w1zc",
        _revoke_arguments,
        _revoke,
    ),
    "quota show": Verb(
        "skerry quota show [--json] TENANT",
        "Show the quota of a tenant, its usage, and the load it has caused.",
        "skerry quota show acme",
        _add_tenant,
        _show,
    ),
    "quota set": Verb(
        "skerry quota set [OPTIONS] TENANT",
        "Replace the quota of a tenant; options left out mean unlimited. Existing environments stay.",
        "skerry quota set --environments 20 --cpus 8 --memory 16g --disk 100g acme",
        _set_arguments,
        _set,
    ),
}
