"""`context`: named daemons, remote ones included."""

from __future__ import annotations

import os
import sys

from skerry.cli.options import add_json
from skerry.cli.parser import Verb
from skerry.cli.terminal import show_json, show_table
from skerry.client import endpoint
from skerry.client.contexts import DEFAULT, Contexts
from skerry.client.remote import Remote
from skerry.errors import InvalidRequest
from skerry.settings import Home

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import SimpleNamespace
    from typing import Any

    from skerry.cli.parser import Parser
    from skerry.client.endpoint import Endpoint


def _add_name(parser: Parser) -> None:
    parser.argument("name", "NAME", "name of a context", completes="context")


def _describe(place: Endpoint) -> dict[str, Any]:
    """What may be shown of an endpoint: never its token."""
    return {"name": place.name, "url": place.url, "token": bool(place.token), "ca": place.ca}


def _ls(args: SimpleNamespace) -> int:
    contexts = Contexts.load()
    places: list[Endpoint] = [endpoint.Local(Home())]
    for name in sorted(contexts.entries):
        entry = contexts.get(name)
        places.append(Remote(entry["url"], entry.get("token", ""), entry.get("ca", ""), name))
    found = [{**_describe(place), "current": place.name == contexts.current} for place in places]
    if args.json:
        show_json(found)
        return 0
    rows = [
        ("*" if row["current"] else "", row["name"], row["url"], "yes" if row["token"] else "", row["ca"])
        for row in found
    ]
    show_table(("", "NAME", "URL", "TOKEN", "CA"), rows)
    return 0


def _add_arguments(parser: Parser) -> None:
    parser.option("--url", takes="URL", help="https://HOST:PORT, http://127.0.0.1:PORT or unix:///PATH")
    parser.option("--token-file", takes="FILE", help="file with the access token; - for stdin")
    parser.option("--ca", takes="FILE", help="trust only the CA certificates in this file")
    _add_name(parser)


def _add(args: SimpleNamespace) -> int:
    if args.name == DEFAULT or not args.name or any(not (c.isalnum() or c in "-_.") for c in args.name):
        raise InvalidRequest(
            f"invalid context name {args.name!r}", hint="use letters, digits, - _ . (`default` is reserved)"
        )
    if not args.url:
        raise InvalidRequest("--url is missing", hint="see skerry context add --help")
    ca = os.path.abspath(args.ca) if args.ca else ""
    place = Remote(args.url, _token(args.token_file), ca)
    if ca:
        from skerry.client.tls import make_context

        make_context(ca)
    contexts = Contexts.load()
    entry = {"url": place.url, "token": place.token, "ca": ca}
    contexts.entries[args.name] = {key: value for key, value in entry.items() if value}
    contexts.save()
    return 0


def _token(path: str | None) -> str:
    if path is None:
        return ""
    if path == "-":
        return sys.stdin.readline().strip()
    with open(path) as file:
        return file.readline().strip()


def _use(args: SimpleNamespace) -> int:
    contexts = Contexts.load()
    if args.name != DEFAULT:
        contexts.get(args.name)
    contexts.current = args.name
    contexts.save()
    return 0


def _show(args: SimpleNamespace) -> int:
    found = _describe(endpoint.find())
    if args.json:
        show_json(found)
        return 0
    for key in ("name", "url", "ca"):
        if found[key]:
            print(f"{key:6} {found[key]}")
    print(f"token  {'yes' if found['token'] else 'none'}")
    return 0


def _rm_arguments(parser: Parser) -> None:
    parser.argument("names", "NAME", "name of a context", count="+", completes="context")


def _rm(args: SimpleNamespace) -> int:
    contexts = Contexts.load()
    for name in args.names:
        contexts.get(name)
        del contexts.entries[name]
        if contexts.current == name:
            contexts.current = DEFAULT
    contexts.save()
    return 0


VERBS = {
    "context ls": Verb(
        "skerry context ls [--json]",
        "List the contexts. `default` is the daemon on this machine; * marks the current context.",
        "skerry context ls",
        add_json,
        _ls,
    ),
    "context add": Verb(
        "skerry context add NAME --url URL [--token-file FILE] [--ca FILE]",
        "Add a context, or replace the URL, token and CA of an existing one.",
        "skerry context add work --url https://build.example.com:7443 --token-file token",
        _add_arguments,
        _add,
    ),
    "context use": Verb(
        "skerry context use NAME",
        "Choose the daemon that commands use, unless SKERRY_URL, SKERRY_CONTEXT or SKERRY_HOME is set.",
        "skerry context use work",
        _add_name,
        _use,
    ),
    "context show": Verb(
        "skerry context show [--json]",
        "Show the daemon that commands use now.",
        "skerry --context work context show",
        add_json,
        _show,
    ),
    "context rm": Verb(
        "skerry context rm NAME...",
        "Remove contexts, with their tokens. Removing the current one makes `default` current.",
        "skerry context rm work",
        _rm_arguments,
        _rm,
    ),
}
