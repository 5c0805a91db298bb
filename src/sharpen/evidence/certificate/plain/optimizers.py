"""AdamW with its schedule and clip, written out to repeat an update; with Muon for matrices or with moments in 8 bits,
if the settings say so.

In: weights, moments and gradients. Out: weights and moments after an update. Nothing is shared with
`trainer.optimizer`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch

from sharpen.config.run import RunConfig
from sharpen.evidence.certificate.plain.quantized import EightBits, in_eight_bits, rounded_moment

Tensor = torch.Tensor

ADAMW = ("exp_avg", "exp_avg_sq")
"""The names of AdamW's two moments."""
MUON = "momentum_buffer"
"""The name of its moment."""
KINDS = (*ADAMW, MUON)
"""Those of all moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How updates are made. `planned` is the number of updates that the schedule spans; `muon`: matrices other than
    tables (embeddings and output layer) are Muon's; `eight_bits`: moments are kept in 8 bits."""

    peak: float
    warmup: int
    schedule: str
    floor: float
    planned: int
    betas: tuple[float, float]
    eps: float
    decay: float
    max_norm: float
    muon: bool = False
    eight_bits: bool = False

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
            muon=trainer.optimizer == "muon",
            eight_bits=trainer.optimizer.endswith("_8bit"),
        )

    def keeps(self, name: str, weight: Tensor, tables: Collection[str]) -> dict[str, float]:
        """Return the moments of a weight, and the share of each that an update keeps."""
        if self.muon and name not in tables and turns(weight):
            return {MUON: MOMENTUM}
        return dict(zip(ADAMW, self.betas, strict=True))

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
    were. `kl_coef` is the KL term's coefficient if it adapts, `critic` the critic's state if there is one.

    Moments in 8 bits that were read are `stored` so, and in `moments` what they stand for. The weights move by moments
    before these are rounded, and so they stay until the next update: `unrounded` are their names."""

    weights: dict[str, Tensor]
    moments: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    version: int = 0
    kl_coef: float | None = None
    critic: State | None = None
    stored: Mapping[str, EightBits] = field(default_factory=dict)
    unrounded: set[str] = field(default_factory=set)

    def copy(self, dtype: torch.dtype) -> State:
        """Return a copy in another precision."""
        return State(
            weights={name: tensor.to(dtype, copy=True) for name, tensor in self.weights.items()},
            moments={name: tensor.to(dtype, copy=True) for name, tensor in self.moments.items()},
            counts=dict(self.counts),
            version=self.version,
            kl_coef=self.kl_coef,
            critic=None if self.critic is None else self.critic.copy(dtype),
            stored=self.stored,
            unrounded=set(self.unrounded),
        )


def adamw(state: State, gradients: Mapping[str, Tensor | None], rates: Rates, tables: Collection[str] = ()) -> None:
    """Clip the gradients to their largest norm and make one update of AdamW (Loshchilov and Hutter, arXiv 1711.05101,
    algorithm 2), or of Muon for what is its own. Weights of fewer than two dimensions do not decay. With moments in 8
    bits all weights that had an update count as many as there were."""
    known = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in known.values()))
    share = min(1.0, rates.max_norm / (norm + 1e-6))
    for name, gradient in known.items():
        weight, gradient = state.weights[name], gradient * share
        before, after = _moments(state, name, weight), {}
        eight_bits = rates.eight_bits and in_eight_bits(weight)
        for kind, keep in rates.keeps(name, weight, tables).items():
            power = gradient * gradient if kind == "exp_avg_sq" else gradient
            after[kind] = keep * before[kind] + (1.0 - keep) * power
            if eight_bits:
                state.unrounded.add(f"{name}/{kind}")
        state.counts[name] = 1 + (
            state.version if rates.eight_bits and name in state.counts else state.counts.get(name, 0)
        )
        state.moments |= {f"{name}/{kind}": moment for kind, moment in after.items()}
        state.weights[name] = _moved(weight, before, after, state.counts[name], rates.rate(state.version), rates)
    state.version += bool(known)


def _moments(state: State, name: str, weight: Tensor) -> dict[str, Tensor]:
    """The moments of a weight by kind, as the next update finds them; 0 before its first one."""
    found = {kind: state.moments.get(f"{name}/{kind}", torch.zeros_like(weight)).to(weight.dtype) for kind in KINDS}
    for kind in ADAMW:
        if f"{name}/{kind}" in state.unrounded:
            other = weight.dtype != torch.float64
            found[kind] = rounded_moment(found[kind], signed=kind == ADAMW[0], other=other)
    return found


def _moved(
    weight: Tensor, before: Mapping[str, Tensor], after: Mapping[str, Tensor], count: int, rate: float, rates: Rates
) -> Tensor:
    """Return a weight after an update, its `count`-th, that led from some moments to others."""
    decayed = weight * (1.0 - rate * rates.decay) if weight.ndim >= 2 else weight
    if MUON in after:
        return decayed - rate * direction(before[MUON], after[MUON])
    (beta1, beta2), (first, second) = rates.betas, (after[kind] for kind in ADAMW)
    unbiased = second / (1.0 - beta2**count)
    return decayed - rate * (first / (1.0 - beta1**count) / (unbiased.sqrt() + rates.eps))


def moved_by(
    before: State,
    after: State,
    counts: Mapping[str, int],
    rates: Rates,
    tables: Collection[str] = (),
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Return the weights of `before` after a single update that led to the moments of `after`; `counts` are the numbers
    of updates then. A weight whose number has not grown stays."""
    weights = {name: weight.to(dtype) for name, weight in before.weights.items()}
    for name, count in counts.items():
        if count > before.counts.get(name, 0):
            weight = weights[name]
            old, new = _moments(before, name, weight), _moments(after, name, weight)
            new = {kind: new[kind] for kind in rates.keeps(name, weight, tables)}
            weights[name] = _moved(weight, old, new, count, rates.rate(before.version), rates)
    return weights


