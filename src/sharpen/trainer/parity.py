"""Do the trainer and the engine compute the same model? Measured in every step, before anything is updated.

In: for each loss entry the trainer's logprob and the recorded one. Out: the gaps, and a `ParityError` when they are too
large. Only tokens of the trainer's current version can be compared: for older ones the model itself has changed, and
newer ones there are none.

In float32 the gap of every single token is bounded. In bfloat16 rounding is large, and differs by model, so it is
measured first (`trainer.rounding`), and gaps are taken in logits: the difference of a token's log odds, times its
temperature. That is the difference of its logit to those of the others, whatever the temperature, and whether the model
is sure of the token or not, so that one figure serves all of them. A token is *off* if its gap is many times the
rounding; the step fails if more are off than chance allows.

Shape suffixes: E loss entries of a pack, K entries that are compared, J places that are judged in logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sharpen.errors import ParityError
from sharpen.trainer.packing import IndexArray, Pack
from sharpen.trainer.suspicion import likeliest_cause
from sharpen.types import Experience

Array = npt.NDArray[np.float64]

MAX_FLOAT32 = 1e-4
"""Largest gap of a token in float32, in nats; below temperature 1 in logits, so times the temperature."""
OFF, OFF_SHARE = 8.0, 0.2
"""Times the rounding from which on a token is off, and the share that may be by rounding alone. An engine, which rounds
all that it stores, is up to 3 times as far from the trainer as the trainer is from float32, and training moves both; by
honest steps (families, temperatures, whole runs) it is below a tenth as a rule."""
FAR, FAR_SHARE = 100.0, 0.01
"""The same for tokens that are far off, of which a few are enough."""
FALSE_ALARM = 1e-6
"""Chance that a step is stopped whose tokens are off independently of each other with that share, for each of the
two."""
SURE = 1e-3
"""A token to which both give more than 1 less this agrees: its log odds are those of numbers too near to 1."""
ROUNDING_BFLOAT16 = 0.02
"""In logits, where nobody has measured it: that of toy models of five families, and of the quickstart's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far logprobs may be apart: the mean and the largest gap of a step (nats; the largest in logits below
    temperature 1), and the rounding in logits that tokens are judged by. None is no bound."""

    mean: float | None = None
    max: float | None = None
    rounding: float | None = None

    @classmethod
    def of(cls, compute_dtype: torch.dtype, rounding: float | None = None) -> Tolerance:
        """That of a compute type; with `rounding`, as `trainer.rounding` measured it, that of the model and machine."""
        if rounding is not None:
            return cls(rounding=rounding)
        if compute_dtype == torch.bfloat16:
            return cls(rounding=ROUNDING_BFLOAT16)
        return cls(max=MAX_FLOAT32)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobPairs:
    """Entries that were compared: both logprobs, their temperatures, and which of them are the same token at the same
    place of a prefix that sequences share (K; numbers from 0 on)."""

    now_K: Array
    recorded_K: Array
    temperatures_K: Array
    places_K: IndexArray


class LogprobGap:
    """The gaps of one update, gathered pack by pack. `num_judged` places were judged in logits, of which `num_off` are
    off; both are known after `check`, if its tolerance has a rounding."""

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
        """Compare the entries whose token was sampled by the current version."""
        chosen = np.flatnonzero(pack.versions_E == self.version)
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
        self._note_worst(pack, chosen, gaps_K * np.minimum(temperatures_K, 1.0), now_K, recorded_K)

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
        """Raise `ParityError`, naming the worst token and the likeliest cause, if the gaps are out of tolerance.
        `at_start`: the weights are those of the model's files on both sides."""
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
            f"updated. Likeliest: {cause}"
        )

    def _bounds(self, tolerance: Tolerance) -> Iterable[str]:
        if tolerance.max is not None and not self._largest <= tolerance.max:
            yield f"allowed is {tolerance.max:g} for each (below temperature 1 times the temperature)"
        if tolerance.mean is not None and not self.mean <= tolerance.mean:
            yield f"allowed is a mean of {tolerance.mean:g}"

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
                    f"in logits {num} of {self.num_judged} places are more than {limit:.3g} apart, {times:g} times the "
                    f"rounding of {tolerance.rounding:.3g} that was measured: by rounding it is at most "
                    f"{most_allowed(self.num_judged, share)} of them"
                )
                return


def logit_gaps(compared: LogprobPairs) -> Array:
    """How far each place is apart in logits, shape J: those where both give the token nearly all are left out."""
    now_K, recorded_K = compared.now_K, compared.recorded_K
    open_K = ~(np.maximum(_missing(now_K), _missing(recorded_K)) < SURE)  # so that NaN is judged too
    gaps_K = np.abs(log_odds(now_K) - log_odds(recorded_K)) * compared.temperatures_K
    gaps_K[np.isnan(gaps_K)] = np.inf
    places_K, gaps_K = compared.places_K[open_K], gaps_K[open_K]
    if not len(gaps_K):
        return gaps_K
    counts = np.bincount(places_K)
    sums = np.bincount(places_K, weights=gaps_K)
    means: Array = sums[counts > 0] / counts[counts > 0]
    return means


def log_odds(logprobs: Array) -> Array:
    """`log(p / (1 - p))`, finite: of p nearer to 1 than float32 can say, that of 1 - 1e-7."""
    odds: Array = logprobs - np.log(np.maximum(_missing(logprobs), 1e-7))
    return odds


def _missing(logprobs: Array) -> Array:
    """`1 - p`."""
    rest: Array = -np.expm1(np.minimum(logprobs, 0.0))
    return rest


def too_many(num: int, num_judged: int, share: float) -> bool:
    """Whether so many are off that chance, at this share, comes to it less often than `FALSE_ALARM`.

    Source: the bound of a binomial tail, exp(-n KL(found || share)) (W. Hoeffding 1963, theorem 1).
    """
    found = num / max(num_judged, 1)
    if found <= share:
        return False
    divergence = found * math.log(found / share)
    if found < 1.0:
        divergence += (1.0 - found) * math.log((1.0 - found) / (1.0 - share))
    return num_judged * divergence > -math.log(FALSE_ALARM)


def most_allowed(num_judged: int, share: float = OFF_SHARE) -> int:
    """How many may be off."""
    low, high = 0, num_judged
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (low, middle - 1) if too_many(middle, num_judged, share) else (middle, high)
    return low


def check_versions(experiences: Iterable[Experience], version: int) -> None:
    """Raise `ParityError` for loss tokens of a version that the trainer has not reached, or that nobody noted: such
    tokens would never be compared."""
    for one in experiences:
        versions_E = one.versions_T[one.loss_mask_T]
        if not len(versions_E) or (versions_E.min() >= 0 and versions_E.max() <= version):
            continue
        wrong = int(versions_E.max()) if versions_E.max() > version else int(versions_E.min())
        token = int(np.flatnonzero(one.loss_mask_T & (one.versions_T == wrong))[0])
        raise ParityError(
            f"rollout {one.rollout_id}, call {one.calls_T[token]}, token {token} was sampled at policy version {wrong} "
            f"by what the engine says, but the trainer is at {version}: it cannot be compared. Nothing was updated. "
            "The engine counts versions wrongly: it must carry the number that `load` gave it"
        )
