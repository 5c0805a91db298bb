"""The gradient that the way of a weight implies, where moments are kept in 8 bits.

In: the state before an update, that after it, and the gradient of the repeated update. Out: of all gradients with which
AdamW moves a weight so, the nearest to the repeated one. A checkpoint holds the moments rounded, the weights moved by
them before; so what the weights say of the gradient is far more exact than what the moments say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from sharpen.evidence.certificate.plain.optimizers import ADAMW, Rates, State

Tensor = torch.Tensor

_OF_WEIGHT, _OF_WAY = 2.0**-22, 2.0**-16
"""How exactly a way is known: two roundings of the weight to float32, and what float32 makes of the betas (1 - 0.999 is
off by 2^-16)."""
_HALVINGS = 60


def gradients(before: State, after: State, rates: Rates) -> dict[str, Tensor]:
    """Return the gradients of a single update made by the plain loop, as far as its moments are then rounded."""
    keep = rates.betas[0]
    found = {}
    for key in after.unrounded:
        name, _, kind = key.rpartition("/")
        if kind == ADAMW[0]:
            moment = after.moments[key]
            found[name] = (moment - keep * _moment(before, key, moment)) / (1.0 - keep)
    return found


def implied(
    before: State, found: State, repeated: Mapping[str, Tensor], counts: Mapping[str, int], rates: Rates
) -> dict[str, Tensor]:
    """Return for each repeated gradient the nearest one with which a single update leads to the found weights. `counts`
    are the numbers of updates after it. Kernels shrink a weight before it moves, or after: either is right."""
    nearest = {}
    for name, gradient in repeated.items():
        gradient, old, new = gradient.double(), before.weights[name].double(), found.weights[name].double()
        first, second = (_moment(before, f"{name}/{kind}", gradient) for kind in ADAMW)
        rate = rates.rate(before.version)
        left = 1.0 - rate * rates.decay if old.ndim >= 2 else 1.0
        way = _Way(first=first, second=second, count=counts[name], rates=rates)
        either = []
        for moved in (old * left - new, old - new / left):
            unsure = _OF_WEIGHT * torch.maximum(old.abs(), new.abs()) + _OF_WAY * moved.abs()
            either.append(way.nearest(gradient, moved / rate, unsure / rate))
        nearest[name] = min(either, key=lambda one: float((one - gradient).norm()))
    return nearest


def _moment(state: State, key: str, like: Tensor) -> Tensor:
    return state.moments.get(key, torch.zeros_like(like)).to(like.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """How far AdamW moves weights, for a rate of 1, as a function of their gradient: given the moments before."""

    first: Tensor
    second: Tensor
    count: int
    rates: Rates

    def far(self, gradient: Tensor) -> Tensor:
        beta1, beta2 = self.rates.betas
        first = beta1 * self.first + (1.0 - beta1) * gradient
        second = beta2 * self.second + (1.0 - beta2) * gradient * gradient
        unbiased = second / (1.0 - beta2**self.count)
        return first / (1.0 - beta1**self.count) / (unbiased.sqrt() + self.rates.eps)

    def turn(self, otherwise: Tensor) -> Tensor:
        """The gradient at which the way turns, where it does. `(a + b g) / (sqrt(c + d g^2) + e)` has at most one
        turning point: where `h = a d g / b` is `c + e sqrt(c + d g^2)`, which is `c` without `e`."""
        beta1, beta2 = self.rates.betas
        unbias, eps = 1.0 - beta2**self.count, self.rates.eps
        c, d = beta2 * self.second / unbias, (1.0 - beta2) / unbias
        slope = beta1 * self.first * d / (1.0 - beta1)
        flat = 1.0 - eps * eps * d / slope.square()  # not positive: the way does not turn
        h = (c + ((1.0 - flat) * c.square() + flat * eps * eps * c).sqrt()) / flat
        return torch.where(flat > 0.0, h / slope, otherwise)

    def between(self, low: Tensor, high: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
        """The shortest and the longest way of all gradients in between."""
        ways = torch.stack([self.far(one) for one in (low, high, turn.clamp(low, high))])
        return ways.amin(0), ways.amax(0)

    def nearest(self, gradient: Tensor, way: Tensor, unsure: Tensor) -> Tensor:
        """Return gradients as near as those nearest to some others that make this way, as far as it is known; where
        none does, one as far away as the whole tensor is long."""
        there = self.far(gradient)
        rest = ~((there - unsure <= way) & (way <= there + unsure))
        part = _Way(first=self.first[rest], second=self.second[rest], count=self.count, rates=self.rates)
        own, way, unsure = gradient[rest], way[rest], unsure[rest]
        turn = part.turn(otherwise=own)
        least = torch.zeros_like(part.first)
        most = least + gradient.norm() + self.second.sqrt().norm() + self.rates.eps
        for _ in range(_HALVINGS):
            away = (least + most) / 2
            shortest, longest = part.between(own - away, own + away, turn)
            reached = (shortest - unsure <= way) & (way <= longest + unsure)
            most, least = torch.where(reached, away, most), torch.where(reached, least, away)
        nearest = gradient.clone()
        nearest[rest] += most
        return nearest
