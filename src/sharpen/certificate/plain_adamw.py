"""AdamW with its schedule and clip, written out to repeat an update.

In: weights, moments and gradients. Out: weights and moments after an update. Nothing is shared with
`trainer.optimizer`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from sharpen.config.run import RunConfig

Tensor = torch.Tensor

KINDS = ("exp_avg", "exp_avg_sq")
"""The names of AdamW's two moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How AdamW makes its updates. `planned` is the number of updates that the schedule spans."""

    peak: float
    warmup: int
    schedule: str
    floor: float
    planned: int
    betas: tuple[float, float]
    eps: float
    decay: float
    max_norm: float

    @classmethod
    def of(cls, config: RunConfig, *, critic: bool = False) -> Rates:
        """Return those of a run's settings, for the policy or for its critic."""
        trainer, own = config.trainer, config.critic if critic else config.trainer
        return cls(
            peak=config.critic.learning_rate if critic else config.algorithm.learning_rate,
            warmup=own.warmup_steps,
            schedule=trainer.schedule,
            floor=trainer.min_lr_ratio,
            planned=(config.train_dataset.total_steps or 0) * trainer.num_minibatches * trainer.epochs,
            betas=(trainer.beta1, trainer.beta2),
            eps=trainer.eps,
            decay=own.weight_decay,
            max_norm=own.max_grad_norm,
        )

    def rate(self, update: int) -> float:
        """Return the rate of an update, which counts from 0: a ramp, then constant, a line or half a cosine wave."""
        if update < self.warmup:
            return self.peak / self.warmup * (update + 1)
        if self.schedule == "constant":
            return self.peak
        share = min(1.0, (update - self.warmup) / max(1, self.planned - self.warmup))
        left = 1.0 - share if self.schedule == "linear" else (1.0 + math.cos(math.pi * share)) / 2.0
        return self.peak * self.floor + self.peak * (1.0 - self.floor) * left


@dataclass(slots=True, kw_only=True)
class State:
    """Trained weights, AdamW's moments as `<weight>/<kind>`, how many updates each weight has had, and how many there
    were. `kl_coef` is the KL term's coefficient if it adapts, `critic` the critic's state if there is one."""

    weights: dict[str, Tensor]
    moments: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    version: int = 0
    kl_coef: float | None = None
    critic: State | None = None

    def copy(self, dtype: torch.dtype) -> State:
        """Return a copy in another precision."""
        return State(
            weights={name: tensor.to(dtype, copy=True) for name, tensor in self.weights.items()},
            moments={name: tensor.to(dtype, copy=True) for name, tensor in self.moments.items()},
            counts=dict(self.counts),
            version=self.version,
            kl_coef=self.kl_coef,
            critic=None if self.critic is None else self.critic.copy(dtype),
        )


def adamw(state: State, gradients: Mapping[str, Tensor | None], rates: Rates) -> None:
    """Clip the gradients to their largest norm and make one update of AdamW (Loshchilov and Hutter, arXiv 1711.05101,
    algorithm 2). Weights of fewer than two dimensions do not decay."""
    known = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in known.values()))
    share = min(1.0, rates.max_norm / (norm + 1e-6))
    beta1, beta2 = rates.betas
    for name, gradient in known.items():
        weight = state.weights[name]
        first, second = (state.moments.get(f"{name}/{kind}", torch.zeros_like(weight)) for kind in KINDS)
        gradient = gradient * share
        first = beta1 * first + (1.0 - beta1) * gradient
        second = beta2 * second + (1.0 - beta2) * gradient * gradient
        state.counts[name] = state.counts.get(name, 0) + 1
        state.moments |= dict(zip((f"{name}/{kind}" for kind in KINDS), (first, second), strict=True))
        state.weights[name] = moved(weight, first, second, state.counts[name], rates.rate(state.version), rates)
    state.version += bool(known)


def moved(weight: Tensor, first: Tensor, second: Tensor, count: int, rate: float, rates: Rates) -> Tensor:
    """Return a weight after an update that led to these moments, its `count`-th."""
    beta1, beta2 = rates.betas
    unbiased = second / (1.0 - beta2**count)
    change = first / (1.0 - beta1**count) / (unbiased.sqrt() + rates.eps)
    decayed = weight * (1.0 - rate * rates.decay) if weight.ndim >= 2 else weight
    return decayed - rate * change


def moved_by(before: State, after: State, counts: Mapping[str, int], rates: Rates) -> dict[str, Tensor]:
    """Return the weights of `before` after a single update that led to the moments of `after`; `counts` are the numbers
    of updates then. A weight whose number has not grown stays."""
    weights = {name: weight.double() for name, weight in before.weights.items()}
    for name, count in counts.items():
        if count > before.counts.get(name, 0):
            first, second = (after.moments.get(f"{name}/{kind}", torch.zeros(())).double() for kind in KINDS)
            weights[name] = moved(weights[name], first, second, count, rates.rate(before.version), rates)
    return weights
