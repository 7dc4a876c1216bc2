"""`python -m benchmarks`: measures everything in one run and writes results.json, README.md and docs/benchmarks.md."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import skerry
from benchmarks import (
    baselines,
    code,
    dockerd,
    egress,
    neighbours,
    neighbours_table,
    ours,
    pages,
    promises,
    report,
    rungs,
    service,
)
from benchmarks.dockerd import Unavailable
from benchmarks.measure import Subject, Summary, take_turns

RESULTS = Path(__file__).resolve().parent / "results.json"


class Collected:
    """The subjects that are available on this machine, and why the others are not."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.subjects: list[Subject] = []
        self.missing: dict[str, str] = {}
        self.versions: list[str] = []

    def add(self, name: str, make: Callable[[], AbstractContextManager[list[Subject]]]) -> None:
        try:
            self.subjects += self.stack.enter_context(make())
        except Unavailable as error:
            self.missing[name] = str(error)

    def add_baselines(self, folder: Path) -> None:
        self.add("bare processes", lambda: nullcontext(baselines.bare()))
        self.add("bubblewrap", lambda: nullcontext(baselines.bubblewrap()))
        self.add("runc", lambda: nullcontext(baselines.runc(folder / "runc")))
        try:
            docker = self.stack.enter_context(dockerd.running(folder / "docker"))
        except Unavailable as error:
            self.missing["Docker and llm-sandbox"] = str(error)
            return
        self.add("Docker", lambda: baselines.docker(docker))
        self.versions.append(docker.description)
        self.add("llm-sandbox", lambda: baselines.llm_sandbox(docker))
        if "llm-sandbox" not in self.missing:
            self.versions.append(f"llm-sandbox {version('llm-sandbox')}")

    def add_skerry(self, client: skerry.Client, folder: Path) -> None:
        self.add("Skerry", lambda: ours.subjects(client))
        self.add("programs in Python", lambda: code.python(client))
        self.add("programs in Go", lambda: code.go(client, folder / "go"))
        self.add("audit", lambda: service.intent(folder))


def measure(rounds: int, environments: int) -> int:
    """Measures, prints and writes everything. Returns the number of missed promises."""
    results: dict[str, Any] = {"machine": report.machine(), "notes": ""}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="skerry-bench-", dir="/tmp")))
        for name in ("runc", "docker", "go"):
            (folder / name).mkdir()
        found = Collected(stack)
        found.add_baselines(folder)
        if found.versions:
            results["notes"] = f"{', '.join(found.versions)}, no network."
        client = stack.enter_context(ours.daemon(str(folder / "home")))
        found.add_skerry(client, folder)
        times = take_turns(found.subjects, rounds, lambda n: _progress(f"round {n} of {rounds}"))
        results |= _throughput(client, environments)
    results["rungs"] = _rungs(rungs.ROUNDS)
    try:
        results["neighbours"] = _neighbours()
    except Unavailable as error:
        found.missing["noisy neighbours"] = str(error)
    results["missing"] = found.missing
    results["times"] = {key: asdict(summary) for key, summary in times.items()}

    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    pages.write_speed(results, times)
    return _print(results, times)


def _throughput(client: skerry.Client, environments: int) -> dict[str, Any]:
    """What is measured once, after the rounds: latencies by door, throughput, memory, egress."""
    results: dict[str, Any] = {}
    token = client.create_token("benchmarks")["token"]
    with skerry.Client(url=ours.URL, token=token) as remote:
        results["doors"] = {
            "unix socket": _measure_door(client, skerry.AsyncClient),
            "TCP and a token": _measure_door(remote, lambda: skerry.AsyncClient(url=ours.URL, token=token)),
        }
    _progress("programs in Python, one after the other")
    results["code"] = asyncio.run(code.many(600, 8))
    results["code"]["without"] = code.many_without(300, 8)
    _progress("idle memory")
    results |= ours.idle_memory()
    _progress(f"{environments} environments at once")
    results["many"] = ours.many(client, environments)
    _progress("egress")
    results["egress"] = egress.measure(3)
    _progress("")
    return results


def _measure_door(client: skerry.Client, make: Callable[[], skerry.AsyncClient]) -> dict[str, Any]:
    _progress("calls one by one")
    alone = service.latencies(client)
    _progress(f"{service.CLIENTS} clients at once")
    return {"alone": alone, "together": asyncio.run(service.together(make))}


