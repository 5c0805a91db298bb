"""Checks in every step, before any update, that trainer and engine compute the same model.

In: for each loss entry the trainer's logprob and the recorded one. Out: the gaps, and a `ParityError` if they are too
large. Only tokens of the trainer's current version can be compared: for older ones the weights have changed, and newer
ones do not exist.

In float32, the gap of every token is bounded, and that of nearly all more tightly: where attention is sharp, rounding
alone is a hundred times the mean for one token in some ten thousand. In bfloat16, rounding is large and depends on the
model, so it is measured first (`trainer.rounding`), and gaps are computed in logits: the difference of a token's log
odds, times its temperature. This is how far the token's logit moves relative to the others, whatever the temperature
and the token's probability, so one bound fits all tokens. A token is *off* if its gap is many times the rounding; the
step fails if more tokens are off than chance allows.

Shape suffixes: E loss entries of a pack, K compared entries, J places judged in logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sharpen.errors import ParityError
from sharpen.learning.trainer.packing import IndexArray, Pack
from sharpen.learning.trainer.suspicion import likeliest_cause
from sharpen.models.routing import RouteShape
from sharpen.types import Experience

Array = npt.NDArray[np.float64]

MAX_FLOAT32, FAR_FLOAT32 = 1e-4, 1e-3
"""Gaps of tokens in float32, in nats; below temperature 1, in logits (multiplied by the temperature): only a few may
have more than the first, and none more than the second."""
FEW = 1e-3
"""The share of tokens that may have more than `MAX_FLOAT32`. In correct runs of the quickstart's model, over
conversations that it was not trained on, one of 30,000 has."""
OFF, OFF_SHARE = 8.0, 0.2
"""A token is off if its gap exceeds this multiple of the rounding; the share of tokens that may be off. An engine,
which rounds all that it stores, is up to 3 times as far from the trainer as the trainer is from float32, and this
changes in training. The share in correct runs, over families and temperatures, is usually below a tenth."""
FAR, FAR_SHARE = 100.0, 0.01
"""The same for tokens that are far off: a few of them suffice to fail."""
FALSE_ALARM = 1e-6
"""Chance, for each of the two limits, of failing a step whose tokens are off independently with exactly that share."""
SURE = 1e-3
"""A token is not judged if both probabilities exceed 1 minus this: log odds so close to 1 are inaccurate."""
ROUNDING_BFLOAT16 = 0.02
"""Rounding in logits if it was not measured: that of toy models of five families and of the quickstart's model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Limits on the gaps of a step: the mean, the largest gap, and the gap of all tokens but a few (in nats; the two of
    tokens below temperature 1 in logits), and the rounding in logits that tokens are judged by. None means no limit."""

    mean: float | None = None
    max: float | None = None
    most: float | None = None
    rounding: float | None = None

    @classmethod
    def of(cls, compute_dtype: torch.dtype, rounding: float | None = None) -> Tolerance:
        """Return the tolerance for a compute dtype, or for a `rounding` measured by `trainer.rounding`."""
        if rounding is not None:
            return cls(rounding=rounding)
        if compute_dtype == torch.bfloat16:
            return cls(rounding=ROUNDING_BFLOAT16)
        return cls(max=FAR_FLOAT32, most=MAX_FLOAT32)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobPairs:
    """Compared entries (shape K): both logprobs, the temperature, and a place number from 0, which is the same for the
    same token at the same position of a shared prefix."""

    now_K: Array
    recorded_K: Array
    temperatures_K: Array
    places_K: IndexArray


class LogprobGap:
    """The gaps of one update, collected pack by pack. `num_judged` is the number of places judged in logits, `num_off`
    of those that are off; `check` sets both if its tolerance has a rounding."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.num_tokens = 0
        self.mean = 0.0
        self.max = 0.0
        self.kl = 0.0
        self.num_judged = 0
        self.num_off = 0
        self._largest = 0.0
        self._worst = ""
        self._compared: list[LogprobPairs] = []

    def add(self, pack: Pack, logprobs_E: torch.Tensor) -> None:
        """Compare the entries whose token was sampled by `version` from a distribution that is known."""
        chosen = np.flatnonzero(pack.comparable_E(self.version))
        if not len(chosen):
            return
        now_K = logprobs_E.detach().cpu().numpy()[chosen].astype(np.float64)
        recorded_K = pack.logprobs_E[chosen].astype(np.float64)
        temperatures_K = pack.temperatures_E[chosen].astype(np.float64)
        gaps_K = np.abs(now_K - recorded_K)
        gaps_K[np.isnan(gaps_K)] = np.inf
        total = self.num_tokens + len(chosen)
        self.mean += (float(gaps_K.mean()) - self.mean) * len(chosen) / total
        # KL(engine || trainer), estimated on tokens that the engine sampled (k3).
        kl = float((np.exp(np.minimum(now_K - recorded_K, 20.0)) - 1.0 - (now_K - recorded_K)).mean())
        self.kl += (kl - self.kl) * len(chosen) / total
        self.num_tokens = total
        self.max = max(self.max, float(gaps_K.max()))
        places = pack.predict_E[chosen] * (int(pack.targets_E.max()) + 1) + pack.targets_E[chosen]
        places_K = np.unique(places, return_inverse=True)[1]
        self._compared.append(
            LogprobPairs(now_K=now_K, recorded_K=recorded_K, temperatures_K=temperatures_K, places_K=places_K)
        )
        self._note_worst(pack, chosen, _scaled_gaps(self._compared[-1]), now_K, recorded_K)

    def _note_worst(self, pack: Pack, chosen: IndexArray, scaled_K: Array, now_K: Array, recorded_K: Array) -> None:
        worst = int(np.argmax(scaled_K))
        if scaled_K[worst] < self._largest:
            return
        self._largest = float(scaled_K[worst])
        entry = int(chosen[worst])
        self._worst = (
            f"rollout {pack.rollout_ids[pack.rollouts_E[entry]]}, call {pack.calls_E[entry]}, token "
            f"{pack.tokens_E[entry]} (id {pack.targets_E[entry]}, temperature {pack.temperatures_E[entry]:g}): "
            f"the engine recorded {recorded_K[worst]:.6f}, the trainer computes {now_K[worst]:.6f}"
        )

    def check(self, tolerance: Tolerance, *, at_start: bool = False) -> None:
        """Raise `ParityError`, naming the worst token and the likeliest cause, if the gaps exceed the tolerance.
        `at_start` says that both sides should have the weights of the model's files."""
        if not self.num_tokens:
            return
        problems = [*self._bounds(tolerance), *self._off(tolerance)]
        if not problems:
            return
        now, recorded, temperatures = (
            np.concatenate([getattr(one, name) for one in self._compared])
            for name in ("now_K", "recorded_K", "temperatures_K")
        )
        cause = likeliest_cause(now, recorded, temperatures, rounding=tolerance.rounding, at_start=at_start)
        raise ParityError(
            f"trainer and engine differ at policy version {self.version}: mean |logprob gap| {self.mean:.3g}, max "
            f"{self.max:.3g} over {self.num_tokens} tokens; {'; '.join(problems)}. Worst: {self._worst}. Nothing was "
            f"updated. Likeliest cause: {cause}"
        )

    def _bounds(self, tolerance: Tolerance) -> Iterable[str]:
        if tolerance.max is not None and not self._largest <= tolerance.max:
            yield f"at most {tolerance.max:g} is allowed for each token (below temperature 1, times the temperature)"
        if tolerance.most is not None:
            gaps = np.concatenate([_scaled_gaps(one) for one in self._compared])
            if too_many(num := int((gaps > tolerance.most).sum()), len(gaps), FEW):
                yield (
                    f"{num} of {len(gaps)} tokens are more than {tolerance.most:g} apart (below temperature 1, times "
                    f"the temperature); at most {most_allowed(len(gaps), FEW)} may be"
                )
        if tolerance.mean is not None and not self.mean <= tolerance.mean:
            yield f"a mean of at most {tolerance.mean:g} is allowed"

    def _off(self, tolerance: Tolerance) -> Iterable[str]:
        if tolerance.rounding is None:
            return
        gaps_J = np.concatenate([logit_gaps(one) for one in self._compared])
        self.num_judged, self.num_off = len(gaps_J), int((gaps_J > OFF * tolerance.rounding).sum())
        for times, share in ((OFF, OFF_SHARE), (FAR, FAR_SHARE)):
            limit = times * tolerance.rounding
            num = int((gaps_J > limit).sum())
            if too_many(num, self.num_judged, share):
                yield (
                    f"in logits, {num} of {self.num_judged} places are more than {limit:.3g} apart, {times:g} times "
                    f"the rounding of {tolerance.rounding:.3g}; at most {most_allowed(self.num_judged, share)} may be"
                )
                return


