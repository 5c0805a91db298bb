"""Updates of the weights, made a second time by a plain loop.

In: weights and optimizer moments before a step, the sequences that each update trains with their advantages and
weights, and the settings. Out: weights and moments after it. The sequences go through transformers' own forward pass
(`model`); losses are those of `losses`, gradients autograd's, clip, rate and AdamW those of `optimizers`.
No function of the trainer, of the algorithms, or of what makes batches is used: no packing, no shared beginnings, no
kernel.

Shape suffix: S tokens of a sequence that carry loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

import torch

from sharpen.evidence.certificate.plain.balance import add_balance
from sharpen.evidence.certificate.plain.begin import (
    NO_TEACHERS,
    Begun,
    PairLoss,
    PlainStep,
    Scored,
    Teachers,
    begin,
    by_teacher,
    logprobs,
)
from sharpen.evidence.certificate.plain.loss_rules import LossRules
from sharpen.evidence.certificate.plain.losses import (
    ExpertLoss,
    adapted_coefficient,
    behaviour_weight,
    divergence,
    kept_in_sequence,
    left_out_by_moment,
    policy_loss,
)
from sharpen.evidence.certificate.plain.model import PlainModel, PlainSequence
from sharpen.evidence.certificate.plain.optimizers import State, adamw
from sharpen.evidence.certificate.plain.teacher import Teaching

Tensor = torch.Tensor
Tensors = Mapping[str, Tensor]


def make_steps(
    model: PlainModel, state: State, steps: Sequence[PlainStep], reference: Tensors, teachers: Teachers = NO_TEACHERS
) -> State:
    """Make these steps and return the state after them. `reference` are the trained weights before the run, `teachers`
    are the models that teach, by name."""
    state = state.copy(model.dtype)
    for step in steps:
        _make_step(model, state, step, reference, teachers)
    return state


def compute_gradients(
    model: PlainModel, state: State, step: PlainStep, reference: Tensors, teachers: Teachers = NO_TEACHERS
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the gradients of a step's only update, which is not made, for the policy and for the critic. `state` must
    be in the precision of the model; a weight without a gradient is missing. For the others see `make_steps`."""
    (update,) = step.updates
    begun = begin(model, state, step, reference, teachers)
    weights = _trainable(state.weights)
    _backward_update(model, step, begun, update, (), weights, teachers)
    of_policy = {name: one.grad for name, one in weights.items() if one.grad is not None}
    del weights
    of_critic: dict[str, Tensor] = {}
    if state.critic is not None and step.critic_rates is not None:
        weights = _trainable(state.critic.weights)
        _backward_critic(model, [begun.scored[id(one)] for one in update], weights, step)
        of_critic = {name: one.grad for name, one in weights.items() if one.grad is not None}
    return of_policy, of_critic


def _make_step(model: PlainModel, state: State, step: PlainStep, reference: Tensors, teachers: Teachers) -> None:
    begun = begin(model, state, step, reference, teachers)
    rules, apart = begun.rules, list[Tensor]()
    for _ in range(step.epochs):
        for update, lessons in zip_longest(step.updates, step.lessons, fillvalue=()):
            if not update and not lessons:
                continue
            weights = _trainable(state.weights)
            apart += _backward_update(model, step, begun, update, lessons, weights, teachers)
            if state.critic is not None and step.critic_rates is not None:
                of_critic = _trainable(state.critic.weights)
                _backward_critic(model, [begun.scored[id(one)] for one in update], of_critic, step)
                adamw(
                    state.critic, {name: one.grad for name, one in of_critic.items()}, step.critic_rates, model.tables
                )
            adamw(state, {name: tensor.grad for name, tensor in weights.items()}, step.rates, model.tables)
    if rules.kl_target is not None and begun.scored:
        measured = [one.credit.divergence_S for one in begun.scored.values()] if rules.kl_in_reward else apart
        state.kl_coef = adapted_coefficient(
            rules.kl_coef,
            float(torch.cat(measured).mean()),
            rules.kl_target,
            rules.kl_horizon,
            len({one.sequence.owner for one in begun.scored.values()}),
        )


def _trainable(weights: Tensors) -> dict[str, Tensor]:
    return {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}


