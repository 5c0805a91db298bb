"""How far a judge agrees with its owner, and what that says of a success rate it measured.

In: what it said of marked answers. Out: agreement, Cohen's kappa, true and false positive rates with Wilson's
intervals, its scatter; a success rate corrected for its errors.

Sources: J. Cohen, "A coefficient of agreement for nominal scales", 1960; W. Rogan and B. Gladen, "Estimating prevalence
from the results of a screening test", 1978, with the bootstrap over marks of judgy (https://github.com/ai-evals-course/judgy).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

import numpy as np
import numpy.typing as npt

from sharpen.agent.judges.several import GOOD_FROM
from sharpen.evidence.certificate.intervals import wilson
from sharpen.evidence.judges.asking import Judged

DRAWS = 2000
"""Draws of the bootstrap."""
FEW = 30
"""With fewer answers of one mark, the interval of a rate is wider than a third."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """So many of so many, with Wilson's 95% interval; NaN of none."""

    count: int
    of: int

    @property
    def value(self) -> float:
        return self.count / self.of if self.of else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.value, self.of, 1) if self.of else (math.nan, math.nan)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.3f} [{low:.3f}, {high:.3f}] ({self.count} of {self.of})" if self.of else "of none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What a judge said first of each answer, against its owner's marks. An answer is good for it from `good_from` on.

    Counts of answers: called good and good (`hits`), called good and not (`false_alarms`), not called good and good
    (`misses`), neither (`rejections`), and those on which it `failed`. `turned` are the answers that it called good one
    time and not another, of those asked several times; `deviation` is the mean standard deviation of its rewards there.
    """

    hits: int
    false_alarms: int
    misses: int
    rejections: int
    failed: int = 0
    errors: tuple[str, ...] = ()
    turned: Share | None = None
    deviation: float = math.nan

    @property
    def agreement(self) -> Share:
        """The share of judged answers on which both agree."""
        return Share(count=self.hits + self.rejections, of=self.judged)

    @property
    def judged(self) -> int:
        """The answers that it judged."""
        return self.hits + self.false_alarms + self.misses + self.rejections

    @property
    def true_positives(self) -> Share:
        """The share of good answers that it calls good."""
        return Share(count=self.hits, of=self.hits + self.misses)

    @property
    def false_positives(self) -> Share:
        """The share of answers that are not good that it calls good."""
        return Share(count=self.false_alarms, of=self.false_alarms + self.rejections)

    @property
    def kappa(self) -> float:
        """Cohen's kappa: agreement beyond what the same shares would give by chance; NaN where that is all."""
        if not self.judged:
            return math.nan
        good, called = (self.hits + self.misses) / self.judged, (self.hits + self.false_alarms) / self.judged
        chance = good * called + (1 - good) * (1 - called)
        return (self.agreement.value - chance) / (1 - chance) if chance < 1.0 else math.nan

    def to_json(self) -> dict[str, object]:
        """As plain JSON."""
        shares = {
            "agreement": self.agreement,
            "true_positive_rate": self.true_positives,
            "false_positive_rate": self.false_positives,
            **({"turned": self.turned} if self.turned is not None else {}),
        }
        return {
            **{
                name: {"value": one.value, "low": one.interval[0], "high": one.interval[1], "of": one.of}
                for name, one in shares.items()
            },
            "kappa": self.kappa,
            "deviation": self.deviation,
            "failed": self.failed,
            "errors": list(self.errors),
        }

    def lines(self) -> Iterator[str]:
        """Yield the numbers as text."""
        good = self.true_positives.of
        yield f"{self.judged + self.failed} marked answers, {self.judged} judged: {good} good, {self.judged - good} not"
        if self.failed:
            yield f"the judge failed on {self.failed}: {'; '.join(self.errors)}"
        if not self.judged:
            return
        yield f"agreement            {self.agreement}"
        yield f"Cohen's kappa        {round(self.kappa, 3) + 0.0:.3f}"
        yield f"true positive rate   {self.true_positives}"
        yield f"false positive rate  {self.false_positives}"
        if self.turned is not None:
            yield f"turned when asked again  {self.turned}; standard deviation of a reward {self.deviation:.3g}"
        if min(good, self.judged - good) < FEW:
            yield f"fewer than {FEW} answers of one kind: mark more of them for narrower intervals"


