"""The starter's tasks: sums of two numbers below ten, asked in three ways.

Out: rows `{"question": ..., "answer": ...}`. A pair of numbers is in one split only, so that held-out tasks ask for
sums that were not trained on.
"""

from __future__ import annotations

QUESTIONS = ("What is {a} + {b}?", "Add {a} and {b}.", "How much is {a} plus {b}?")
_HELD_OUT, _OF = 2, 5
"""So many pairs of so many are held out."""


def rows() -> dict[str, list[dict[str, str]]]:
    """Return the rows by split: `train` has 180, `test` has 120: 40 sums, enough to tell any run from none."""
    splits: dict[str, list[dict[str, str]]] = {"train": [], "test": []}
    for a in range(10):
        for b in range(10):
            split = "test" if (a + 2 * b) % _OF < _HELD_OUT else "train"
            for question in QUESTIONS:
                splits[split].append({"question": question.format(a=a, b=b), "answer": str(a + b)})
    return splits