def _scaled_gaps(compared: LogprobPairs) -> Array:
    """Return the gap of each entry, shape K, below temperature 1 in logits; infinite if either logprob is no number."""
    gaps_K = np.abs(compared.now_K - compared.recorded_K) * np.minimum(compared.temperatures_K, 1.0)
    gaps_K[np.isnan(gaps_K)] = np.inf
    return gaps_K


def logit_gaps(compared: LogprobPairs) -> Array:
    """Return the gap in logits of each place, shape J, without places where both probabilities are nearly 1."""
    now_K, recorded_K = compared.now_K, compared.recorded_K
    judged_K = ~(np.maximum(_complement(now_K), _complement(recorded_K)) < SURE)  # written so that NaN is judged too
    gaps_K = np.abs(log_odds(now_K) - log_odds(recorded_K)) * compared.temperatures_K
    gaps_K[np.isnan(gaps_K)] = np.inf
    places_K, gaps_K = compared.places_K[judged_K], gaps_K[judged_K]
    if not len(gaps_K):
        return gaps_K
    counts = np.bincount(places_K)
    sums = np.bincount(places_K, weights=gaps_K)
    means: Array = sums[counts > 0] / counts[counts > 0]
    return means


def log_odds(logprobs: Array) -> Array:
    """Return `log(p / (1 - p))`, limited to its value at p = 1 - 1e-7, the resolution of float32."""
    odds: Array = logprobs - np.log(np.maximum(_complement(logprobs), 1e-7))
    return odds


