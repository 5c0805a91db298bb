"""A pytest plugin for every session: a failure is printed when it happens, so that a run that is cut off has said it.

In: the reports of the tests, also those of xdist's workers. Out: the failure as pytest prints it again at the end.
"""

from __future__ import annotations

import pytest


class FailuresAtOnce:
    """Prints each failure."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._print(report)

    @pytest.hookimpl(trylast=True)
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._print(report)

    def _print(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        terminal = self._config.pluginmanager.getplugin("terminalreporter")
        if terminal is None or not report.failed:  # a worker of xdist has no terminal
            return
        terminal.ensure_newline()
        terminal.write_line(f"FAILED AT ONCE {report.nodeid} ({report.when})", red=True)
        terminal.write_line(report.longreprtext)
        terminal.flush()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FailuresAtOnce(config), "failures-at-once")
