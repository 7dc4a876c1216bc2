"""What is made of the numbers: the table, the results file, and the targets."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.measure import Summary

MIB = 1 << 20

GROUPS: list[tuple[str, str, list[tuple[str, str]]]] = [
    (
        "A fresh sandbox to its first output",
        "docker_run",
        [
            ("docker_run", "`docker run --rm`"),
            ("docker_run_end", "`docker run --rm`, until it is removed"),
            ("llm_sandbox_fresh", "llm-sandbox, open and one command"),
            ("runc", "`runc run`"),
            ("bubblewrap", "bubblewrap, `true`, neither limits nor filter"),
            ("fresh", "**Skerry**, create and `env.run`, no pool"),
            ("pooled_fresh", "**Skerry**, create and `env.run`, from a pool"),
        ],
    ),
    (
        "A command in a live sandbox",
        "docker_exec",
        [
            ("docker_exec", "`docker exec`"),
            ("llm_sandbox_command", "llm-sandbox, `execute_command`"),
            ("llm_sandbox_python", "llm-sandbox, `run` of one line of Python"),
            ("execute", "**Skerry**, stateful `env.execute`"),
            ("run", "**Skerry**, `env.run`"),
            ("true", "bare `subprocess.run` on the host"),
        ],
    ),
    (
        "A Python program that runs once",
        "bare_print",
        [
            ("bare_print", "bare `python3 -c 'print(...)'`"),
            ("llm_sandbox_code", "llm-sandbox, open and `run`"),
            ("code_cold", "**Skerry**, `client.execute_code`, no pool"),
            ("code_python", "**Skerry**, `client.execute_code`, from its pool"),
        ],
    ),
    (
        "A Go program that runs once",
        "bare_go",
        [
            ("bare_go", "bare `go run`, with a warm cache"),
            ("code_go", "**Skerry**, `client.execute_code`, no pool"),
        ],
    ),
    (
        "From the shell",
        "python",
        [
            ("python", "bare `python3 -c pass`"),
            ("cli", "**Skerry**, `skerry run -- true`, daemon up"),
            ("session", "**Skerry**, `session.run` in a live Python session, of ten"),
        ],
    ),
    (
        "Skerry's other steps",
        "",
        [
            ("create", "create"),
            ("pooled_create", "create, from a pool"),
            ("delete", "delete"),
            ("write", "write a file of 1 KiB"),
            ("read", "read it"),
            ("helper", "start of the native program"),
            ("intent", "an intent in the audit, synced, on the same disk"),
        ],
    ),
]

Row = tuple[str, str, str, str]
Call = tuple[str, str, str, str, str]


def machine() -> str:
    """This machine in a line: what the numbers mean nothing without."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = next(
        (line.split(":")[1].strip() for line in cpuinfo.splitlines() if line.startswith("model name")),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    system = platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    kernel = platform.release().split("-")[0]
    return (
        f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB, {system}, Linux {kernel}, "
        f"Python {platform.python_version()}"
    )


def rows(times: Mapping[str, Summary]) -> list[tuple[str, list[Row]]]:
    """The table, group by group: what, median, 95th percentile, how it compares with the group's first."""
    table = []
    for title, against, entries in GROUPS:
        lines: list[Row] = []
        for key, what in entries:
            if (summary := times.get(key)) is None:
                lines.append((what, "-", "-", "not measured"))
                continue
            lines.append((what, _ms(summary.median), _ms(summary.p95), _compare(times.get(against), summary)))
        table.append((title, lines))
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 0.1 else f"{seconds * 1000:.0f} ms"


def _compare(base: Summary | None, other: Summary) -> str:
    if base is None:
        return ""
    if base is other:
        return "1"
    ratio = base.median / other.median
    return f"{ratio:.3g}× faster" if ratio >= 1 else f"{1 / ratio:.3g}× slower"


def markdown(results: Mapping[str, Any], times: Mapping[str, Summary]) -> str:
    lines = [f"{results['machine']}. {results['notes']}".strip(), ""]
    for title, group in rows(times):
        lines += [f"| {title} | median | p95 | |", "|---|--:|--:|--:|"]
        lines += [f"| {' | '.join(row)} |" for row in group]
        lines.append("")
    for title, calls in service(results):
        lines += [f"| {title} | median | p95 | p99 | calls a second |", "|---|--:|--:|--:|--:|"]
        lines += [f"| {' | '.join(row)} |" for row in calls]
        lines.append("")
    lines += [*(f"- {fact}" for fact in (*beside_llm_sandbox(times), *facts(results))), ""]
    return "\n".join(lines)


def service(results: Mapping[str, Any]) -> list[tuple[str, list[Call]]]:
    """The service, door by door: what, median, 95th and 99th percentile, how many a second."""
    table = []
    for door, found in results.get("doors", {}).items():
        for title, calls in (
            (f"{door}, one client", found["alone"]),
            (f"{door}, 50 clients at once", found["together"]),
        ):
            table.append((title, [_call(name, values) for name, values in calls.items()]))
    return table


def _call(name: str, values: Mapping[str, float]) -> Call:
    rate = values.get("per_second")
    times = [f"{values[key] * 1000:.2f} ms" for key in ("median", "p95", "p99")]
    return name, times[0], times[1], times[2], "" if rate is None else f"{rate:,.0f}"


