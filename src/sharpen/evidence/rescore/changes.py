"""What another judge would have changed.

In: the scores of a run. Out: `Changes`: rewards, the groups that teach something, the rollouts that would have been
pushed the other way, and, of evaluations, the difference between before and after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from sharpen.evidence.rescore.scores import Score

SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """`trimmed` rollouts have no text to judge. `same` rollouts keep their reward. `flat_before` and `flat_after` count
    groups whose rewards are all the same, which teach nothing. `turned` counts rollouts that were above their group's
    mean and would have been below it, or the other way round. `most` are those whose reward changed most."""

    rollouts: int
    failed: int
    trimmed: int
    same: int
    mean_before: float | None
    mean_after: float | None
    groups: int
    flat_before: int
    flat_after: int
    turned: int
    most: tuple[Score, ...]
    errors: tuple[str, ...]


def changes(scores: Sequence[Score]) -> Changes:
    """Compare the recorded rewards with the new ones, over the rollouts that have both."""
    whole = [score for score in scores if score.new is not None]
    trimmed = sum(score.trimmed for score in scores)
    groups: dict[str, list[tuple[float, float]]] = {}
    for score in whole:
        assert score.new is not None
        groups.setdefault(score.group, []).append((score.old, score.new))
    changed = [score for score in whole if score.new != score.old]
    changed.sort(key=lambda score: abs((score.new or 0.0) - score.old), reverse=True)
    return Changes(
        rollouts=len(scores),
        failed=len(scores) - len(whole) - trimmed,
        trimmed=trimmed,
        same=len(whole) - len(changed),
        mean_before=fmean(score.old for score in whole) if whole else None,
        mean_after=fmean(score.new for score in whole if score.new is not None) if whole else None,
        groups=len(groups),
        flat_before=sum(len({old for old, _ in pairs}) == 1 for pairs in groups.values()),
        flat_after=sum(len({new for _, new in pairs}) == 1 for pairs in groups.values()),
        turned=sum(_turned(pairs) for pairs in groups.values()),
        most=tuple(changed[:SHOWN]),
        errors=tuple(dict.fromkeys(score.error for score in scores if score.error and not score.trimmed))[:3],
    )


def _turned(pairs: Sequence[tuple[float, float]]) -> int:
    """Return how many rollouts of a group change the side of its mean, and so the direction in which they push."""
    old_mean, new_mean = fmean(old for old, _ in pairs), fmean(new for _, new in pairs)
    return sum((old - old_mean) * (new - new_mean) < 0 for old, new in pairs)
