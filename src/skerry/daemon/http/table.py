"""All operations of the API, in the order of the documentation."""

from __future__ import annotations

from skerry.daemon.http import attach, documents, environments, events, executions, files, images, system

OPERATIONS = (
    *environments.OPERATIONS,
    *executions.OPERATIONS,
    *events.OPERATIONS,
    *attach.OPERATIONS,
    *files.OPERATIONS,
    *images.OPERATIONS,
    *system.OPERATIONS,
    *documents.OPERATIONS,
)
