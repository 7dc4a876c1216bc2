"""The door to the database, for asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from skerry.errors import InvalidRequest, StoreUnavailable
from skerry.store.connection import Connection, Database
from skerry.store.migrations import migrate
from skerry.store.writer import Writer, Written

T = TypeVar("T")
READERS = 3
_URLS = "sqlite:///absolute/path/of/a/file or postgresql://user@host/database"


class Store:
    """What Skerry remembers. Work is a function of an open transaction, made of the functions of this package.

    Work must only use the transaction and must let its errors through: it runs in another thread, and it may
    run again when the database took back what it had done. Both `write` and `read` raise what the work raises,
    and StoreUnavailable.
    """

    @classmethod
    async def open(cls, url: str) -> Store:
        """The store at `sqlite:///absolute/path` or `postgresql://...`, with its schema brought up to date.

        Raises InvalidRequest (not such a URL), StoreUnavailable, StoreUnusable.
        """
        database = _database(url)
        return await asyncio.to_thread(cls, database)

    def __init__(self, database: Database) -> None:
        tx = database.writer()
        try:
            migrate(database, tx)
        except BaseException:
            tx.close()
            raise
        self._database = database
        self._closed = False
        self._writer = Writer(database, tx)
        self._mine = threading.local()
        self._readers: set[Connection] = set()
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="skerry-store-reader")

    def write(self, work: Callable[[Connection], T], *, later: bool = False) -> asyncio.Future[T]:
        """Done when what the work did is committed and on disk.

        Work is queued at once, in the order of the calls, and happens even if nobody waits for it any more; with
        `later` it may wait for a moment, so that it shares a commit with what comes next. A
        StoreUnavailable means that nothing was written, unless its `detail["written"]` is "unknown".
        """
        self._check()
        return self._writer.submit(work, later=later)

    def write_early(self, work: Callable[[Connection], T]) -> Written[T]:
        """The same, for who can make use of the time that the disk takes."""
        self._check()
        return self._writer.submit_early(work)

    def read(self, work: Callable[[Connection], T]) -> asyncio.Future[T]:
        """What the work finds; all its statements see the same moment, after all acknowledged writes."""
        self._check()
        return asyncio.get_running_loop().run_in_executor(self._pool, self._read, work)

    async def check(self) -> None:
        """Write something, for nothing. Raises StoreUnavailable when the store cannot be written."""
        await self.write(lambda tx: tx.run("UPDATE schema_version SET version = version"))

    async def close(self) -> None:
        """Ends when all work that was queued is done. More of it raises StoreUnavailable."""
        if not self._closed:
            self._closed = True
            self._writer.send()
            await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._writer.stop()
        self._pool.shutdown()
        for tx in self._readers:
            tx.close()

    def _check(self) -> None:
        if self._closed:
            raise StoreUnavailable("the store is closed")

    def _read(self, work: Callable[[Connection], T]) -> T:
        tx = self._reader()
        try:
            return work(tx)
        finally:
            try:
                tx.rollback()
            except StoreUnavailable:
                self._drop(tx)

    def _reader(self) -> Connection:
        """This thread's connection, with a transaction; replaced when it broke while it was idle."""
        mine: Connection | None = getattr(self._mine, "tx", None)
        if mine is not None:
            try:
                mine.begin()
                return mine
            except StoreUnavailable:
                self._drop(mine)
        new = self._mine.tx = self._database.reader()
        self._readers.add(new)
        new.begin()
        return new

    def _drop(self, tx: Connection) -> None:
        self._mine.tx = None
        self._readers.discard(tx)
        tx.close()


def _database(url: str) -> Database:
    # No error repeats the URL: it may hold a password.
    try:
        parts = urlsplit(url)
    except ValueError:
        raise InvalidRequest("not the URL of a store", hint=_URLS) from None
    if parts.scheme == "sqlite" and not parts.netloc and parts.path.startswith("/"):
        from skerry.store.sqlite import SqliteDatabase

        return SqliteDatabase(unquote(parts.path))
    if parts.scheme in ("postgresql", "postgres"):
        # Only who uses Postgres needs its driver, and pays for the import.
        from skerry.store.postgres import PostgresDatabase

        return PostgresDatabase(url)
    raise InvalidRequest(f"not the URL of a store: {parts.scheme or 'no scheme'}", hint=_URLS)
