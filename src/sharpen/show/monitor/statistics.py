"""Statistics of an evaluation.

In: the reward of each task, by task id. Out: means and differences with 95% intervals. Differences are paired by task,
so that a task's difficulty cancels out.

Shape suffix: N tasks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from sharpen.show.monitor.intervals import ROUNDING, agreed, newcombe, ratio, student, wilson
from sharpen.types import Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Mean reward of `num_tasks` tasks with its 95% interval; NaN if there are too few tasks."""

    accuracy: float
    low: float
    high: float
    num_tasks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Mean of (after - before) over the tasks that both have, with its 95% interval."""

    difference: float
    low: float
    high: float
    num_tasks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Rewards by task id, greedy and sampled (the mean for a task evaluated several times), and evaluations of further
    datasets.

    `metrics` holds, by mode and then by name, what workflow and judge measured on each task. `without_calls` counts, by
    mode, rollouts that never called the model. `out_of_time` has, by mode, the tasks whose reward is that of a failure
    because a time limit ended their rollout. `no_result` is a sentence if the numbers do not describe the model and no
    conclusion may be drawn from them.
    """

    greedy: Mapping[str, float]
    sampled: Mapping[str, float]
    further: Mapping[str, Evaluation] = field(default_factory=dict)
    metrics: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    without_calls: Mapping[str, int] = field(default_factory=dict)
    out_of_time: Mapping[str, Sequence[str]] = field(default_factory=dict)
    no_result: str = ""

    @property
    def rewards(self) -> Mapping[Mode, Mapping[str, float]]:
        """Rewards by task id for each mode; empty for a mode that was not evaluated."""
        return {"greedy": self.greedy, "sampled": self.sampled}


def accuracy(rewards_N: Iterable[float], *, among: Collection[float] = ()) -> Accuracy:
    """Return the mean with a 95% interval: Wilson's where there are two different rewards, 0 and 1 or others, else
    Student's (N >= 2). `among` are further rewards of the same run: what all of them are decides."""
    rewards = list(rewards_N)
    num_tasks = len(rewards)
    if num_tasks == 0:
        return Accuracy(accuracy=math.nan, low=math.nan, high=math.nan, num_tasks=0)
    if (levels := two_levels({*rewards, *among})) is not None:
        worse, better = levels
        shares = wilson(rewards.count(better), num_tasks)
        low, high = (worse + (better - worse) * share for share in shares)
    else:
        low, high = student(rewards)
    return Accuracy(accuracy=fmean(rewards), low=low, high=high, num_tasks=num_tasks)


def paired_difference(
    before: Mapping[str, float], after: Mapping[str, float], looks: int = 1, *, among: Collection[float] = ()
) -> Difference:
    """Return after minus before over the tasks in both: Newcombe's interval where there are two different rewards, else
    Student's, so that `looks` such intervals hold jointly; both as far as 0 where the exact test does not agree that
    there is a difference (`monitor.intervals`). `among` as in `accuracy`."""
    pairs = [(before[task], after[task]) for task in before if task in after]
    num_tasks = len(pairs)
    if num_tasks == 0:
        return Difference(difference=math.nan, low=math.nan, high=math.nan, num_tasks=0)
    differences = [0.0 if math.isclose(*pair, rel_tol=ROUNDING) else pair[1] - pair[0] for pair in pairs]
    if (levels := two_levels({*(reward for pair in pairs for reward in pair), *among})) is not None:
        worse, better = levels
        both = pairs.count((better, better))
        gained, lost = pairs.count((worse, better)), pairs.count((better, worse))
        shares = newcombe(both, gained, lost, num_tasks - both - gained - lost, looks)
        interval = ((better - worse) * shares[0], (better - worse) * shares[1])
    else:
        interval = student(differences, looks)
    low, high = agreed(interval, differences, looks)
    return Difference(difference=fmean(differences), low=low, high=high, num_tasks=num_tasks)


def loss_difference(
    before: Mapping[str, tuple[float, int]], after: Mapping[str, tuple[float, int]], looks: int = 1
) -> Difference:
    """Return loss after minus loss before over the rows in both. Each row has the sum of its losses and their count;
    the loss is the total of all sums over the total of all counts, and its interval that of a ratio."""
    pairs = [(after[row][0] - before[row][0], before[row][1]) for row in before if row in after]
    changes, counts = [change for change, _ in pairs], [count for _, count in pairs]
    if sum(counts) == 0:
        return Difference(difference=math.nan, low=math.nan, high=math.nan, num_tasks=len(pairs))
    difference, *interval = ratio(changes, counts, looks)
    low, high = agreed((interval[0], interval[1]), changes, looks)
    return Difference(difference=difference, low=low, high=high, num_tasks=len(pairs))


