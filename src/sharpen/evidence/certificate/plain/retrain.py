"""Repeat the updates of a run and compare every weight.

In: a run directory, and steps (none: all that can be repeated). Out: a `Retrained`: for the steps between each two
checkpoints whether the second is what the plain loop (`plain_update`) makes of the first and of the records; what does
not agree; and what could not be repeated, and why.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sharpen.errors import CheckpointError, ConfigError, ModelError, SharpenError
from sharpen.evidence.certificate.certificate import Certificate, RepeatedSteps, Retrained, recorded_updates
from sharpen.evidence.certificate.certify import Settings, read_resolved
from sharpen.evidence.certificate.likeness import TWINS, Likeness, compare, in_words
from sharpen.evidence.certificate.lineage import in_words as steps_in_words
from sharpen.evidence.certificate.lineage import read_lineage
from sharpen.evidence.certificate.plain.begin import PlainStep
from sharpen.evidence.certificate.plain.implied import gradients, implied
from sharpen.evidence.certificate.plain.model import HEAD, PlainModel
from sharpen.evidence.certificate.plain.optimizers import Rates, State, moved_by
from sharpen.evidence.certificate.plain.quantized import FourBits
from sharpen.evidence.certificate.plain.saved_state import (
    SavedState,
    num_weights,
    read_adapters_at_start,
    read_state,
    records_adapters_at_start,
)
from sharpen.evidence.certificate.plain.steps import RolloutSteps
from sharpen.evidence.certificate.plain.teacher import teacher_folders
from sharpen.evidence.certificate.plain.update import make_steps
from sharpen.learning.algorithm.supervised import learns_from_rows
from sharpen.machine import available_bytes
from sharpen.models.files import model_folder, quiet_transformers
from sharpen.models.identity import model_identity
from sharpen.models.table import bring

_BYTES = 100
"""Memory for each weight: the model twice, states before, after and made once more, and gradients."""

_TEACHER_BYTES = 20
"""Those for each weight of a teacher: twice, in both precisions, and as it is loaded."""


def retrain(
    run_dir: Path,
    steps: Sequence[int] = (),
    tell: Callable[[str], None] = lambda line: None,
    *,
    free: int | None = None,
) -> Retrained:
    """Repeat these steps (none: all). `tell` gets a line for each stretch that is done; `free` is the memory that it
    may take, in bytes (None: what is free).

    Raises `ConfigError` for steps that the run does not have."""
    quiet_transformers()
    records = _Records(run_dir)
    free = available_bytes() if free is None else free
    last = max((record.step for record in records.lineage.steps), default=0)
    if unknown := [step for step in steps if not 1 <= step <= last]:
        raise ConfigError(f"--retrain {unknown[0]}: the run has steps 1 to {last}")
    found: list[Retrained] = []
    asked = [one for one in records.stretches() if not steps or set(steps) & set(one[0])]
    if asked:
        tell(f"making updates once more, up to step {asked[-1][0][-1]}; the first are those of step {asked[0][0][0]}")
    for inside, before, after in asked:
        found.append(records.attempt(inside, before, after, free))
        for one in found[-1].repeated:
            tell(one.line)
    if rest := [step for step in (steps or range(1, last + 1)) if step > records.saved_until]:
        found.append(
            Retrained(
                not_repeated=(f"the updates of steps {steps_in_words(rest)}: no checkpoint was saved after them",)
            )
        )
    return Retrained.of(found or [Retrained(not_repeated=("any update: the run has no checkpoint",))])


def retrain_step(run_dir: Path, step: int, before: Path | None, after: Path) -> Retrained:
    """Repeat a step of a run that goes on, from the trainer's state `before` it (None: the model before training) to
    that `after` it: two folders as `Trainer.save` writes them."""
    quiet_transformers()
    return _Records(run_dir, running=True).attempt(range(step, step + 1), before, after, available_bytes())


def with_updates(
    certificate: Certificate, run_dir: Path, steps: Sequence[int], tell: Callable[[str], None]
) -> Certificate:
    """Return the certificate with what `retrain` found, beside what the run itself did."""
    found = retrain(run_dir, steps, tell)
    known = recorded_updates(run_dir / "run.db", read_lineage(run_dir))
    again = {step for one in found.repeated for step in range(one.first, one.last + 1)}
    return replace(
        certificate,
        repeated=(*(one for one in known.repeated if one.last not in again), *found.repeated),
        problems=(*certificate.problems, *found.problems),
        not_repeated=(),
        not_recomputed=(*certificate.not_recomputed, *found.not_repeated),
    )


def memory_bytes(folder: Path) -> int:
    """Return how much memory it takes to repeat a step of the model in this folder."""
    return _BYTES * num_weights(folder)


def why_not(error: Exception) -> str:
    """Say why updates could not be made once more, where no checkpoint is at fault."""
    said = str(error).partition("\n")[0]
    if isinstance(error, SharpenError):
        return said
    if isinstance(error, MemoryError) or "allocate memory" in said:
        return "the memory of this machine did not suffice"
    if isinstance(error, OSError):
        return f"this machine failed ({type(error).__name__}: {said})"
    if isinstance(error, RuntimeError):  # torch's, of a model that cannot be computed so
        return f"transformers' own forward pass fails: {said}"
    return f"the plain loop fails ({type(error).__name__}: {said})"


def _repeated(inside: range, likeness: Likeness) -> RepeatedSteps:
    return RepeatedSteps(
        first=inside[0],
        last=inside[-1],
        cosine=likeness.cosine,
        length=likeness.length,
        furthest=likeness.gaps[0].name,
        share=likeness.gaps[0].share,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """The state before some steps and those after them, made again: exactly, and `rounded` as the run rounds, by the
    model `low`."""

    before: State
    exact: State
    rounded: Sequence[State]
    low: PlainModel


class _Records:
    """What a run left of its steps."""

    def __init__(self, run_dir: Path, *, running: bool = False) -> None:
        config = read_resolved(run_dir / "resolved.json")
        bring(*config.families)
        self._config = config
        self._run_dir, self._settings = run_dir, Settings.of(run_dir, config)
        self.lineage = read_lineage(run_dir, running=running)
        self._base = model_folder(config.model.model_path)
        known = {record.step for record in self.lineage.steps}
        found = (int(path.name.rpartition("_")[2]) for path in run_dir.glob("global_step_*") if path.is_dir())
        self._saved = sorted({step for step in found if step in known})
        self._adapts = config.trainer.lora is not None
        if learns_from_rows(config.algorithm):
            from sharpen.evidence.certificate.plain.rows import RowSteps

            self._steps: RolloutSteps | RowSteps = RowSteps(run_dir, self._settings)
        else:
            expert = None
            if config.expert.dataset is not None:
                from sharpen.evidence.certificate.plain.rows import ExpertRowSteps

                expert = ExpertRowSteps(run_dir, self._settings).updates
            self._steps = RolloutSteps(run_dir, self.lineage, self._settings, self._base, expert)

    @property
    def saved_until(self) -> int:
        """The step of the last checkpoint."""
        return max(self._saved, default=0)

    def stretches(self) -> Iterator[tuple[range, Path | None, Path]]:
        """Yield the steps between each two checkpoints, and the two; the first is None: the model before training."""
        folders = {step: self._run_dir / f"global_step_{step}" for step in self._saved}
        for begin, end in zip([0, *self._saved], self._saved, strict=False):
            yield range(begin + 1, end + 1), folders.get(begin), folders[end]

    def attempt(self, inside: range, before: Path | None, after: Path, free: int) -> Retrained:
        """Repeat the steps `inside` two checkpoints, if they can be repeated in so many bytes of memory."""
        name = f"the updates of steps {steps_in_words(inside)}"
        try:
            likeness = self._repeat(inside, before, after, free)
        except CheckpointError as error:
            return Retrained(problems=(f"{name} cannot be made once more: {error}",))
        except (OSError, MemoryError, RuntimeError, ValueError, KeyError) as error:
            return Retrained(not_repeated=(f"{name}: {why_not(error)}",))
        if isinstance(likeness, str):
            return Retrained(not_repeated=(f"{name}: {likeness}",))
        repeated, wrong = _repeated(inside, likeness), likeness.wrong
        problem = (
            f"{repeated.steps}: the weights are not those that the updates make when they are made once more; "
            f"furthest: {in_words(wrong)}"
        )
        return Retrained(repeated=(repeated,), problems=(problem,) if wrong else ())

    def _repeat(self, inside: range, before: Path | None, after: Path, free: int) -> Likeness | str:
        """Make the steps from one checkpoint to the other again, in two precisions, and compare; or say why that cannot
        be done in so many bytes of memory."""
        if self._adapts and before is None and not records_adapters_at_start(self._run_dir):
            return "adapters begin at random, and this run did not record how"
        of_teacher = _TEACHER_BYTES * sum(num_weights(folder) for folder in self._taught_by.values())
        if (needed := memory_bytes(after) + of_teacher) > free:
            return f"that takes about {needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are free"
        steps: list[PlainStep] = []
        for number in inside:
            step = self._steps.step(number)
            if isinstance(step, str):
                return step
            steps.append(step)
        return self._compared(before, after, steps)

    def _compared(self, begin: Path | None, end: Path, steps: Sequence[PlainStep]) -> Likeness:
        after = read_state(end)
        if after.rounded and any(step.entropy_clip is not None for step in steps):
            raise ModelError("in bfloat16 rounding decides which tokens lose their advantage")
        made = self._made(begin, end, after, steps)
        before, exact, low = made.before, made.exact, made.low
        several = sum(step.epochs * len(step.updates) for step in steps) > 1
        found = [_compared(before, after.state, exact, made.rounded, None if several else steps[0].rates, low)]
        if before.critic is not None and after.state.critic is not None and exact.critic is not None:
            critics = [one.critic for one in made.rounded if one.critic is not None]
            rates = None if several else steps[0].critic_rates
            found.append(_compared(before.critic, after.state.critic, exact.critic, critics, rates, low, "critic "))
        return found[0] if len(found) == 1 else found[0].beside(found[1])

    def _made(self, begin: Path | None, end: Path, after: SavedState, steps: Sequence[PlainStep]) -> _Made:
        """Make the steps again; of what came `after` them only its kind is used. Raises `ModelError` and
        `CheckpointError` where other weights were trained than these."""
        exact_dtype = torch.float32 if after.rounded else torch.float64
        high, low = (self._model(after.rounded, after.adapter_scale, exact) for exact in (True, False))
        teachers = self._teachers(False, exact_dtype), self._teachers(after.rounded, torch.float32)
        start = _start(low, after)
        before = self._before(begin, start)
        if after.state.kl_coef is not None and before.kl_coef is None:
            before.kl_coef = steps[0].loss.kl_coef
        if unknown := before.weights.keys() ^ start.weights.keys():
            raise ModelError(f"{min(unknown)} is either in the checkpoint or in transformers' model, not in both")
        if lost := before.weights.keys() - after.state.weights.keys():
            raise CheckpointError(f"{end.name} is damaged: it has no {min(lost)}")
        exact = make_steps(high, before, steps, _to(start.weights, high.dtype), teachers[0])
        rounded = [make_steps(low, _nudged(before, twin), steps, start.weights, teachers[1]) for twin in range(TWINS)]
        return _Made(before=before, exact=exact, rounded=rounded, low=low)

    def _before(self, folder: Path | None, start: State) -> State:
        """The state in a checkpoint, or that before training."""
        if folder is not None:
            return read_state(folder).state
        return replace(start, weights=read_adapters_at_start(self._run_dir)) if self._adapts else start

    @functools.cached_property
    def _taught_by(self) -> dict[str, Path]:
        """The folders of the models that teach. Raises `ModelError` where one is not there any more, or does not hold
        what it held when the run started."""
        folders, entries = teacher_folders(self._config), json.loads((self._run_dir / "resolved.json").read_text())
        for name, folder in folders.items():
            setting = f"distill.teachers.{name}" if name else "distill.teacher_path"
            recorded = entries.get(f"identity.{setting if name else 'teacher'}", {}).get("value")
            if recorded is not None and model_identity(folder) != recorded:
                raise ModelError(f"the files in {folder} ({setting}) are no longer those of the run's teacher")
        return folders

    @functools.cache  # noqa: B019 (lives as long as the call of `retrain`)
    def _teachers(self, rounded: bool, dtype: torch.dtype) -> dict[str, PlainModel]:
        return {name: _load(folder, rounded, dtype, None) for name, folder in self._taught_by.items()}

    @functools.cache  # noqa: B019
    def _model(self, rounded: bool, scale: float | None, exact: bool) -> PlainModel:
        """The model in the precision of the run or, `exact`, in a higher one."""
        lora, four_bits = self._config.trainer.lora, None
        if lora is not None and lora.base == "nf4":
            served = not learns_from_rows(self._config.algorithm)  # the engine's own, which it loads in its type
            before = torch.bfloat16 if rounded and served else torch.float32
            four_bits = FourBits(before=before, other=not exact)
        dtype = torch.float64 if exact and not rounded else torch.float32
        return _load(self._base, rounded and not exact, dtype, scale, four_bits)


def _load(
    folder: Path, rounded: bool, dtype: torch.dtype, scale: float | None, four_bits: FourBits | None = None
) -> PlainModel:
    try:
        return PlainModel(folder, rounded=rounded, dtype=dtype, adapter_scale=scale, four_bits=four_bits)
    except (ImportError, OSError, ValueError, KeyError) as error:
        raise ModelError(f"transformers cannot load {folder}: {error}") from error


def _start(model: PlainModel, after: SavedState) -> State:
    """The state before the run: the model's weights, or adapters without effect; a critic with a head of zeros."""
    named = dict(model.module.named_parameters())
    own = {name: named[name].detach().clone() for name in model.trained_names()}
    adapters = {name: torch.zeros_like(tensor) for name, tensor in after.state.weights.items()}
    start = State(weights=own if after.adapter_scale is None else adapters)
    if after.state.critic is not None:
        critic = after.state.critic.weights
        heads = {name: torch.zeros_like(tensor) for name, tensor in critic.items() if name.startswith(HEAD)}
        start.critic = State(weights={name: own[name] for name in own if name in critic} | heads)
    return start


