"""The intervals and the test behind a verdict, written out a second time: nothing of `monitor` is used.

In: rewards by task. Out: 95% intervals of means and of paired differences. Where `monitor.statistics` has closed forms
and counts, here are the equations that define them: quadrature, roots, a characteristic function.

Shape suffix: N tasks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import NormalDist, fmean, stdev

import numpy as np

Interval = tuple[float, float]
SAME = 1e-9
"""Numbers that differ by less than this share are the same, computed in another order."""
NODES, WEIGHTS = np.polynomial.legendre.leggauss(300)
GRID = 2**16


def mean_interval(rewards_N: Sequence[float], among: Collection[float]) -> Interval:
    """Wilson's interval if there are two different rewards, counting those in `among`; else Student's (NaN for one)."""
    if (levels := two_values({*rewards_N, *among})) is not None:
        low, high = wilson(sum(reward == levels[1] for reward in rewards_N) / len(rewards_N), len(rewards_N), 1)
        return _scaled(low, levels), _scaled(high, levels)
    return student(rewards_N, 1)


def difference(
    before: Mapping[str, float], after: Mapping[str, float], among: Collection[float], looks: int
) -> tuple[float, float, float, int]:
    """Return the mean of after minus before over the tasks in both, its interval so that `looks` of them hold jointly,
    as far as 0 where the exact test does not agree, and the number of tasks."""
    pairs = [(before[task], after[task]) for task in before if task in after]
    if not pairs:
        return math.nan, math.nan, math.nan, 0
    changes = [0.0 if math.isclose(first, second, rel_tol=SAME) else second - first for first, second in pairs]
    if (levels := two_values({*among, *(reward for pair in pairs for reward in pair)})) is not None:
        low, high = newcombe([(first == levels[1], second == levels[1]) for first, second in pairs], looks)
        low, high = (levels[1] - levels[0]) * low, (levels[1] - levels[0]) * high
    else:
        low, high = student(changes, looks)
    if (low > 0.0 or high < 0.0) and by_chance(changes) > 0.025 / looks:
        low, high = min(low, 0.0), max(high, 0.0)
    return fmean(changes), low, high, len(pairs)


def two_values(rewards: Collection[float]) -> tuple[float, float] | None:
    """Return the two values that all rewards have, 0 and 1 also if only one of them occurs; None for more or others."""
    found = sorted(set(rewards))
    if set(found) <= {0.0, 1.0}:
        return 0.0, 1.0
    return (found[0], found[1]) if len(found) == 2 and not math.isclose(*found, rel_tol=SAME) else None


def _scaled(share: float, levels: tuple[float, float]) -> float:
    return levels[0] + share * (levels[1] - levels[0])


def wilson(share: float, count: int, looks: int) -> Interval:
    """The shares p at which `(p - share)^2 = z^2 p (1 - p) / count` (Wilson, 1927)."""
    z2 = NormalDist().inv_cdf(1 - 0.025 / looks) ** 2 / count
    low, high = sorted(np.roots([1 + z2, -(2 * share + z2), share**2]).real.tolist())
    return (0.0 if share == 0.0 else low), (1.0 if share == 1.0 else high)


def newcombe(pairs_N: Sequence[tuple[bool, bool]], looks: int) -> Interval:
    """Newcombe's method 10 for paired shares (1998), from whether each task was good before and after."""
    table = np.array([[sum(pair == (x, y) for pair in pairs_N) for y in (True, False)] for x in (True, False)])
    count, (first, second) = len(pairs_N), (table[0].sum() / len(pairs_N), table[:, 0].sum() / len(pairs_N))
    (low1, high1), (low2, high2) = wilson(first, count, looks), wilson(second, count, looks)
    excess = float(table[0, 0] * table[1, 1] - table[0, 1] * table[1, 0])
    margins = float(np.prod(table.sum(0).astype(float)) * np.prod(table.sum(1).astype(float)))
    phi = 0.0 if not margins else (max(excess - count / 2, 0.0) if excess > 0 else excess) / math.sqrt(margins)

    def reach(a: float, b: float) -> float:
        return math.sqrt(max(a * a + b * b - 2 * phi * a * b, 0.0))

    middle = float(second - first)
    low, high = middle - reach(second - low2, high1 - first), middle + reach(high2 - second, first - low1)
    return max(low, -1.0), min(high, 1.0)


def student(values_N: Sequence[float], looks: int) -> Interval:
    """Student's interval of a mean; no width if all values are the same, NaN for a single one."""
    if len(values_N) < 2:
        return math.nan, math.nan
    mean, deviation = fmean(values_N), stdev(values_N)
    if deviation <= SAME * max(map(abs, values_N)):
        return mean, mean
    half = student_quantile(len(values_N) - 1, looks) * deviation / math.sqrt(len(values_N))
    return mean - half, mean + half


def student_quantile(degrees: int, looks: int) -> float:
    """The t below which the density's integral from 0 is `0.5 - 0.025 / looks`, by Gauss's quadrature and bisection, in
    the angle `atan(t / sqrt(degrees))`."""
    factor = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(math.pi)
    low, high = 0.0, math.pi / 2
    for _ in range(80):
        middle = (low + high) / 2
        integral = factor * middle / 2 * float(WEIGHTS @ np.cos(middle / 2 * (NODES + 1)) ** (degrees - 1))
        low, high = (middle, high) if integral < 0.5 - 0.025 / looks else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def by_chance(changes_N: Sequence[float]) -> float:
    """The chance that signs at random make the sum at least as large on its side of 0; 0 for more than 1,000 changes,
    where Student's interval says the same. The distribution of the sum is the Fourier transform of a product of
    cosines; sizes are counted in their common measure, else in steps of a grid of 65,536."""
    changes = np.array([change for change in changes_N if change])
    if len(changes) > 1000:
        return 0.0
    total = float(np.abs(changes).sum())
    step = max(_measure(np.abs(changes).tolist(), SAME * total), total / GRID)
    counts = np.rint(changes / step).astype(int)
    size = 2 * int(np.abs(counts).sum()) + 1
    wave = np.ones(size)
    for count in np.abs(counts).tolist():
        wave *= np.cos(2 * math.pi * count * np.arange(size) / size)
    chances = np.fft.ifft(wave).real  # of the sums 0 .. size // 2, and then of the negative ones
    return float(chances[abs(int(counts.sum())) : size // 2 + 1].sum())


def _measure(sizes_N: Sequence[float], rounding: float) -> float:
    """The largest number of which all sizes are multiples, but for rounding (Euclid)."""
    found = 0.0
    for size in sizes_N:
        while size > rounding:
            found, size = size, min(found % size, size - found % size)
    return found
