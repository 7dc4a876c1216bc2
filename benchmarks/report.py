"""Formats measured numbers as tables and sentences, for the terminal and for docs."""

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
            ("docker_run_end", "`docker run --rm`, container removed"),
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
            ("helper", "start of the native binary"),
            ("intent", "audit intent row, with fsync, on the same disk"),
        ],
    ),
]

Row = tuple[str, str, str, str]
Call = tuple[str, str, str, str, str]


def machine() -> str:
    """CPU, cores, memory, system, kernel and Python version in one line."""
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
    """Rows of each group: label, median, 95th percentile, ratio to the group's baseline."""
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


HEADLINE = (
    ("fresh environment to first output", "fresh", "docker_run", "`docker run`"),
    ("the same, from a pool", "pooled_fresh", "docker_run", "`docker run`"),
    ("command in a live environment", "run", "docker_exec", "`docker exec`"),
    ("Python program, from its pool", "code_python", "bare_print", "bare `python3 -c 'print(...)'`"),
    ("call in a live Python session", "session", "python", "bare `python3 -c pass`"),
)


def headline(times: Mapping[str, Summary]) -> str:
    """Five rows for the README: Skerry's median, a baseline's median, the ratio."""
    lines = ["| median | Skerry | compared with | | |", "|---|--:|---|--:|--:|"]
    for what, subject, base, name in HEADLINE:
        if subject not in times or base not in times:
            lines.append(f"| {what} | not measured | {name} | | |")
            continue
        ours, other = times[subject], times[base]
        lines.append(
            f"| {what} | {_ms(ours.median)} | {name} | {_ms(other.median)} | {_compare(other, ours)} |"
        )
    return "\n".join(lines)


def markdown(results: Mapping[str, Any], times: Mapping[str, Summary]) -> str:
    """All tables and facts, for docs/benchmarks.md."""
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
    """Calls at each door: name, median, 95th and 99th percentile, calls a second."""
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
    """Sentences on throughput, memory, egress, and on what was not measured."""
    said = [f"Not measured: {what}: {why}." for what, why in results["missing"].items()]
    if found := results.get("code"):
        without = found["without"]
        beside = f", in bubblewrap {without['bubblewrap']:.0f}" if "bubblewrap" in without else ""
        said.append(
            f"{found['callers']} concurrent callers run {found['per_second']:.0f} Python programs a second, each in "
            f"a fresh environment ({found['from_pool']:.0%} from the pool). On the host without isolation: "
            f"{without['bare']:.0f}{beside}."
        )
    if (idle := results.get("idle_bytes")) is not None:
        after = results["idle_after_run_bytes"]
        said.append(
            f"An idle environment is charged {idle / 1024:.0f} KiB, {after / 1024:.0f} KiB after a command."
        )
    if many := results.get("many"):
        charged = many["charged_bytes"]
        said.append(
            f"{many['alive']} environments alive at once: created one by one in "
            f"{many['create_seconds']:.1f} s, one command in each in {many['run_in_all_seconds']:.1f} s, "
            f"deleted in {many['delete_seconds']:.1f} s; the daemon uses "
            f"{many['daemon_rss_bytes'] / MIB:.0f} MiB"
            + (f", all environments together {charged / MIB:.0f} MiB." if charged is not None else ".")
        )
    if egress := results.get("egress"):
        direct, proxy = egress["direct"], egress["proxy"]
        said.append(
            f"Egress, with a direct connection in brackets: download {proxy['download'] / MIB:.0f} "
            f"({direct['download'] / MIB:.0f}) MiB/s, upload {proxy['upload'] / MIB:.0f} "
            f"({direct['upload'] / MIB:.0f}) MiB/s, round trip {proxy['trip'] * 1e6:.0f} "
            f"({direct['trip'] * 1e6:.0f}) µs, new connection {proxy['connect'] * 1e6:.0f} "
            f"({direct['connect'] * 1e6:.0f}) µs, 1,000 connections at once {proxy['together']:.1f} "
            f"({direct['together']:.1f}) s."
        )
        first, again, attempts = egress["first"], egress["again"], egress["attempts"]
        said.append(
            f"{first['open']:,} connections out of an environment take {first['bytes'] / MIB:.1f} MiB of the daemon's "
            f"memory, the same again {again['bytes'] / MIB:.1f} MiB more. Of {attempts['tried']:,} attempts at once "
            f"{attempts['open']:,} succeed, for {attempts['bytes'] / MIB:.1f} MiB more."
        )
    return said


def beside_llm_sandbox(times: Mapping[str, Summary]) -> list[str]:
    """One sentence with the ratios to llm-sandbox; empty if it was not measured."""
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
    return [f"Faster than llm-sandbox: {', '.join(parts)}."]