def _neighbours() -> dict[str, Any]:
    """Measures the noisy-neighbour table and writes it to docs/benchmarks.md. Raises Unavailable."""
    state = f"{report.machine()}. Load average before: {os.getloadavg()[0]:.1f}."
    cells = neighbours.measure(progress=_progress)
    _progress("")
    pages.replace(pages.PAGE, "neighbours", f"{state}\n\n{neighbours_table.markdown(cells)}")
    return {"state": state, "cells": cells}


def measure_neighbours(arguments: argparse.Namespace) -> int:
    """Measures the noisy-neighbour table alone. Files are written only for a whole table."""
    if arguments.attack or arguments.attackers or arguments.cell_rounds:
        counts = arguments.attackers or neighbours.COUNTS
        cells = neighbours.measure(
            arguments.cell_rounds or neighbours.ROUNDS, arguments.attack or (), counts, _progress
        )
        _progress("")
    else:
        results = json.loads(RESULTS.read_text())
        results["neighbours"] = _neighbours()
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")
        cells = results["neighbours"]["cells"]
    print(neighbours_table.markdown(cells))
    broken = neighbours_table.missed(cells)
    for line in broken:
        print(f"  MISSED  {line}")
    return len(broken)


def _rungs(rounds: int) -> dict[str, Any]:
    """Measures all backends side by side and writes the table to docs/benchmarks.md."""
    found = rungs.measure(rounds, _progress)
    _progress("")
    pages.replace(pages.PAGE, "rungs", f"{report.machine()}.\n\n{rungs.markdown(found)}")
    return found


def measure_rungs(rounds: int) -> int:
    results = json.loads(RESULTS.read_text())
    results["rungs"] = _rungs(rounds)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    print(rungs.markdown(results["rungs"]))
    return 0


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _print(results: dict[str, Any], times: dict[str, Summary]) -> int:
    """Prints all results. Returns the number of missed promises; missed goals do not count."""
    for title, group in report.rows(times):
        print(f"\n{title}")
        for what, middle, high, ratio in group:
            print(f"  {what.replace('`', '').replace('*', ''):<48}  {middle:>9}  {high:>9}  {ratio}".rstrip())
    print()
    for title, calls in report.service(results):
        print(f"{title:<36}  {'median':>10}  {'p95':>10}  {'p99':>10}  {'a second':>8}")
        for what, middle, high, higher, rate in calls:
            print(f"  {what:<34}  {middle:>10}  {high:>10}  {higher:>10}  {rate:>8}".rstrip())
        print()
    facts = [*report.beside_llm_sandbox(times), *report.facts(results)]
    print("\n".join([*facts, "", results["machine"], results["notes"], ""]))
    kept = promises.promises(results, times)
    print("Promises (SPECIFICATION.md):")
    _print_verdicts(kept, "MISSED")
    print("\nGoals beyond, not promised:")
    _print_verdicts(promises.goals(results, times), "not yet")
    return sum(not verdict.kept for verdict in kept)


def _print_verdicts(verdicts: Iterable[promises.Verdict], missed: str) -> None:
    for each in verdicts:
        print(f"  {'kept' if each.kept else missed:<7}  {each.what}, {each.value}: {each.measured}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--environments", type=int, default=500, help="how many to have alive at once")
    parser.add_argument("--check", action="store_true", help="fail when a promise is missed")
    commands = parser.add_subparsers(dest="what")
    alone = commands.add_parser("neighbours", help="only the noisy-neighbour table")
    alone.add_argument(
        "--attack", action="append", choices=neighbours.names(), help="only this one; may be repeated"
    )
    alone.add_argument("--attackers", action="append", type=int, help="how many; may be repeated")
    alone.add_argument("--rounds", type=int, dest="cell_rounds", help="of each cell")
    commands.add_parser("rungs", help="only the backends side by side")
    arguments = parser.parse_args()
    # So that what was started is ended: attackers would go on without the daemon.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if arguments.what == "neighbours":
        missed = measure_neighbours(arguments)
    elif arguments.what == "rungs":
        missed = measure_rungs(rungs.ROUNDS)
    else:
        missed = measure(arguments.rounds, arguments.environments)
    return 1 if missed and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
