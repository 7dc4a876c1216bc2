"""SQLite: one file and its log (WAL).

A commit that is early is `synchronous = NORMAL`: written to the log, which `sync` brings to the disk. Together they are
what FULL does. Before a checkpoint, and when it begins to use the log anew, SQLite syncs by itself."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
import time
from typing import Any

from skerry.errors import Conflict, InvalidRequest, StoreUnavailable, StoreUnusable
from skerry.store.connection import Aborted, Connection, Database, Parameters, Row

BUSY_MILLISECONDS = 5000
_UNUSABLE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_HINTS = {
    sqlite3.SQLITE_FULL: "make room on its disk",
    sqlite3.SQLITE_READONLY: "its file or its disk is read-only",
    sqlite3.SQLITE_BUSY: "another process holds it locked",
    sqlite3.SQLITE_CANTOPEN: "is its directory there, and does it belong to this user?",
}


class SqliteDatabase(Database):
    """The file at `path`, private to this user. Its directory is made, private, when it is missing."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            # SQLite gives its other files the mode of this one.
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                os.fchmod(fd, 0o600)
            finally:
                os.close(fd)
        except OSError as error:
            raise StoreUnavailable(
                f"cannot open {path}: {error.strerror}", hint="does it belong to this user?"
            ) from error

    def writer(self, *, repair: bool = False) -> Connection:
        pragmas = ["PRAGMA synchronous = FULL"]
        if repair:
            pragmas.append("PRAGMA wal_checkpoint(TRUNCATE)")  # from the log into the database itself
        return SqliteConnection(self._path, "BEGIN IMMEDIATE", *pragmas)

    def reader(self) -> Connection:
        return SqliteConnection(self._path, "BEGIN", "PRAGMA query_only = ON")

    def lock_schema(self, tx: Connection) -> None:
        """BEGIN IMMEDIATE has done it."""


class SqliteConnection(Connection):
    lock = ""  # there is one writer at a time

    def __init__(self, path: str, begin: str, *pragmas: str) -> None:
        self._path = path
        self._begin = begin
        self._early = self._closed = False
        self._log: int | None = None
        self._syncing = threading.Lock()
        try:
            # Each connection has its thread; only close() may come from another one.
            self._db = sqlite3.connect(
                path, timeout=BUSY_MILLISECONDS / 1000, isolation_level=None, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise self._translate(error) from error
        try:
            if self._switch_to_wal() != [("wal",)]:
                raise StoreUnusable(f"{path} is on a file system without shared memory for WAL")
            for pragma in ("PRAGMA foreign_keys = ON", "PRAGMA trusted_schema = OFF", *pragmas):
                self.rows(pragma)
        except BaseException:
            self._db.close()
            raise

    def _switch_to_wal(self) -> list[Row]:
        """Unlike everything else this does not wait by itself while another process does the same."""
        deadline = time.monotonic() + BUSY_MILLISECONDS / 1000
        while True:
            try:
                return self.rows("PRAGMA journal_mode = WAL")
            except StoreUnavailable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)

    def rows(self, sql: str, parameters: Parameters = {}) -> list[Row]:  # noqa: B006
        try:
            return self._db.execute(sql, parameters).fetchall()
        except (sqlite3.Error, UnicodeEncodeError, OverflowError) as error:
            raise self._translate(error) from error

    def run(self, sql: str, parameters: Parameters = {}) -> int:  # noqa: B006
        try:
            return self._db.execute(sql, parameters).rowcount
        except (sqlite3.Error, UnicodeEncodeError, OverflowError) as error:
            raise self._translate(error) from error

    def begin(self, *, early: bool = False) -> None:
        if early is not self._early:
            self.run(f"PRAGMA synchronous = {'NORMAL' if early else 'FULL'}")
            self._early = early
        self.run(self._begin)

    def commit(self) -> None:
        self.run("COMMIT")

    def sync(self) -> None:
        try:
            with self._syncing:
                if self._closed:
                    raise OSError(errno.EBADF, "its connection is closed")
                if self._log is None:  # it is there since the first commit
                    self._log = os.open(f"{self._path}-wal", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                os.fdatasync(self._log)
        except OSError as error:
            raise StoreUnavailable(
                f"{self._path}: cannot be synced: {error.strerror}", detail={"written": "unknown"}
            ) from error

    def rollback(self) -> None:
        if self._db.in_transaction:  # it may have rolled back by itself
            self.run("ROLLBACK")

    def close(self) -> None:
        self._db.close()
        with self._syncing:
            self._closed = True
            if self._log is not None:
                os.close(self._log)
                self._log = None

    def _translate(self, error: Exception) -> Exception:
        if isinstance(error, UnicodeEncodeError | OverflowError):
            return InvalidRequest(f"a value that cannot be stored: {error}")
        code: Any = getattr(error, "sqlite_errorcode", None)
        if code is None:
            return error
        primary = code & 0xFF
        if primary == sqlite3.SQLITE_CONSTRAINT:
            return Conflict(f"the store refuses it: {error}")
        if primary in _UNUSABLE:
            return StoreUnusable(f"{self._path}: {error}", hint="restore it from a copy, or move it away")
        if primary == sqlite3.SQLITE_ERROR and not self._db.in_transaction and "savepoint" in str(error):
            return Aborted(str(error))
        if isinstance(error, sqlite3.OperationalError) and primary != sqlite3.SQLITE_ERROR:
            return StoreUnavailable(f"{self._path}: {error}", hint=_HINTS.get(primary, ""))
        return error
