"""Repeat the updates of a run and compare every weight.

In: a run directory, and steps (none: all that can be repeated). Out: a `Retrained`: for the steps between each two
checkpoints whether the second is what the plain loop (`plain_update`) makes of the first and of the records; what does
not agree; and what could not be repeated, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sharpen.certificate.certificate import Certificate, RepeatedSteps
from sharpen.certificate.certify import Settings, read_resolved
from sharpen.certificate.expectation import TRAINED, expect
from sharpen.certificate.likeness import Likeness, compare, in_words
from sharpen.certificate.lineage import Lineage, read_lineage
from sharpen.certificate.lineage import in_words as steps_in_words
from sharpen.certificate.loss_rules import LossRules
from sharpen.certificate.plain_update import PlainCall, PlainModel, PlainStep, Rates, State, make_steps
from sharpen.certificate.rules import Rules
from sharpen.certificate.saved_state import SavedState, read_state
from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError
from sharpen.execution.model_files import model_folder, quiet_transformers
from sharpen.experience.evidence import read_delivery, read_step_groups
from sharpen.experience.reading import read_groups_at
from sharpen.types import Call


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrained:
    """The steps that were repeated, from one checkpoint to the next; a sentence for each of these that does not agree;
    and one for each that was not repeated."""

    repeated: tuple[RepeatedSteps, ...]
    problems: tuple[str, ...]
    not_repeated: tuple[str, ...]


def retrain(run_dir: Path, steps: Sequence[int] = (), tell: Callable[[str], None] = lambda line: None) -> Retrained:
    """Repeat these steps (none: all). `tell` gets a line for each stretch that is done.

    Raises `ConfigError` for steps that the run does not have."""
    quiet_transformers()
    records = _Records(run_dir)
    last = max((record.step for record in records.lineage.steps), default=0)
    if unknown := [step for step in steps if not 1 <= step <= last]:
        raise ConfigError(f"--retrain {unknown[0]}: the run has steps 1 to {last}")
    done: list[RepeatedSteps] = []
    problems: list[str] = []
    missing: list[str] = []
    for begin, end in records.stretches():
        inside = range(begin + 1, end + 1)
        if steps and not set(steps) & set(inside):
            continue
        if reason := records.reason(begin, inside):
            missing.append(f"the updates of steps {steps_in_words(inside)}: {reason}")
            continue
        likeness = records.repeat(begin, end)
        done.append(_repeated(begin, end, likeness))
        tell(done[-1].line)
        if wrong := likeness.wrong:
            problems.append(
                f"{done[-1].steps}: the weights are not those that the updates make when they are made once more; "
                f"furthest: {in_words(wrong)}"
            )
    if rest := [step for step in (steps or range(1, last + 1)) if step > records.saved_until]:
        missing.append(f"the updates of steps {steps_in_words(rest)}: no checkpoint was saved after them")
    if not done and not problems and not missing:
        missing.append("any update: the run has no checkpoint")
    return Retrained(repeated=tuple(done), problems=tuple(problems), not_repeated=tuple(missing))


def with_updates(
    certificate: Certificate, run_dir: Path, steps: Sequence[int], tell: Callable[[str], None]
) -> Certificate:
    """Return the certificate with what `retrain` found."""
    found = retrain(run_dir, steps, tell)
    return replace(
        certificate,
        repeated=found.repeated,
        problems=(*certificate.problems, *found.problems),
        not_recomputed=(*certificate.not_recomputed, *found.not_repeated),
    )


def _repeated(begin: int, end: int, likeness: Likeness) -> RepeatedSteps:
    return RepeatedSteps(
        first=begin + 1,
        last=end,
        cosine=likeness.cosine,
        length=likeness.length,
        furthest=likeness.gaps[0].name,
        share=likeness.gaps[0].share,
    )


class _Records:
    """What a run left of its steps."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._journal = run_dir, run_dir / "run.db"
        self._config = read_resolved(run_dir / "resolved.json")
        self._settings = Settings.of(run_dir, self._config)
        self.lineage: Lineage = read_lineage(run_dir)
        self._placed = read_step_groups(self._journal)
        self._base = model_folder(self._config.model.model_path)
        known = {record.step for record in self.lineage.steps}
        found = (int(path.name.rpartition("_")[2]) for path in run_dir.glob("global_step_*") if path.is_dir())
        self._saved = sorted({step for step in found if step in known})

    @property
    def saved_until(self) -> int:
        """The step of the last checkpoint."""
        return max(self._saved, default=0)

    def stretches(self) -> Iterator[tuple[int, int]]:
        """Yield the steps of each checkpoint and of the next one; the first is the model before training, step 0."""
        yield from zip([0, *self._saved], self._saved, strict=False)

    def reason(self, begin: int, inside: range) -> str | None:
        """Say why steps cannot be repeated."""
        configs = [self._settings.config(step) for step in inside]
        reasons = [reason for config in configs for reason in unrepeatable(config)]
        if self._config.trainer.lora is not None and begin == 0:
            reasons.append("adapters begin at random, and no checkpoint holds how")
        calls = (call for step in inside if not reasons for call in self._trained(step))
        reasons += dict.fromkeys(reason for call in calls for reason in _unrepeatable_call(call))
        return reasons[0] if reasons else None

    def repeat(self, begin: int, end: int) -> Likeness:
        """Make the steps from one checkpoint to the other again, in two precisions, and compare."""
        after = read_state(self._folder(end))
        rounded = after.rounded
        high = PlainModel(
            self._base,
            rounded=False,
            dtype=torch.float32 if rounded else torch.float64,
            adapter_scale=_scale(after),
        )
        before = State(weights=_weights(high, after), moments={})
        reference = before.weights
        if begin:
            before = read_state(self._folder(begin)).state
        if after.state.kl_coef is not None and before.kl_coef is None:
            before.kl_coef = LossRules.of(self._settings.config(begin + 1)).kl_coef
        steps = [self._step(step) for step in range(begin + 1, end + 1)]
        exact = make_steps(high, before, steps, _to(reference, high.dtype))
        del high
        low = PlainModel(self._base, rounded=rounded, dtype=torch.float32, adapter_scale=_scale(after))
        return compare(before, after.state, exact, make_steps(low, before, steps, _to(reference, low.dtype)))

    def _folder(self, step: int) -> Path:
        return self._run_dir / f"global_step_{step}"

    def _step(self, step: int) -> PlainStep:
        config, rules = self._settings.config(step), self._settings.rules(step)
        expected = self._expected(step, rules)
        updates: list[list[PlainCall]] = [[] for _ in range(1 + max((one.update for one in expected), default=-1))]
        for one in expected:
            updates[one.update].append(_plain_call(one.rollout_id, one.call, one.advantage, one.weight))
        return PlainStep(
            number=step,
            updates=updates,
            epochs=config.trainer.epochs,
            loss=LossRules.of(config),
            rates=Rates.of(config, config.train_dataset.total_steps or 0),
        )

    def _expected(self, step: int, rules: Rules):  # type: ignore[no-untyped-def]
        fresh = read_groups_at(self._journal, self.lineage.groups[step])
        replayed = read_groups_at(self._journal, [key for key, again in self._placed.get(step, ()) if again])
        delivered = read_delivery(self._journal, step)
        statuses = {} if delivered is None else {one.group_id: one.left_out or TRAINED for one in delivered.places}
        return list(expect(fresh, replayed, rules, statuses).calls.values())

    def _trained(self, step: int) -> list[Call]:
        return [one.call for one in self._expected(step, self._settings.rules(step))]


