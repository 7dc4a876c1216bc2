"""The machine's own registries, as seen by a daemon in a network of its own."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from skerry.egress.presets import preset
from skerry.errors import SkerryError
from skerry.settings import Home
from tests import support
from tests.integration.daemon import Daemon, started
from tests.integration.internet import in_a_network_of_its_own, internet, relayed


def registries(home: Path, *names: str) -> dict[str, str]:
    """The hosts of presets, and their addresses, by the machine's own resolver."""
    found = {}
    for name in names:
        try:
            rules = preset(name, Home(str(home))).rules
        except SkerryError as error:
            support.missing(f"{name}: {error}")
        for rule in rules:
            host = rule.partition(":")[0]
            try:
                found[host] = str(socket.getaddrinfo(host, 443, socket.AF_INET)[0][4][0])
            except OSError:
                support.missing(f"no registry for {name} can be reached")
    return found


def public(hosts: Mapping[str, str]) -> str:
    """For SKERRY_PUBLIC_RANGES: wherever the registries are, they may be reached."""
    return ",".join(f"{address}/32" for address in hosts.values())


def with_python_packages(folder: Path, test: Callable[[Daemon], None]) -> None:
    """Run a test with a daemon that reaches what `python-packages` names, and nothing else."""
    with support.temporary_home() as home:
        hosts = registries(home, "python-packages")
        places = {(address, 443) for address in hosts.values()}
        with relayed(places, folder) as there, pytest.MonkeyPatch.context() as patch:

            def body() -> None:
                with internet(set(hosts.values()), ports=(), also=there) as outside:
                    outside.names = dict(hosts)
                    patch.setenv("SKERRY_PUBLIC_RANGES", public(hosts))
                    with started(home) as daemon:
                        test(daemon)

            in_a_network_of_its_own(body)
