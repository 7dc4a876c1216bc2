"""What a run of pytest found, for the runner: the plugin that writes it, and what the runner reads.

`pytest -p tests.results --results FILE` appends one JSON object a line: {"collected": N} once, then one for each test
as it ends, with the fields of Result.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import pytest

TEXT_LINES = 40
"""How much of the end of a traceback is kept."""


@dataclass
class Result:
    test: str
    """pytest's node id."""
    outcome: str = "passed"
    """passed, failed or skipped."""
    seconds: float = 0.0
    """The test itself, without its fixtures."""
    text: str = ""
    """The end of the traceback, or the reason for the skip."""


class Reader:
    """Follows a file of results while it is written."""

    def __init__(self, path: Path) -> None:
        self.collected = 0
        self._path = path
        self._file: IO[str] | None = None
        self._rest = ""

    def new(self) -> Iterator[Result]:
        """The results since the last call."""
        if self._file is None:
            if not self._path.exists():
                return
            self._file = self._path.open()
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        for line in lines:
            fields = json.loads(line)
            if "collected" in fields:
                self.collected = fields["collected"]
            else:
                yield Result(**fields)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Writer:
    """Writes results as tests end; with pytest-xdist in the process that hands out the tests."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", buffering=1)  # noqa: SIM115
        self._running: dict[str, Result] = {}
        self._collected = False

    def _write(self, **fields: object) -> None:
        self._file.write(json.dumps(fields) + "\n")

    def _write_collected(self, number: int) -> None:
        if not self._collected:
            self._collected = True
            self._write(collected=number)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self._write_collected(len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self._write_collected(len(ids))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(**asdict(Result(report.nodeid, "failed", text=_end(report.longreprtext))))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        result = self._running.setdefault(report.nodeid, Result(report.nodeid))
        if report.when == "call":
            result.seconds = report.duration
        if report.failed:
            result.outcome = "failed"
            result.text = _end(report.longreprtext)
        elif report.skipped and result.outcome == "passed":
            result.outcome = "skipped"
            result.text = getattr(report, "wasxfail", "") or _reason(report)
        if report.when not in ("setup", "call"):  # also the report of a test whose process ended
            self._write(**asdict(self._running.pop(report.nodeid)))

    def pytest_unconfigure(self) -> None:
        self._file.close()


def _end(text: str) -> str:
    return "\n".join(text.splitlines()[-TEXT_LINES:])


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return report.longreprtext


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", help="a file to which results are appended as JSON lines")


def pytest_configure(config: pytest.Config) -> None:
    if (path := config.getoption("--results")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Writer(path), "skerry-results")
