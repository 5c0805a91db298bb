"""Statistics of an evaluation.

In: the reward of each task, by task id. Out: means and differences with 95% intervals. Differences are paired by task,
so that a task's difficulty cancels out.

Shape suffix: N tasks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist, fmean

import numpy as np

from sharpen.types import Mode

# 95% intervals of shares, means and paired differences, and the test that has the last word on a difference.
#
# In: numbers of independent tasks (or runs). Out: `(low, high)`; `looks` intervals hold jointly (Bonferroni). Wilson's
# and Newcombe's are for shares, Student's for all other means.
#
# A difference is called above or below 0 only if an exact test agrees (`agreed`): were before and after
# interchangeable, each task's difference would have either sign with the same chance. So a model that is the same as
# before is called better in at most 2.5% of all cases, whatever the rewards are.
#
# Shape suffix: N tasks.

TAIL = 0.025
"""The chance of error at each side of an interval."""
ROUNDING = 1e-9
"""What differs by less than this share of its size is the same number, computed in another order."""
_GRID = 2**16
_MOST_FLIPPED = 1000


def normal_quantile(looks: int = 1) -> float:
    """Return the quantile of the standard normal distribution at `1 - 0.025 / looks`; 1.95996 for one look."""
    return NormalDist().inv_cdf(1 - TAIL / looks)


@lru_cache
def student_quantile(degrees: int, looks: int = 1) -> float:
    """Return the quantile of Student's distribution with `degrees` of freedom (at least 1) at `1 - 0.025 / looks`.

    The distribution is a finite sum in the angle `atan(t / sqrt(degrees))` (Abramowitz and Stegun, "Handbook of
    mathematical functions", 26.7.3 and 26.7.4); the angle is found by bisection.
    """
    odd = degrees % 2
    factors = np.arange(2 + odd, degrees - 1, 2)
    weights = np.cumprod(np.concatenate([[1.0], (factors - 1) / factors])) if degrees > 1 else np.zeros(1)
    powers = odd + 2 * np.arange(len(weights))

    def inside(angle: float) -> float:
        terms = math.sin(angle) * float(weights @ math.cos(angle) ** powers)
        return 2 / math.pi * (angle + terms) if odd else terms

    low, high = 0.0, math.pi / 2
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if inside(middle) < 1 - 2 * TAIL / looks else (low, middle)
    return math.tan(low) * math.sqrt(degrees)


def student(values_N: Sequence[float], looks: int = 1) -> tuple[float, float]:
    """Return the interval of a mean; NaN with fewer than two values. Values that are all the same give no width.

    Student, "The probable error of a mean", Biometrika 6 (1908).
    """
    if len(values_N) < 2:
        return math.nan, math.nan
    mean = fmean(values_N)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values_N) / (len(values_N) - 1))
    if deviation <= ROUNDING * max(map(abs, values_N)):
        return mean, mean
    half = student_quantile(len(values_N) - 1, looks) * deviation / math.sqrt(len(values_N))
    return mean - half, mean + half


def ratio(sums_N: Sequence[float], counts_N: Sequence[float], looks: int = 1) -> tuple[float, float, float]:
    """Return the sum of the sums over the sum of the counts (above 0), and its interval: Student's, of `(sum - ratio x
    count) / mean count`.

    Source: W. Cochran, "Sampling techniques", 1977, equation 6.13.
    """
    total, size = sum(counts_N), len(counts_N)
    found = sum(sums_N) / total
    residuals = [
        0.0 if math.isclose(part, found * count, rel_tol=ROUNDING) else (part - found * count) * size / total
        for part, count in zip(sums_N, counts_N, strict=True)
    ]
    low, high = student(residuals, looks)
    return found, found + low, found + high


def wilson(num_successes: int, num_tasks: int, looks: int = 1) -> tuple[float, float]:
    """Return Wilson's score interval of a share, without continuity correction.

    Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927).
    """
    z = normal_quantile(looks)
    share, z2 = num_successes / num_tasks, z * z
    centre = (share + z2 / (2 * num_tasks)) / (1 + z2 / num_tasks)
    half = z / (1 + z2 / num_tasks) * math.sqrt(share * (1 - share) / num_tasks + z2 / (4 * num_tasks**2))
    low = 0.0 if num_successes == 0 else centre - half
    high = 1.0 if num_successes == num_tasks else centre + half
    return low, high


def newcombe(both: int, gained: int, lost: int, neither: int, looks: int = 1) -> tuple[float, float]:
    """Return the interval of (share after - share before), from the four counts of paired outcomes.

    Newcombe, "Improved confidence intervals for the difference between binomial proportions based on paired data",
    Statistics in Medicine 17 (1998), method 10: Wilson's limits of the two shares, squared and added, less their
    correlation with a continuity correction.
    """
    num_tasks = both + gained + lost + neither
    after, before = (both + gained) / num_tasks, (both + lost) / num_tasks
    after_low, after_high = wilson(both + gained, num_tasks, looks)
    before_low, before_high = wilson(both + lost, num_tasks, looks)
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


def agreed(interval: tuple[float, float], differences_N: Iterable[float], looks: int = 1) -> tuple[float, float]:
    """Return the interval of the differences' mean, widened as far as 0 if signs at random explain so large a mean."""
    low, high = interval
    if (low > 0.0 or high < 0.0) and sign_flips(differences_N) > TAIL / looks:
        return min(low, 0.0), max(high, 0.0)
    return low, high


def sign_flips(differences_N: Iterable[float]) -> float:
    """Return the chance that the sum of these differences lies at least as far on its side of 0 if each has either sign
    with the same chance: exact where their sizes are multiples of one number, 65,536 together at most, else on a grid
    of 65,536 steps; 0 if more than 1,000 are not 0, where Student's interval says the same.

    Fisher, "The design of experiments", 1935, section 21; Pitman, "Significance tests which may be applied to samples
    from any populations", Supplement to the Journal of the Royal Statistical Society 4 (1937). With all sizes the same
    it is McNemar's exact test.
    """
    changes = np.array([difference for difference in differences_N if difference])
    if len(changes) > _MOST_FLIPPED:
        return 0.0
    sizes = np.abs(changes)
    steps = np.rint(sizes / _step_of(sizes.tolist())).astype(int)
    least = int(min(steps[changes > 0].sum(), steps[changes < 0].sum()))
    chances = np.zeros(least + 1)  # of each sum of the sizes with one of the signs, as far as `least`
    chances[0] = 1.0
    for step in steps:
        if step <= least:
            chances[step:] += chances[: least + 1 - step]
        chances /= 2
    return float(chances.sum())


def _step_of(sizes_N: Sequence[float]) -> float:
    """Return the largest number of which all sizes are multiples (by Euclid), at least a step of the grid."""
    total, measure = math.fsum(sizes_N), 0.0
    for size in sizes_N:
        rest = size
        while rest > ROUNDING * total:
            measure, rest = rest, abs(math.remainder(measure, rest))
        if measure < total / _GRID:
            return total / _GRID
    return measure


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
    there is a difference (`monitor.statistics`). `among` as in `accuracy`."""
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
