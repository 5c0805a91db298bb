"""The loss of an expert's rows beside rollouts, a second time, to repeat an update.

In: a run's settings, the number of a step, logprobs of the expert's tokens. Out: what the two losses count, and the
loss of each token. Written out from CHORD (arXiv 2508.11408) and `docs/use/beyond-rl.md`; nothing is shared with
`algorithm.expert`.

Shape suffix: S tokens of a sequence with loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from sharpen.config.run import ExpertConfig, RunConfig

PHI: Mapping[str, bool] = {"mix": False, "mix_chord": True}
"""The algorithms with an expert, and whether they weigh its tokens unless set otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoss:
    """The loss of an update is `(1 - mu)` times the policy loss and `mu` times the expert's. `phi`: a token counts
    p (1 - p)."""

    mu: float
    phi: bool

    @classmethod
    def of(cls, config: RunConfig, step: int) -> ExpertLoss | None:
        """Return what a run's settings define for a step (from 1), None without an expert."""
        usual, phi = PHI.get(config.algorithm.algorithm_type), config.expert.phi
        return None if usual is None else cls(mu=_mu(config.expert, step), phi=usual if phi is None else phi)

    def losses(self, logprobs_S: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token (S)."""
        p_S = torch.exp(logprobs_S.detach())
        return -self.mu * (p_S * (1.0 - p_S) if self.phi else 1.0) * logprobs_S


def _mu(settings: ExpertConfig, step: int) -> float:
    """Linearly up to `mu`, then along half a cosine down to `mu_valley`."""
    peak, warmup = 0.1 if settings.mu is None else settings.mu, settings.mu_warmup_steps or 0
    if step < warmup:
        return peak * step / warmup
    if settings.mu_valley is None or settings.mu_decay_steps is None:
        return peak
    done = 1.0 if settings.mu_decay_steps == 0 else min(1.0, (step - warmup) / settings.mu_decay_steps)
    return settings.mu_valley + (peak - settings.mu_valley) * (1.0 + math.cos(math.pi * done)) / 2.0
