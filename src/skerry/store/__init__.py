"""What outlives the daemon: environments, executions, tokens, quotas and the audit, in SQLite or Postgres.

`Store` opens a database; the other modules are functions of an open transaction, to be combined at will:

    await store.write(lambda tx: (environments.insert(tx, record), audit.append(tx, tenant, [entry])))

Only this package speaks SQL.
"""

from __future__ import annotations

from skerry.store import audit, environments, executions, quotas, retention, tokens
from skerry.store.connection import Connection
from skerry.store.store import Store
from skerry.store.writer import Written

__all__ = [
    "Connection",
    "Store",
    "Written",
    "audit",
    "environments",
    "executions",
    "quotas",
    "retention",
    "tokens",
]
