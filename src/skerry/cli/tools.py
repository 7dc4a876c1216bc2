"""`tools`: what agents call."""

from __future__ import annotations

from skerry.cli.parser import Verb
from skerry.cli.terminal import show_json

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


VERBS = {
    "tools schema": Verb(
        "skerry tools schema [--format FORMAT]",
        "Print all tools with the JSON Schema of their arguments: as the `tools` of a request to a model, or plainly.",
        "skerry tools schema --format anthropic",
        _schema_arguments,
        _schema,
    ),
}