def _backward_update(
    model: PlainModel,
    step: PlainStep,
    begun: Begun,
    update: Sequence[PlainSequence],
    lessons: Sequence[PlainSequence],
    weights: Tensors,
    teachers: Teachers,
) -> list[Tensor]:
    """Add the gradient of an update to the policy's weights. Return the divergence from the reference, token by
    token."""
    part, share = [begun.scored[id(one)] for one in update], 1.0 if step.expert is None else 1.0 - step.expert.mu
    if step.pairs:
        apart = _backward_pairs(model, part, weights, begun.rules, step.pairs)
    else:
        apart = _backward(model, part, weights, begun.rules, share)
    if step.balance:
        add_balance(model, update, weights, step.balance)
    if step.expert is not None:
        _backward_lessons(model, lessons, weights, step.expert)
    if begun.rules.echo:
        _backward_shown(model, update, weights, begun.rules.echo)
    if step.teaching is not None and not step.teaching.by_sample:
        _backward_taught(model, update, weights, step.teaching, teachers)
    return apart


def _backward_taught(
    model: PlainModel, update: Sequence[PlainSequence], weights: Tensors, teaching: Teaching, teachers: Teachers
) -> None:
    """Add the gradient of the divergence from the teacher over the vocabulary."""
    for some in (some for own in by_teacher(update) for some in model.groups(own)):
        with torch.no_grad():
            of_teacher = teachers[some[0].teacher].distributions([replace(one, routes_TLK=None) for one in some], {})
        own = model.distributions(some, weights)
        _backward_sum(
            _weighted(one, teaching.losses(own_SV, teacher_SV))
            for one, own_SV, teacher_SV in zip(some, own, of_teacher, strict=True)
        )


def _backward_shown(model: PlainModel, update: Sequence[PlainSequence], weights: Tensors, weight: float) -> None:
    """Add the gradient of the cross-entropy of all that the environment answered: the mean over these tokens, times
    `weight` (ECHO, arXiv 2605.24517)."""
    shown = [one.shown for one in update if one.shown is not None]
    num_tokens = sum(len(one.places_S) for one in shown)
    for some in model.groups(shown):
        _backward_sum(-weight * now_S / num_tokens for now_S, _ in model.logprobs(some, weights))


def _backward_lessons(
    model: PlainModel, lessons: Sequence[PlainSequence], weights: Tensors, expert: ExpertLoss
) -> None:
    """Add the gradient of an expert's rows."""
    for some in model.groups(lessons):
        now = model.logprobs(some, weights)
        _backward_sum(_weighted(one, expert.losses(now_S)) for one, (now_S, _) in zip(some, now, strict=True))


def _weighted(one: PlainSequence, loss_S: Tensor) -> Tensor:
    return one.weights_S.to(loss_S) * loss_S


def _backward_sum(losses: Iterable[Tensor]) -> None:
    """Add the gradient of the sum of all these."""
    torch.stack([one.sum() for one in losses]).sum().backward()  # type: ignore[no-untyped-call]


def _backward(
    model: PlainModel, part: Sequence[Scored], weights: Tensors, rules: LossRules, share: float
) -> list[Tensor]:
    """Add the gradient of an update to the weights; the policy loss counts `share`. Return the divergence from the
    reference, token by token."""
    apart: list[Tensor] = []
    pairs = [*zip(part, _kept(model, part, weights, rules), strict=True)]
    for some in model.groups(pairs, lambda pair: len(pair[0].sequence.ids_T)):
        now = model.logprobs([one.sequence for one, _ in some], weights)
        terms = [_loss(one, kept_S, *own, rules, share) for (one, kept_S), own in zip(some, now, strict=True)]
        _backward_sum(loss_S for loss_S, _ in terms)
        apart += [apart_S.detach() for _, apart_S in terms]
    return apart


def _kept(model: PlainModel, part: Sequence[Scored], weights: Tensors, rules: LossRules) -> list[Tensor]:
    """Return for each sequence of an update which of its tokens (S) the policy loss trains."""
    if rules.policy_loss != "m2po":
        return [torch.ones(len(one.sequence.places_S), dtype=torch.bool) for one in part]
    now = logprobs(model, [one.sequence for one in part], weights)
    pairs = [
        (one.credit.advantages_S, now_S - _recorded(one.sequence, now_S)) for one, now_S in zip(part, now, strict=True)
    ]
    return [~left_S for left_S in left_out_by_moment(pairs, **rules.arguments)]


