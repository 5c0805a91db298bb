"""95% intervals of shares, means and paired differences, and the test that has the last word on a difference.

In: numbers of independent tasks (or runs). Out: `(low, high)`; `looks` intervals hold jointly (Bonferroni). Wilson's
and Newcombe's are for shares, Student's for all other means.

A difference is called above or below 0 only if an exact test agrees (`agreed`): were before and after interchangeable,
each task's difference would have either sign with the same chance. So a model that is the same as before is called
better in at most 2.5% of all cases, whatever the rewards are.

Shape suffix: N tasks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from statistics import NormalDist, fmean

import numpy as np

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
