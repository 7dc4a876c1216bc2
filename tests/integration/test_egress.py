"""The proxy between an environment's namespaces and an internet of our own."""

from __future__ import annotations

import pytest

from tests.integration.egress_world import in_a_network_of_its_own, world

pytestmark = pytest.mark.root
PUBLIC = "93.184.216.34"


def http(host: str, path: str = "/") -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode()


def test_a_name_that_is_allowed() -> None:
    async def main() -> None:
        async with world("allowlist", ["example.com"], names={"example.com": [PUBLIC]}) as it:
            error, heard = await it.ask("example.com", 80, http("example.com"))
            assert (error, heard[:15]) == ("", b"HTTP/1.1 200 OK")
            assert it.arrived == [(PUBLIC, 80)]
            assert it.ledger.opened == [("example.com", 80, PUBLIC)]

    in_a_network_of_its_own(main)


def test_a_name_that_is_not() -> None:
    async def main() -> None:
        names = {"example.com": [PUBLIC], "evil.example": [PUBLIC]}
        async with world("allowlist", ["example.com"], names=names) as it:
            error, _ = await it.ask("evil.example", 80, http("evil.example"))
            assert "gaierror" in error
            assert it.asked == []
            error, heard = await it.ask("example.com", 80, http("evil.example"))
            assert b"403 Forbidden" in heard
            assert b"was for something else" in heard
            error, _ = await it.ask(PUBLIC, 80, http("example.com"))
            assert it.arrived == []
            assert {(denial.host, denial.port) for denial in it.ledger.refused} == {
                ("evil.example", 0),
                ("example.com", 80),
                (PUBLIC, 80),
            }

    in_a_network_of_its_own(main)
