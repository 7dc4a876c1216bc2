"""`run`, `exec`, `shell`: commands in environments, with their input, output and signals passed through."""

from __future__ import annotations

import os
import sys

from skerry.cli.attach import Signals, attach
from skerry.cli.options import (
    add_create_options,
    add_environment,
    add_json,
    add_parameters,
    add_variables,
    create,
    environment_request,
    parse_secrets,
    parse_variables,
    path_of,
)
from skerry.cli.parser import Verb
from skerry.cli.terminal import clean, say, show_json
from skerry.client.sync.transport import Transport
from skerry.errors import InvalidRequest, SkerryError
from skerry.parameters import EXECUTE, START

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import SimpleNamespace
    from typing import Any

    from skerry.cli.parser import Parser

# If this process is killed, it cannot delete its environment: that ends after this idle time instead.
RUN_IDLE_SECONDS = 60
SHELL = ["sh", "-c", "command -v bash >/dev/null && exec bash; exec sh"]


def _add_context(parser: Parser) -> None:
    """Variables, secrets, working directory, user and execution profile of the command."""
    add_variables(parser)
    add_parameters(parser, EXECUTE["secrets"], EXECUTE["cwd"], EXECUTE["user"], EXECUTE["profile"])


def _add_streams(parser: Parser) -> None:
    add_parameters(parser, EXECUTE["stdin"], START["pty"], EXECUTE["timeout"])
    add_json(parser)


def _add_command(parser: Parser) -> None:
    parser.argument("command", "COMMAND", "the program and its arguments", count="...")


def _run_arguments(parser: Parser) -> None:
    _add_streams(parser)
    _add_context(parser)
    add_create_options(parser)
    parser.option("--rm", help="delete the environment afterwards (the default)")
    parser.option("--keep", help="keep the environment afterwards")
    _add_command(parser)


def _exec_arguments(parser: Parser) -> None:
    _add_streams(parser)
    _add_context(parser)
    parser.option("-d", "--detach", help="run in the background and print the execution id")
    add_environment(parser)
    _add_command(parser)


def _shell_arguments(parser: Parser) -> None:
    _add_context(parser)
    add_create_options(parser)
    parser.argument(
        "environment", "ENV", "environment (default: a temporary one)", count="?", completes="environment"
    )
    parser.fixed = {
        "interactive": True,
        "timeout": None,
        "json": False,
        "keep": False,
        "detach": False,
        "command": SHELL,
    }


def _argv(args: SimpleNamespace) -> list[str]:
    argv: list[str] = args.command
    if not argv:
        raise InvalidRequest("no command given", hint="put it at the end: -- python3 -c 'print(1)'")
    return argv


def _request(args: SimpleNamespace, argv: list[str], variables: dict[str, str]) -> dict[str, Any]:
    """The request for this command, without its input and timeout."""
    request: dict[str, Any] = {"argv": argv}
    secrets = parse_secrets(args.secret)
    given = (
        ("cwd", args.workdir),
        ("user", args.user),
        ("env", variables),
        ("secrets", secrets),
        ("profile", args.execution_profile),
    )
    for name, value in given:
        if value:
            request[name] = value
    return request


def _run(args: SimpleNamespace) -> int:
    request = _request(args, _argv(args), {})
    wanted = environment_request(args)
    if not args.keep:
        wanted.setdefault("idle", RUN_IDLE_SECONDS)
    _check_terminal(args)
    transport = Transport()
    with Signals() as signals:
        ref = create(transport, wanted)["environment_id"]
        try:
            signals.check()
            return _command(args, transport, path_of(ref), request, signals)
        finally:
            if args.keep:
                say(f"environment {ref} is kept; delete it with skerry rm {ref}")
            else:
                _delete(transport, ref)


def _exec(args: SimpleNamespace) -> int:
    request = _request(args, _argv(args), parse_variables(args.env, args.env_file))
    transport, path = Transport(), path_of(args.environment)
    if args.detach:
        if args.timeout is not None:
            request["timeout"] = args.timeout
        print(clean(transport.call("POST", f"{path}/executions", json=request)["execution_id"]))
        return 0
    _check_terminal(args)
    with Signals() as signals:
        return _command(args, transport, path, request, signals)


def _shell(args: SimpleNamespace) -> int:
    args.tty = os.isatty(0) and os.isatty(1)
    if args.environment is None:
        return _run(args)
    if set(environment_request(args)) - {"env"}:
        raise InvalidRequest(
            "limits and network cannot be set for an existing environment", hint="leave out ENV for a new one"
        )
    return _exec(args)


def _check_terminal(args: SimpleNamespace) -> None:
    if args.tty and args.interactive and not os.isatty(0):
        raise InvalidRequest("stdin is not a terminal", hint="leave out -t")


def _command(
    args: SimpleNamespace, transport: Transport, path: str, request: dict[str, Any], signals: Signals
) -> int:
    """Run the command and return its exit code."""
    if args.timeout is not None:
        request["timeout"] = args.timeout
    if args.json:
        result = _captured(args, transport, path, request)
    else:
        result = attach(transport, path, request, signals, stdin=args.interactive, tty=args.tty)
    outcome = result["outcome"]
    if outcome in ("timed_out", "oom_killed", "output_limit", "canceled", "internal") and not args.json:
        say(f"skerry: {result.get('message') or outcome.replace('_', ' ')}")
    return 125 if outcome == "internal" else int(result["exit_code"])


def _captured(
    args: SimpleNamespace, transport: Transport, path: str, request: dict[str, Any]
) -> dict[str, Any]:
    """Run with --json: prints the result, with its output in it, at the end."""
    from skerry.models import encode_bytes

    if args.interactive:
        request["stdin"], request["stdin_encoding"] = encode_bytes(sys.stdin.buffer.read())
    result: dict[str, Any] = transport.call("POST", f"{path}/execute", json=request)
    show_json(result)
    return result


def _delete(transport: Transport, ref: str) -> None:
    try:
        transport.call("DELETE", path_of(ref))
    except SkerryError as error:
        if error.status != 404:
            say(f"skerry: environment {ref} was not deleted: {error}")


VERBS = {
    "run": Verb(
        "skerry run [OPTIONS] [--] COMMAND [ARG...]",
        "Run a command in a new environment, with its output and exit code, and delete the environment afterwards.",
        "skerry run --memory 256m -- python3 -c 'print(6*7)'",
        _run_arguments,
        _run,
    ),
    "exec": Verb(
        "skerry exec [OPTIONS] ENV [--] COMMAND [ARG...]",
        "Run a command in an environment.",
        "skerry exec -it web bash",
        _exec_arguments,
        _exec,
    ),
    "shell": Verb(
        "skerry shell [OPTIONS] [ENV]",
        "Open a terminal in an environment. Without ENV, in a new one that is deleted at the end.",
        "skerry shell --image dev",
        _shell_arguments,
        _shell,
    ),
}
