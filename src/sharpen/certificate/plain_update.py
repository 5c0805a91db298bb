"""Updates of the weights, made a second time by a plain loop.

In: weights and optimizer moments before a step, the sequences that each update trains with their advantages and
weights, and the settings. Out: weights and moments after it. One sequence at a time goes through transformers' own
forward pass, without padding; losses are those of `plain_losses`, gradients autograd's, clip, rate and AdamW those of
`plain_adamw`. No function of the trainer, of the algorithms, or of what makes batches is used: no packing, no shared
beginnings, no kernel.

Shape suffixes: T tokens of a sequence, S of them that carry loss, V vocabulary, C hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call

from sharpen.certificate.loss_rules import LossRules
from sharpen.certificate.plain_adamw import Rates, State, adamw
from sharpen.certificate.plain_credit import Credit, Episodes, Tokens, assign
from sharpen.certificate.plain_experts import Chosen, num_experts_of
from sharpen.certificate.plain_losses import (
    POLICY_LOSSES,
    adapted_coefficient,
    behaviour_weight,
    divergence,
    left_out_by_moment,
)
from sharpen.certificate.plain_pictures import Pictures
from sharpen.types import PictureSpan

Tensor = torch.Tensor
Tensors = Mapping[str, Tensor]

HEAD = "value_head"
"""The critic's layer in place of the output layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainSequence:
    """A sequence that trains, of a rollout's call or of a row: its ids (T), the places of its S tokens with loss, and
    of these the recorded logprobs and the weights (S). `advantage` is that of all of them, `temperature` that of the
    call. `whole` is whether they were sampled from the whole distribution; `allowed_SV`, under a constraint, are the
    tokens among which each was. `routes_TLK` are the experts that were recorded for each token, if any were;
    `pictures` the images in it."""

    owner: str
    ids_T: Tensor
    places_S: Tensor
    recorded_S: Tensor
    weights_S: Tensor
    advantage: float = 1.0
    temperature: float = 1.0
    whole: bool = True
    allowed_SV: Tensor | None = None
    routes_TLK: Tensor | None = None
    pictures: tuple[PictureSpan, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLoss:
    """DPO's loss of the two answers of a row, of advantage 1 and -1."""

    beta: float = 0.1
    smoothing: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainStep:
    """A step: its updates with their sequences, each rollout's calls one after the other, repeated `epochs` times.
    `pairs`: rows are pairs of answers. `episodes`: advantages are a critic's."""

    updates: Sequence[Sequence[PlainSequence]]
    epochs: int
    loss: LossRules
    rates: Rates
    pairs: PairLoss | None = None
    episodes: Episodes | None = None
    critic_rates: Rates | None = None


class PlainModel:
    """A causal model of transformers', whose trained weights are given with every pass: all of them, or adapters by
    peft's names, of which the pass makes weights `W + scale B A`."""

    def __init__(self, folder: Path, *, rounded: bool, dtype: torch.dtype, adapter_scale: float | None) -> None:
        """`rounded`: with products in bfloat16, as autocast does. `adapter_scale` is given if adapters train."""
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        sees = hasattr(AutoConfig.from_pretrained(folder, trust_remote_code=False), "vision_config")
        kind: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        plain = {"trust_remote_code": False, "experts_implementation": "eager"}
        module = kind.from_pretrained(folder, dtype=torch.float32, **plain)
        self._pictures = Pictures(folder, module) if sees else None
        self.module = module.eval().to(dtype).requires_grad_(False)
        self._num_experts = num_experts_of(module.config)
        ends = (module.get_input_embeddings(), module.get_output_embeddings())
        self.tables = {name for name, own in module.named_parameters() if any(own is end.weight for end in ends)}
        self.dtype, self._rounded, self._scale = dtype, rounded, adapter_scale

    def trained_names(self) -> list[str]:
        """Return the names of all weights, tied ones once; of a model that sees images, those of its text."""
        whole = (self.module.get_decoder(), self.module.get_output_embeddings()) if self._pictures else (self.module,)
        text = {id(own) for part in whole for own in part.parameters()}
        return [name for name, own in self.module.named_parameters() if id(own) in text]

    def logprobs(self, one: PlainSequence, weights: Tensors) -> tuple[Tensor, Tensor]:
        """Return logprob and entropy of each token of a sequence that carries loss (S), at its temperature."""
        logits_SV = self._forward(one, weights).logits[0, one.places_S - 1].to(self.dtype) / one.temperature
        if one.allowed_SV is not None:
            logits_SV = logits_SV.masked_fill(~one.allowed_SV[:, : logits_SV.shape[1]], torch.finfo(self.dtype).min)
        logprobs_SV = torch.log_softmax(logits_SV, -1)
        entropy_S = -(logprobs_SV.exp() * logprobs_SV).sum(-1)
        return logprobs_SV.gather(1, one.ids_T[one.places_S, None])[:, 0], entropy_S

    def values(self, one: PlainSequence, weights: Tensors) -> Tensor:
        """Return a critic's value of the state before each token that carries loss (S)."""
        body = {name: tensor for name, tensor in weights.items() if not name.startswith(HEAD)}
        hidden_TC = self._forward(one, body, output_hidden_states=True).hidden_states[-1][0].to(self.dtype)
        values_S: Tensor = hidden_TC[one.places_S - 1] @ weights[f"{HEAD}.weight"][0] + weights[f"{HEAD}.bias"]
        return values_S

    def _forward(self, one: PlainSequence, weights: Tensors, **more: Any) -> Any:
        experts = nullcontext() if one.routes_TLK is None else Chosen(one.routes_TLK, self._num_experts)
        if self._pictures is not None:
            more |= self._pictures.arguments(one.ids_T, one.pictures, self.dtype)
        with experts, torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._rounded):
            return functional_call(self.module, self._effective(weights), kwargs={"input_ids": one.ids_T[None], **more})

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
    rules = step.loss if state.kl_coef is None else replace(step.loss, kl_coef=state.kl_coef)
    sequences = [one for update in step.updates for one in update]
    needs_reference = rules.kl != "none" or step.pairs is not None
    known = [_scored(model, replace(one, routes_TLK=None), reference) if needs_reference else None for one in sequences]
    before = [_scored(model, one, state.weights) if rules.behaviour != "none" else None for one in sequences]
    values = None
    if state.critic is not None:
        with torch.no_grad():
            values = [model.values(one, state.critic.weights) for one in sequences]
    credits = assign(
        [_tokens(one, known_S, rules) for one, known_S in zip(sequences, known, strict=True)], values, step.episodes
    )
    scored = {
        id(one): _Scored(one, credit, known_S, before_S)
        for one, credit, known_S, before_S in zip(sequences, credits, known, before, strict=True)
    }
    apart: list[Tensor] = []
    for _ in range(step.epochs):
        for update in filter(None, step.updates):
            weights = {name: tensor.detach().requires_grad_() for name, tensor in state.weights.items()}
            part = [scored[id(one)] for one in update]
            apart += (
                _backward_pairs(model, part, weights, rules, step.pairs)
                if step.pairs
                else _backward(model, part, weights, rules)
            )
            if state.critic is not None and step.critic_rates is not None:
                _critic_update(model, part, state.critic, step)
            adamw(state, {name: tensor.grad for name, tensor in weights.items()}, step.rates, model.tables)
    if rules.kl_target is not None and sequences:
        measured = [one.divergence_S for one in credits] if rules.kl_in_reward else apart
        state.kl_coef = adapted_coefficient(
            rules.kl_coef,
            float(torch.cat(measured).mean()),
            rules.kl_target,
            rules.kl_horizon,
            len({one.owner for one in sequences}),
        )


