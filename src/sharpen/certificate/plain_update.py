"""Updates of the weights, made a second time by a plain loop.

In: weights and optimizer moments before a step, the calls that each update trains with their advantages and weights,
and the settings. Out: weights and moments after it. One call at a time goes through transformers' own forward pass, as
one sequence without padding; losses are those of `plain_losses`, gradients autograd's, clip, rate and AdamW written out
here. No function of the trainer, of the algorithms, or of what makes batches is used: no packing, no shared beginnings,
no kernel.

Shape suffixes: T tokens of a call with its prompt, S sampled tokens of a call, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call

from sharpen.certificate.loss_rules import LossRules
from sharpen.certificate.plain_losses import (
    POLICY_LOSSES,
    adapted_coefficient,
    behaviour_weight,
    divergence,
    left_out_by_moment,
)
from sharpen.config.run import RunConfig

Tensor = torch.Tensor
Tensors = Mapping[str, Tensor]

KINDS = ("exp_avg", "exp_avg_sq")
"""The names of AdamW's two moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainCall:
    """A call that trains: its ids (T) of which the last S were sampled, their recorded logprobs (S), and what its tokens
    have in common. `whole` is whether they were sampled from the whole distribution."""

    rollout_id: str
    ids_T: Tensor
    recorded_S: Tensor
    temperature: float
    advantage: float
    weight: float
    whole: bool = True


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
    def of(cls, config: RunConfig, total_steps: int) -> Rates:
        """Return those of a run's settings."""
        trainer = config.trainer
        return cls(
            peak=config.algorithm.learning_rate,
            warmup=trainer.warmup_steps,
            schedule=trainer.schedule,
            floor=trainer.min_lr_ratio,
            planned=total_steps * trainer.num_minibatches * trainer.epochs,
            betas=(trainer.beta1, trainer.beta2),
            eps=trainer.eps,
            decay=trainer.weight_decay,
            max_norm=trainer.max_grad_norm,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainStep:
    """A step: its updates with their calls in the order of training, repeated `epochs` times."""

    number: int
    updates: Sequence[Sequence[PlainCall]]
    epochs: int
    loss: LossRules
    rates: Rates


@dataclass(slots=True, kw_only=True)
class State:
    """Trained weights, AdamW's moments as `<weight>/<kind>`, how many updates each weight has had, and how many there
    were. `kl_coef` is the KL term's coefficient if it adapts."""

    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    counts: dict[str, int] = field(default_factory=dict)
    version: int = 0
    kl_coef: float | None = None

    def copy(self, dtype: torch.dtype) -> State:
        """Return a copy in another precision."""
        return State(
            weights={name: tensor.to(dtype, copy=True) for name, tensor in self.weights.items()},
            moments={name: tensor.to(dtype, copy=True) for name, tensor in self.moments.items()},
            counts=dict(self.counts),
            version=self.version,
            kl_coef=self.kl_coef,
        )


class PlainModel:
    """A causal model of transformers', whose trained weights are given with every pass: all of them, or adapters by
    peft's names, of which the pass makes weights `W + scale B A`."""

    def __init__(self, folder: Path, *, rounded: bool, dtype: torch.dtype, adapter_scale: float | None) -> None:
        """Load it in `dtype`; `rounded` computes its products in bfloat16, as autocast does. `adapter_scale` is given if
        adapters train."""
        from transformers import AutoModelForCausalLM

        self.module: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(dtype)
        self.module.requires_grad_(False)
        self.dtype, self._rounded, self._scale = dtype, rounded, adapter_scale

    def trained_names(self) -> list[str]:
        """Return the names of all weights, tied ones once."""
        return [name for name, _ in self.module.named_parameters()]

    def logprobs(self, call: PlainCall, weights: Tensors) -> tuple[Tensor, Tensor]:
        """Return logprob and entropy of each sampled token of a call (S), at its temperature."""
        start = len(call.ids_T) - len(call.recorded_S)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._rounded):
            out = functional_call(self.module, self._effective(weights), kwargs={"input_ids": call.ids_T[None]})
        logits_SV = out.logits[0, start - 1 : -1].to(self.dtype) / call.temperature
        logprobs_SV = torch.log_softmax(logits_SV, -1)
        entropy_S = -(logprobs_SV.exp() * logprobs_SV).sum(-1)
        return logprobs_SV.gather(1, call.ids_T[start:, None])[:, 0], entropy_S

    def _effective(self, weights: Tensors) -> dict[str, Tensor]:
        if self._scale is None:
            return dict(weights)
        own, merged = dict(self.module.named_parameters()), {}
        for name, down in weights.items():
            layer, found, _ = name.partition(".lora_A.")
            if found:
                up = weights[name.replace(".lora_A.", ".lora_B.")]
                merged[f"{layer}.weight"] = own[f"{layer}.weight"] + self._scale * (up @ down)
        return merged


def make_steps(model: PlainModel, state: State, steps: Sequence[PlainStep], reference: Tensors) -> State:
    """Make these steps and return the state after them. `reference` are the trained weights before the run."""
    state = state.copy(model.dtype)
    for step in steps:
        _make_step(model, state, step, reference)
    return state


