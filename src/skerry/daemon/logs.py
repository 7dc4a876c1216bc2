"""Structured logs: one JSON object a line, on stderr.

What is logged are ids, names, states and errors; never variables, commands, their input or their output.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from typing import TextIO, cast

import structlog

LARGE = 64 << 20


class _Stderr(io.TextIOBase):
    """What cannot be written is lost: a daemon whose disk is full must still be able to delete."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            os.write(sys.stderr.fileno(), text.encode(errors="backslashreplace"))
        return len(text)


def configure() -> None:
    """Send our own logs, and those of the libraries from warnings up, to stderr."""
    processors: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(),
    ]
    stderr = cast(TextIO, _Stderr())
    structlog.configure(
        processors=processors,
        logger_factory=structlog.WriteLoggerFactory(stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[_add_component, *processors[:-1]],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, processors[-1]],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(True)


def turn_over(path: str) -> None:
    """Begin a new file when stderr is this one and has become large; the one before is kept as `.1`.

    Raises OSError.
    """
    mine = os.fstat(2)
    if mine.st_size < LARGE:
        return
    there = os.stat(path)
    if (mine.st_dev, mine.st_ino) != (there.st_dev, there.st_ino):
        return
    os.replace(path, f"{path}.1")
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.dup2(fd, 2, inheritable=True)
    os.close(fd)


def _add_component(
    logger: object, method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    return {**event, "component": event["_record"].name}
