"""Capacity that tenants share: bytes of the daemon's memory, or of its disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class SharedCapacity:
    """A tenant may hold at most as much as it leaves free, so one that takes all it can leaves some to the next."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: Counter[str] = Counter()

    @property
    def taken(self) -> int:
        return self._taken.total()

    def take(self, tenant: str, size: int) -> bool:
        """Reserve bytes for a tenant: False if they are not free. Release them with `give_back`."""
        if size and self._taken[tenant] + size > self._most - self.taken - size:
            return False
        self._taken[tenant] += size
        return True

    def give_back(self, tenant: str, size: int) -> None:
        self._taken[tenant] -= size
        if not self._taken[tenant]:
            del self._taken[tenant]

    @contextmanager
    def held(self, tenant: str, usual: int = 0) -> Iterator[Callable[[int], bool]]:
        """Yields a function that reserves more, as `take` does; all is released at the end of the block.

        The first `usual` bytes are not counted.
        """
        size = taken = 0

        def more(count: int) -> bool:
            nonlocal size, taken
            beyond = max(0, size + count - usual) - taken
            if not self.take(tenant, beyond):
                return False
            size += count
            taken += beyond
            return True

        try:
            yield more
        finally:
            self.give_back(tenant, taken)
