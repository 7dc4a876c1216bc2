"""Which backend serves a request: never a weaker one than was asked for."""

from __future__ import annotations

import asyncio

import pytest

from skerry.backends import registry
from skerry.backends.base import Capabilities
from skerry.backends.registry import Registry
from skerry.errors import ImageNotFound, InvalidRequest, IsolationUnavailable
from skerry.images.progress import Report
from skerry.images.store import Image
from tests.unit.stubs import StubBackend, asynchronous, until


def backend(name: str, isolation: str, *, available: bool = True) -> StubBackend:
    made = StubBackend()
    made.name, made.isolation = name, isolation
    repair(made, available=available)
    return made


def repair(broken: StubBackend, *, available: bool = True) -> None:
    async def capabilities() -> Capabilities:
        return Capabilities(available, "" if available else f"{broken.name} is not installed")

    broken.capabilities = capabilities  # type: ignore[method-assign]


@asynchronous
async def test_the_weakest_that_is_enough_is_taken() -> None:
    backends = [
        backend("vm", "microvm"),
        backend("ns", "namespace"),
        backend("gv", "gvisor"),
        backend("no", "none"),
    ]
    found = Registry(backends)
    for isolation, name in (("namespace", "ns"), ("gvisor", "gv"), ("microvm", "vm")):
        assert (await found.pick(isolation))[0].name == name


@asynchronous
async def test_more_than_was_asked_for_is_fine_and_less_never() -> None:
    assert (await Registry([backend("vm", "microvm")]).pick("namespace"))[0].isolation == "microvm"
    for weaker in (backend("no", "none"), backend("ns", "namespace")):
        with pytest.raises(IsolationUnavailable, match="no backend that is installed gives it"):
            await Registry([weaker]).pick("gvisor")


@asynchronous
async def test_what_stands_in_the_way_is_said() -> None:
    found = Registry([backend("ns", "namespace"), backend("gv", "gvisor", available=False)])
    with pytest.raises(IsolationUnavailable, match="gv: gv is not installed") as caught:
        await found.pick("gvisor")
    assert "skerry doctor" in caught.value.hint


@asynchronous
async def test_a_backend_that_was_repaired_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "PROBE_AGAIN", 0.0)
    gv = backend("gv", "gvisor", available=False)
    found = Registry([gv])
    with pytest.raises(IsolationUnavailable):
        await found.pick("gvisor")
    repair(gv)
    with pytest.raises(IsolationUnavailable):  # known by now: this request does not wait for a look
        await found.pick("gvisor")
    await until(lambda: found.known("gvisor") is gv)
    assert (await found.pick("gvisor"))[0] is gv


@asynchronous
async def test_a_backend_that_stopped_working_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "PROBE_AGAIN", 0.0)
    gv, vm = backend("gv", "gvisor"), backend("vm", "microvm")
    found = Registry([gv, vm])
    assert (await found.pick("gvisor"))[0] is gv
    repair(gv, available=False)
    found.doubt(gv)
    await vm.capabilities()
    await found.pick("microvm")
    await until(lambda: found.known("gvisor") is vm)


@asynchronous
async def test_no_request_waits_for_the_probe_of_what_it_does_not_need() -> None:
    never = asyncio.Event()
    ns, slow = backend("ns", "namespace"), backend("gv", "gvisor")

    async def hangs() -> Capabilities:
        await never.wait()
        return Capabilities(True)

    slow.capabilities = hangs  # type: ignore[method-assign]
    found = Registry([slow, ns])
    found.begin()
    assert (await found.pick("namespace"))[0] is ns
    asked = asyncio.create_task(found.pick("gvisor"))
    await asyncio.sleep(0)
    assert not asked.done()
    never.set()
    assert (await asked)[0] is slow
    await found.close()


@asynchronous
async def test_the_weakest_is_probed_at_once_and_the_others_later(monkeypatch: pytest.MonkeyPatch) -> None:
    ns, gv = backend("ns", "namespace"), backend("gv", "gvisor")
    found = Registry([gv, ns])
    found.begin()
    await until(lambda: found.known("namespace") is ns)
    assert found.known("gvisor") is None
    await found.close()
    monkeypatch.setattr(registry, "PROBE_AFTER", 0.0)
    found = Registry([gv, ns])
    found.begin()
    await until(lambda: found.known("gvisor") is gv)
    await found.close()