def agreement_of(judged: Sequence[Judged], *, good_from: float = GOOD_FROM) -> Agreement:
    """Count what a judge said of marked answers."""
    called = [(one.rewards[0] >= good_from, one.mark.good) for one in judged if one.rewards]
    several = [one.rewards for one in judged if len(one.rewards) > 1]
    failed = [one for one in judged if not one.rewards]
    turned = sum(len({reward >= good_from for reward in rewards}) > 1 for rewards in several)
    return Agreement(
        hits=called.count((True, True)),
        false_alarms=called.count((True, False)),
        misses=called.count((False, True)),
        rejections=called.count((False, False)),
        failed=len(failed),
        errors=tuple(dict.fromkeys(one.error for one in failed))[:3],
        turned=Share(count=turned, of=len(several)) if several else None,
        deviation=fmean(map(pstdev, several)) if several else math.nan,
    )


def below(found: Agreement, kappa: float) -> str | None:
    """Say why a judge does not reach a floor; None if it does."""
    if found.failed * 10 > found.judged:
        first = found.errors[0] if found.errors else ""
        return f"failed on {found.failed} of {found.judged + found.failed} marked answers ({first})"
    if not found.true_positives.of or not found.false_positives.of:
        return f"cannot be measured by {found.judged} marks of one kind: judge_floor needs good answers and others"
    if math.isnan(found.kappa) or found.kappa < kappa:
        return (
            f"agrees with its owner on {found.agreement}, Cohen's kappa {found.kappa:.3f}, below the floor of {kappa:g}"
        )
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrected:
    """A success rate as a judge measured it on `of` answers, and corrected for its errors, with a 95% interval; NaN if
    the judge calls good answers good no more often than others."""

    measured: float
    corrected: float
    low: float
    high: float
    of: int

    def __str__(self) -> str:
        found = "no better than chance: cannot be corrected"
        if not math.isnan(self.corrected):
            found = f"{self.corrected:.3f} [{self.low:.3f}, {self.high:.3f}] corrected"
        return f"{self.measured:.3f} by the judge ({self.of} answers), {found}"


def corrected_rate(called_N: Sequence[bool], found: Agreement, *, seed: int = 0) -> Corrected:
    """Correct the share of answers that a judge called good by its true and false positive rates: `(share - fpr) / (tpr
    - fpr)`, cut to 0 to 1. The interval draws marks and answers again, with replacement, `DRAWS` times."""
    measured = fmean(called_N) if called_N else math.nan
    point = float(_rogan_gladen(*map(np.float64, (measured, found.true_positives.value, found.false_positives.value))))
    if not called_N or math.isnan(point):
        return Corrected(measured=measured, corrected=math.nan, low=math.nan, high=math.nan, of=len(called_N))
    draw = np.random.default_rng(seed)
    cells = np.array([found.hits, found.false_alarms, found.misses, found.rejections]) / found.judged
    hits, alarms, misses, rejections = draw.multinomial(found.judged, cells, DRAWS).T.astype(np.float64)
    shares = draw.binomial(len(called_N), measured, DRAWS) / len(called_N)
    with np.errstate(invalid="ignore", divide="ignore"):
        drawn = _rogan_gladen(shares, hits / (hits + misses), alarms / (alarms + rejections))
    low, high = np.nanpercentile(drawn, [2.5, 97.5]) if not np.isnan(drawn).all() else (math.nan, math.nan)
    return Corrected(measured=measured, corrected=point, low=float(low), high=float(high), of=len(called_N))


def _rogan_gladen(
    share: npt.NDArray[np.float64] | np.float64,
    tpr: npt.NDArray[np.float64] | np.float64,
    fpr: npt.NDArray[np.float64] | np.float64,
) -> npt.NDArray[np.float64]:
    """NaN where the judge is no better than chance."""
    better = np.where(tpr > fpr, tpr - fpr, np.nan)
    return np.clip((share - fpr) / better, 0.0, 1.0)
