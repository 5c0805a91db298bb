"""A step, and what is known before its first update.

In: the step's sequences, the weights before it, those before the run. Out: the credit of each token, with the logprobs
that losses compare with. Nothing is shared with what makes batches and advantages.

Shape suffix: S tokens of a sequence that carry loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from sharpen.evidence.certificate.plain.credit import (
    Credit,
    EntropyClip,
    Episodes,
    Tokens,
    assign,
    entropy_terms,
    less_baselines,
    squared_norms,
)
from sharpen.evidence.certificate.plain.loss_rules import LossRules
from sharpen.evidence.certificate.plain.losses import ExpertLoss, divergence
from sharpen.evidence.certificate.plain.model import PlainModel, PlainSequence
from sharpen.evidence.certificate.plain.optimizers import Rates, State
from sharpen.evidence.certificate.plain.teacher import Teaching

Tensor = torch.Tensor
Tensors = Mapping[str, Tensor]
Teachers = Mapping[str, PlainModel]

NO_TEACHERS: Teachers = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLoss:
    """DPO's loss of the two answers of a row, of advantage 1 and -1."""

    beta: float = 0.1
    smoothing: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainStep:
    """A step: its updates with their sequences, each rollout's calls one after the other, repeated `epochs` times.
    `pairs`: rows are pairs of answers. `episodes`: advantages are a critic's. `entropy_clip` leaves tokens out;
    `token_baseline`: each token is compared with its place in the group. `teaching` is by another model. `lessons` are
    an expert's rows in each update, with the loss `expert`. `balance` is the coefficient of the balance loss of
    experts, 0 for none."""

    updates: Sequence[Sequence[PlainSequence]]
    epochs: int
    loss: LossRules
    rates: Rates
    pairs: PairLoss | None = None
    episodes: Episodes | None = None
    critic_rates: Rates | None = None
    entropy_clip: EntropyClip | None = None
    token_baseline: bool = False
    teaching: Teaching | None = None
    lessons: Sequence[Sequence[PlainSequence]] = ()
    expert: ExpertLoss | None = None
    balance: float = 0.0


@dataclass(frozen=True, slots=True)
class Scored:
    """A sequence with what is known of it before the step's first update (each of shape S)."""

    sequence: PlainSequence
    credit: Credit
    reference_S: Tensor | None
    before_S: Tensor | None


@dataclass(frozen=True, slots=True)
class Begun:
    """What is known before a step's first update: its loss, and each sequence by its `id`."""

    rules: LossRules
    scored: Mapping[int, Scored]


def begin(model: PlainModel, state: State, step: PlainStep, reference: Tensors, teachers: Teachers) -> Begun:
    """Compute it with the weights in `state`; see `update.make_steps` for the others."""
    rules = step.loss if state.kl_coef is None else replace(step.loss, kl_coef=state.kl_coef)
    sequences = [one for update in step.updates for one in update]
    needs_reference = rules.kl != "none" or step.pairs is not None
    unknown: Sequence[Tensor | None] = [None] * len(sequences)
    known, before, values = unknown, unknown, None
    if needs_reference:
        known = logprobs(model, [replace(one, routes_TLK=None) for one in sequences], reference)
    if rules.behaviour != "none":
        before = logprobs(model, sequences, state.weights)
    if state.critic is not None:
        with torch.no_grad():
            values = [one for some in model.groups(sequences) for one in model.values(some, state.critic.weights)]
    credits = assign(
        [_tokens(one, known_S, rules) for one, known_S in zip(sequences, known, strict=True)], values, step.episodes
    )
    if step.token_baseline:
        credits = _compared(credits, sequences, model, state.weights)
    if step.teaching is not None and step.teaching.by_sample:
        credits = _taught(credits, sequences, step.teaching, teachers)
    if step.entropy_clip is not None:
        credits = _clipped(credits, sequences, step.entropy_clip, model, state.weights)
    scored = {
        id(one): Scored(one, credit, known_S, before_S)
        for one, credit, known_S, before_S in zip(sequences, credits, known, before, strict=True)
    }
    return Begun(rules, scored)


def logprobs(model: PlainModel, sequences: Sequence[PlainSequence], weights: Tensors) -> list[Tensor]:
    """Return the logprobs of each sequence's tokens (S), without a gradient."""
    with torch.no_grad():
        return [logprobs_S for some in model.groups(sequences) for logprobs_S, _ in model.logprobs(some, weights)]


def _tokens(one: PlainSequence, reference_S: Tensor | None, rules: LossRules) -> Tokens:
    """What the credit of a sequence's tokens is made of."""
    divergence_S = torch.zeros(len(one.places_S), dtype=torch.float64)
    if rules.kl_in_reward and reference_S is not None:
        recorded_S = one.recorded_S.to(reference_S)
        divergence_S = divergence(rules, recorded_S, reference_S, recorded_S).double()
    return Tokens(owner=one.owner, advantage=one.advantage, divergence_S=divergence_S, coefficient=rules.kl_coef)


def _compared(
    credits: Sequence[Credit], sequences: Sequence[PlainSequence], model: PlainModel, weights: Tensors
) -> list[Credit]:
    """The credits less what each token of a group is compared with."""
    norms = []
    for some in model.groups(sequences):
        with torch.no_grad():
            for one, logprobs_SV in zip(some, model.distributions(some, weights), strict=True):
                norms.append(squared_norms(logprobs_SV, one.ids_T[one.places_S]))
    return less_baselines(credits, [(one.group, one.owner) for one in sequences], norms)


def _clipped(
    credits: Sequence[Credit],
    sequences: Sequence[PlainSequence],
    clip: EntropyClip,
    model: PlainModel,
    weights: Tensors,
) -> list[Credit]:
    """The credits without the advantages of tokens that the clip leaves out."""
    terms = []
    for some in model.groups(sequences):
        with torch.no_grad():
            for one, logprobs_SV in zip(some, model.distributions(some, weights), strict=True):
                falls_SV, means_S = entropy_terms(logprobs_SV)
                terms.append((one.of_tokens(falls_SV), means_S))
    left_out = clip.left_out([credit.advantages_S for credit in credits], terms)
    return [
        replace(credit, advantages_S=credit.advantages_S * ~left_S)
        for credit, left_S in zip(credits, left_out, strict=True)
    ]


def _taught(
    credits: Sequence[Credit], sequences: Sequence[PlainSequence], teaching: Teaching, teachers: Teachers
) -> list[Credit]:
    """The credits with the teachers' part."""
    added: dict[int, Tensor] = {}
    for own in by_teacher(sequences):
        recorded = [one.taught_S for one in own if one.taught_S is not None]
        of_teacher = recorded
        if len(recorded) < len(own):
            read = [one.read or replace(one, routes_TLK=None) for one in own]
            of_teacher = logprobs(teachers[own[0].teacher], read, {})
        for one, teacher_S in zip(own, of_teacher, strict=True):
            parts = one.stretches or None
            added[id(one)] = teaching.advantages(teacher_S, one.recorded_S, parts).double()
    return [
        replace(credit, advantages_S=credit.advantages_S + added[id(one)])
        for credit, one in zip(credits, sequences, strict=True)
    ]


def by_teacher(sequences: Sequence[PlainSequence]) -> list[list[PlainSequence]]:
    """The sequences of each teacher."""
    found: dict[str, list[PlainSequence]] = {}
    for one in sequences:
        found.setdefault(one.teacher, []).append(one)
    return list(found.values())
