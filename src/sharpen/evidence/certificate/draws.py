"""Were the sampled tokens drawn from the distributions that are recorded?

In: the groups of a step, and what the trainer measured of the distributions behind its trained tokens. Out: sums that
are 0 on average if each token was drawn from its recorded distribution, and how far from 0 chance may take them.

- surprise: -logprob less the entropy of the token's distribution, over the tokens;
- noise: the probability of smaller ids than the token's and half its own, less 1/2, over the tokens;
- repeats: over neighbours in a group with the same first prompt, as long as they have sampled the same: 1 if the next
  token is the same too, less the probability that it is.

Which tokens count in the first two must not depend on what they are. So there are two sums of each: over all calls, and
over those of members before whom two of their group had different rewards, for algorithms that train no others. A call
that should count, but was not measured (it failed, say), widens the bound by what its tokens may have added, whatever
the reason for which it is missing.

Each sum is a martingale. By Freedman's inequality (Annals of Probability 3, 1975) it is above bL/3 + sqrt((bL/3)^2 +
2VL) with a probability of at most exp(-L), if no term is above b and V is the sum of their variances.

Shape suffix: S sampled tokens of a call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sharpen.evidence.certificate.checks import DRAWS
from sharpen.evidence.certificate.rules import Rules
from sharpen.learning.experience.entropies import EntropySums
from sharpen.learning.experience.records import GroupPlace
from sharpen.types import Call, Check, Group, Rollout

Measured = Mapping[tuple[str, int], EntropySums]
"""Of the calls that trained, by rollout id and index."""

EVIDENCE = 13.0 * math.log(10.0)
"""L: one bound is passed by chance once in 1e13."""
LARGEST = 20.0 * math.log(2.0)
"""b: no entropy is above this (a vocabulary of a million). A larger surprise counts as this; that makes an alarm for
tokens that are too rare less likely, and none for others more likely."""
_LARGEST_VARIANCE = LARGEST * LARGEST / 4.0 + 1.0
"""No distribution over so many tokens has a surprise of larger variance (Reeb and Wolf, IEEE Transactions on
Information Theory 61, 2015)."""
_GRID = 1.1
"""V depends on chance itself, so it is rounded up to a power of this: every bound is then one of `_NUM_BOUNDS`, up to a
V of 1e12."""
_NUM_BOUNDS = 290
_NOISE_VARIANCE = 1.0 / 12.0
"""The largest of the second sum's terms: of a number that is uniform in 0 to 1."""
_ENTROPY_ERROR, _VARIANCE_ERROR, _CUMULATIVE_ERROR = 1e-5, 1e-4, 1e-4
"""How far sums over a vocabulary in float32 may be off."""

FALSE_ALARMS = 18.0 * (_NUM_BOUNDS + 1) * math.exp(-EVIDENCE)
"""The largest chance of a false alarm, for each step: two sums each of surprise and noise, from both sides, and one of
repeats; of the step, and of all so far; each against all bounds, and with that on missing calls. 6 in 10 million for
1,000 steps."""

SURPRISE, NOISE, REPEATS = "surprise", "noise", "repeats"
_ALL, _UNEQUAL = "of all members", "of members after unequal ones"
_UNITS = {SURPRISE: " nats", NOISE: " of cumulative probability", REPEATS: " more than probable"}
Name = tuple[str, str]
"""Of a sum: which one, and of which members."""


class Sums(NamedTuple):
    """Of `tokens` in `calls` calls: how far the sum is above 0 (`up`), with large terms cut, and below it (`down`); the
    `variance` and the `largest` of its terms; and by how much something else may have moved it (`slack`). Of the calls,
    `missing` have no terms; theirs would have at most this variance."""

    tokens: int = 0
    calls: int = 0
    up: float = 0.0
    down: float = 0.0
    variance: float = 0.0
    largest: float = 0.0
    slack: float = 0.0
    missing: int = 0
    missing_variance: float = 0.0

    @property
    def bound(self) -> float:
        """How far from 0 the sum may be. For missing calls, it covers every choice of as many."""
        away = _freedman(self.variance, self.largest, EVIDENCE) + self.slack
        if not self.missing:
            return away
        choices = math.lgamma(self.calls + 1) - math.lgamma(self.missing + 1)
        choices -= math.lgamma(self.calls - self.missing + 1)
        evidence = EVIDENCE + choices + math.log(self.calls * _NUM_BOUNDS)
        return away + _freedman(self.missing_variance, self.largest, evidence)

    @property
    def share(self) -> float:
        """How far from 0 it is, as a share of the bound."""
        return max(self.up, self.down, 0.0) / self.bound if self.tokens else 0.0


