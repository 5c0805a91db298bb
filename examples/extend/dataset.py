"""A dataset of one's own: sums that are made up, the same ones in every run.

sharpen run --config run.yaml --set train_dataset.path=examples/extend/dataset.py:sums --set train_dataset.name=3
"""

import random
from typing import Any

SIZES = {"train": 200, "test": 50}


def sums(name: str | None, split: str | None) -> list[dict[str, Any]]:
    """The rows of a split: sums of two numbers of so many digits (`name`, 2 without one)."""
    if split not in SIZES:
        raise ValueError(f"there is no split {split!r}: there are {', '.join(SIZES)}")
    digits = int(name or 2)
    dice, rows = random.Random(f"{digits} {split}"), []
    for _ in range(SIZES[split]):
        left, right = (dice.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
        rows.append({"question": f"What is {left} + {right}?", "answer": str(left + right)})
    return rows
