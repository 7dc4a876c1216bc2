"""`logs`: what ran in an environment said."""

from __future__ import annotations

import codecs
import os
import sys

from skerry.cli.options import add_environment, add_json, path_of
from skerry.cli.parser import Verb
from skerry.cli.terminal import clean_text
from skerry.client.sync.transport import Transport

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import SimpleNamespace

    from skerry.cli.parser import Parser


def _logs_arguments(parser: Parser) -> None:
    parser.option("-f", "--follow", help="stay for what is still to come")
    add_environment(parser)
    parser.argument("execution", "EXECUTION", "only of this execution", count="?")
    add_json(parser)


def _logs(args: SimpleNamespace) -> int:
    import json

    from skerry.models import decode_bytes

    query = {"follow": args.follow, "execution": args.execution}
    response = Transport().send("GET", f"{path_of(args.environment)}/logs", query=query)
    sinks = {"stdout": _Sink(1), "stderr": _Sink(2)}
    try:
        for line in response.lines():
            if args.json:
                print(json.dumps(line), flush=True)
            elif line["stream"] in sinks:
                sinks[line["stream"]].write(decode_bytes(line["data"], line["encoding"]))
    finally:
        response.close()
    return 0


class _Sink:
    """Where one stream goes: bytes as they are, but on a terminal only what it can show."""

    def __init__(self, fd: int) -> None:
        self._file = (sys.stdout if fd == 1 else sys.stderr).buffer
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode if os.isatty(fd) else None

    def write(self, data: bytes) -> None:
        self._file.write(data if self._decode is None else clean_text(self._decode(data)).encode())
        self._file.flush()


VERBS = {
    "logs": Verb(
        "skerry logs [-f] [--json] ENV [EXECUTION]",
        "Show the recent output of what ran in an environment: stdout on stdout, stderr on stderr.",
        "skerry logs -f web",
        _logs_arguments,
        _logs,
    ),
}
