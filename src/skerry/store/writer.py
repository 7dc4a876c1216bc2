"""The one thread that writes, and its group commit.

All work that came while the last transaction was being synced goes into the next one together: one sync pays
for many. Each piece has a savepoint of its own, so that a piece that fails takes nothing of the others along,
and nobody is told of success before the COMMIT of all.

A piece may run more than once: when the database takes back a whole transaction (a deadlock with another
daemon, say), its pieces run again, each in a transaction of its own. A transaction that may have been
committed is never run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from skerry.errors import StoreUnavailable
from skerry.store.connection import Aborted, Connection, Database

T = TypeVar("T")
MOST_AT_ONCE = 256
TRIES = 10
LATER = 0.01
"""Seconds that what nobody waits for may wait."""


@dataclass(slots=True, eq=False)
class _Piece:
    work: Callable[[Connection], Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    value: Any = None
    error: BaseException | None = None

    def run(self, tx: Connection) -> None:
        self.value, self.error = self.work(tx), None

    def tell(self) -> None:
        if self.future.done():  # given up by who waited
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.value)


class Writer:
    """Starts its thread at once; `stop()` ends it when everything that was submitted has been done."""

    def __init__(self, database: Database, tx: Connection) -> None:
        self._database = database
        self._tx: Connection | None = tx
        self._queue: SimpleQueue[list[_Piece] | None] = SimpleQueue()
        self._later: list[_Piece] = []
        self._timer: asyncio.TimerHandle | None = None
        self._thread = threading.Thread(target=self._serve, name="skerry-store-writer", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[Connection], T], *, later: bool = False) -> asyncio.Future[T]:
        """`later`: it may wait for a moment, for what is submitted next and goes into the same transaction."""
        loop = asyncio.get_running_loop()
        piece = _Piece(work, loop, loop.create_future())
        self._later.append(piece)
        if not later:
            self.send()
        elif self._timer is None:
            self._timer = loop.call_later(LATER, self.send)
        return piece.future

    def send(self) -> None:
        """Let nothing wait any longer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._later:
            self._queue.put(self._later)
            self._later = []

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _serve(self) -> None:
        stopping = False
        while not stopping:
            batch: list[_Piece] = []
            more = self._queue.get()
            with contextlib.suppress(Empty):
                while more is not None:
                    batch += more
                    if len(batch) >= MOST_AT_ONCE:
                        break
                    more = self._queue.get_nowait()
            stopping = more is None
            if batch:
                self._write(batch)
                _tell(batch)
        self._drop()

    def _write(self, batch: list[_Piece]) -> None:
        """Leaves every piece with its value or its error."""
        for attempt in range(TRIES):
            try:
                self._transaction(batch)
                return
            except Aborted as error:
                self._rollback()
                if len(batch) > 1:
                    for piece in batch:
                        self._write([piece])
                    return
                if attempt == TRIES - 1:
                    batch[0].error = StoreUnavailable(f"the database took this back {TRIES} times: {error}")
            except BaseException as error:
                self._rollback()
                for piece in batch:
                    piece.error = error
                return

    def _transaction(self, batch: list[_Piece]) -> None:
        tx = self._begin()
        if len(batch) == 1:
            batch[0].run(tx)
        else:
            for piece in batch:
                _in_savepoint(tx, piece)
        tx.commit()

    def _begin(self) -> Connection:
        """A connection with a transaction; a connection that broke while it was idle is replaced."""
        if self._tx is not None:
            try:
                self._tx.begin()
                return self._tx
            except StoreUnavailable:
                self._drop()
        tx = self._database.writer()
        try:
            tx.begin()
        except BaseException:
            tx.close()
            raise
        self._tx = tx
        return tx

    def _rollback(self) -> None:
        if self._tx is not None:
            try:
                self._tx.rollback()
            except Exception:
                self._drop()

    def _drop(self) -> None:
        if self._tx is not None:
            with contextlib.suppress(Exception):
                self._tx.close()
            self._tx = None


def _in_savepoint(tx: Connection, piece: _Piece) -> None:
    """Run a piece. Raises Aborted, or StoreUnavailable, when the transaction did not survive it."""
    tx.run("SAVEPOINT piece")
    try:
        piece.run(tx)
    except Aborted:
        raise
    except BaseException as error:
        piece.error = error
        tx.run("ROLLBACK TO SAVEPOINT piece")
    tx.run("RELEASE SAVEPOINT piece")


def _tell(batch: list[_Piece]) -> None:
    by_loop = defaultdict(list)
    for piece in batch:
        by_loop[piece.loop].append(piece)
    for loop, pieces in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(_tell_all, pieces)


def _tell_all(pieces: list[_Piece]) -> None:
    for piece in pieces:
        piece.tell()
