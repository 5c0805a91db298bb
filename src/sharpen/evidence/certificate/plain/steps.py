"""What the steps of a run trained, for the plain loop: from the recorded calls, or from the rows.

In: a run directory. Out: a `PlainStep` for each step, or a sentence that says why its updates cannot be repeated. Which
calls train, with which advantage and weight, comes from `expectation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from sharpen.config.run import RunConfig
from sharpen.engine.token_masks import TokenMasks, allowed
from sharpen.evidence.certificate.certify import Settings
from sharpen.evidence.certificate.constraints import support_mask
from sharpen.evidence.certificate.expectation import TRAINED, ExpectedCall, expect
from sharpen.evidence.certificate.lineage import Lineage, in_words
from sharpen.evidence.certificate.plain.begin import PairLoss, PlainStep
from sharpen.evidence.certificate.plain.credit import EntropyClip, Episodes
from sharpen.evidence.certificate.plain.loss_rules import LossRules
from sharpen.evidence.certificate.plain.losses import ExpertLoss
from sharpen.evidence.certificate.plain.model import PlainSequence
from sharpen.evidence.certificate.plain.optimizers import Rates
from sharpen.evidence.certificate.plain.reread import PlainReader, others
from sharpen.evidence.certificate.plain.teacher import Teaching, teacher_of_row
from sharpen.evidence.certificate.role_baselines import NO_BASELINE, RoleBaselines
from sharpen.evidence.certificate.rules import Rules
from sharpen.evidence.certificate.sources import without_second
from sharpen.learning.experience.evidence import read_delivery, read_step_groups
from sharpen.learning.experience.reading import read_groups_at
from sharpen.types import Call, RouteArray

ExpertRows = Callable[[int, int], list[list[PlainSequence]] | str]
"""Gives an expert's rows in each of so many updates of a step, or says why they are not known."""


class RolloutSteps:
    """The steps of a run with rollouts."""

    def __init__(
        self, run_dir: Path, lineage: Lineage, settings: Settings, base: Path, expert: ExpertRows | None = None
    ) -> None:
        """`base` is the folder of the model before training, `expert` gives the rows of one, if the run has one."""
        self._expert = expert
        self._journal, self._lineage, self._settings, self._base = run_dir / "run.db", lineage, settings, base
        self._placed = read_step_groups(self._journal)
        self._masks = TokenMasks.of_folder(base)
        self._roles = RoleBaselines()
        self._readers: dict[str, PlainReader] | None = None

    def step(self, step: int) -> PlainStep | str:
        """Return a step, or say why it cannot be repeated."""
        config, rules = self._settings.config(step), self._settings.rules(step)
        for reason in (*unrepeatable(config), *without_formula(config), *without_second(config).values()):
            return reason
        if rules.formula.by_role and (lost := self._learn_until(step)):
            return f"{NO_BASELINE} {in_words(lost)} are not in run.db"
        expected, teachers = self._expected(step, config)
        updates: list[list[PlainSequence]] = [
            [] for _ in range(1 + max((one.update for one, _ in expected), default=-1))
        ]
        for one, before in expected:
            sequence = replace(self._sequence(one, before), teacher=teachers[one.group_id])
            if (reader := self._reader(sequence.teacher, config)) is not None:
                if not one.call.messages:
                    return "the messages that its teacher would read are not in run.db any more (journal.keep_steps)"
                sequence = reader.read(one.call, sequence)
            updates[one.update].append(sequence)
        lessons = self._lessons(step, config)
        if isinstance(lessons, str):
            return lessons
        return PlainStep(
            updates=updates,
            lessons=lessons,
            expert=ExpertLoss.of(config, step),
            epochs=config.trainer.epochs,
            loss=LossRules.of(config),
            rates=Rates.of(config),
            episodes=episodes(rules, config) if rules.formula.critic else None,
            critic_rates=Rates.of(config, critic=True) if rules.formula.critic else None,
            entropy_clip=EntropyClip.of(rules),
            token_baseline=rules.formula.token_baseline,
            teaching=Teaching.of(config),
            balance=config.trainer.balance_coef,
        )

    def _reader(self, teacher: str, config: RunConfig) -> PlainReader | None:
        """What reads calls as this teacher does; None if it has the model's tokens."""
        if self._readers is None:
            thinking = config.model.enable_thinking
            folders = others(config, self._base)
            self._readers = {name: PlainReader(self._base, folder, thinking) for name, folder in folders.items()}
        return self._readers.get(teacher)

    def _learn_until(self, step: int) -> list[int]:
        """Read the rewards of the steps before this one, once each. Return the steps that are not there."""
        for earlier in self._roles.missing(step):
            if fresh := read_groups_at(self._journal, self._lineage.groups.get(earlier, ())):
                delivered = read_delivery(self._journal, earlier)
                self._roles.learn(earlier, fresh, delivered, self._settings.rules(earlier))
        return self._roles.missing(step)

    def _lessons(self, step: int, config: RunConfig) -> list[list[PlainSequence]] | str:
        """The rows of an expert in each update: as many updates as there are groups to train, up to those asked for,
        and at least one."""
        if self._expert is None:
            return []
        delivered = read_delivery(self._journal, step)
        if delivered is None:
            return "the run did not record into which updates its groups went"
        trained = sum(one.left_out is None for one in delivered.places)
        return self._expert(step, max(1, min(config.trainer.num_minibatches, trained)))

    def _expected(
        self, step: int, config: RunConfig
    ) -> tuple[Sequence[tuple[ExpectedCall, Call | None]], dict[str, str]]:
        """The calls that train, each with the call that it goes on from, and the teacher of each group."""
        fresh = read_groups_at(self._journal, self._lineage.groups[step])
        replayed = read_groups_at(self._journal, [key for key, again in self._placed.get(step, ()) if again])
        delivered = read_delivery(self._journal, step)
        statuses = {} if delivered is None else {one.group_id: one.left_out or TRAINED for one in delivered.places}
        rules = self._settings.rules(step)
        found = expect(fresh, replayed, rules, statuses, self._roles.before(step, fresh, rules))
        rollouts = {rollout.id: rollout for of_group in found.participants.values() for rollout in of_group}
        expected = [
            (one, None if one.call.parent is None else rollouts[one.rollout_id].calls[one.call.parent])
            for one in found.calls.values()
        ]
        trained = {one.group_id for one, _ in expected}
        every = (part for group in (*fresh, *replayed) for part in group.with_side if part.id in trained)
        return expected, {group.id: teacher_of_row(config, group.task.row) for group in every}

    def _sequence(self, one: ExpectedCall, before: Call | None) -> PlainSequence:
        call = one.call
        assert one.advantage is not None and one.weight is not None, "see `without_second`"  # noqa: PT018
        prompt, sampled = call.prompt_ids_P, call.sampled_ids_S
        sequence = PlainSequence(
            owner=one.rollout_id,
            group=one.group_id,
            ids_T=torch.tensor(np.concatenate([prompt, sampled]), dtype=torch.long),
            places_S=torch.arange(len(prompt), len(prompt) + len(sampled)),
            recorded_S=torch.tensor(call.logprobs_S),
            weights_S=torch.full((len(sampled),), one.weight, dtype=torch.float64),
            advantage=one.advantage,
            temperature=call.sampling.temperature,
            whole=call.has_ratio,
            allowed_SV=self._allowed(call),
            routes_TLK=None if call.routes_NLK is None else _routes(call.routes_NLK),
            pictures=call.pictures,
            taught_S=None if call.taught_S is None else torch.tensor(call.taught_S),
        )
        if before is None:
            return sequence
        shown = np.arange(len(before.prompt_ids_P) + len(before.sampled_ids_S), len(prompt))
        for span in call.pictures:
            shown = shown[(shown < span.start) | (shown >= span.stop)]
        return replace(sequence, shown=sequence.beginning(torch.from_numpy(shown))) if len(shown) else sequence

    def _allowed(self, call: Call) -> torch.Tensor | None:
        """Return the tokens among which each of a call's was sampled (S, V); None if among all."""
        if call.constraint is None:
            return None if call.supports is None else torch.from_numpy(support_mask(call.supports))
        masks_SW = torch.from_numpy(self._masks.of_response(call.constraint, call.sampled_ids_S))
        num_ids = 32 * masks_SW.shape[1] if call.supports is None else call.supports.vocab_size
        allowed_SV = allowed(masks_SW, num_ids)
        return allowed_SV if call.supports is None else allowed_SV & torch.from_numpy(support_mask(call.supports))


