"""Statistics of an evaluation.

In: the reward of each task, by task id. Out: means and differences with 95% intervals. Differences are paired by task,
so that a task's difficulty cancels out.

Shape suffix: N tasks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, fmean, stdev

from sharpen.types import Mode

Z95 = NormalDist().inv_cdf(0.975)
"""The 97.5% quantile of the standard normal distribution, 1.95996."""


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


def accuracy(rewards_N: Iterable[float], *, binary: bool | None = None) -> Accuracy:
    """Return the mean with a 95% interval: Wilson's for rewards of 0 and 1, else the normal interval of the mean (N >=
    2). `binary` says which of the two all numbers of the run have; None: what these rewards have.

    Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927).
    """
    rewards = list(rewards_N)
    num_tasks = len(rewards)
    if num_tasks == 0:
        return Accuracy(accuracy=math.nan, low=math.nan, high=math.nan, num_tasks=0)
    mean = fmean(rewards)
    if is_binary(rewards) if binary is None else binary:
        low, high = wilson(sum(reward == 1.0 for reward in rewards), num_tasks)
    else:
        low, high = _normal(rewards)
    return Accuracy(accuracy=mean, low=low, high=high, num_tasks=num_tasks)


def quantile(looks: int = 1) -> float:
    """Return the half-width of an interval, in standard errors, with which `looks` intervals hold jointly with 95%
    (Bonferroni)."""
    return Z95 if looks == 1 else NormalDist().inv_cdf(1 - 0.025 / looks)


def wilson(num_successes: int, num_tasks: int, z: float = Z95) -> tuple[float, float]:
    """Return Wilson's score interval of a proportion (95% with the default `z`), without continuity correction."""
    share, z2 = num_successes / num_tasks, z * z
    centre = (share + z2 / (2 * num_tasks)) / (1 + z2 / num_tasks)
    half = z / (1 + z2 / num_tasks) * math.sqrt(share * (1 - share) / num_tasks + z2 / (4 * num_tasks**2))
    low = 0.0 if num_successes == 0 else centre - half
    high = 1.0 if num_successes == num_tasks else centre + half
    return low, high


def paired_difference(
    before: Mapping[str, float], after: Mapping[str, float], looks: int = 1, *, binary: bool | None = None
) -> Difference:
    """Return after minus before over the tasks in both: Newcombe's interval for rewards of 0 and 1, else the normal
    one, widened so that `looks` such intervals hold jointly. `binary` as in `accuracy`.

    Newcombe, "Improved confidence intervals for the difference between binomial proportions based on paired data",
    Statistics in Medicine 17 (1998), method 10: Wilson's limits of the two shares, squared and added, less their
    correlation with a continuity correction.
    """
    pairs = [(before[task], after[task]) for task in before if task in after]
    num_tasks = len(pairs)
    if num_tasks == 0:
        return Difference(difference=math.nan, low=math.nan, high=math.nan, num_tasks=0)
    differences = [second - first for first, second in pairs]
    if is_binary([reward for pair in pairs for reward in pair]) if binary is None else binary:
        both = sum(pair == (1, 1) for pair in pairs)
        gained = sum(pair == (0, 1) for pair in pairs)
        lost = sum(pair == (1, 0) for pair in pairs)
        low, high = newcombe(both, gained, lost, num_tasks - both - gained - lost, quantile(looks))
    else:
        low, high = _normal(differences, quantile(looks))
    return Difference(difference=fmean(differences), low=low, high=high, num_tasks=num_tasks)


