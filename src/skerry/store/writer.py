"""The one thread that writes, its group commit, and the thread that waits for the disk.

All work that came while the last transaction was being synced goes into the next one together: one sync pays
for many. Each piece has a savepoint of its own, so that a piece that fails takes nothing of the others along,
and nobody is told of success before the COMMIT of all; nor, unless it was submitted as early, before the disk
has it.

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
from itertools import groupby
from operator import itemgetter
from queue import Empty, SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

from skerry.errors import StoreUnavailable
from skerry.store.connection import Aborted, Connection, Database
from skerry.store.priority import disk_first

T = TypeVar("T")
MOST_AT_ONCE = 256
TRIES = 10
FEW = 4
LATER = 0.01
"""Seconds that a write without a waiting caller may be delayed."""


class Written(NamedTuple, Generic[T]):
    """Work of which the disk need not have everything yet."""

    committed: asyncio.Future[T]
    """What the work returned: from here on it cannot be lost with this process."""
    synced: asyncio.Future[None]
    """Resolves when this and all earlier writes are on disk; has the error of `committed`, too."""


@dataclass(slots=True, eq=False)
class _Piece:
    work: Callable[[Connection], Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    early: asyncio.Future[Any] | None = None
    value: Any = None
    error: BaseException | None = None
    unsynced: BaseException | None = None

    def run(self, tx: Connection) -> None:
        self.value, self.error = self.work(tx), None

    def tell_early(self) -> None:
        if self.early is not None:
            _settle(self.early, self.value, self.error)

    def tell(self) -> None:
        self.tell_early()
        _settle(self.future, None if self.early is not None else self.value, self.error or self.unsynced)


class Writer:
    """Starts its threads at once; `stop()` ends them when everything that was submitted has been done."""

    def __init__(self, database: Database, tx: Connection) -> None:
        self._database = database
        self._tx: Connection | None = tx
        self._queue: SimpleQueue[list[_Piece] | None] = SimpleQueue()
        self._later: list[_Piece] = []
        self._timer: asyncio.TimerHandle | None = None
        self._committed: SimpleQueue[tuple[Connection, list[_Piece]] | None] = SimpleQueue()
        self._broken = False
        """True after a failed sync; nothing may depend on the data until it is repaired."""
        self._threads = [
            threading.Thread(target=self._serve, name="skerry-store-writer", daemon=True),
            threading.Thread(target=self._serve_disk, name="skerry-store-disk", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[Connection], T], *, later: bool = False) -> asyncio.Future[T]:
        """`later` allows a short delay, to share a transaction with the next writes."""
        loop = asyncio.get_running_loop()
        piece = _Piece(work, loop, loop.create_future())
        self._later.append(piece)
        if not later:
            self.send()
        elif self._timer is None:
            self._timer = loop.call_later(LATER, self.send)
        return piece.future

    def submit_early(self, work: Callable[[Connection], T]) -> Written[T]:
        loop = asyncio.get_running_loop()
        written: Written[T] = Written(loop.create_future(), loop.create_future())
        written.synced.add_done_callback(_retrieve)
        self._later.append(_Piece(work, loop, written.synced, written.committed))
        self.send()
        return written

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
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        disk_first()
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
                # When many come at once, one sync for all of them costs less than telling each of them twice.
                early = len(batch) <= FEW and any(piece.early is not None for piece in batch)
                self._write(batch, early=early)
                if early and self._tx is not None:
                    _tell(batch, _Piece.tell_early)
                    self._committed.put((self._tx, batch))
                else:  # the disk has what has no error
                    _tell(batch, _Piece.tell)
        self._committed.put(None)
        self._threads[1].join()
        self._drop()

    def _serve_disk(self) -> None:
        """Sync writes already answered, while the next transaction is written."""
        disk_first()
        stopping = False
        while not stopping:
            found = [self._committed.get()]
            with contextlib.suppress(Empty):
                while True:
                    found.append(self._committed.get_nowait())
            stopping = None in found
            committed = [each for each in found if each is not None]
            for tx, batches in groupby(committed, key=itemgetter(0)):
                self._sync(tx, [piece for _, batch in batches for piece in batch])

    def _write(self, batch: list[_Piece], *, early: bool) -> None:
        """Leaves every piece with its value or its error."""
        for attempt in range(TRIES):
            try:
                self._transaction(batch, early)
                return
            except Aborted as error:
                self._rollback()
                if len(batch) > 1:
                    for piece in batch:
                        self._write([piece], early=False)
                    return
                if attempt == TRIES - 1:
                    batch[0].error = StoreUnavailable(f"the database took this back {TRIES} times: {error}")
            except BaseException as error:
                self._rollback()
                for piece in batch:
                    piece.error = error
                return

    def _sync(self, tx: Connection, batch: list[_Piece]) -> None:
        """Tell those who wait for the disk. What it may not have is an error."""
        try:
            tx.sync()
        except BaseException as error:
            self._broken = True
            for piece in batch:
                piece.unsynced = error
        _tell(batch, _Piece.tell)

    def _transaction(self, batch: list[_Piece], early: bool) -> None:
        tx = self._begin(early)
        if len(batch) == 1:
            batch[0].run(tx)
        else:
            for piece in batch:
                _in_savepoint(tx, piece)
        tx.commit()

    def _begin(self, early: bool) -> Connection:
        """A connection with a transaction; a connection that broke while it was idle is replaced."""
        if self._broken:
            self._drop()
        if self._tx is not None:
            try:
                self._tx.begin(early=early)
                return self._tx
            except StoreUnavailable:
                self._drop()
        tx = self._database.writer(repair=self._broken)
        self._broken = False
        try:
            tx.begin(early=early)
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


def _settle(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():  # given up by who waited
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)


def _retrieve(synced: asyncio.Future[None]) -> None:
    """Who was told of the error by `committed` does not ask for it again."""
    if not synced.cancelled():
        synced.exception()


def _tell(pieces: list[_Piece], how: Callable[[_Piece], None]) -> None:
    by_loop = defaultdict(list)
    for piece in pieces:
        by_loop[piece.loop].append(piece)
    for loop, of_loop in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(_tell_all, of_loop, how)


def _tell_all(pieces: list[_Piece], how: Callable[[_Piece], None]) -> None:
    for piece in pieces:
        how(piece)
