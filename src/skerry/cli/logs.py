"""`logs`: the recent output of an environment."""

from __future__ import annotations

from skerry.cli.options import add_environment, add_json, path_of
from skerry.cli.parser import Verb
from skerry.cli.terminal import Sink
from skerry.client.sync.transport import Transport

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import SimpleNamespace

    from skerry.cli.parser import Parser


def _logs_arguments(parser: Parser) -> None:
    parser.option("-f", "--follow", help="keep printing new output")
    add_environment(parser)
    parser.argument("execution", "EXECUTION", "only this execution", count="?")
    add_json(parser)


def _logs(args: SimpleNamespace) -> int:
    import json

    from skerry.models import decode_bytes

    query = {"follow": args.follow, "execution": args.execution}
    response = Transport().send("GET", f"{path_of(args.environment)}/logs", query=query)
    sinks = {"stdout": Sink(1), "stderr": Sink(2)}
    try:
        for line in response.lines():
            if args.json:
                print(json.dumps(line), flush=True)
            elif line["stream"] in sinks:
                sinks[line["stream"]].write(decode_bytes(line["data"], line["encoding"]))
    finally:
        response.close()
    return 0


VERBS = {
    "logs": Verb(
        "skerry logs [-f] [--json] ENV [EXECUTION]",
        "Show the recent output of an environment's commands: their stdout on stdout, their stderr on stderr.",
        "skerry logs -f web",
        _logs_arguments,
        _logs,
    ),
}
