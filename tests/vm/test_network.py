"""An environment can have a network where the kernel has no IPv6."""

from __future__ import annotations

import json

import pytest

from tests.vm.machine import VirtualMachine

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


@pytest.mark.parametrize("user", ["root", "tester"])
def test_without_ipv6(vm: VirtualMachine, user: str) -> None:
    code = "import socket; socket.socket(socket.AF_INET6)"
    assert "not supported by protocol" in vm.run(["python3", "-c", code], user=user).stdout
    checks = json.loads(vm.run(["python3", "-m", "skerry.daemon.doctor", "--json"], user=user).stdout)[
        "checks"
    ]
    (network,) = [check for check in checks if check["name"] == "network"]
    assert network["status"] == "ok", network
