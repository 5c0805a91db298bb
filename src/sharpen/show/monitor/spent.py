"""How the time of a step is spent.

In: a step's metrics. Out: shares of its wall-clock time:

    generating   the engine had at least one request to work on
    waiting      neither engine nor trainer computed: both waited for tools, judges or environments
    training     the trainer computed
    syncing      new weights were copied into the engine

A synchronous step is the sum of the four, up to short moments. When rollouts run ahead of the training, generating and
training overlap, and the shares add up to more than 100%.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

PARTS = {
    "generating": "time/generate_s",
    "waiting": "time/idle_s",
    "training": "time/train_s",
    "syncing": "time/sync_s",
}
"""The metric (seconds) behind each part."""

Shares = Mapping[str, float]


def shares(steps: Iterable[Mapping[str, float]]) -> Shares:
    """Return the share of each part in the total time of these steps; empty if it was not measured."""
    rows = [row for row in steps if all(name in row for name in (*PARTS.values(), "time/step_s"))]
    total = sum(row["time/step_s"] for row in rows)
    if total <= 0.0:
        return {}
    return {part: sum(row[name] for row in rows) / total for part, name in PARTS.items()}


def plus(total: Mapping[str, float], step: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of earlier steps and of one more, in all and by part; those of one that lacks some do not
    count."""
    names = (*PARTS.values(), "time/step_s")
    if not all(name in step for name in names):
        return dict(total)
    return {name: total.get(name, 0.0) + step[name] for name in names}


def line(shares: Shares) -> str:
    """Format shares as text, e.g. `generating 46%, waiting 2%, training 50%, syncing 1%`."""
    return ", ".join(f"{part} {share:.0%}" for part, share in shares.items())
