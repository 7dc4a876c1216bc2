"""`create`, `ls`, `info`, `rm`: the life of environments."""

from __future__ import annotations

import time

from skerry.cli.options import (
    add_create_options,
    add_environment,
    add_json,
    add_variables,
    create,
    environment_request,
    path_of,
)
from skerry.cli.parser import Verb
from skerry.cli.terminal import ago, clean, say, show_error, show_json, show_table
from skerry.client.sync.transport import Transport
from skerry.errors import InvalidRequest, SkerryError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import SimpleNamespace
    from typing import Any

    from skerry.cli.parser import Parser
    from skerry.client.http1 import Query


def _create_arguments(parser: Parser) -> None:
    add_variables(parser)
    add_create_options(parser)
    add_json(parser)


def _create(args: SimpleNamespace) -> int:
    info = create(Transport(), environment_request(args))
    if args.json:
        show_json(info)
    else:
        print(clean(info["environment_id"]))
    return 0


def _ls_arguments(parser: Parser) -> None:
    parser.option("-a", "--all", help="include those that ended in the last day")
    parser.option("--state", takes="STATE", help="only in this state: creating, running, deleting or ended")
    parser.option("--name", takes="NAME", help="only with this name")
    parser.option("--image", takes="IMAGE", help="only with this image", completes="image")
    parser.option("-q", "--quiet", help="print only ids")
    add_json(parser)


def _ls(args: SimpleNamespace) -> int:
    query = {"all": args.all or None, "state": args.state, "name": args.name, "image": args.image}
    found = list_all(Transport(), query)
    if args.json:
        show_json(found)
    elif args.quiet:
        for info in found:
            print(clean(info["environment_id"]))
    else:
        now = time.time()
        show_table(
            ("ID", "NAME", "IMAGE", "STATE", "ISOLATION", "AGE", "ENDS IN"),
            (
                (
                    info["environment_id"],
                    info["name"],
                    info["image"],
                    info["ended_reason"] or info["state"],
                    info["isolation"],
                    ago(now - info["created_at"]),
                    ago(info["expires_at"] - now) if info["state"] == "running" else "",
                )
                for info in found
            ),
        )
    return 0


def list_all(transport: Transport, query: Query) -> list[Any]:
    """All environments, page by page."""
    found: list[Any] = []
    while True:
        answer = transport.call("GET", "/environments", query=query)
        found += answer["environments"]
        if not answer.get("next"):
            return found
        query = {**query, "after": answer["next"]}


def _info_arguments(parser: Parser) -> None:
    add_environment(parser)
    add_json(parser)


def _info(args: SimpleNamespace) -> int:
    info = Transport().call("GET", path_of(args.environment))
    if args.json:
        show_json(info)
        return 0
    enforced = info.pop("enforced", [])
    for key, value in info.items():
        print(f"{clean(key)}: {_value(key, value)}")
    print()
    show_table(
        ("LIMIT", "ENFORCED", "VALUE", "BY"),
        ((row["name"], "yes" if row["enforced"] else "NO", row["value"], row["by"]) for row in enforced),
    )
    return 0


def _value(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{clean(name)}={clean(each)}" for name, each in value.items() if each is not None)
    if key.endswith("_at"):
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    return clean(value)


def _rm_arguments(parser: Parser) -> None:
    parser.option("-f", "--force", help="ignore environments that do not exist")
    parser.option("--all", help="delete every environment")
    parser.argument("environments", "ENV", "ids or names", count="*", completes="environment")
    add_json(parser)


def _rm(args: SimpleNamespace) -> int:
    """Deletes all it can; the exit code is that of the last failure."""
    if bool(args.environments) == args.all:
        raise InvalidRequest("give environments or --all, not both")
    transport, code = Transport(), 0
    refs = args.environments
    if args.all:
        refs = [info["environment_id"] for info in list_all(transport, {})]
    deleted = []
    for ref in refs:
        try:
            deleted.append(transport.call("DELETE", path_of(ref))["environment_id"])
        except SkerryError as error:
            if not (args.force and error.status == 404):
                show_error(error, args.json)
                code = error.exit_code
            continue
        if not args.json:
            print(clean(deleted[-1]))
    if args.json:
        show_json({"deleted": deleted})
    elif args.all and not refs:
        say("no environments")
    return code


VERBS = {
    "create": Verb(
        "skerry create [OPTIONS]",
        "Create an environment and print its id. It ends with skerry rm, or when its lifetime or idle time is over.",
        "skerry create --name web --memory 1g --lifetime 3600",
        _create_arguments,
        _create,
    ),
    "ls": Verb("skerry ls [OPTIONS]", "List environments.", "skerry ls -q", _ls_arguments, _ls),
    "info": Verb(
        "skerry info [--json] ENV",
        "Show the state and usage of an environment, and the limits that the kernel enforces.",
        "skerry info web",
        _info_arguments,
        _info,
    ),
    "rm": Verb(
        "skerry rm [OPTIONS] ENV... | --all",
        "Delete environments, with their files and processes.",
        "skerry rm web 3fk",
        _rm_arguments,
        _rm,
    ),
}
