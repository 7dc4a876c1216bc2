"""`python -m tests`: every test that proves the product. `python -m tests --all`: the soaks as well.

A run is a list of stages, one after the other; a stage is a list of parts, which run side by side, each in a pytest of
its own. What pytest prints goes to `.cache/tests/PART.log`; failures are shown as they happen.

A test that fails beside others is run once more alone. It fails the run if it fails again, and is listed as unstable
if it does not. A test that takes over 10 s and is not marked `soak` is treated in the same way: it fails if it takes
over 10 s alone as well, unless other work keeps the machine busy. Random histories are not repeated, as no two runs
are alike.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.conformance.elsewhere import selectable
from tests.results import Reader, Result

ROOT = Path(__file__).resolve().parent.parent
PROGRESS_SECONDS = 30.0
POLL_SECONDS = 0.2
LONGEST_SECONDS = 10.0
"""Of a test that is not marked `soak`."""
BUSY_LOAD = 4.0 * len(os.sched_getaffinity(0))
"""Processes that run at a time. Beyond it, on a machine with other work, durations say nothing and are only listed."""
LOG_LINES = 30

PROCESSES = 4
"""More than cores: most tests wait most of the time."""
FILES = ("--dist", "loadfile", "--no-loadscope-reorder")
NEWEST_PYTHON = ROOT / ".cache" / "newest-python"
"""Made by scripts/setup_newest_python.sh."""


@dataclass
class Part:
    """One run of pytest."""

    name: str
    options: Sequence[str]
    python: str = sys.executable
    nice: int = 0
    """How much its processes give way to those of the other parts."""
    repeats: bool = True
    """Whether what fails is run once more alone."""
    short: bool = False
    """Whether each test has to be short."""


@dataclass
class Run:
    """A part under way, or ended."""

    part: Part
    process: subprocess.Popen[bytes]
    log: Path
    file: Path
    """Its results."""
    reader: Reader
    results: list[Result] = field(default_factory=list)

    @classmethod
    def start(cls, part: Part, root: Path, output: Path) -> Run:
        results, log = output / f"{part.name}.jsonl", output / f"{part.name}.log"
        argv = [
            "nice",
            f"-n{part.nice}",
            part.python,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            *part.options,
        ]
        argv += ["-p", "tests.results", "--results", str(results)]
        with log.open("wb") as printed:
            process = subprocess.Popen(
                argv, cwd=root, stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT
            )
        return cls(part, process, log, results, Reader(results))

    def read(self) -> list[Result]:
        new = list(self.reader.new())
        self.results += new
        return new

    @property
    def numbered(self) -> list[tuple[tuple[str, int], Result]]:
        """Results by name and number: schemathesis gives all its tests one name."""
        seen = Counter[str]()
        found = []
        for result in self.results:
            seen[result.test] += 1
            found.append(((result.test, seen[result.test]), result))
        return found

    @property
    def failed(self) -> list[Result]:
        return [result for result in self.results if result.outcome == "failed"]

    @property
    def slow(self) -> set[tuple[str, int]]:
        """Name and number of what took too long, though other work may be the reason if the machine is busy."""
        return {
            key
            for key, result in self.numbered
            if self.part.short and result.outcome == "passed" and result.seconds > LONGEST_SECONDS
        }

    @property
    def progress(self) -> str:
        failed = f", {len(self.failed)} failed" if self.failed else ""
        return f"{self.part.name} {len(self.results)}/{self.reader.collected or '?'}{failed}"

    @property
    def trouble(self) -> str:
        """Why the part is not as it should be, beyond the tests that failed; empty if it is."""
        code = self.process.returncode
        if code == 0 or (code == 1 and self.failed):
            return ""
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "\n".join([f"pytest ended with exit code {code}; the end of {self.log}:", *lines])


class Runner:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.output = root / ".cache" / "tests"
        """What pytest prints, and the results."""
        shutil.rmtree(self.output, ignore_errors=True)
        self.output.mkdir(parents=True)
        self.began = time.monotonic()
        self.runs: list[Run] = []
        self.again: list[Run] = []
        self.faults: list[str] = []
        """What is wrong beyond the tests that failed."""

    def say(self, text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self.began), 60)
        print(f"[{minutes}:{seconds:02}] {text}", flush=True)

    def stage(self, parts: Iterable[Part], runs: list[Run]) -> None:
        """Run the parts side by side, to their end, and add them to `runs`."""
        running = [Run.start(part, self.root, self.output) for part in parts]
        runs += running
        self.say("started: " + ", ".join(run.part.name for run in running))
        shown = time.monotonic()
        try:
            while any(run.process.poll() is None for run in running):
                time.sleep(POLL_SECONDS)
                self._show_failures(running)
                if time.monotonic() - shown >= PROGRESS_SECONDS:
                    shown = time.monotonic()
                    self.say("; ".join(run.progress for run in running))
        finally:
            for run in running:
                if run.process.poll() is None:
                    run.process.terminate()
                run.process.wait()
            self._show_failures(running)
            for run in running:
                run.reader.close()
        self.say("ended: " + "; ".join(run.progress for run in running))
        for run in running:
            if run.trouble:
                self.say(f"{run.part.name}: {run.trouble}")
                self.faults.append(f"{run.part.name}: see {run.log}")

    def _show_failures(self, running: Iterable[Run]) -> None:
        for run in running:
            for result in run.read():
                if result.outcome == "failed":
                    self.say(f"{run.part.name}: FAILED {result.test}\n{result.text}")

    def repeat(self) -> None:
        """Run alone what failed, or was slow, beside others."""
        for run in self.runs:
            tests = [*(result.test for result in run.failed), *(test for test, _ in sorted(run.slow))]
            tests = tests if run.part.repeats else []
            if not tests:
                continue
            name = f"{run.part.name}-again"
            names = self.output / f"{name}.txt"
            names.write_text("\n".join(dict.fromkeys(map(selectable, tests))))
            part = Part(name, (f"@{names}",), run.part.python, short=run.part.short)
            self.stage([part], self.again)

    def check_requirements(self) -> None:
        """Every requirement that a test is said to show was shown in this run; what is missing is a fault in CI."""
        results = [run.file for run in (*self.runs, *self.again) if run.part.python == sys.executable]
        script = ROOT / "scripts" / "generate_requirements.py"
        argv = [sys.executable, str(script), "--results", *map(str, results)]
        done = subprocess.run(argv, capture_output=True, text=True)
        if done.returncode:
            self.missing(f"requirements that this run did not show:\n{done.stdout}{done.stderr}")

    def missing(self, what: str) -> None:
        """Say what could not be had here; it is a fault in CI."""
        self.say(what)
        if os.environ.get("CI") == "true":
            self.faults.append(what)

    def summary(self) -> int:
        """Print what the whole run found; returns the exit code."""
        final: dict[tuple[str, str, int], Result] = {}
        for run in self.runs:
            final |= {(run.part.name, *key): result for key, result in run.numbered}
        failed_before = {key for key, result in final.items() if result.outcome == "failed"}
        unstable = []
        busy = os.getloadavg()[0] > BUSY_LOAD
        for run in self.again:
            part = run.part.name.removesuffix("-again")
            slow_before = {key for one in self.runs if one.part.name == part for key in one.slow}
            slow = set() if busy else run.slow & slow_before
            for key, result in run.numbered:
                if key in slow:
                    result.outcome = "failed"
                    result.text = f"takes {result.seconds:.1f} s alone: make it shorter, or mark it `soak`"
                if result.outcome == "passed" and (part, *key) in failed_before:
                    unstable.append(f"{part}: {result.test}")
                final[part, *key] = result
        by_outcome = {
            outcome: {key: result for key, result in final.items() if result.outcome == outcome}
            for outcome in ("passed", "failed", "skipped")
        }
        reasons = Counter(result.text for result in by_outcome["skipped"].values())
        slowest = sorted(final.items(), key=lambda item: -item[1].seconds)[:10]
        _list("slowest", [f"{one.seconds:6.1f} s  {part}: {test}" for (part, test, _), one in slowest])
        _list("skipped", [f"{number:4}  {reason}" for reason, number in reasons.most_common()])
        _list("unstable: failed beside others, passed alone", unstable)
        _list("other faults", self.faults)
        failed = by_outcome["failed"].items()
        _list("failed", [f"{part}: {test}: {_last(result.text)}" for (part, test, _), result in failed])
        print(", ".join(f"{len(found)} {outcome}" for outcome, found in by_outcome.items()), flush=True)
        return 1 if by_outcome["failed"] or self.faults else 0


def _list(title: str, lines: Sequence[str]) -> None:
    if lines:
        print(f"\n{title}:\n  " + "\n  ".join(lines), flush=True)
        print(flush=True)


def _last(text: str) -> str:
    return (text.splitlines() or [""])[-1]


def stages(everything: bool, newest_python: bool) -> list[list[Part]]:
    together = ("-n", str(PROCESSES), *FILES, "-m", "not soak and not alone")
    found = [
        [Part("tests", together, short=True)],
        [Part("alone", ("-m", "alone" if everything else "alone and not soak"), short=True)],
    ]
    if everything:
        elsewhere = ("--ignore=tests/soak", "--ignore=tests/vm")
        newest = Part(
            "newest-python",
            ("-n", "2", *FILES, "-m", "not soak", "tests/unit", "tests/conformance"),
            python=str(NEWEST_PYTHON / "venv" / "bin" / "python"),
            nice=10,
        )
        found += [
            [
                Part("histories", ("-m", "soak", "-s", "tests/soak/test_random_histories.py"), repeats=False),
                Part("load", ("-m", "soak", "-s", "tests/soak/test_mixed_load.py")),
            ],
            [
                *([newest] if newest_python else ()),
                Part("machines", ("-m", "soak", "tests/vm")),
                Part("soak", ("-n", "3", *FILES, "-m", "soak and not alone", "tests", *elsewhere)),
            ],
        ]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests", description="Run the tests.")
    parser.add_argument("--all", action="store_true", help="the soaks as well")
    arguments = parser.parse_args()
    runner = Runner(ROOT)
    interrupted = False
    try:
        newest_python = (NEWEST_PYTHON / "installed").exists()
        for stage in stages(arguments.all, newest_python):
            runner.stage(stage, runner.runs)
        runner.repeat()
        if arguments.all:
            if not newest_python:
                runner.missing("left out: the newest Python is not here (scripts/setup_newest_python.sh)")
            runner.check_requirements()
    except KeyboardInterrupt:
        interrupted = True
    code = runner.summary()
    return 130 if interrupted else code


if __name__ == "__main__":
    sys.exit(main())
