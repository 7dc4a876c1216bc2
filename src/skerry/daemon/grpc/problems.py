"""Errors as gRPC carries them: a status by the table in `skerry.errors`, and the whole problem beside it."""

from __future__ import annotations

import json
from typing import Any

import grpc
from grpc.aio import ServicerContext

from skerry.daemon.grpc.messages import clean, to_message
from skerry.errors import PlatformError, SkerryError, from_dict
from skerry.v1.problem_pb2 import Problem

CODE = "skerry-code"
PROBLEM = "skerry-problem-bin"
STATUS_MAX = 600
"""Bytes of the status's text, each of which can be three on the wire."""
PROBLEM_MAX = 3600
"""Bytes of the problem, before base64. Clients take 8 KiB of metadata: a call that fails with more arrives as
RESOURCE_EXHAUSTED, without its code."""


def problem(body: bytes) -> SkerryError:
    """The error that an answer of the API tells of."""
    try:
        return from_dict(json.loads(body))
    except ValueError:
        return PlatformError("the request failed", hint="see the daemon's log")


def refuse(context: ServicerContext[Any, Any], error: SkerryError) -> None:
    """Make this error the answer; the handler is to return at once.

    `context.abort()` would raise an exception that the call itself keeps: a cycle through the frames of its traceback,
    which holds the request until the next full garbage collection.
    """
    metadata = (*(context.trailing_metadata() or ()), (CODE, error.code), (PROBLEM, _packed(error)))
    context.set_trailing_metadata(metadata)
    context.set_code(grpc.StatusCode[error.grpc])
    context.set_details(_cut(clean(str(error)), STATUS_MAX))


def _packed(error: SkerryError) -> bytes:
    """A Problem of at most PROBLEM_MAX bytes: the details give way first, then the end of the message."""
    found = to_message(Problem, error.to_dict())
    if found.ByteSize() > PROBLEM_MAX:
        found.ClearField("detail")
        found.hint = _cut(found.hint, PROBLEM_MAX // 4)
        found.message = _cut(found.message, PROBLEM_MAX // 2)
    return found.SerializeToString()


def _cut(text: str, most: int) -> str:
    """Text whose UTF-8 has at most `most` bytes."""
    data = text.encode()
    return text if len(data) <= most else data[: most - 3].decode(errors="ignore") + "..."
