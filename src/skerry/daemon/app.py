"""The daemon put together: the only place where its objects are made and joined."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from skerry.backends.base import Backend
from skerry.backends.docker.backend import DockerBackend, DockerGvisorBackend
from skerry.backends.fake import FakeBackend
from skerry.backends.machine import Machine
from skerry.backends.microvm import MicrovmBackend
from skerry.backends.namespace import NamespaceBackend
from skerry.backends.oci import OciBackend
from skerry.backends.registry import Registry
from skerry.daemon import logs, pools
from skerry.daemon.auth import Authenticator
from skerry.daemon.doors import Door, UnixDoor
from skerry.daemon.http import table
from skerry.daemon.http.api import Api
from skerry.daemon.http.operations import Engine
from skerry.daemon.http.readiness import Readiness
from skerry.daemon.metrics import Metrics, WriteMetrics
from skerry.daemon.server import Server, listen, unlisten
from skerry.daemon.watchdog import Watchdog
from skerry.egress import presets
from skerry.egress.addresses import Address, Network, Ranges, parse_network
from skerry.errors import InvalidRequest, SkerryError
from skerry.fairness import budget
from skerry.host import space
from skerry.host.interfaces import own_addresses
from skerry.images.store import ImageStore
from skerry.languages import Languages
from skerry.manager.audit import retention
from skerry.manager.audit.trail import AuditTrail
from skerry.manager.code.programs import Programs
from skerry.manager.environments.manager import EnvironmentManager
from skerry.manager.environments.records import StoredRecords
from skerry.manager.executions.profiles import Profiles
from skerry.manager.tenants.quotas import Quotas
from skerry.manager.tenants.tokens import Tokens
from skerry.settings import Home
from skerry.store import Store

if TYPE_CHECKING:
    from skerry.daemon.grpc.server import GrpcServer

BACKENDS: dict[str, Callable[[Machine], Backend]] = {
    "namespace": NamespaceBackend,
    "oci": OciBackend,
    "docker": DockerBackend,
    "docker-runsc": DockerGvisorBackend,
    "microvm": MicrovmBackend,
}
IDLE_LOOK = 1.0
OWN_ADDRESSES_KEPT = 5.0
"""Seconds."""
SWEEP_EVERY = 10.0
RETAIN_EVERY = 3600.0

log = structlog.get_logger(component="daemon")


def make_registry(home: Home, backend: str | None) -> Registry:
    """All that isolate, or the one that the operator named. Raises InvalidRequest, IsolationUnavailable."""
    if backend is None:
        machine = Machine(home.path)
        return Registry(
            [
                NamespaceBackend(machine),
                OciBackend(machine),
                DockerBackend(machine),
                DockerGvisorBackend(machine),
                MicrovmBackend(machine),
            ]
        )
    if backend == FakeBackend.name:
        return Registry([FakeBackend(home.path)], chosen=True)
    if backend not in BACKENDS:
        known = ", ".join([*BACKENDS, FakeBackend.name])
        raise InvalidRequest(f"unknown backend {backend!r}", hint=f"known: {known}")
    return Registry([BACKENDS[backend](Machine(home.path))], chosen=True)


def make_ranges(home: Home) -> Ranges:
    """What counts as public here. Raises InvalidRequest."""

    def networks(variable: str) -> tuple[Network, ...]:
        return tuple(parse_network(text, variable) for text in home.ranges(variable))

    known: frozenset[Address] = frozenset()
    until = 0.0

    def own() -> frozenset[Address]:
        nonlocal known, until
        if time.monotonic() >= until:
            known, until = own_addresses(), time.monotonic() + OWN_ADDRESSES_KEPT
        return known

    return Ranges(networks("SKERRY_PUBLIC_RANGES"), networks("SKERRY_INTERNAL_RANGES"), own)


async def serve(
    home: Home,
    ready: Callable[[Sequence[str]], None],
    *,
    doors: Sequence[Door] = (),
    grpc: Sequence[str] = (),
    tls: tuple[str, str] | None = None,
    backend: str | None,
    idle_exit: float | None,
) -> None:
    """Recover, serve until told to stop (or idle for `idle_exit` seconds). Raises SkerryError.

    `doors` are open beside the unix socket; gRPC is served at the addresses `grpc`, over TLS if its files are given.
    `ready` is called with the bound addresses of gRPC. SIGTERM leaves the environments to the next daemon; any other
    end deletes them.
    """
    space.check_settings()
    retention.days()
    profiles = Profiles.load(home.path)
    images = ImageStore(Path(home.images))
    registry = make_registry(home, backend)
    store = await Store.open(home.database)
    metrics = Metrics()
    budget().charged = metrics.accounts.charge
    watchdog = Watchdog()
    metrics.others.append(watchdog.lines)
    records = StoredRecords(store, home.identity(), WriteMetrics(metrics))
    manager = _make_manager(home, registry, images, records, profiles)
    stop = _Stop(manager)
    tokens, quotas, trail = Tokens(store), Quotas(store, manager.isolation.forget), AuditTrail(store)
    authenticator = Authenticator(tokens)
    code = Programs(manager, images, home.path)
    readiness = Readiness(manager, store, home.path)
    engine = Engine(
        manager, code, images, tokens, quotas, trail, authenticator, home, readiness, metrics, stop.deleting
    )
    api = Api(engine, table.OPERATIONS)
    grpc_server = _grpc_server(api, engine, grpc, tls) if grpc else None
    await asyncio.to_thread(images.sweep)
    await manager.recover()
    server = Server(api, [UnixDoor(listen(home)), *doors])
    if grpc_server is not None:
        await grpc_server.start()
    stop.on_signals()
    server.start()
    ready(grpc_server.addresses if grpc_server is not None else ())
    work = [_sweep(home, manager, code), _retain(trail), authenticator.watch()]
    if idle_exit:
        work.append(_idle(server, manager, idle_exit, stop.deleting))
    tasks = [asyncio.create_task(each) for each in work]
    try:
        await stop.requested.wait()
    finally:
        for task in tasks:
            task.cancel()
        watchdog.close()
        unlisten(home)
        server.close_doors()
        try:
            await _end_environments(manager, code, keep=stop.keep)
        finally:
            await asyncio.gather(server.stop(), *((grpc_server.stop(),) if grpc_server is not None else ()))
            with contextlib.suppress(SkerryError):
                await authenticator.note_use()
            await store.close()


def _make_manager(
    home: Home, registry: Registry, images: ImageStore, records: StoredRecords, profiles: Profiles
) -> EnvironmentManager:
    """Raises InvalidRequest."""
    return EnvironmentManager(
        registry,
        images,
        records,
        ranges=make_ranges(home),
        preset=partial(presets.preset, home=home),
        pools=pools.load(home, Languages(home.path).list()),
        profiles=profiles,
    )


async def _end_environments(manager: EnvironmentManager, code: Programs, *, keep: bool) -> None:
    """Delete the environments, or leave them to the next daemon."""
    manager.refuse()
    if len(manager):
        what = "left to the next daemon" if keep else "deleted"
        log.warning(f"stopping: all environments are {what}", environments=len(manager))
    await code.close()
    await manager.close(keep=keep)


class _Stop:
    """Ends the daemon. Creates are refused from the request on."""

    def __init__(self, manager: EnvironmentManager) -> None:
        self._manager = manager
        self.requested = asyncio.Event()
        self.keep = False
        """Leave the environments to the next daemon."""

    def deleting(self) -> None:
        self._manager.refuse()
        self.requested.set()

    def keeping(self) -> None:
        self.keep = True
        self.deleting()

    def on_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.keeping)
        loop.add_signal_handler(signal.SIGINT, self.deleting)


def _grpc_server(
    api: Api, engine: Engine, addresses: Sequence[str], tls: tuple[str, str] | None
) -> GrpcServer:
    """Raises InvalidRequest."""
    # What is started from here executes another program at once: gRPC need not prepare for a fork.
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    try:
        from skerry.daemon.grpc.server import GrpcServer
    except ImportError as error:
        raise InvalidRequest(f"cannot serve gRPC: {error}", hint="pip install 'skerry[grpc]'") from error
    return GrpcServer(api, api.admit, table.OPERATIONS, engine.readiness.check, addresses, tls)


async def _sweep(home: Home, manager: EnvironmentManager, code: Programs) -> None:
    while True:
        await asyncio.sleep(SWEEP_EVERY)
        try:
            await manager.reconcile()
            await code.tend()
            logs.turn_over(home.log)
        except (SkerryError, OSError) as error:
            log.error("sweep failed", error=str(error))


async def _retain(trail: AuditTrail) -> None:
    while True:
        try:
            await trail.retain()
        except SkerryError as error:
            log.error("audit not pruned", error=str(error))
        await asyncio.sleep(RETAIN_EVERY)


async def _idle(
    server: Server, manager: EnvironmentManager, seconds: float, stop: Callable[[], None]
) -> None:
    loop = asyncio.get_running_loop()
    since, served = loop.time(), server.served
    while loop.time() - since < seconds:
        await asyncio.sleep(min(IDLE_LOOK, seconds))
        if len(manager) or server.busy or server.served != served:
            since, served = loop.time(), server.served
    log.info("idle: nobody needs this daemon any more")
    stop()