def facts(results: Mapping[str, Any]) -> list[str]:
    """What is not a time, in sentences."""
    said = [f"Not measured: {what}: {why}." for what, why in results["missing"].items()]
    if found := results.get("code"):
        without = found["without"]
        beside = f", in bubblewrap {without['bubblewrap']:.0f}" if "bubblewrap" in without else ""
        said.append(
            f"{found['callers']} callers at once get {found['per_second']:.0f} Python programs a second done, each in "
            f"a fresh environment ({found['from_pool']:.0%} from the pool); the same programs on the host, without any "
            f"isolation: {without['bare']:.0f}{beside}."
        )
    if (idle := results.get("idle_bytes")) is not None:
        after = results["idle_after_run_bytes"]
        said.append(
            f"An idle environment has {idle / 1024:.0f} KiB charged to its cgroup, "
            f"{after / 1024:.0f} KiB after a command."
        )
    if many := results.get("many"):
        charged = many["charged_bytes"]
        said.append(
            f"{many['alive']} environments alive at once: created one after the other in "
            f"{many['create_seconds']:.1f} s, a command in every one in {many['run_in_all_seconds']:.1f} s, "
            f"deleted in {many['delete_seconds']:.1f} s; the daemon uses "
            f"{many['daemon_rss_bytes'] / MIB:.0f} MiB"
            + (f", all of them together {charged / MIB:.0f} MiB." if charged is not None else ".")
        )
    if egress := results.get("egress"):
        direct, proxy = egress["direct"], egress["proxy"]
        said.append(
            f"Out of an environment, beside a direct connection: download {proxy['download'] / MIB:.0f} "
            f"({direct['download'] / MIB:.0f}) MiB/s, upload {proxy['upload'] / MIB:.0f} "
            f"({direct['upload'] / MIB:.0f}) MiB/s, there and back in {proxy['trip'] * 1e6:.0f} "
            f"({direct['trip'] * 1e6:.0f}) µs, a new connection in {proxy['connect'] * 1e6:.0f} "
            f"({direct['connect'] * 1e6:.0f}) µs, 1,000 at once in {proxy['together']:.1f} "
            f"({direct['together']:.1f}) s."
        )
        first, again, attempts = egress["first"], egress["again"], egress["attempts"]
        said.append(
            f"{first['open']:,} connections out of an environment take {first['bytes'] / MIB:.1f} MiB of the daemon's "
            f"memory, and {again['bytes'] / MIB:.1f} MiB more the next time. Of {attempts['tried']:,} at once "
            f"{attempts['open']:,} are let through, with {attempts['bytes'] / MIB:.1f} MiB more."
        )
    return said


def beside_llm_sandbox(times: Mapping[str, Summary]) -> list[str]:
    """How much faster Skerry does the same, in a sentence; nothing where llm-sandbox was not measured."""
    pairs = (
        ("a fresh sandbox to its first output", "llm_sandbox_fresh", ("fresh", "pooled_fresh")),
        ("a command in a live one", "llm_sandbox_command", ("run",)),
        ("a Python program that runs once", "llm_sandbox_code", ("code_cold", "code_python")),
    )
    if any(key not in times for _, base, ours in pairs for key in (base, *ours)):
        return []
    parts = []
    for what, base, ours in pairs:
        ratios = [f"{times[base].median / times[key].median:.3g}×" for key in ours]
        parts.append(f"{what} {' and, from a pool, '.join(ratios)}")
    return [f"Beside llm-sandbox Skerry is faster: {', '.join(parts)}."]


def targets(results: Mapping[str, Any], times: Mapping[str, Summary]) -> list[tuple[str, bool, str]]:
    """(promise, kept, what was measured). A number that is missing is a promise not kept."""

    def at_least(promise: str, base: str, ours: str, factor: float) -> tuple[str, bool, str]:
        if base not in times or ours not in times:
            return promise, False, "not measured"
        ratio = times[base].median / times[ours].median
        return promise, ratio >= factor, f"{ratio:.1f}× faster" if ratio >= 1 else f"{1 / ratio:.1f}× slower"

    idle, many = results.get("idle_bytes"), results.get("many") or {}
    found = results.get("code") or {"per_second": 0.0}
    return [
        at_least("fresh environment to first output, 25× faster than docker run", "docker_run", "fresh", 25),
        at_least(
            "a fresh environment from a pool, 60× faster than docker run", "docker_run", "pooled_fresh", 60
        ),
        at_least(
            "a Python program from its pool, before python3 -c has ended on the host",
            "bare_print",
            "code_python",
            1,
        ),
        (
            "150 Python programs a second, each in a fresh environment",
            found["per_second"] >= 150,
            f"{found['per_second']:.0f}",
        ),
        at_least("env.run in a live environment, 22× faster than docker exec", "docker_exec", "run", 22),
        at_least(
            "env.execute in a live environment, 22× faster than docker exec", "docker_exec", "execute", 22
        ),
        at_least("a call in a Python session, 10× faster than python3 -c pass", "python", "session", 10),
        at_least("skerry run -- true, within 8× of python3 -c pass", "python", "cli", 1 / 8),
        at_least("a Go program that runs once, within 3× of go run", "bare_go", "code_go", 1 / 3),
        (
            "an idle environment is charged less than 1 MiB",
            idle is not None and idle < MIB,
            "not measured" if idle is None else f"{idle / 1024:.0f} KiB",
        ),
        ("500 environments alive at once", many.get("alive", 0) >= 500, f"{many.get('alive', 0)}"),
    ]