@dataclass(frozen=True, slots=True)
class _Scored:
    """A sequence with what is known of it before the step's first update (each of shape S)."""

    sequence: PlainSequence
    credit: Credit
    reference_S: Tensor | None
    before_S: Tensor | None


def _scored(model: PlainModel, one: PlainSequence, weights: Tensors) -> Tensor:
    with torch.no_grad():
        return model.logprobs(one, weights)[0]


def _tokens(one: PlainSequence, reference_S: Tensor | None, rules: LossRules) -> Tokens:
    """What the credit of a sequence's tokens is made of."""
    divergence_S = torch.zeros(len(one.places_S), dtype=torch.float64)
    if rules.kl_in_reward and reference_S is not None:
        recorded_S = one.recorded_S.to(reference_S)
        divergence_S = divergence(rules, recorded_S, reference_S, recorded_S).double()
    return Tokens(owner=one.owner, advantage=one.advantage, divergence_S=divergence_S, coefficient=rules.kl_coef)


def _backward(model: PlainModel, part: Sequence[_Scored], weights: Tensors, rules: LossRules) -> list[Tensor]:
    """Add the gradient of an update to the weights. Return the divergence from the reference, token by token."""
    kept = _kept(model, part, weights, rules)
    return [_backward_one(model, one, kept_S, weights, rules) for one, kept_S in zip(part, kept, strict=True)]


