"""`audit`: read, verify and prune the audit log."""

from __future__ import annotations

import json
import sys
import time

from skerry.cli.options import add_json
from skerry.cli.parser import Verb
from skerry.cli.terminal import clean, say, show_json
from skerry.client.sync.client import Client
from skerry.errors import InvalidRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import SimpleNamespace
    from typing import Any

    from skerry.cli.parser import Parser

BROKEN = 1
"""The exit code when verification fails."""


def _tail_arguments(parser: Parser) -> None:
    parser.option("-n", "--lines", takes="NUMBER", convert=int, help="number of rows (default: 20)")
    parser.option("-f", "--follow", help="keep printing new rows")
    add_json(parser)


def _tail(args: SimpleNamespace) -> int:
    last = 20 if args.lines is None else args.lines
    return _print(args.json, last=last, follow=args.follow)


def _search_arguments(parser: Parser) -> None:
    parser.option("--kind", takes="KIND", help="intent, result, denial or lifecycle")
    parser.option("--action", takes="ACTION", help="e.g. execution, file.write, environment.create")
    parser.option("--environment", takes="ENV", help="only of the environment with this id")
    parser.option("--token", takes="TOKEN", help="only of the token with this id")
    parser.option("--request", takes="ID", help="only of the request with this id")
    parser.option("--trace", takes="ID", help="only of the trace with this id")
    parser.option("--outcome", takes="OUTCOME", help="e.g. failed, timed_out, denied")
    parser.option("--since", takes="TIME", help="e.g. 2026-01-31 or 2026-01-31T12:00:00+01:00")
    parser.option("--until", takes="TIME", help="up to this time")
    add_json(parser)


def _search(args: SimpleNamespace) -> int:
    names = ("kind", "action", "environment", "token", "request", "trace", "outcome")
    filters = {name: getattr(args, name) for name in names}
    return _print(args.json, since=_unix(args.since), until=_unix(args.until), **filters)


def _unix(text: str | None) -> int | None:
    if text is None:
        return None
    from datetime import datetime

    try:
        return int(datetime.fromisoformat(text).timestamp())
    except ValueError:
        raise InvalidRequest(f"{text!r} is not a time", hint="use ISO 8601: 2026-01-31T12:00:00") from None


def _export_arguments(parser: Parser) -> None:
    parser.option("--after", takes="SEQ", convert=int, help="only rows after this one")


def _export(args: SimpleNamespace) -> int:
    return _print(True, after=args.after or 0)


def _print(as_json: bool, **query: Any) -> int:
    with Client() as client:
        for row in client.audit(**query):
            print(json.dumps(row) if as_json else _line(row))
            if query.get("follow"):
                sys.stdout.flush()
    return 0


def _line(row: dict[str, Any]) -> str:
    """One row for people: when, who, what, where, how it ended."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["at"]))
    who = f"token {row['token']}" if row["token"] else row["peer"]
    detail = {name: value for name, value in row["detail"].items() if name != "execution_id"}
    what = detail.pop("command", None) or detail.pop("argv", None) or detail.pop("path", None)
    words = [at, f"#{row['seq']}", row["kind"], row["action"], row["environment_id"] or "-", who]
    if row["outcome"]:
        words.append(row["outcome"])
    if what is not None:
        words.append(json.dumps(what, ensure_ascii=False))
    return clean("  ".join(words))


def _verify_arguments(parser: Parser) -> None:
    parser.option("--seq", takes="SEQ", convert=int, help="number of a row recorded earlier")
    parser.option("--hash", takes="HASH", help="hash of the same row")
    add_json(parser)


def _verify(args: SimpleNamespace) -> int:
    found = Client().verify_audit(args.seq, args.hash)
    if args.json:
        show_json(found)
    elif found["intact"]:
        pruned = found.get("pruned")  # a daemon of an older version does not say
        say(
            f"intact: {found['seq']} rows"
            + (f", of which the first {pruned['seq']} were pruned" if pruned else "")
        )
        print(clean(f"{found['seq']} {found['hash']}"))
    else:
        broken = found["broken"]
        say(f"BROKEN at row {broken['seq']}: {broken['reason']}")
    return 0 if found["intact"] else BROKEN


def _prune_arguments(parser: Parser) -> None:
    parser.option("--before", takes="TIME", help="e.g. 2026-01-31 or 2026-01-31T12:00:00+01:00")
    add_json(parser)


def _prune(args: SimpleNamespace) -> int:
    before = _unix(args.before)
    if before is None:
        raise InvalidRequest("--before is missing", hint="skerry audit prune --before 2026-01-31")
    pruned = Client().prune_audit(before)
    if args.json:
        show_json(pruned)
        return 0
    kept = (
        f"; row {pruned['unfinished']} and later rows stay, because it has no result yet"
        if pruned["unfinished"]
        else ""
    )
    say(f"{pruned['removed']} rows removed, {pruned['seq']} in total{kept}")
    return 0


VERBS = {
    "audit tail": Verb(
        "skerry audit tail [-f] [-n NUMBER] [--json]",
        "Show the last rows of the audit log.",
        "skerry audit tail -f",
        _tail_arguments,
        _tail,
    ),
    "audit search": Verb(
        "skerry audit search [OPTIONS]",
        "Search the audit log; the oldest row comes first.",
        "skerry audit search --action execution --outcome failed --since 2026-01-31",
        _search_arguments,
        _search,
    ),
    "audit export": Verb(
        "skerry audit export [--after SEQ]",
        "Print the audit log, oldest row first, one JSON object per line.",
        "skerry audit export > audit.ndjson",
        _export_arguments,
        _export,
    ),
    "audit verify": Verb(
        "skerry audit verify [--seq SEQ --hash HASH] [--json]",
        "Verify that no row was changed, removed or moved (else exit code 1); print number and hash of the last row.",
        "skerry audit verify --seq 17 --hash 5feceb66ffc8...",
        _verify_arguments,
        _verify,
    ),
    "audit prune": Verb(
        "skerry audit prune --before TIME [--json]",
        "Remove rows of the audit log that are older than TIME. The remaining rows can still be verified.",
        "skerry audit prune --before 2026-01-31",
        _prune_arguments,
        _prune,
    ),
}
