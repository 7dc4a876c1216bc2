"""The names that the daemon looks up by its own resolver."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from skerry.egress.resolver import ADDRESSES_MAX, resolve


def test_a_name_with_thousands_of_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of names may answer with 64 KiB of them. Those that are never tried are not looked at either."""

    def found(*_: Any, **__: Any) -> list[Any]:
        places: list[Any] = [(f"93.184.{number >> 8}.{number & 255}", 0) for number in range(4000)]
        return [(None, None, None, "", place) for place in (*places[:1], *places, ("fe80::1%lo", 0, 0, 1))]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    addresses = asyncio.run(resolve("a.example"))
    assert [str(address) for address in addresses] == [
        f"93.184.0.{number}" for number in range(ADDRESSES_MAX)
    ]