def unrepeatable(config: RunConfig) -> Iterator[str]:
    """Yield what in a run's settings the plain loop does not make."""
    rules, loss, trainer = Rules.of(config), LossRules.of(config), config.trainer
    lora = trainer.lora
    cases = {
        "their advantages need the critic's weights": rules.formula.critic,
        "they are taught by another model": rules.teacher,
        "an expert's rows train beside the rollouts": rules.expert,
        "which tokens lose their advantage depends on entropies": rules.formula.entropy_clip,
        "the KL penalty is in the reward": loss.kl_in_reward,
        f"the optimizer is {trainer.optimizer}": trainer.optimizer != "adamw",
        "a balance loss of experts is added": bool(trainer.balance_coef),
        "the vision tower is trained": trainer.train_towers,
        "the adapters are those of experts": lora is not None and lora.experts,
        "the frozen weights are in 4 bits": lora is not None and lora.base == "nf4",
        "how many updates the rate's schedule spans is not among the settings": trainer.schedule != "constant"
        and config.train_dataset.total_steps is None,
    }
    yield from (reason for reason, applies in cases.items() if applies)


def _unrepeatable_call(call: Call) -> Iterator[str]:
    cases = {
        "their tokens were constrained": call.constraint is not None,
        "their experts were chosen by the engine": call.routes_NLK is not None,
        "their prompts have images": bool(call.pictures),
    }
    yield from (reason for reason, applies in cases.items() if applies)


def _plain_call(rollout_id: str, call: Call, advantage: float, weight: float) -> PlainCall:
    prompt, sampled = torch.tensor(call.prompt_ids_P), torch.tensor(call.sampled_ids_S)
    return PlainCall(
        rollout_id=rollout_id,
        ids_T=torch.cat([prompt, sampled]).long(),
        recorded_S=torch.tensor(call.logprobs_S),
        temperature=call.sampling.temperature,
        advantage=advantage,
        weight=weight,
        whole=call.sampling.full_support,
    )


def _scale(saved: SavedState) -> float | None:
    """The factor of the adapters' product, None if all weights train."""
    return None if saved.adapters is None else float(saved.adapters["alpha"]) / float(saved.adapters["rank"])


def _weights(model: PlainModel, after: SavedState) -> dict[str, torch.Tensor]:
    """The trained weights before the run: the model's, or adapters without effect."""
    if after.adapters is not None:
        return {name: torch.zeros_like(tensor) for name, tensor in after.state.weights.items()}
    return {name: tensor.detach().float() for name, tensor in model.module.named_parameters()}


def _to(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}