def loss_difference(
    before: Mapping[str, tuple[float, int]], after: Mapping[str, tuple[float, int]], looks: int = 1
) -> Difference:
    """Return loss after minus loss before over the rows in both. Each row has the sum of its losses and their count;
    the loss is the total of all sums over the total of all counts. The interval is therefore that of a ratio: the
    normal interval of `(difference of the sums - ratio x count) / mean count` (linearization).

    Source: W. Cochran, "Sampling techniques", 1977, equation 6.13.
    """
    pairs = [(after[row][0] - before[row][0], before[row][1]) for row in before if row in after]
    num_rows, total = len(pairs), sum(count for _, count in pairs)
    if total == 0:
        return Difference(difference=math.nan, low=math.nan, high=math.nan, num_tasks=num_rows)
    ratio = sum(change for change, _ in pairs) / total
    residuals = [(change - ratio * count) * num_rows / total for change, count in pairs]
    low, high = _normal(residuals, quantile(looks))
    return Difference(difference=ratio, low=ratio + low, high=ratio + high, num_tasks=num_rows)


def newcombe(both: int, gained: int, lost: int, neither: int, z: float = Z95) -> tuple[float, float]:
    """Return method 10's interval of (share after - share before), from the four counts of paired outcomes."""
    num_tasks = both + gained + lost + neither
    after, before = (both + gained) / num_tasks, (both + lost) / num_tasks
    after_low, after_high = wilson(both + gained, num_tasks, z)
    before_low, before_high = wilson(both + lost, num_tasks, z)
    phi = _correlation(both, gained, lost, neither)

    def reach(first: float, second: float) -> float:
        return math.sqrt(max(0.0, first * first - 2 * phi * first * second + second * second))

    difference = after - before
    low = difference - reach(after - after_low, before_high - before)
    high = difference + reach(after_high - after, before - before_low)
    return max(-1.0, low), min(1.0, high)


def _correlation(both: int, gained: int, lost: int, neither: int) -> float:
    product = (both + gained) * (lost + neither) * (both + lost) * (gained + neither)
    if product == 0:
        return 0.0
    excess = float(both * neither - gained * lost)
    if excess > 0:
        excess = max(excess - (both + gained + lost + neither) / 2, 0.0)
    return excess / math.sqrt(product)


def _normal(values_N: list[float], z: float = Z95) -> tuple[float, float]:
    if len(values_N) < 2:
        return math.nan, math.nan
    half = z * stdev(values_N) / math.sqrt(len(values_N))
    return fmean(values_N) - half, fmean(values_N) + half


def is_binary(rewards_N: Iterable[float]) -> bool:
    """Return whether every reward is 0 or 1, so that their mean is an accuracy."""
    return all(reward in (0.0, 1.0) for reward in rewards_N)


def rewards_are_binary(*evaluations: Evaluation | None) -> bool:
    """Return whether the rewards of a run are 0 or 1 wherever it was evaluated: in every mode, on every dataset."""
    return all(
        is_binary([reward for rewards in one.rewards.values() for reward in rewards.values()])
        and rewards_are_binary(*one.further.values())
        for one in evaluations
        if one is not None
    )


def metric_is_binary(name: str, *evaluations: Evaluation | None) -> bool:
    """Return the same for a metric of the workflow or the judge."""
    return all(
        is_binary([value for by_name in one.metrics.values() for value in by_name.get(name, {}).values()])
        and metric_is_binary(name, *one.further.values())
        for one in evaluations
        if one is not None
    )


def by_mode(evaluation: Evaluation | None, *, binary: bool | None = None) -> dict[str, Accuracy]:
    """Return the mean reward of each mode that was evaluated; `binary` as in `accuracy`."""
    modes = evaluation.rewards if evaluation is not None else {}
    return {mode: accuracy(rewards.values(), binary=binary) for mode, rewards in modes.items() if rewards}


def accuracy_metrics(evaluation: Evaluation, prefix: str = "eval") -> dict[str, float]:
    """Return an evaluation as metrics: `eval/greedy/accuracy`, `.../low`, `.../high`, and the means of what workflow
    and judge measured (`eval/greedy/judge/<name>`); further datasets as `eval_<name>/...`."""
    metrics: dict[str, float] = {}
    binary = rewards_are_binary(evaluation)
    for mode, rewards in evaluation.rewards.items():
        if rewards:
            of_mode = accuracy(rewards.values(), binary=binary)
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
