"""Metrics of every request, and a log line for those that change something or fail."""

from __future__ import annotations

import time
from typing import Self

import structlog

from skerry.daemon.http.operations import Operation
from skerry.daemon.metrics import Metrics
from skerry.manager.caller import Caller

log = structlog.get_logger(component="daemon")


class RequestLog:
    """One request, from its arrival to the end of its response.

    The log contains ids, names and numbers: no command, no variable, no token. Unauthenticated requests are not logged:
    a flood of them would fill the disk.
    """

    __slots__ = ("_began", "_metrics", "_status", "caller", "operation")

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._began = time.perf_counter()
        self._status = 0
        self.operation: Operation | None = None
        self.caller: Caller | None = None

    def __enter__(self) -> Self:
        self._metrics.under_way += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.under_way -= 1
        operation, caller = self.operation, self.caller
        if operation is None or not operation.verb or caller is None:
            return
        if self._status >= 400 or operation.method != "GET" or operation.websocket:
            log.info(
                "request",
                operation=operation.name,
                status=self._status,
                ms=round((time.perf_counter() - self._began) * 1000, 2),
                tenant=caller.tenant,
                who=caller.who,
                request=caller.request_id,
                trace=caller.trace_id,
            )

    def answered(self, status: int) -> None:
        """The answer begins, or a WebSocket has ended."""
        self._status = status
        name = "" if self.operation is None else self.operation.name
        self._metrics.requests.add(name, str(status))
        if self.operation is None or not self.operation.websocket:
            self._metrics.request_seconds.observe(time.perf_counter() - self._began, name)
