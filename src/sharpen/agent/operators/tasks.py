"""The built-in operators on tasks.

In: the tasks of the training set. Out: those to train on.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from sharpen.errors import ConfigError, DatasetError
from sharpen.types import Task


def range_filter(tasks: Sequence[Task], key: str, low: float | None = None, high: float | None = None) -> list[Task]:
    """Keep tasks whose number in the field `key` is from `low` to `high`, both included; None is no bound. Raises
    `DatasetError` for a task without such a number."""
    kept = []
    for task in tasks:
        value = task.row.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise DatasetError(
                f"task {task.id} has {value!r} in {key!r}, where every task needs a number to be filtered by"
            )
        if (low is None or value >= low) and (high is None or value <= high):
            kept.append(task)
    return kept


def difficulty_filter(
    tasks: Sequence[Task], key: str = "difficulty", low: float | None = None, high: float | None = None
) -> list[Task]:
    """Keep tasks whose difficulty, a number in the field `key`, is from `low` to `high`."""
    return range_filter(tasks, key, low, high)


def pass_rate_filter(
    tasks: Sequence[Task], key: str = "pass_rate", low: float | None = None, high: float | None = None
) -> list[Task]:
    """Keep tasks whose pass rate, a number in the field `key`, is from `low` to `high`. Pass rates that the run itself
    measures are those of `sampling.reward_low`, `reward_high` and `sampling.order: difficulty`."""
    return range_filter(tasks, key, low, high)


def random_sample(tasks: Sequence[Task], count: int, seed: int = 0) -> list[Task]:
    """Keep `count` tasks, chosen by `seed`, in their order; all of them where there are no more."""
    chosen = sorted(random.Random(seed).sample(range(len(tasks)), min(count, len(tasks))))
    return [tasks[place] for place in chosen]


# The operator on tasks that orders them by what was measured of them.
#
# In: tasks with statistics of Data-Juicer's in their rows. Out: those of highest priority first.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Range:
    """The values of a statistic, from low to high (without one: as the tasks have them), and whether greater ones count
    as more."""

    low: float = 0.0
    high: float | None = 1.0
    rising: bool = True


_FALLING = _Range(rising=False)
_STATISTICS: Mapping[str, Mapping[str, _Range]] = {
    "quality": {
        "alnum_ratio": _Range(),
        "stopwords_ratio": _Range(),
        "llm_quality_score": _Range(),
        **dict.fromkeys(("char_rep_ratio", "flagged_words_ratio", "special_char_ratio", "word_rep_ratio"), _FALLING),
    },
    "difficulty": {"perplexity": _Range(high=None), "llm_difficulty_score": _Range(), "lang_score": _FALLING},
}
_USUAL = {"quality": 1.0, "difficulty": -0.7}


def priority_order(
    tasks: Sequence[Task], weights: Mapping[str, float] | None = None, top_k: int | None = None
) -> list[Task]:
    """Order the tasks by the weighted sum of their `quality` and `difficulty`, the highest first, and keep the first
    `top_k`. Each is the mean of those statistics in the row that tell of it, from 0 to 1, and 0 where there are none.
    Weights are 1 and -0.7 unless given. Raises `ConfigError` for a weight of something else."""
    weights = weights or _USUAL
    if unknown := sorted(weights.keys() - _STATISTICS.keys()):
        raise ConfigError(f"priority_order has a weight of {unknown[0]!r}: there are {', '.join(_STATISTICS)}")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"priority_order has top_k {top_k}: it must be at least 1, or left out to keep all")
    scores = [0.0] * len(tasks)
    for kind, weight in weights.items():
        for place, score in enumerate(_scores(tasks, _STATISTICS[kind])):
            scores[place] += weight * score
    order = sorted(range(len(tasks)), key=lambda place: -scores[place])
    return [tasks[place] for place in order[:top_k]]


def _scores(tasks: Sequence[Task], statistics: Mapping[str, _Range]) -> list[float]:
    columns = [_normalized([_number(task.row.get(name)) for task in tasks], ends) for name, ends in statistics.items()]
    rows = ([one for one in row if one is not None] for row in zip(*columns, strict=True))
    return [fmean(row) if row else 0.0 for row in rows]


def _normalized(values: Sequence[float | None], ends: _Range) -> list[float | None]:
    """Values from 0 to 1, or from 1 to 0 for a statistic that falls; None where there is no number."""
    low, high = ends.low, ends.high
    if high is None:
        numbers = [one for one in values if one is not None]
        low, high = min(numbers, default=0.0), max(numbers, default=0.0)
    width = (high - low) or 1.0
    parts = [None if one is None else (one - low) / width for one in values]
    return parts if ends.rising else [None if one is None else 1.0 - one for one in parts]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