def _complement(logprobs: Array) -> Array:
    """Return `1 - p`."""
    complement: Array = -np.expm1(np.minimum(logprobs, 0.0))
    return complement


def too_many(num: int, num_judged: int, share: float) -> bool:
    """Whether chance makes `num` of `num_judged` places be off less often than `FALSE_ALARM`, if each is with
    probability `share`.

    Source: the bound of a binomial tail, exp(-n KL(observed || share)) (W. Hoeffding 1963, theorem 1).
    """
    observed = num / max(num_judged, 1)
    if observed <= share:
        return False
    divergence = observed * math.log(observed / share)
    if observed < 1.0:
        divergence += (1.0 - observed) * math.log((1.0 - observed) / (1.0 - share))
    return num_judged * divergence > -math.log(FALSE_ALARM)


def most_allowed(num_judged: int, share: float = OFF_SHARE) -> int:
    """Return the largest number of places that may be off."""
    low, high = 0, num_judged
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (low, middle - 1) if too_many(middle, num_judged, share) else (middle, high)
    return low


def is_comparable(experience: Experience, version: int) -> bool:
    """Whether any loss token was sampled by this policy version, from a distribution that is known."""
    known_T = experience.loss_mask_T & ~experience.truncated_T
    return bool((experience.versions_T[known_T] == version).any())


def check_versions(experiences: Iterable[Experience], version: int) -> None:
    """Raise `ParityError` for loss tokens with no version, or one that the trainer has not reached: such tokens would
    never be compared."""
    for one in experiences:
        versions_E = one.versions_T[one.loss_mask_T]
        if not len(versions_E) or (versions_E.min() >= 0 and versions_E.max() <= version):
            continue
        wrong = int(versions_E.max()) if versions_E.max() > version else int(versions_E.min())
        token = int(np.flatnonzero(one.loss_mask_T & (one.versions_T == wrong))[0])
        raise ParityError(
            f"the engine reported that rollout {one.rollout_id}, call {one.calls_T[token]}, token {token} was sampled "
            f"at policy version {wrong}, but the trainer is at {version}: the token cannot be compared. Nothing was "
            "updated. The engine must report the version passed to `load`"
        )


def check_routes(experiences: Iterable[Experience], shape: RouteShape) -> None:
    """Raise `ParityError` for a sequence without the experts of all its tokens but the last, as a mixture of experts of
    this `shape` chooses them."""
    for one in experiences:
        where = f"rollout {one.rollout_id}"
        expected = (len(one.ids_T) - 1, shape.num_layers, shape.top_k)
        if one.routes_NLK is None:
            raise ParityError(
                f"the engine returned no experts for {where}, but the model is a mixture of experts: the trainer could "
                "choose others than the engine, and its logprobs would be of another model. Nothing was updated. The "
                "embedded engine returns them (engine.type: embedded)"
            )
        highest = int(one.routes_NLK.max(initial=0))
        if one.routes_NLK.shape != expected or highest >= shape.num_experts:
            raise ParityError(
                f"the engine returned experts of the shape {one.routes_NLK.shape}, up to number {highest}, for "
                f"{where}; the trainer's model needs {expected} (tokens but the last, layers with experts, experts of "
                f"a token), below {shape.num_experts}. Nothing was updated"
            )
