"""Which backend serves a request: never a weaker one than was asked for."""

from __future__ import annotations

import pytest

from skerry.backends.base import Capabilities
from skerry.backends.registry import Registry
from skerry.errors import IsolationUnavailable
from tests.unit.stubs import StubBackend


def backend(name: str, isolation: str, *, available: bool = True) -> StubBackend:
    made = StubBackend()
    made.name = name
    made.capabilities = lambda: Capabilities(isolation, available, f"{name} is not installed")  # type: ignore[method-assign]
    return made


def test_the_weakest_that_is_enough_is_taken() -> None:
    backends = [
        backend("vm", "microvm"),
        backend("ns", "namespace"),
        backend("gv", "gvisor"),
        backend("no", "none"),
    ]
    registry = Registry(backends)
    for isolation, name in (("namespace", "ns"), ("gvisor", "gv"), ("microvm", "vm")):
        assert registry.pick(isolation)[0].name == name


def test_more_than_was_asked_for_is_fine_and_less_never() -> None:
    assert Registry([backend("vm", "microvm")]).pick("namespace")[1].isolation == "microvm"
    for weaker in (backend("no", "none"), backend("ns", "namespace")):
        with pytest.raises(IsolationUnavailable, match="no backend that is installed gives it"):
            Registry([weaker]).pick("gvisor")


def test_what_stands_in_the_way_is_said() -> None:
    registry = Registry([backend("ns", "namespace"), backend("gv", "gvisor", available=False)])
    with pytest.raises(IsolationUnavailable, match="gv: gv is not installed") as caught:
        registry.pick("gvisor")
    assert "skerry doctor" in caught.value.hint


def test_a_backend_that_was_repaired_is_found() -> None:
    gv = backend("gv", "gvisor", available=False)
    registry = Registry([gv])
    with pytest.raises(IsolationUnavailable):
        registry.pick("gvisor")
    gv.capabilities = lambda: Capabilities("gvisor", True)  # type: ignore[method-assign]
    assert registry.pick("gvisor")[0] is gv


def test_the_operators_choice_serves_everything_and_says_what_it_is() -> None:
    found, capabilities = Registry([backend("fake", "none")], chosen=True).pick("microvm")
    assert (found.name, capabilities.isolation) == ("fake", "none")
