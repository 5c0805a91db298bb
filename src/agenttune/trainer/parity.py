"""Do the trainer and the engine compute the same model? Measured in every step, before anything is updated.

In: for each loss entry the trainer's logprob and the recorded one. Out: the gaps, and a `ParityError` when they are too
large. Only tokens of the trainer's current version can be compared: for older ones the model itself has changed.

Shape suffixes: E loss entries of a pack.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from agenttune.errors import ParityError
from agenttune.trainer.packing import Pack


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far logprobs may be apart (natural logarithm): the mean and the largest gap of a step; None is no bound.

    In float32 honest gaps are near 1e-5, wrong temperatures, masks, templates or stale weights are above 1e-2. In
    bfloat16 single tokens scatter, so the mean decides.
    """

    mean: float | None
    max: float | None

    @classmethod
    def of(cls, compute_dtype: torch.dtype) -> Tolerance:
        """The vetted tolerance of a compute type."""
        if compute_dtype == torch.bfloat16:
            return cls(mean=1e-2, max=None)
        return cls(mean=None, max=1e-4)


class LogprobGap:
    """The gaps of one update, gathered pack by pack."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.num_tokens = 0
        self.mean = 0.0
        self.max = 0.0
        self.kl = 0.0
        self._worst = ""

    def add(self, pack: Pack, logprobs_E: torch.Tensor) -> None:
        """Compare the entries whose token was sampled by the current version."""
        chosen = np.flatnonzero(pack.versions_E == self.version)
        if not len(chosen):
            return
        now = logprobs_E.detach().cpu().numpy()[chosen].astype(np.float64)
        recorded = pack.logprobs_E[chosen].astype(np.float64)
        gaps = np.abs(now - recorded)
        gaps[np.isnan(gaps)] = np.inf
        total = self.num_tokens + len(chosen)
        self.mean += (float(gaps.mean()) - self.mean) * len(chosen) / total
        # KL(engine || trainer), estimated on tokens that the engine sampled (k3).
        kl = float((np.exp(np.minimum(now - recorded, 20.0)) - 1.0 - (now - recorded)).mean())
        self.kl += (kl - self.kl) * len(chosen) / total
        self.num_tokens = total
        worst = int(np.argmax(gaps))
        if gaps[worst] >= self.max:
            self.max = float(gaps[worst])
            entry = int(chosen[worst])
            self._worst = (
                f"rollout {pack.rollout_ids[pack.rollouts_E[entry]]}, call {pack.calls_E[entry]}, token "
                f"{pack.tokens_E[entry]} (id {pack.targets_E[entry]}, temperature {pack.temperatures_E[entry]:g}): "
                f"the engine recorded {recorded[worst]:.6f}, the trainer computes {now[worst]:.6f}"
            )

    def check(self, tolerance: Tolerance) -> None:
        """Raise `ParityError`, naming the worst token, if the gaps are out of tolerance."""
        too_far = (tolerance.max is not None and not self.max <= tolerance.max) or (
            tolerance.mean is not None and not self.mean <= tolerance.mean
        )
        if too_far:
            raise ParityError(
                f"trainer and engine differ at policy version {self.version}: mean |logprob gap| {self.mean:.3g}, max "
                f"{self.max:.3g} over {self.num_tokens} tokens (allowed: mean {tolerance.mean}, max {tolerance.max}). "
                f"Worst: {self._worst}. Nothing was updated. Either a weight update did not reach the engine, or the "
                "trained ids or temperatures are not those that were sampled"
            )
