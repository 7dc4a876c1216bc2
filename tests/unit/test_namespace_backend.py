"""The namespace backend, as far as no environment has to start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from skerry.backends.namespace import NamespaceBackend
from skerry.policy import GIB, Limits, Policy


@pytest.mark.parametrize("rootful", [True, False])
def test_without_root_a_pool_entry_keeps_its_memory_limit(rootful: bool) -> None:
    """The sizes of /tmp and /dev/shm follow the limit, and only root can change them."""
    backend: Any = SimpleNamespace(
        _rootful=rootful, _cgroups=SimpleNamespace(mode="v2"), workspace_kind=lambda policy: "disk"
    )
    small, large = (
        NamespaceBackend.fixed(backend, Policy(limits=Limits(memory=memory))) for memory in (GIB, 2 * GIB)
    )
    assert (small == large) == rootful
