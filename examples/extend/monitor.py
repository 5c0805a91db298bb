"""A monitor of one's own: every number of a run in a table of SQLite, for SQL.

sharpen run --config run.yaml --set monitor_type=examples/extend/monitor.py:SqliteMonitor
sqlite3 checkpoints/<project>/<run>/monitor/numbers.sqlite "select step, value from numbers where name = 'reward/mean'"
"""

import sqlite3
from collections.abc import Mapping

from sharpen.contracts import MonitoredRun


class SqliteMonitor:
    """One row for each number of a step. A run that goes on forgets the steps that it trains again."""

    def __init__(self, run: MonitoredRun) -> None:
        self._file = sqlite3.connect(run.run_dir / "monitor" / "numbers.sqlite")
        self._file.execute("create table if not exists numbers (step, name, value, primary key (step, name))")
        if run.resume_step is not None:
            self._file.execute("delete from numbers where step > ?", (run.resume_step,))
        self._file.commit()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the numbers. One that comes twice, after a write that failed, is there once."""
        rows = [(step, name, value) for name, value in metrics.items()]
        self._file.executemany("insert or replace into numbers values (?, ?, ?)", rows)
        self._file.commit()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