def _kept(model: PlainModel, part: Sequence[_Scored], weights: Tensors, rules: LossRules) -> list[Tensor]:
    """Return for each sequence of an update which of its tokens (S) the policy loss trains."""
    if rules.policy_loss != "m2po":
        return [torch.ones(len(one.sequence.places_S), dtype=torch.bool) for one in part]
    now = [_scored(model, one.sequence, weights) for one in part]
    pairs = [
        (one.credit.advantages_S, now_S - _recorded(one.sequence, now_S)) for one, now_S in zip(part, now, strict=True)
    ]
    return [~left_S for left_S in left_out_by_moment(pairs, **rules.arguments)]


def _recorded(one: PlainSequence, now_S: Tensor) -> Tensor:
    """The recorded logprobs; of a truncated distribution none is known, and the ratio counts as 1."""
    return one.recorded_S.to(now_S) if one.whole else now_S.detach()


def _backward_one(model: PlainModel, one: _Scored, kept_S: Tensor, weights: Tensors, rules: LossRules) -> Tensor:
    now_S, entropy_S = model.logprobs(one.sequence, weights)
    recorded_S = _recorded(one.sequence, now_S)
    base_S = recorded_S if one.before_S is None else one.before_S
    advantages_S = one.credit.advantages_S.to(now_S) * kept_S
    arguments = {} if rules.policy_loss == "m2po" else rules.arguments
    loss_S = POLICY_LOSSES[rules.policy_loss](now_S, base_S, advantages_S, **arguments)
    if one.before_S is not None:
        loss_S = loss_S * behaviour_weight(rules, one.before_S, recorded_S)
    apart_S = torch.zeros_like(now_S)
    if one.reference_S is not None and not rules.kl_in_reward:
        apart_S = divergence(rules, now_S, one.reference_S, recorded_S)
        loss_S = loss_S + rules.kl_coef * apart_S
    if rules.entropy_coef:
        loss_S = loss_S - rules.entropy_coef * entropy_S
    (one.sequence.weights_S.to(now_S) * loss_S).sum().backward()  # type: ignore[no-untyped-call]
    return apart_S.detach()


def _backward_pairs(
    model: PlainModel, part: Sequence[_Scored], weights: Tensors, rules: LossRules, loss: PairLoss
) -> list[Tensor]:
    """Add the gradient of an update on pairs: the mean over pairs of DPO's loss (arXiv 2305.18290, equation 7), and of
    the KL term over all tokens."""
    pairs: dict[str, list[_Scored]] = {}
    for one in part:
        pairs.setdefault(one.sequence.owner, []).append(one)
    num_tokens = sum(len(one.sequence.places_S) for one in part)
    for answers in pairs.values():
        margin, apart = torch.zeros((), dtype=model.dtype), torch.zeros((), dtype=model.dtype)
        for one in answers:
            assert one.reference_S is not None
            now_S, _ = model.logprobs(one.sequence, weights)
            margin = margin + one.sequence.advantage * (now_S - one.reference_S).sum()
            if rules.kl != "none":
                apart = apart + divergence(rules, now_S, one.reference_S, now_S.detach()).sum()
        right, wrong = torch.sigmoid(loss.beta * margin), torch.sigmoid(-loss.beta * margin)
        of_pair = -(1.0 - loss.smoothing) * torch.log(right) - loss.smoothing * torch.log(wrong)
        (of_pair / len(pairs) + rules.kl_coef * apart / num_tokens).backward()  # type: ignore[no-untyped-call]
    return []


def _critic_update(model: PlainModel, part: Sequence[_Scored], critic: State, step: PlainStep) -> None:
    """Make the critic's update: half the squared distance to the returns, a mean over the update's tokens, of the value
    or of the value bounded near the one before the step, whichever is larger."""
    assert step.episodes is not None
    assert step.critic_rates is not None
    bound, num_tokens = step.episodes.value_clip, sum(len(one.sequence.places_S) for one in part)
    weights = {name: tensor.detach().requires_grad_() for name, tensor in critic.weights.items()}
    for one in part:
        now_S, old_S, goal_S = model.values(one.sequence, weights), one.credit.values_S, one.credit.returns_S
        old_S, goal_S = old_S.to(now_S), goal_S.to(now_S)
        squares_S = (now_S - goal_S) ** 2
        if bound is not None:
            near_S = torch.minimum(torch.maximum(now_S, old_S - bound), old_S + bound)
            squares_S = torch.maximum(squares_S, (near_S - goal_S) ** 2)
        (squares_S.sum() / 2 / num_tokens).backward()  # type: ignore[no-untyped-call]
    adamw(critic, {name: tensor.grad for name, tensor in weights.items()}, step.critic_rates, model.tables)
