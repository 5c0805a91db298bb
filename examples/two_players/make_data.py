"""The games: heaps of sticks, from either seat.

In: nothing. Out: a folder with `train.jsonl` and `test.jsonl`; no heap that a game of one begins with begins a game of
the other.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parts.rows import write_rows
from two_players.game import SEATS

LARGEST = 15
HELD_OUT = (7, 10, 13)
GAMES = 16
"""Held-out games from each heap and seat. They differ by chance alone: both sides sample."""


def write_games(folder: Path) -> Path:
    """Write both files; gives the folder."""
    heaps = [heap for heap in range(5, LARGEST + 1) if heap not in HELD_OUT]
    return write_rows(folder, {"train": games(heaps, 1), "test": games(HELD_OUT, GAMES)})


def games(heaps: Sequence[int], times: int) -> list[dict[str, Any]]:
    """Each heap from both seats, so many times."""
    return [{"sticks": heap, "seat": seat, "game": game} for game in range(times) for heap in heaps for seat in SEATS]
