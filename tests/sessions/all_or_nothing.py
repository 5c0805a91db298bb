"""A pytest plugin for `make test-agentscope` and the like: a session in which any test was skipped, or any file was
left out that belongs to this environment, has failed.

In: `-p all_or_nothing`; `--all-of FOLDER` where all test files of a folder belong to the environment. Out: the
session's exit status, and a line for what was missing.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from environments import expected, installed, test_files


class AllOrNothing:
    """Counts what ran."""

    def __init__(self, should_run: set[str]) -> None:
        self.should_run = should_run
        self.skipped: list[str] = []
        self.collected: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self.skipped.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.skipped.append(report.nodeid)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collected = {item.path.name for item in session.items}

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.missing() and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.missing():
            terminalreporter.write_line(f"FAILED {line}", red=True)

    def missing(self) -> list[str]:
        """What should have run and did not."""
        left_out = sorted(self.should_run - self.collected)
        return [f"{node}: skipped" for node in self.skipped] + [f"{name}: no test was collected" for name in left_out]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-of", type=Path, help="folder whose test files must all run")


def pytest_configure(config: pytest.Config) -> None:
    folder: Path | None = config.getoption("--all-of")
    named = {path.name for path in folder.glob("test_*.py")} if folder else expected(test_files(), installed())
    config.pluginmanager.register(AllOrNothing(named), "all-or-nothing-session")