def _recorded(one: PlainSequence, now_S: Tensor) -> Tensor:
    """The recorded logprobs; of a distribution that was cut somewhere none is known, and the ratio counts as 1."""
    return one.recorded_S.to(now_S) if one.whole else now_S.detach()


def _loss(
    one: Scored, kept_S: Tensor, now_S: Tensor, entropy_S: Tensor, rules: LossRules, share: float
) -> tuple[Tensor, Tensor]:
    """Return the loss of a sequence's tokens, weighted, and their divergence from the reference."""
    recorded_S = _recorded(one.sequence, now_S)
    base_S = recorded_S if one.before_S is None else one.before_S
    advantages_S = one.credit.advantages_S.to(now_S) * kept_S
    arguments = {} if rules.policy_loss == "m2po" else rules.arguments
    loss_S = policy_loss(rules)(now_S, base_S, advantages_S, **arguments)
    if one.before_S is not None:
        loss_S = loss_S * behaviour_weight(rules, one.before_S, recorded_S)
    loss_S = loss_S * kept_in_sequence(rules, now_S, recorded_S, advantages_S)
    loss_S, apart_S = share * loss_S, torch.zeros_like(now_S)
    if one.reference_S is not None and not rules.kl_in_reward:
        apart_S = divergence(rules, now_S, one.reference_S, recorded_S)
        loss_S = loss_S + rules.kl_coef * apart_S
    if rules.entropy_coef:
        loss_S = loss_S - rules.entropy_coef * entropy_S
    return _weighted(one.sequence, loss_S), apart_S


def _backward_pairs(
    model: PlainModel, part: Sequence[Scored], weights: Tensors, rules: LossRules, loss: PairLoss
) -> list[Tensor]:
    """Add the gradient of an update on pairs: the mean over pairs of DPO's loss (arXiv 2305.18290, equation 7), and of
    the KL term over all tokens."""
    pairs: dict[str, list[Scored]] = {}
    for one in part:
        pairs.setdefault(one.sequence.owner, []).append(one)
    num_tokens = sum(len(one.sequence.places_S) for one in part)
    for some in model.groups([*pairs.values()], lambda two: sum(len(one.sequence.ids_T) for one in two)):
        losses = []
        sequences = [one.sequence for answers in some for one in answers]
        now = iter(model.logprobs(sequences, weights))
        for answers in some:
            margin, apart = torch.zeros((), dtype=model.dtype), torch.zeros((), dtype=model.dtype)
            for one in answers:
                assert one.reference_S is not None
                now_S, _ = next(now)
                margin = margin + one.sequence.advantage * (now_S - one.reference_S).sum()
                if rules.kl != "none":
                    apart = apart + divergence(rules, now_S, one.reference_S, now_S.detach()).sum()
            right, wrong = torch.sigmoid(loss.beta * margin), torch.sigmoid(-loss.beta * margin)
            of_pair = -(1.0 - loss.smoothing) * torch.log(right) - loss.smoothing * torch.log(wrong)
            losses.append(of_pair / len(pairs) + rules.kl_coef * apart / num_tokens)
        _backward_sum(losses)
    return []


def _backward_critic(model: PlainModel, part: Sequence[Scored], weights: Tensors, step: PlainStep) -> None:
    """Add the gradient of the critic's update: of half the squared distance to the returns, a mean over the update's
    tokens, of the value or of the value bounded near the one before the step, whichever is larger."""
    assert step.episodes is not None
    bound, num_tokens = step.episodes.value_clip, sum(len(one.sequence.places_S) for one in part)
    for some in model.groups(part, lambda one: len(one.sequence.ids_T)):
        losses = []
        for one, now_S in zip(some, model.values([one.sequence for one in some], weights), strict=True):
            old_S, goal_S = one.credit.values_S.to(now_S), one.credit.returns_S.to(now_S)
            squares_S = (now_S - goal_S) ** 2
            if bound is not None:
                near_S = torch.minimum(torch.maximum(now_S, old_S - bound), old_S + bound)
                squares_S = torch.maximum(squares_S, (near_S - goal_S) ** 2)
            losses.append(squares_S / 2 / num_tokens)
        _backward_sum(losses)
