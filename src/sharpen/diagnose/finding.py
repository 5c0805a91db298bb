"""One cause that a diagnosis found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sharpen.diagnose.data import Digest
from sharpen.diagnose.series import StepRow, Trend

MAX_EXAMPLES = 3
"""Rollouts or steps that a finding names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A cause, in one sentence, with its evidence: numbers by what they are, and up to three rollouts (by id) or steps
    (`step 12`) that show it. `advice` says what to do.
    """

    name: str
    what: str
    evidence: Mapping[str, float]
    examples: tuple[str, ...] = ()
    advice: str
    quotes: tuple[str, ...] = field(default=())
    """Lines of the records, such as an error's."""


def ids(seen: Iterable[Digest]) -> tuple[str, ...]:
    """The first few rollouts' ids."""
    return tuple(dict.fromkeys(one.id for one in seen))[:MAX_EXAMPLES]


def steps(rows: Iterable[StepRow]) -> tuple[str, ...]:
    """The first few steps, as examples."""
    return tuple(f"step {row.step}" for row in list(rows)[:MAX_EXAMPLES])


def ends(name: str, course: Trend) -> dict[str, float]:
    """How a series began and ended, as evidence."""
    return {f"{name}, first steps": course.early, f"{name}, last steps": course.late}
