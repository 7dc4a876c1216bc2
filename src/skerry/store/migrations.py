"""The schema, as the ordered list of changes that made it.

A migration that was released is never edited; a change is a new one at the end. Statements must be understood
by SQLite and by Postgres alike. All that is missing runs in one transaction, so a schema is never half made.
"""

from __future__ import annotations

from skerry.errors import StoreUnusable
from skerry.store.connection import Connection, Database

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """
        CREATE TABLE environments (
            id TEXT NOT NULL PRIMARY KEY,
            tenant TEXT NOT NULL,
            host TEXT NOT NULL,
            backend TEXT NOT NULL,
            name TEXT NOT NULL,
            state TEXT NOT NULL CHECK (state IN ('creating', 'running', 'deleting', 'ended')),
            image TEXT NOT NULL,
            image_digest TEXT NOT NULL,
            isolation TEXT NOT NULL,
            policy TEXT NOT NULL,
            variables TEXT NOT NULL,
            cpus DOUBLE PRECISION NOT NULL,
            memory BIGINT NOT NULL,
            lifetime DOUBLE PRECISION NOT NULL,
            idle DOUBLE PRECISION NOT NULL,
            created_at DOUBLE PRECISION NOT NULL,
            active_at DOUBLE PRECISION NOT NULL,
            expires_at DOUBLE PRECISION NOT NULL,
            boot_id TEXT NOT NULL,
            instance TEXT NOT NULL,
            created_by TEXT NOT NULL,
            usage TEXT,
            ended_at DOUBLE PRECISION,
            ended_reason TEXT NOT NULL,
            outcome TEXT NOT NULL
        )
        """,
        """
        CREATE UNIQUE INDEX environments_name ON environments (tenant, name)
        WHERE name <> '' AND state <> 'ended'
        """,
        "CREATE INDEX environments_pages ON environments (tenant, created_at, id)",
        "CREATE INDEX environments_live ON environments (host) WHERE state <> 'ended'",
        "CREATE INDEX environments_ended ON environments (ended_at) WHERE state = 'ended'",
        """
        CREATE TABLE idempotency_keys (
            tenant TEXT NOT NULL,
            key TEXT NOT NULL,
            body_hash TEXT NOT NULL,
            environment_id TEXT NOT NULL,
            created_at DOUBLE PRECISION NOT NULL,
            PRIMARY KEY (tenant, key)
        )
        """,
        """
        CREATE TABLE executions (
            id TEXT NOT NULL PRIMARY KEY,
            environment_id TEXT NOT NULL REFERENCES environments (id) ON DELETE CASCADE,
            command TEXT NOT NULL,
            process BIGINT NOT NULL,
            detail TEXT NOT NULL,
            started_at DOUBLE PRECISION NOT NULL,
            ended_at DOUBLE PRECISION,
            outcome TEXT NOT NULL,
            exit_code BIGINT
        )
        """,
        "CREATE INDEX executions_environment ON executions (environment_id, started_at)",
        "CREATE INDEX executions_running ON executions (environment_id) WHERE ended_at IS NULL",
        "CREATE INDEX executions_ended ON executions (ended_at) WHERE ended_at IS NOT NULL",
        """
        CREATE TABLE tokens (
            id TEXT NOT NULL PRIMARY KEY,
            tenant TEXT NOT NULL,
            name TEXT NOT NULL,
            verbs TEXT NOT NULL,
            digest TEXT NOT NULL,
            created_at DOUBLE PRECISION NOT NULL,
            expires_at DOUBLE PRECISION,
            revoked_at DOUBLE PRECISION,
            last_used_at DOUBLE PRECISION
        )
        """,
        """
        CREATE TABLE quotas (
            tenant TEXT NOT NULL PRIMARY KEY,
            environments BIGINT,
            cpus DOUBLE PRECISION,
            memory BIGINT
        )
        """,
        """
        CREATE TABLE audit (
            tenant TEXT NOT NULL,
            seq BIGINT NOT NULL,
            at DOUBLE PRECISION NOT NULL,
            kind TEXT NOT NULL CHECK (kind IN ('intent', 'result', 'denial', 'lifecycle')),
            action TEXT NOT NULL,
            request_id TEXT NOT NULL,
            trace_id TEXT NOT NULL,
            token TEXT NOT NULL,
            peer TEXT NOT NULL,
            environment_id TEXT NOT NULL,
            backend TEXT NOT NULL,
            isolation TEXT NOT NULL,
            image_digest TEXT NOT NULL,
            detail TEXT NOT NULL,
            outcome TEXT NOT NULL,
            usage TEXT,
            hash TEXT NOT NULL,
            PRIMARY KEY (tenant, seq)
        )
        """,
        "CREATE INDEX audit_environment ON audit (tenant, environment_id, seq)",
        """
        CREATE TABLE audit_heads (
            tenant TEXT NOT NULL PRIMARY KEY,
            seq BIGINT NOT NULL,
            hash TEXT NOT NULL
        )
        """,
    ),
    (
        "ALTER TABLE environments ADD COLUMN disk BIGINT NOT NULL DEFAULT 0",
        "ALTER TABLE quotas ADD COLUMN disk BIGINT",
        """
        CREATE TABLE kept (
            host TEXT NOT NULL,
            tenant TEXT NOT NULL,
            kind TEXT NOT NULL,
            bytes BIGINT NOT NULL,
            PRIMARY KEY (host, tenant, kind)
        )
        """,
        """
        CREATE TABLE audit_anchors (
            tenant TEXT NOT NULL PRIMARY KEY,
            seq BIGINT NOT NULL,
            hash TEXT NOT NULL
        )
        """,
    ),
    ("ALTER TABLE quotas ADD COLUMN isolation TEXT",),
)


def migrate(database: Database, tx: Connection) -> None:
    """Bring the schema up to date.

    Raises StoreUnusable (a newer Skerry made it), StoreUnavailable, and leaves it to the caller to close the
    connection then, which takes everything back.
    """
    tx.begin()
    database.lock_schema(tx)
    tx.run("CREATE TABLE IF NOT EXISTS schema_version (version BIGINT NOT NULL)")
    found = tx.rows("SELECT version FROM schema_version")
    version = found[0][0] if found else 0
    if version > len(MIGRATIONS):
        raise StoreUnusable(
            f"the store has schema version {version}, and this Skerry knows {len(MIGRATIONS)}",
            hint="run the newer Skerry that made it, or give this one a store of its own",
        )
    if version < len(MIGRATIONS):
        for migration in MIGRATIONS[version:]:
            for statement in migration:
                tx.run(statement)
        tx.run("DELETE FROM schema_version")
        tx.run("INSERT INTO schema_version (version) VALUES (:version)", {"version": len(MIGRATIONS)})
    tx.commit()
