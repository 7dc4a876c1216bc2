"""Errors as gRPC carries them: a status by the table in `skerry.errors`, and the whole problem beside it."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import grpc
from grpc.aio import ServicerContext

from skerry.daemon.grpc.messages import clean, to_message
from skerry.errors import PlatformError, SkerryError, from_dict
from skerry.v1.problem_pb2 import Problem

CODE = "skerry-code"
PROBLEM = "skerry-problem-bin"


def problem(body: bytes) -> SkerryError:
    """The error that an answer of the API tells of."""
    try:
        return from_dict(json.loads(body))
    except ValueError:
        return PlatformError("the request failed", hint="see the daemon's log")


async def refuse(context: ServicerContext[Any, Any], error: SkerryError) -> NoReturn:
    """End the call with this error."""
    metadata = (
        *(context.trailing_metadata() or ()),
        (CODE, error.code),
        (PROBLEM, to_message(Problem, error.to_dict()).SerializeToString()),
    )
    await context.abort(grpc.StatusCode[error.grpc], clean(str(error)), metadata)
