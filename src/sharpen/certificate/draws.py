"""Were the sampled tokens drawn from the distributions that are recorded?

In: the calls of a run's steps, and the entropies that the trainer recorded. Out: two sums that are 0 on average where
each token was drawn from its recorded distribution, with bounds that hold whatever these distributions are.

- surprise: -logprob less entropy, over the tokens. Which tokens count must not depend on what they are: those of a step
  are counted if each has its entropy, or else those of members before whom two of their group had different rewards.
- repeats: over neighbours in a group with the same first prompt, as long as they have sampled the same: 1 if the next
  token is the same too, less the probability that it is.

Each sum is a martingale. By Freedman's inequality (Annals of Probability 3, 1975) it is above x = bL/3 + sqrt((bL/3)^2
+ 2VL) with a probability of at most exp(-L), if no term is above b and V bounds the sum of their variances. No
distribution with an entropy has a surprise of larger variance than the one with one likely token and all others equal.

Shape suffix: S sampled tokens of a call.
"""

from __future__ import annotations

import functools
import itertools
import math
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sharpen.certificate.lineage import Lineage, in_words
from sharpen.experience.entropies import read_entropies
from sharpen.experience.reading import has, read_groups_at, reading
from sharpen.types import Call, FloatArray, Group, Rollout

Floats = npt.NDArray[np.float64]

EVIDENCE = 13.0 * math.log(10.0)
"""L: a sum is beyond its bound by chance once in 1e13. Held against it are both sums of each unbroken stretch of steps,
both ways, with either choice of tokens: below 3 n^2 1e-13 for a run of n steps, 3 in 10 million for 1,000."""
LARGEST_VOCABULARY = 1 << 18
"""Taken where the model's own is not known."""
_HALF = 2.0**-11
"""By how much float16 rounds an entropy, as a share of it."""


class Sums(NamedTuple):
    """Of `tokens`: the sum of their terms; that of the terms cut to at most `largest`, which is what can rise above the
    bound; the sum of the largest variances that they may have; and by how much rounding may move the sum."""

    tokens: int = 0
    total: float = 0.0
    cut: float = 0.0
    variance: float = 0.0
    rounding: float = 0.0
    largest: float = 0.0

    def bound(self, evidence: float = EVIDENCE) -> float:
        """How far from 0 the sum may be."""
        part = self.largest * evidence / 3.0
        return part + math.sqrt(part * part + 2.0 * self.variance * evidence) + self.rounding

    def share(self, evidence: float = EVIDENCE) -> float:
        """How far from 0 it is, as a share of the bound."""
        return max(-self.total, self.cut, 0.0) / self.bound(evidence) if self.tokens else 0.0


def add(parts: Iterable[Sums]) -> Sums:
    """Return the sums of several parts together."""
    tokens, total, cut, variance, rounding, largest = zip(Sums(), *parts, strict=True)
    return Sums(sum(tokens), sum(total), sum(cut), sum(variance), sum(rounding), max(largest))


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawTest:
    """The sum of this name: of how many tokens and steps; and where it is nearest to its bound or furthest beyond, of
    all unbroken stretches (steps `first` to `last`): its `total`, its `bound` (of surprise in nats, of repeats in
    tokens), and the `share` of the bound."""

    name: str
    tokens: int
    steps: int
    first: int
    last: int
    total: float
    bound: float
    share: float

    @property
    def line(self) -> str:
        """A line for the user."""
        return f"{self.tokens:>12,} tokens of {self.steps} steps: at most {self.share:.0%} of what chance may give"

    @property
    def problem(self) -> str | None:
        """A sentence if the sum is beyond its bound."""
        where = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        by = f"by {self.total:+.4g}, where chance gives at most {self.bound:.4g} either way"
        if self.share <= 1.0:
            return None
        if self.name == "repeats":
            than = "more" if self.total > 0.0 else "less"
            return f"{where}: members of a group drew the same tokens {than} often than they are probable, {by}"
        than = "less" if self.total > 0.0 else "more"
        return (
            f"{where}: the tokens were not drawn from the recorded distributions (but at another temperature, with a "
            f"filter or with biased noise): they are {than} probable than these make them, {by} nats"
        )


