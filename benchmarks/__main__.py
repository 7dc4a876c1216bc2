"""`python -m benchmarks`: measure it all in one run, print the table, write results.json and results.md."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import skerry
from benchmarks import baselines, code, dockerd, egress, neighbours, ours, report, service
from benchmarks.dockerd import Unavailable
from benchmarks.measure import Subject, take_turns

HERE = Path(__file__).resolve().parent


class Collected:
    """The subjects that are available here, and why the others are not."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.subjects: list[Subject] = []
        self.missing: dict[str, str] = {}

    def add(self, name: str, make: Callable[[], AbstractContextManager[list[Subject]]]) -> None:
        try:
            self.subjects += self.stack.enter_context(make())
        except Unavailable as error:
            self.missing[name] = str(error)


def measure(rounds: int, environments: int) -> int:
    """All of it. Returns how many promises were not kept."""
    results: dict[str, Any] = {"machine": report.machine(), "notes": ""}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(_folder()))
        for name in ("runc", "docker", "go"):
            (folder / name).mkdir()
        found = Collected(stack)
        found.add("bare processes", lambda: nullcontext(baselines.bare()))
        found.add("bubblewrap", lambda: nullcontext(baselines.bubblewrap()))
        found.add("runc", lambda: nullcontext(baselines.runc(folder / "runc")))
        try:
            docker = stack.enter_context(dockerd.running(folder / "docker"))
        except Unavailable as error:
            found.missing["Docker and llm-sandbox"] = str(error)
        else:
            found.add("Docker", lambda: baselines.docker(docker))
            found.add("llm-sandbox", lambda: baselines.llm_sandbox(docker))
            used = [docker.description]
            if "llm-sandbox" not in found.missing:
                used.append(f"llm-sandbox {version('llm-sandbox')}")
            results["notes"] = f"{', '.join(used)}, no network."
        client = stack.enter_context(ours.daemon(str(folder / "home")))
        found.add("Skerry", lambda: ours.subjects(client))
        found.add("programs in Python", lambda: code.python(client))
        found.add("programs in Go", lambda: code.go(client, folder / "go"))
        found.add("audit", lambda: service.intent(folder))

        times = take_turns(found.subjects, rounds, lambda n: _progress(f"round {n} of {rounds}"))
        token = client.create_token("benchmarks")["token"]
        with skerry.Client(url=ours.URL, token=token) as remote:
            results["doors"] = {
                "unix socket": measure_door(client, skerry.AsyncClient),
                "TCP and a token": measure_door(
                    remote, lambda: skerry.AsyncClient(url=ours.URL, token=token)
                ),
            }
        _progress("programs in Python, one after the other")
        results["code"] = asyncio.run(code.many(600, 8))
        results["code"]["without"] = code.many_without(300, 8)
        _progress("idle memory")
        results |= ours.idle_memory()
        _progress(f"{environments} environments at once")
        results["many"] = ours.many(client, environments)
        _progress("the way out")
        results["egress"] = egress.measure(3)
        _progress("")
    try:
        results["neighbours"] = _neighbours()
    except Unavailable as error:
        found.missing["noisy neighbours"] = str(error)
    results["missing"] = found.missing
    results["times"] = {key: asdict(summary) for key, summary in times.items()}

    (HERE / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    (HERE / "results.md").write_text(report.markdown(results, times))
    _show(report.rows(times))
    _show_service(report.service(results))
    said = [*report.beside_llm_sandbox(times), *report.facts(results)]
    print("\n".join([*said, "", results["machine"], results["notes"], ""]))
    kept = report.targets(results, times)
    for promise, met, value in kept:
        print(f"  {'kept  ' if met else 'MISSED'}  {promise}: {value}")
    return sum(not met for _, met, _ in kept)


def _neighbours() -> dict[str, Any]:
    """The noisy-neighbour table, also put into docs/benchmarks.md. Raises Unavailable."""
    state = _state()
    cells = neighbours.measure(progress=_progress)
    _progress("")
    neighbours.write_page(cells, state)
    return {"state": state, "cells": cells}


def _state() -> str:
    """The machine, and how busy it was before anything was measured."""
    return f"{report.machine()}. Load average before: {os.getloadavg()[0]:.1f}."


def measure_neighbours(arguments: argparse.Namespace) -> int:
    """The noisy-neighbour table alone; the files are only written for a whole table."""
    if arguments.attack or arguments.attackers or arguments.cell_rounds:
        counts = arguments.attackers or neighbours.COUNTS
        cells = neighbours.measure(
            arguments.cell_rounds or neighbours.ROUNDS, arguments.attack or (), counts, _progress
        )
        _progress("")
    else:
        results = json.loads((HERE / "results.json").read_text())
        results["neighbours"] = _neighbours()
        (HERE / "results.json").write_text(json.dumps(results, indent=2) + "\n")
        cells = results["neighbours"]["cells"]
    print(neighbours.markdown(cells))
    broken = neighbours.missed(cells)
    for line in broken:
        print(f"  MISSED  {line}")
    return len(broken)


def measure_door(client: skerry.Client, make: Callable[[], skerry.AsyncClient]) -> dict[str, Any]:
    """One way to reach the daemon."""
    _progress("calls one by one")
    alone = service.latencies(client)
    _progress(f"{service.CLIENTS} clients at once")
    return {"alone": alone, "together": asyncio.run(service.together(make))}


def _folder() -> AbstractContextManager[str]:
    return tempfile.TemporaryDirectory(prefix="skerry-bench-", dir="/tmp")


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _show(table: list[tuple[str, list[report.Row]]]) -> None:
    for title, group in table:
        print(f"\n{title}")
        for what, middle, high, ratio in group:
            print(f"  {what.replace('`', '').replace('*', ''):<48}  {middle:>9}  {high:>9}  {ratio}".rstrip())
    print()


def _show_service(table: list[tuple[str, list[report.Call]]]) -> None:
    for title, calls in table:
        print(f"{title:<36}  {'median':>10}  {'p95':>10}  {'p99':>10}  {'a second':>8}")
        for what, middle, high, higher, rate in calls:
            print(f"  {what:<34}  {middle:>10}  {high:>10}  {higher:>10}  {rate:>8}".rstrip())
        print()


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--environments", type=int, default=500, help="how many to have alive at once")
    parser.add_argument("--check", action="store_true", help="fail when a promise is not kept")
    commands = parser.add_subparsers(dest="what")
    alone = commands.add_parser("neighbours", help="only the noisy-neighbour table")
    alone.add_argument(
        "--attack", action="append", choices=neighbours.names(), help="only this one; may be repeated"
    )
    alone.add_argument("--attackers", action="append", type=int, help="how many; may be repeated")
    alone.add_argument("--rounds", type=int, dest="cell_rounds", help="of each cell")
    arguments = parser.parse_args()
    if arguments.what == "neighbours":
        missed = measure_neighbours(arguments)
    else:
        missed = measure(arguments.rounds, arguments.environments)
    return 1 if missed and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