# Muon, written out to repeat an update: the optimizer of the matrices in a model's blocks.
#
# In: the moment of a matrix before and after an update. Out: the direction in which it moves. From Keller Jordan's
# description (https://kellerjordan.github.io/posts/muon), with the scale that matches AdamW's (arXiv 2502.16982,
# equation 4). Nothing is shared with `trainer.update_rules` or torch's class.

MOMENTUM = 0.95
_STEPS = 5
_SHIFT = 2.0**-16
"""As a part of each number: steps of bfloat16 are 2^-8 apart."""
_A, _B, _C = 3.4445, -4.7750, 2.0315


def turns(weight: Tensor) -> bool:
    """Whether this is a matrix, not a vector in the shape of one."""
    return weight.ndim == 2 and min(weight.shape) > 1


def direction(before: Tensor, after: Tensor) -> Tensor:
    """Return how a matrix moves for a rate of 1, given its moment before and after the update: Nesterov's step, with
    singular values near 1, and 0.2 as root of its mean square."""
    gradient = (after - MOMENTUM * before) / (1.0 - MOMENTUM)
    ahead = (1.0 - MOMENTUM) * gradient + MOMENTUM * after
    return 0.2 * math.sqrt(max(after.shape)) * _orthogonal(ahead)


def _orthogonal(matrix: Tensor) -> Tensor:
    """Five steps of Newton and Schulz, in bfloat16, as Muon makes them. They enlarge what is nearly 0 by hundreds, and
    what rounding makes of it too. To measure this, a matrix in float32 is rounded otherwise in one number of a hundred;
    one in float64 is not."""
    if matrix.dtype != torch.float64:
        shifts = torch.rand(matrix.shape, generator=torch.Generator().manual_seed(0)) * 2.0 - 1.0
        matrix = matrix * (1.0 + _SHIFT * shifts)
    now = (matrix.T if matrix.shape[0] > matrix.shape[1] else matrix).bfloat16()
    now = now / now.norm().clamp(min=1e-7)
    for _ in range(_STEPS):
        gram = now @ now.T
        now = torch.addmm(now, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), now, beta=_A)
    return (now.T if matrix.shape[0] > matrix.shape[1] else now).to(matrix.dtype)
