"""The operators that the settings name, applied one after the other, with the built-in ones on tasks.

In: `sampling.operators` or `sampling.task_operators`. Out: a function over the groups of a step, or over the tasks.
Everything that can be wrong with a name or an argument is said before anything is loaded.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from statistics import fmean
from typing import Any

from sharpen.agent.operators import rollouts
from sharpen.agent.operators.data_juicer.rows import on_rollouts, on_tasks
from sharpen.agent.operators.rollouts import checked
from sharpen.config.functions import import_function
from sharpen.config.run import OperatorConfig
from sharpen.errors import ConfigError, DatasetError, OperatorError
from sharpen.types import Group, Task


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


Operator = Callable[..., Any]

ON_ROLLOUTS: Mapping[str, Operator] = {
    **{
        function.__name__: function
        for function in (
            rollouts.reward_filter,
            rollouts.reward_std_filter,
            rollouts.dapo_dynamic_sampling,
            rollouts.reward_shaping_mapper,
            rollouts.invalid_reward_filter,
            rollouts.pass_rate_calculator,
        )
    },
    "data_juicer": on_rollouts,
}
ON_TASKS: Mapping[str, Operator] = {
    **{
        function.__name__: function
        for function in (
            range_filter,
            difficulty_filter,
            pass_rate_filter,
            random_sample,
            priority_order,
        )
    },
    "data_juicer": on_tasks,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Operators by the names that the settings give them, with their arguments."""

    operators: tuple[tuple[str, Operator], ...]

    @property
    def asks_models(self) -> bool:
        """Whether an operator takes the auxiliary models of the run."""
        return any(_asks_models(operator) for _, operator in self.operators)

    @classmethod
    def of(cls, configs: Sequence[OperatorConfig], known: Mapping[str, Operator]) -> Pipeline:
        """The operators of a setting. Raises `ConfigError` for a name that nobody has, or arguments that it does not
        take."""
        return cls(operators=tuple((config.name, _bound(config, known)) for config in configs))

    def on_groups(self, groups: Sequence[Group], auxiliary_models: Mapping[str, Any] | None = None) -> list[Group]:
        """Apply the operators to the groups of a step; those that take the auxiliary models get these. Raises
        `OperatorError`, with the operator's name."""
        found = list(groups)
        for name, operator in self.operators:
            asks = partial(operator, auxiliary_models=auxiliary_models) if _asks_models(operator) else operator
            found = checked(name, found, _called(name, asks, found))
        return found

    def on_tasks(self, tasks: Sequence[Task]) -> list[Task]:
        """Apply the operators to the tasks. Raises `OperatorError`, and `DatasetError` if none is left."""
        found = list(tasks)
        for name, operator in self.operators:
            after = _called(name, operator, found)
            if not isinstance(after, Sequence) or not all(isinstance(task, Task) for task in after):
                raise OperatorError(f"operator {name} must return a list of tasks, got {type(after).__name__}")
            if not after:
                raise DatasetError(f"operator {name} kept none of {len(found)} tasks: there is nothing to train on")
            found = list(after)
        return found


def filter_tasks(tasks: Sequence[Task], configs: Sequence[OperatorConfig]) -> tuple[Sequence[Task], tuple[str, ...]]:
    """Return the tasks that the operators leave, and a line that says so if there are operators."""
    if not configs:
        return tasks, ()
    kept = Pipeline.of(configs, ON_TASKS).on_tasks(tasks)
    names = ", ".join(config.name for config in configs)
    return kept, (f"{len(kept)} of {len(tasks)} training tasks are left by the operators {names}",)


def _asks_models(operator: Operator) -> bool:
    return "auxiliary_models" in inspect.signature(operator).parameters


def _bound(config: OperatorConfig, known: Mapping[str, Operator]) -> Operator:
    operator = known.get(config.name)
    if operator is None:
        if ":" not in config.name:
            raise ConfigError(
                f"there is no operator {config.name!r}{_nearest(config.name, known)}; there are {', '.join(known)}, "
                "and your own as 'package.module:function' or 'file.py:function'"
            )
        operator = import_function(config.name)
        if inspect.isclass(operator):
            raise ConfigError(
                f"operator {config.name} is a class, but an operator is a function: it takes the groups of a step, or "
                "the tasks, and returns those to go on with (docs/use/operators.md)"
            )
    try:
        inspect.signature(operator).bind([], **config.args)
    except TypeError as error:
        raise ConfigError(
            f"operator {config.name} does not take the arguments {config.args}: {error}; its signature is "
            f"{inspect.signature(operator)}"
        ) from error
    bound = partial(operator, **config.args)
    if config.name in known:
        _called(config.name, bound, [])  # of nothing, a built-in one says what is wrong with its arguments
    return bound


def _nearest(name: str, known: Mapping[str, Operator]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _called(name: str, operator: Operator, what: Sequence[Any]) -> Any:
    try:
        return operator(what)
    except (ConfigError, DatasetError, OperatorError):
        raise
    except Exception as error:  # the owner's code: whatever it raises is told with the operator's name
        raise OperatorError(f"operator {name} failed: {type(error).__name__}: {error}") from error