def tested_draws(journal: Path, lineage: Lineage, vocabulary: int) -> tuple[tuple[DrawTest, ...], list[str]]:
    """Test the steps behind the weights. Also return what could not be tested, and why. `vocabulary` is the number of
    tokens that the model knows, at least."""
    found: dict[str, dict[int, Sums]] = {"surprise": {}, "repeats": {}}
    without = []
    with reading(journal) as connection:
        for record in lineage.steps:
            step, keys = record.step, lineage.groups[record.step]
            groups = dict(zip(keys, read_groups_at(journal, keys), strict=True))
            found["repeats"][step] = repeats(groups.values())
            if not _has_entropies(connection, step):
                without.append(step)
                continue
            first = [groups[key] for key in _in_first_update(connection, step, keys)]
            entropies = {one.id: read_entropies(connection, one, [step]) for group in first for one in group.rollouts}
            sums = surprise(first, entropies, lineage.version_before(step), vocabulary)
            if sums is not None:
                gap = sums.tokens * record.metrics.get("trainer/logprob_gap_mean", 0.0)
                found["surprise"][step] = sums._replace(rounding=sums.rounding + gap)
    tests = [worst(name, by_step) for name, by_step in found.items()]
    missing = [
        f"whether the tokens of steps {in_words(without)} were drawn from the distributions that are recorded, by "
        "their surprise: no entropies are in run.db (an earlier version of Sharpen did not keep them)"
    ]
    return tuple(test for test in tests if test is not None), missing if without else []


def _has_entropies(connection: sqlite3.Connection, step: int) -> bool:
    sql = "SELECT 1 FROM entropies WHERE step = ? LIMIT 1"
    return has(connection, "entropies") and connection.execute(sql, (step,)).fetchone() is not None


def _in_first_update(connection: sqlite3.Connection, step: int, keys: Sequence[int]) -> Sequence[int]:
    """Return the groups of a step's first update: the entropies of others are of later weights. Which ones these are
    must not depend on what was sampled: none, if groups were left out of a step with several updates."""
    if not has(connection, "step_groups"):
        return ()
    sql = "SELECT group_key, update_number, left_out FROM step_groups WHERE step = ?"
    rows = {key: (update, left_out) for key, update, left_out in connection.execute(sql, (step,))}
    if all(not update for update, _ in rows.values()):
        return keys
    if any(left_out is not None for _, left_out in rows.values()):
        return ()
    return [key for key in keys if rows[key][0] == 0]


def worst(name: str, by_step: Mapping[int, Sums]) -> DrawTest | None:
    """Hold each step, and the unbroken stretch of steps up to it, against the bound; None if no token counts. A step
    that is not in `by_step` was not tested, and ends a stretch."""
    found: list[tuple[int, int, Sums]] = []
    begin, stretch = 0, Sums()
    for step, sums in sorted(by_step.items()):
        begin, stretch = (begin, add((stretch, sums))) if step - 1 in by_step else (step, sums)
        found += [(step, step, sums), (begin, step, stretch)]
    first, last, sums = max(found, key=lambda one: one[2].share(), default=(0, 0, Sums()))
    tokens = [one.tokens for one in by_step.values() if one.tokens]
    if not tokens:
        return None
    return DrawTest(
        name=name,
        tokens=sum(tokens),
        steps=len(tokens),
        first=first,
        last=last,
        total=sums.total,
        bound=sums.bound(),
        share=sums.share(),
    )


def surprise(
    groups: Iterable[Group], entropies: Mapping[str, Mapping[int, FloatArray]], version: int, vocabulary: int
) -> Sums | None:
    """Return the sums of groups; None if tokens that must count have no entropy. `entropies` are those of a rollout's
    calls, by its id, of the weights of this policy version."""
    every: list[Sums | None] = []
    chosen: list[Sums | None] = []
    for group in groups:
        before: set[float] = set()
        for rollout in group.rollouts:
            every.append(_of_member(rollout, entropies[rollout.id], version, vocabulary))
            chosen += every[-1:] if len(before) > 1 else []
            before |= {rollout.reward} if rollout.reward is not None else set()
    for members in (every, chosen):
        complete = [one for one in members if one is not None]
        if len(complete) == len(members):
            return add(complete)
    return None