def two_levels(rewards: Collection[float]) -> tuple[float, float] | None:
    """Return the lower and the higher of the two values that all rewards have: `(0, 1)`, also where only one of them
    occurs, or two others; None if there are more."""
    distinct = set(rewards)
    if is_binary(distinct):
        return 0.0, 1.0
    if len(distinct) != 2 or math.isclose(*distinct, rel_tol=ROUNDING):
        return None
    return min(distinct), max(distinct)


def is_binary(rewards_N: Iterable[float]) -> bool:
    """Return whether every reward is 0 or 1, so that their mean is an accuracy."""
    return all(reward in (0.0, 1.0) for reward in rewards_N)


def distinct_rewards(*evaluations: Evaluation | None) -> frozenset[float]:
    """Return the different rewards of a run, wherever it was evaluated: in every mode, on every dataset."""
    return frozenset(
        reward
        for one in evaluations
        if one is not None
        for some in (*(rewards.values() for rewards in one.rewards.values()), distinct_rewards(*one.further.values()))
        for reward in some
    )


def distinct_values(name: str, *evaluations: Evaluation | None) -> frozenset[float]:
    """Return the same for a metric of the workflow or the judge."""
    return frozenset(
        value
        for one in evaluations
        if one is not None
        for some in (
            *(by_name.get(name, {}).values() for by_name in one.metrics.values()),
            distinct_values(name, *one.further.values()),
        )
        for value in some
    )


def by_mode(evaluation: Evaluation | None, *, among: Collection[float] = ()) -> dict[str, Accuracy]:
    """Return the mean reward of each mode that was evaluated; `among` as in `accuracy`."""
    modes = evaluation.rewards if evaluation is not None else {}
    return {mode: accuracy(rewards.values(), among=among) for mode, rewards in modes.items() if rewards}


def accuracy_metrics(evaluation: Evaluation, prefix: str = "eval") -> dict[str, float]:
    """Return an evaluation as metrics: `eval/greedy/accuracy`, `.../low`, `.../high`, and the means of what workflow
    and judge measured (`eval/greedy/judge/<name>`); further datasets as `eval_<name>/...`."""
    metrics: dict[str, float] = {}
    among = distinct_rewards(evaluation)
    for mode, rewards in evaluation.rewards.items():
        if rewards:
            of_mode = accuracy(rewards.values(), among=among)
            metrics |= {
                f"{prefix}/{mode}/accuracy": of_mode.accuracy,
                f"{prefix}/{mode}/low": of_mode.low,
                f"{prefix}/{mode}/high": of_mode.high,
            }
        if mode in evaluation.without_calls:
            metrics[f"{prefix}/{mode}/without_calls"] = float(evaluation.without_calls[mode])
    for place, by_name in evaluation.metrics.items():
        metrics |= {f"{prefix}/{place}/{name}": fmean(values.values()) for name, values in by_name.items() if values}
    for name, further in evaluation.further.items():
        metrics |= accuracy_metrics(further, f"{prefix}_{name}")
    return metrics


def evaluation_to_json(evaluation: Evaluation) -> dict[str, object]:
    """Return an evaluation as JSON for a checkpoint's state, so that a resumed run still knows its `before`."""
    return {
        "greedy": dict(evaluation.greedy),
        "sampled": dict(evaluation.sampled),
        "further": {name: evaluation_to_json(inner) for name, inner in evaluation.further.items()},
        "metrics": evaluation.metrics,
        "without_calls": dict(evaluation.without_calls),
        "out_of_time": {mode: list(tasks) for mode, tasks in evaluation.out_of_time.items()},
        "no_result": evaluation.no_result,
    }


def evaluation_from_json(content: Mapping[str, object]) -> Evaluation:
    """Read an evaluation from a checkpoint's state; keys that older versions did not write may be missing."""
    further = content["further"]
    assert isinstance(further, dict)
    return Evaluation(
        greedy=content["greedy"],  # type: ignore[arg-type]
        sampled=content["sampled"],  # type: ignore[arg-type]
        further={name: evaluation_from_json(inner) for name, inner in further.items()},
        metrics=content.get("metrics", {}),  # type: ignore[arg-type]
        without_calls=content.get("without_calls", {}),  # type: ignore[arg-type]
        out_of_time=content.get("out_of_time", {}),  # type: ignore[arg-type]
        no_result=str(content.get("no_result", "")),
    )
