"""All operations of the API, in the order of the documentation."""

from __future__ import annotations

from skerry.daemon.http import (
    attach,
    audit,
    code,
    documents,
    environments,
    events,
    executions,
    files,
    images,
    metrics,
    network,
    pools,
    sessions,
    system,
    tenants,
)

OPERATIONS = (
    *environments.OPERATIONS,
    *executions.OPERATIONS,
    *events.OPERATIONS,
    *attach.OPERATIONS,
    *code.OPERATIONS,
    *sessions.OPERATIONS,
    *files.OPERATIONS,
    *network.OPERATIONS,
    *images.OPERATIONS,
    *pools.OPERATIONS,
    *tenants.OPERATIONS,
    *audit.OPERATIONS,
    *system.OPERATIONS,
    *metrics.OPERATIONS,
    *documents.OPERATIONS,
)