def _make_step(model: PlainModel, state: State, step: PlainStep, reference: Tensors) -> None:
    rules = step.loss
    if state.kl_coef is not None:
        rules = replace(rules, kl_coef=state.kl_coef)
    calls = [call for update in step.updates for call in update]
    before = {id(call): _scored(model, call, state.weights) for call in calls} if rules.behaviour != "none" else {}
    known = {id(call): _scored(model, call, reference) for call in calls} if rules.kl != "none" else {}
    apart: list[Tensor] = []
    for _ in range(step.epochs):
        for update in filter(None, step.updates):
            weights = {name: tensor.detach().requires_grad_() for name, tensor in state.weights.items()}
            kept = _kept(model, update, weights, rules)
            for call, kept_S in zip(update, kept, strict=True):
                apart.append(_backward(model, call, kept_S, weights, rules, before.get(id(call)), known.get(id(call))))
            _adamw(state, {name: tensor.grad for name, tensor in weights.items()}, step.rates)
    if rules.kl_target is not None and apart:
        rollouts = len({call.rollout_id for call in calls})
        mean = float(torch.cat(apart).mean())
        state.kl_coef = adapted_coefficient(rules.kl_coef, mean, rules.kl_target, rules.kl_horizon, rollouts)


def _scored(model: PlainModel, call: PlainCall, weights: Tensors) -> Tensor:
    with torch.no_grad():
        return model.logprobs(call, weights)[0]


def _kept(model: PlainModel, update: Sequence[PlainCall], weights: Tensors, rules: LossRules) -> list[Tensor]:
    """Return for each call of an update which of its tokens (S) the policy loss trains."""
    if rules.policy_loss != "m2po":
        return [torch.ones(len(call.recorded_S), dtype=torch.bool) for call in update]
    pairs = []
    for call in update:
        now_S = _scored(model, call, weights)
        pairs.append((torch.full_like(now_S, call.advantage), now_S - _recorded(call, now_S)))
    return [~left_S for left_S in left_out_by_moment(pairs, **rules.arguments)]


def _recorded(call: PlainCall, now_S: Tensor) -> Tensor:
    """The recorded logprobs; of a truncated distribution none is known, and the ratio counts as 1."""
    return call.recorded_S.to(now_S) if call.whole else now_S.detach()


def _backward(
    model: PlainModel,
    call: PlainCall,
    kept_S: Tensor,
    weights: Tensors,
    rules: LossRules,
    before_S: Tensor | None,
    reference_S: Tensor | None,
) -> Tensor:
    """Add the gradient of a call to the weights. Return its divergence from the reference, token by token."""
    now_S, entropy_S = model.logprobs(call, weights)
    recorded_S = _recorded(call, now_S)
    base_S = recorded_S if before_S is None else before_S
    advantage_S = torch.full_like(now_S, call.advantage) * kept_S
    arguments = {} if rules.policy_loss == "m2po" else rules.arguments
    loss_S = POLICY_LOSSES[rules.policy_loss](now_S, base_S, advantage_S, **arguments)
    if before_S is not None:
        loss_S = loss_S * behaviour_weight(rules, before_S, recorded_S)
    apart_S = torch.zeros_like(now_S)
    if reference_S is not None:
        apart_S = divergence(rules, now_S, reference_S, recorded_S)
        loss_S = loss_S + rules.kl_coef * apart_S
    if rules.entropy_coef:
        loss_S = loss_S - rules.entropy_coef * entropy_S
    (call.weight * loss_S).sum().backward()  # type: ignore[no-untyped-call]
    return apart_S.detach()


def _adamw(state: State, gradients: Mapping[str, Tensor | None], rates: Rates) -> None:
    """Clip the gradients to their largest norm and make one update of AdamW (Loshchilov and Hutter, arXiv 1711.05101,
    algorithm 2). Weights of fewer than two dimensions do not decay."""
    known = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in known.values()))
    share = min(1.0, rates.max_norm / (norm + 1e-6))
    rate, (beta1, beta2) = rates.rate(state.version), rates.betas
    for name, gradient in known.items():
        weight = state.weights[name]
        first, second = (state.moments.get(f"{name}/{kind}", torch.zeros_like(weight)) for kind in KINDS)
        gradient = gradient * share
        first = beta1 * first + (1.0 - beta1) * gradient
        second = beta2 * second + (1.0 - beta2) * gradient * gradient
        count = state.counts[name] = state.counts.get(name, 0) + 1
        unbiased = second / (1.0 - beta2**count)
        change = first / (1.0 - beta1**count) / (unbiased.sqrt() + rates.eps)
        decayed = weight * (1.0 - rate * rates.decay) if weight.ndim >= 2 else weight
        state.weights[name] = decayed - rate * change
        state.moments |= dict(zip((f"{name}/{kind}" for kind in KINDS), (first, second), strict=True))
    state.version += bool(known)


def every_call(steps: Sequence[PlainStep]) -> Iterator[PlainCall]:
    """Yield the calls of steps, each once."""
    for step in steps:
        for update in step.updates:
            yield from update
