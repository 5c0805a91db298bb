"""One cause that a diagnosis found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sharpen.evidence.diagnose.data import Digest
from sharpen.evidence.diagnose.series import StepRow, Trend

MAX_EXAMPLES = 3
"""The most rollouts or steps that a finding names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A cause in one sentence, with its evidence: numbers by their descriptions, and up to three rollouts (by id) or
    steps (`step 12`) that show it. `advice` says what to do."""

    name: str
    what: str
    evidence: Mapping[str, float]
    examples: tuple[str, ...] = ()
    advice: str
    quotes: tuple[str, ...] = field(default=())
    """Lines of the records, such as an error's."""
    read_first: tuple[str, ...] = field(default=())
    """Up to twenty rollouts whose answers to read, the most suspect first."""


def ids(rollouts: Iterable[Digest]) -> tuple[str, ...]:
    """Return the ids of the first few rollouts."""
    return tuple(dict.fromkeys(rollout.id for rollout in rollouts))[:MAX_EXAMPLES]


def steps(rows: Iterable[StepRow]) -> tuple[str, ...]:
    """Return the first few steps, as examples."""
    return tuple(f"step {row.step}" for row in list(rows)[:MAX_EXAMPLES])


def ends(name: str, trend: Trend) -> dict[str, float]:
    """Return the start and end values of a series, as evidence."""
    return {f"{name}, first steps": trend.early, f"{name}, last steps": trend.late}
