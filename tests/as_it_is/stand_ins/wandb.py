"""Stands for Weights & Biases, which files name and no test can reach: it takes what a run logs."""

from __future__ import annotations

from typing import Any


class _Run:
    def define_metric(self, *_: Any, **__: Any) -> None:
        """Take what steps count."""

    def log(self, *_: Any, **__: Any) -> None:
        """Take metrics."""

    def finish(self, *_: Any, **__: Any) -> None:
        """Take the end of the run."""


def init(*_: Any, **__: Any) -> _Run:
    """Take the run's name and settings."""
    return _Run()
