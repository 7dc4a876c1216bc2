"""Postgres: one database for several daemons. Needs psycopg 3 (the extra `postgres`)."""

from __future__ import annotations

import re
from enum import StrEnum
from functools import cache

from skerry.errors import Conflict, InvalidRequest, StoreUnavailable, StoreUnusable
from skerry.store.connection import Aborted, Connection, Database, Parameters, Row

try:
    import psycopg
    from psycopg.types.string import StrDumper
except ImportError as error:
    raise StoreUnusable(
        "a Postgres store needs psycopg", hint="pip install 'skerry[postgres]', or use SQLite"
    ) from error

MIGRATION_LOCK = 0x736B6572  # "sker"
CONNECT_SECONDS = 5
# A daemon that stands still must not hold the locks of the others for long, nor a dead server hold us.
_SETTINGS = """
    SET statement_timeout = '15s';
    SET idle_in_transaction_session_timeout = '30s';
    SET synchronous_commit = on;
"""
_PARAMETER = re.compile(r":([a-z_][a-z_0-9]*)")


@cache
def _native(sql: str) -> str:
    """`:name` as psycopg writes it."""
    return _PARAMETER.sub(r"%(\1)s", sql.replace("%", "%%"))


class PostgresDatabase(Database):
    def __init__(self, url: str) -> None:
        self._url = url

    def writer(self, *, repair: bool = False) -> Connection:
        return PostgresConnection(self._url, "BEGIN")

    def reader(self) -> Connection:
        return PostgresConnection(self._url, "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")

    def lock_schema(self, tx: Connection) -> None:
        tx.rows("SELECT pg_advisory_xact_lock(:lock)", {"lock": MIGRATION_LOCK})


class PostgresConnection(Connection):
    lock = " FOR UPDATE"

    def __init__(self, url: str, begin: str) -> None:
        self._begin = begin
        try:
            self._db = psycopg.connect(
                url,
                autocommit=True,
                connect_timeout=CONNECT_SECONDS,
                tcp_user_timeout=15000,
                application_name="skerry",
                client_encoding="UTF8",
            )
        except psycopg.ProgrammingError:  # which may quote the URL
            raise InvalidRequest("not a URL that Postgres understands") from None
        except psycopg.Error as error:
            raise _translate(error) from error
        try:
            self._db.adapters.register_dumper(StrEnum, StrDumper)
            if self._db.info.parameter_status("server_encoding") != "UTF8":
                raise StoreUnusable("the Postgres database does not have the encoding UTF8")
            self.run(_SETTINGS)
        except BaseException:
            self._db.close()
            raise

    def rows(self, sql: str, parameters: Parameters = {}) -> list[Row]:  # noqa: B006
        try:
            return self._db.execute(_native(sql), parameters).fetchall()
        except (psycopg.Error, UnicodeEncodeError) as error:
            raise _translate(error) from error

    def run(self, sql: str, parameters: Parameters = {}) -> int:  # noqa: B006
        try:
            return self._db.execute(_native(sql), parameters).rowcount
        except (psycopg.Error, UnicodeEncodeError) as error:
            raise _translate(error) from error

    def begin(self, *, early: bool = False) -> None:
        self.run(self._begin)

    def commit(self) -> None:
        try:
            # A transaction that had failed would be rolled back by COMMIT without an error.
            if self._db.execute("COMMIT").statusmessage != "COMMIT":
                raise Aborted("the transaction had failed")
        except psycopg.Error as error:
            translated = _translate(error)
            if self._db.broken and isinstance(translated, StoreUnavailable):
                translated.detail["written"] = "unknown"
            raise translated from error

    def sync(self) -> None:
        """COMMIT has done it."""

    def rollback(self) -> None:
        self.run("ROLLBACK")

    def close(self) -> None:
        self._db.close()


def _translate(error: Exception) -> Exception:
    if isinstance(error, psycopg.errors.DeadlockDetected | psycopg.errors.SerializationFailure):
        return Aborted(str(error))
    if isinstance(error, psycopg.DataError | UnicodeEncodeError):
        return InvalidRequest(f"a value that cannot be stored: {error}")
    if isinstance(error, psycopg.IntegrityError):
        return Conflict(f"the store refuses it: {error.diag.message_primary or error}")
    if isinstance(error, psycopg.OperationalError | psycopg.errors.ReadOnlySqlTransaction):
        return StoreUnavailable(f"Postgres: {_one_line(error)}", hint="is the server of this URL running?")
    return error


def _one_line(error: psycopg.Error) -> str:
    return " ".join((error.diag.message_primary or str(error)).split())