def _compared(
    before: State,
    after: State,
    exact: State,
    rounded: Sequence[State],
    rates: Rates | None,
    model: PlainModel,
    whose: str = "",
) -> Likeness:
    """Compare the states after some updates, or after a single one with these `rates`: then the weights with those that
    the optimizer makes of the moments after it, exactly and as this machine rounds; with moments in 8 bits, the
    gradients that the weights imply."""
    if rates is None:
        return compare(before, after, exact, rounded, (), whose)
    own = [
        moved_by(before, after, exact.counts, rates, model.tables, dtype) for dtype in (torch.float64, torch.float32)
    ]
    said: list[Mapping[str, torch.Tensor]] = []
    if rates.eight_bits:
        right, *low = (gradients(before, one, rates) for one in (exact, *rounded))
        said = [implied(before, after, right, exact.counts, rates), right, *low]
    return compare(before, after, exact, rounded, own, whose, said)


def _nudged(state: State, twin: int) -> State:
    """Return a state as it is (the first twin), or with each weight moved by at most a rounding of float32."""
    generator = torch.Generator().manual_seed(twin)
    copy = state.copy(torch.float32)
    for name, weight in copy.weights.items() if twin else ():
        copy.weights[name] = weight * (1.0 + 2.0**-24 * (2.0 * torch.rand(weight.shape, generator=generator) - 1.0))
    return copy


def _to(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}
