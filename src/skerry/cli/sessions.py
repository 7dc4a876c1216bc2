"""`session run|ls|rm`: interpreters that keep their state between calls."""

from __future__ import annotations

import sys
import time

from skerry.cli.options import add_environment, add_json, add_parameters, path_of
from skerry.cli.parser import Verb
from skerry.cli.terminal import Sink, ago, clean_text, say, show_json, show_table
from skerry.client.http1 import quote
from skerry.client.sync.transport import Transport
from skerry.models import decode_bytes
from skerry.parameters import SESSION, SESSION_CALL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import SimpleNamespace

    from skerry.cli.parser import Parser


def _run_arguments(parser: Parser) -> None:
    add_parameters(
        parser, *(row for row in (*SESSION.values(), *SESSION_CALL.values()) if "cli" in row.where)
    )
    add_json(parser)
    add_environment(parser)


def _run(args: SimpleNamespace) -> int:
    code = sys.stdin.read() if args.code is None else args.code
    transport, path = Transport(), f"{path_of(args.environment)}/sessions"
    wanted = {
        "language": args.language or "python",
        "session_id": args.session or "main",
        "packages": args.package,
    }
    opened = transport.call("POST", path, json=wanted)
    here = f"{path}/{quote(opened['session_id'])}"
    if opened["state"] == "crashed":
        say(f"the session crashed ({opened['message']}) and is restarted without its state")
        transport.call("POST", f"{here}/restart")
    result = transport.call("POST", f"{here}/run", json={"code": code, "timeout": args.timeout})
    if args.json:
        show_json(result)
        return int(result["exit_code"])
    for fd, name in ((1, "stdout"), (2, "stderr")):
        Sink(fd).write(decode_bytes(result[name], result[f"{name}_encoding"]))
    for value in result["values"]:
        print(clean_text(value["data"].get("text/plain", "")))
    if result["raised"] is not None:
        say(result["raised"]["traceback"].rstrip())
    if result["message"]:
        say(result["message"])
    return int(result["exit_code"]) or int(result["outcome"] != "completed")


def _ls_arguments(parser: Parser) -> None:
    add_environment(parser)
    add_json(parser)


def _ls(args: SimpleNamespace) -> int:
    found = Transport().call("GET", f"{path_of(args.environment)}/sessions")
    if args.json:
        show_json(found)
        return 0
    show_table(
        ("SESSION", "LANGUAGE", "STATE", "CALLS", "SINCE"),
        (
            (
                each["session_id"],
                each["language"],
                each["state"],
                each["calls"],
                ago(time.time() - each["started_at"]),
            )
            for each in found["sessions"]
        ),
    )
    return 0


def _rm_arguments(parser: Parser) -> None:
    add_environment(parser)
    parser.argument("sessions", "SESSION", "ids", count="+")


def _rm(args: SimpleNamespace) -> int:
    transport = Transport()
    for session in args.sessions:
        transport.call("DELETE", f"{path_of(args.environment)}/sessions/{quote(session)}")
    return 0


VERBS = {
    "session run": Verb(
        "skerry session run [OPTIONS] ENV [-c CODE]",
        "Run code in a session, which keeps its variables. The session is opened if it does not exist.",
        "skerry session run web -c 'x = 6; x * 7'",
        _run_arguments,
        _run,
    ),
    "session ls": Verb(
        "skerry session ls [--json] ENV",
        "List the sessions of an environment.",
        "skerry session ls web",
        _ls_arguments,
        _ls,
    ),
    "session rm": Verb(
        "skerry session rm ENV SESSION...",
        "Close sessions and end every process they started.",
        "skerry session rm web main",
        _rm_arguments,
        _rm,
    ),
}