def _freedman(variance: float, largest: float, evidence: float) -> float:
    rounded = _GRID ** math.ceil(math.log(max(variance, 1.0), _GRID))
    part = largest * evidence / 3.0
    return part + math.sqrt(part * part + 2.0 * rounded * evidence)


def add(parts: Iterable[Sums]) -> Sums:
    """Return the sums of several parts together."""
    tokens, calls, up, down, variance, largest, slack, missing, unknown = zip(Sums(), *parts, strict=True)
    return Sums(
        sum(tokens), sum(calls), sum(up), sum(down), sum(variance), max(largest), sum(slack), sum(missing), sum(unknown)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawTest:
    """The sum of this name, of how many `tokens` of how many `steps`. It is `off` from 0 by so much, of the `bound` (of
    surprise in nats, of repeats in tokens), in the steps `first` to `last`. `calls` counted, of which `missing` have no
    entropies."""

    name: str
    tokens: int
    steps: int
    calls: int
    missing: int
    off: float
    bound: float
    first: int
    last: int

    @property
    def line(self) -> str:
        """A line for the user."""
        missing = f"; {self.missing} of {self.calls} calls were not measured, which widens this" * bool(self.missing)
        return (
            f"{self.tokens:>12,} tokens of {self.steps} steps: {self.off:+.4g}{_UNITS[self.name]}, where chance gives "
            f"at most {self.bound:.4g} ({self.bound / self.tokens:.2g} a token){missing}"
        )

    @property
    def problem(self) -> str | None:
        """A sentence if the sum is beyond its bound."""
        if abs(self.off) <= self.bound:
            return None
        where = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        by = f"by {abs(self.off):.4g}, where chance gives at most {self.bound:.4g} in {self.tokens} tokens"
        if self.name == REPEATS:
            return f"{where}: members of a group drew the same tokens more often than these are probable, {by}"
        if self.name == NOISE:
            than = "larger" if self.off > 0.0 else "smaller"
            return (
                f"{where}: the tokens were drawn with biased noise: {than} ids than are probable, {by} (of cumulative "
                "probability)"
            )
        than = "less" if self.off > 0.0 else "more"
        return (
            f"{where}: the tokens were not drawn from the recorded distributions (but at another temperature, or with "
            f"a filter): they are {than} probable than these make them, {by} (nats)"
        )


@dataclass(slots=True)
class Draws:
    """The sums of each step, one after the other, and of all steps so far."""

    _so_far: dict[Name, Sums] = field(default_factory=dict)
    _steps: dict[Name, list[int]] = field(default_factory=dict)
    _worst: dict[Name, tuple[int, int, Sums]] = field(default_factory=dict)

    def add(self, step: int, found: Mapping[Name, Sums]) -> Check:
        """Add the sums of a step (`sums_of`). Return the check of its draws: of the tokens whose surprise is tested."""
        problems = []
        for name, sums in found.items():
            so_far = self._so_far[name] = add((self._so_far.get(name, Sums()), sums))
            steps = self._steps.setdefault(name, [])
            steps += [step] * bool(sums.tokens)
            if not steps:
                continue
            for one in ((step, step, sums), (steps[0], step, so_far)):
                if one[2].share > 1.0:
                    problems.append(_test(name, one, 1 + step - one[0]).problem)
                if name not in self._worst or one[2].share > self._worst[name][2].share:
                    self._worst[name] = one
        tested = _sharpest(found, SURPRISE)
        tokens = 0 if tested is None else found[tested].tokens
        return Check(name=DRAWS, checked=tokens, broken=len(problems), first=next(iter(problems), None))

    def tests(self) -> tuple[DrawTest, ...]:
        """Return the tests: of each the sum of all steps or, if any is beyond its bound, the one that is furthest. Of
        the sums of surprise, that which would find the smaller deviation."""
        tests = []
        for kind in (SURPRISE, NOISE, REPEATS):
            name = _sharpest(self._so_far, kind)
            if name is None:
                continue
            furthest = max((one for one in self._worst if one[0] == kind), key=lambda one: self._worst[one][2].share)
            steps = self._steps[name]
            if self._worst[furthest][2].share > 1.0:
                tests.append(_test(furthest, self._worst[furthest], len(steps)))
            else:
                tests.append(_test(name, (steps[0], steps[-1], self._so_far[name]), len(steps)))
        return tuple(tests)


def _sharpest(found: Mapping[Name, Sums], kind: str) -> Name | None:
    """Return which sum of a kind would find the smallest deviation of a token; None if none has any token."""
    return min(
        (name for name, sums in found.items() if name[0] == kind and sums.tokens),
        key=lambda name: found[name].bound / found[name].tokens,
        default=None,
    )


def _test(name: Name, where: tuple[int, int, Sums], num_steps: int) -> DrawTest:
    first, last, sums = where
    return DrawTest(
        name=name[0],
        tokens=sums.tokens,
        steps=1 if first == last else num_steps,
        calls=sums.calls,
        missing=sums.missing,
        off=sums.up if sums.up >= sums.down else -sums.down,
        bound=sums.bound,
        first=first,
        last=last,
    )


def sums_of(
    groups: Sequence[Group],
    measured: Measured,
    metrics: Mapping[str, float],
    *,
    version: int,
    places: Iterable[GroupPlace],
    rules: Rules,
) -> dict[Name, Sums]:
    """Return the sums of a step by name. `groups` were rolled out for it, in the order of their tasks, `metrics` and
    `places` are the step's, `version` is the policy version before it.

    What the trainer measures for later updates of a step is of other weights than those that drew the tokens. So there
    count only as many groups as are in the first update, whatever was sampled. Surprise and noise are not tested of
    rollouts that ran ahead: which of their groups train at once depends on their length.
    """
    found = {(REPEATS, _ALL): repeats(groups)}
    if not ran_ahead(metrics):
        num_first = len(groups)
        if rules.num_minibatches > 1:
            num_first = (rules.batch_size or len(groups)) // rules.num_minibatches
            of_first = {one.group_id for one in places if one.update == 0}
            ids = {rollout.id for group in groups if group.id in of_first for rollout in group.rollouts}
            measured = {key: sums for key, sums in measured.items() if key[0] in ids}
        first = groups[:num_first]
        mean, kl = (max(metrics.get(f"trainer/logprob_gap_{one}", 0.0), 0.0) for one in ("mean", "kl"))
        for members in (_ALL, _UNEQUAL):
            sums, noise = of_tokens(first, measured, version, unequal=members == _UNEQUAL)
            gap = mean * sums.tokens + math.sqrt(2.0 * kl * sums.tokens * sums.variance)
            found[SURPRISE, members] = sums._replace(slack=sums.slack + gap)
            found[NOISE, members] = noise._replace(slack=noise.slack + mean * noise.tokens)
    return found


def ran_ahead(metrics: Mapping[str, float]) -> bool:
    """Whether the rollouts of a step ran ahead of the training."""
    return "sync/staleness_max" in metrics


def of_tokens(groups: Iterable[Group], measured: Measured, version: int, *, unequal: bool) -> tuple[Sums, Sums]:
    """Return the sums of surprise and noise of groups, whose tokens the weights of this policy version drew: of all
    members, or of those before whom there were `unequal` rewards."""
    parts: list[tuple[Sums, Sums]] = []
    for group in groups:
        rewards: set[float] = set()
        for rollout in sorted(group.rollouts, key=lambda one: one.index):
            if not unequal or len(rewards) > 1:
                again = [one for one in group.attempts if one.index == rollout.index]
                parts += [_missing(call) for one in again for call in _tested(one)]
                parts += [_of_call(call, measured.get((rollout.id, call.index)), version) for call in _tested(rollout)]
            if rollout.reward is not None:
                rewards.add(rollout.reward)
    surprise, noise = zip((Sums(), Sums()), *parts, strict=True)
    return add(surprise), add(noise)


def is_drawn(call: Call) -> bool:
    """Whether a call's tokens are drawn from the distributions that the trainer measures, by noise of their own."""
    return call.sampling.temperature > 0.0 and call.has_ratio and not call.seeded


def _tested(rollout: Rollout) -> Iterator[Call]:
    """Yield the calls that count: the first with its prompt, of those with `n` > 1 or asked once more."""
    prompts: set[bytes] = set()
    for call in rollout.calls:
        prompt = call.prompt_ids_P.tobytes()
        if is_drawn(call) and prompt not in prompts:
            yield call
        prompts.add(prompt)


def _of_call(call: Call, measured: EntropySums | None, version: int) -> tuple[Sums, Sums]:
    """Return the sums of surprise and noise of a call."""
    count = len(call.sampled_ids_S)
    if measured is None or not count or measured.num_tokens != count or (call.versions_S != version).any():
        return _missing(call)
    surprise_S, noise = -call.logprobs_S.astype(np.float64), measured.cumulative - 0.5 * count
    return Sums(
        tokens=count,
        calls=1,
        up=float(np.minimum(surprise_S, LARGEST).sum()) - measured.entropy,
        down=measured.entropy - float(surprise_S.sum()),
        variance=measured.varentropy + _VARIANCE_ERROR * count,
        largest=LARGEST,
        slack=_ENTROPY_ERROR * count,
    ), Sums(
        tokens=count,
        calls=1,
        up=noise,
        down=-noise,
        variance=_NOISE_VARIANCE * count,
        largest=0.5,
        slack=_CUMULATIVE_ERROR * count,
    )


def _missing(call: Call) -> tuple[Sums, Sums]:
    """Return the sums of a call whose tokens were not measured, or not recorded: it may have sampled as many as were
    allowed."""
    count = len(call.sampled_ids_S) or call.sampling.max_tokens
    return (
        Sums(calls=1, missing=1, missing_variance=_LARGEST_VARIANCE * count, largest=LARGEST),
        Sums(calls=1, missing=1, missing_variance=_NOISE_VARIANCE * count, largest=0.5),
    )


def repeats(groups: Iterable[Group]) -> Sums:
    """Return the sums of groups: of each two neighbours whose first calls have the same prompt."""
    parts: list[Sums] = []
    for group in groups:
        again = {one.index for one in group.attempts}
        for one, other in itertools.pairwise(sorted(group.rollouts, key=lambda one: one.index)):
            if one.calls and other.calls and not _alike(one.calls[0], other.calls[0]):
                continue
            if one.calls and other.calls:
                parts.append(repeats_of(one.calls[0], other.calls[0]))
            whole = all(member.calls and len(member.calls[0].sampled_ids_S) for member in (one, other))
            if not whole or {one.index, other.index} & again:
                parts.append(Sums(slack=1.0))  # a pair that is missing is at most so far below 0
    return add(parts)


def _alike(one: Call, other: Call) -> bool:
    """Whether two calls draw their first token from the same distribution, each by noise of its own."""
    first, second = one.sampling, other.sampling
    return (
        first.temperature > 0.0
        and (first.temperature, first.cuts) == (second.temperature, second.cuts)
        and (one.constraint, one.pictures) == (other.constraint, other.pictures)
        and not (one.seeded or other.seeded)
        and np.array_equal(one.prompt_ids_P, other.prompt_ids_P)
    )


def repeats_of(one: Call, other: Call) -> Sums:
    """Return the sums of two calls, up to and with the first token that differs, and while the weights are the same."""
    length = min(len(one.sampled_ids_S), len(other.sampled_ids_S))
    same_S = one.sampled_ids_S[:length] == other.sampled_ids_S[:length]
    begun_S = np.concatenate([[True], same_S[:-1]])[:length] & (one.versions_S[:length] == other.versions_S[:length])
    count = length if begun_S.all() else int(begun_S.argmin())
    chance_S = np.minimum(np.exp(one.logprobs_S[:count].astype(np.float64)), 1.0)
    up = float((same_S[:count] - chance_S).sum())
    return Sums(tokens=count, calls=1, up=up, variance=float((chance_S * (1.0 - chance_S)).sum()), largest=1.0)