def _of_member(rollout: Rollout, entropies: Mapping[int, FloatArray], version: int, vocabulary: int) -> Sums | None:
    """Return the sums of a rollout; None if a token has no entropy of the weights that drew it. Calls that are greedy
    or of truncated distributions do not count."""
    parts = []
    for call in rollout.calls:
        if call.sampling.temperature > 0.0 and call.sampling.full_support and len(call.sampled_ids_S):
            entropies_S = entropies.get(call.index)
            if entropies_S is None or not np.isfinite(entropies_S).all() or (call.versions_S != version).any():
                return None
            parts.append(surprise_of(call.logprobs_S, entropies_S, vocabulary))
    return add(parts)


def surprise_of(logprobs_S: FloatArray, entropies_S: FloatArray, vocabulary: int) -> Sums:
    """Return the sums of tokens with these logprobs, drawn from distributions with these entropies (nats)."""
    surprise_S, entropy_S = -logprobs_S.astype(np.float64), entropies_S.astype(np.float64)
    most = math.log(vocabulary) + 3.0  # above every entropy; the cut only makes an alarm less likely
    near = [np.interp(entropy_S * factor, *_largest_variances(vocabulary)) for factor in (1.0 - _HALF, 1.0 + _HALF)]
    return Sums(
        tokens=len(surprise_S),
        total=float((surprise_S - entropy_S).sum()),
        cut=float((np.minimum(surprise_S, most) - entropy_S).sum()),
        variance=float(np.maximum(*near).sum()),
        rounding=_HALF * float(entropy_S.sum()),
        largest=most,
    )


@functools.cache
def _largest_variances(vocabulary: int) -> tuple[Floats, Floats]:
    """Return entropies, and the largest variance of the surprise in a distribution with each (Reeb and Wolf, IEEE
    Transactions on Information Theory 61, 2015: one likely token, and `rest` spread evenly over the others)."""
    rest = np.logspace(-12.0, 0.0, 4000) * (1.0 - 1.0 / vocabulary)
    likely, other = -np.log1p(-rest), math.log(vocabulary - 1) - np.log(rest)
    return (1.0 - rest) * likely + rest * other, rest * (1.0 - rest) * (other - likely) ** 2


def repeats(groups: Iterable[Group]) -> Sums:
    """Return the sums of groups: of each two neighbours whose first calls have the same prompt."""
    calls = [[rollout.calls[0] for rollout in group.rollouts if rollout.calls] for group in groups]
    pairs = [pair for of_group in calls for pair in itertools.pairwise(of_group)]
    return add(repeats_of(one, other) for one, other in pairs if _alike(one, other))


def _alike(one: Call, other: Call) -> bool:
    """Whether two calls draw their first token from the same distribution, and not greedily."""
    first, second = one.sampling, other.sampling
    return (
        first.temperature > 0.0
        and (first.temperature, first.top_p, first.top_k) == (second.temperature, second.top_p, second.top_k)
        and (one.constraint, one.pictures) == (other.constraint, other.pictures)
        and np.array_equal(one.prompt_ids_P, other.prompt_ids_P)
    )


def repeats_of(one: Call, other: Call) -> Sums:
    """Return the sums of two calls, up to and with the first token that differs, and while the weights are the same."""
    length = min(len(one.sampled_ids_S), len(other.sampled_ids_S))
    same_S = one.sampled_ids_S[:length] == other.sampled_ids_S[:length]
    begun_S = np.concatenate([[True], same_S[:-1]])[:length] & (one.versions_S[:length] == other.versions_S[:length])
    count = length if begun_S.all() else int(begun_S.argmin())
    chance_S = np.minimum(np.exp(one.logprobs_S[:count].astype(np.float64)), 1.0)
    total = float((same_S[:count] - chance_S).sum())
    return Sums(count, total, total, float((chance_S * (1.0 - chance_S)).sum()), largest=1.0)