@asynchronous
async def test_what_a_probe_would_change_is_probed_by_the_first_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "PROBE_AFTER", 0.0)
    ns, foreign, vm = backend("ns", "namespace"), backend("foreign", "gvisor"), backend("vm", "microvm")
    foreign.ahead = False
    found = Registry([ns, foreign, vm])
    found.begin()
    await until(lambda: found.known("microvm") is vm)
    assert found.known("gvisor") is None
    assert (await found.pick("gvisor"))[0] is foreign
    await found.close()


@asynchronous
async def test_the_operators_choice_serves_everything_and_says_what_it_is() -> None:
    found, _ = await Registry([backend("fake", "none")], chosen=True).pick("microvm")
    assert (found.name, found.isolation) == ("fake", "none")


@asynchronous
async def test_preferences_are_tried_in_their_order() -> None:
    ns, gv, vm = backend("ns", "namespace"), backend("gv", "gvisor"), backend("vm", "microvm")
    assert (await Registry([ns, gv, vm]).pick("microvm,gvisor"))[0] is vm
    repair(vm, available=False)
    assert (await Registry([ns, gv, vm]).pick("microvm,gvisor"))[0] is gv
    repair(gv, available=False)
    with pytest.raises(IsolationUnavailable, match=r"vm: vm is not installed; gv: gv is not installed"):
        await Registry([ns, gv, vm]).pick("microvm,gvisor")


@asynchronous
async def test_a_backend_that_is_named_serves_alone_and_never_with_less() -> None:
    ns, gv, vm = backend("ns", "namespace"), backend("gv", "gvisor"), backend("vm", "microvm")
    found = Registry([ns, gv, vm])
    assert (await found.pick("namespace", "vm"))[0] is vm
    repair(vm, available=False)
    with pytest.raises(IsolationUnavailable, match="vm: vm is not installed"):
        await Registry([ns, gv, vm]).pick("namespace", "vm")
    with pytest.raises(IsolationUnavailable, match="backend 'ns' gives isolation 'namespace', not 'gvisor'"):
        await found.pick("gvisor", "ns")
    with pytest.raises(InvalidRequest, match="unknown backend 'xen'") as caught:
        await found.pick("namespace", "xen")
    assert "ns, gv, vm" in caught.value.hint


class _Source:
    """Images that a backend has itself."""

    async def find(self, name: str) -> Image:
        raise ImageNotFound(name)

    async def pull(self, name: str, report: Report) -> Image:
        raise ImageNotFound(name)


@asynchronous
async def test_an_image_of_an_engine_goes_to_a_backend_of_an_engine() -> None:
    ns, gv, vm = backend("ns", "namespace"), backend("gv", "gvisor"), backend("vm", "microvm")
    engine, enclosed = backend("engine", "namespace"), backend("enclosed", "gvisor")
    engine.images = enclosed.images = _Source()
    found = Registry([ns, gv, vm, engine, enclosed])
    image = "docker://python"
    assert (await found.pick("namespace", image=image))[0] is engine
    assert (await found.pick("gvisor", image=image))[0] is enclosed
    assert (await found.pick("microvm,gvisor", image=image))[0] is enclosed
    assert found.known("namespace", image) is engine
    assert (await found.pick("namespace", image="python"))[0] is ns
    with pytest.raises(InvalidRequest, match="backend 'ns' cannot run docker://python") as caught:
        await found.pick("namespace", "ns", image)
    assert "'docker'" in caught.value.hint
    with pytest.raises(IsolationUnavailable, match="no backend here that gives isolation 'microvm'"):
        await found.pick("microvm", image=image)
    with pytest.raises(IsolationUnavailable, match="runs images of a Docker Engine"):
        await Registry([ns], chosen=True).pick("namespace", image=image)
    repair(enclosed, available=False)
    with pytest.raises(IsolationUnavailable, match="enclosed: enclosed is not installed"):
        await Registry([gv, enclosed]).pick("gvisor", image=image)
