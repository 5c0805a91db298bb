"""The counts of docs/follow_travellers.py, on a way that is counted by hand."""

import runpy
from pathlib import Path

COUNTS = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "follow_travellers.py"))["counts"]


def test_files_moves_climbs_and_returns_by_hand():
    """loop > a > a > b > loop > c > b: down, down, up, down, and across to a file of the same height."""
    height = {"loop": 3, "a": 2, "b": 1, "c": 1}
    assert COUNTS(["loop", "a", "a", "b", "loop", "c", "b"], height) == (4, 5, 1, 2)
    assert COUNTS(["loop"], height) == (1, 0, 0, 0)