def row_loss(config: RunConfig) -> tuple[LossRules, PairLoss | None]:
    """Return the loss that the settings of a run on rows define; with that of pairs, if rows are pairs of answers."""
    loss, pairs = config.loss, None
    if config.algorithm.algorithm_type == "dpo":
        given = loss.policy_loss_args
        pairs = PairLoss(beta=given.get("beta", 0.1), smoothing=given.get("label_smoothing", 0.0))
    coefficient = loss.kl_coef or 0.0
    kl = (loss.kl or "none") if coefficient else "none"
    return LossRules(policy_loss="sft", kl=kl, kl_coef=coefficient), pairs


def _routes(routes_NLK: RouteArray) -> torch.Tensor:
    """The recorded experts, and any for the last token, which nothing is predicted from."""
    recorded_NLK = torch.from_numpy(routes_NLK.astype(np.int64))
    return torch.cat([recorded_NLK, recorded_NLK[-1:]])


def without_gradient(config: RunConfig) -> Iterator[str]:
    """Yield what in a run's settings keeps the plain loop from computing its gradients."""
    trainer, lora = config.trainer, config.trainer.lora
    cases = {
        "the vision tower is trained": trainer.train_towers,
        "the adapters are those of experts": lora is not None and lora.experts,
    }
    yield from (reason for reason, applies in cases.items() if applies)


def unrepeatable(config: RunConfig) -> Iterator[str]:
    """Yield what in a run's settings the plain loop does not make."""
    trainer = config.trainer
    yield from without_gradient(config)
    cases = {
        "how many updates the rate's schedule spans is not among the settings": trainer.schedule != "constant"
        and config.train_dataset.total_steps is None,
    }
    yield from (reason for reason, applies in cases.items() if applies)


def without_formula(config: RunConfig) -> Iterator[str]:
    """Yield what in the settings of a run with rollouts keeps the plain loop from computing its loss."""
    rules = Rules.of(config)
    cases = {
        "a critic learns what a teacher gives": rules.teacher and rules.formula.critic,
        "what the teacher was told (distill.context) has no second reading": config.distill.context is not None,
    }
    yield from (reason for reason, applies in cases.items() if applies)
    yield from (why for part, why in without_second(config).items() if part in ("policy_loss", "kl"))


def episodes(rules: Rules, config: RunConfig) -> Episodes:
    """Return how a critic credits tokens under these settings."""
    calls = rules.advantage == "call_gae"
    given = {name: rules.arguments[name] for name in ("gamma", "lam", "whiten") if name in rules.arguments}
    return Episodes(calls=calls, value_clip=config.critic.value_clip, **({"lam": 1.0 if calls else 0.95} | given))
