"""Before training: is the trainer's gradient that of a plain loop?

In: a run's settings, the folder of its model, the trainer as it will train. Out: a `GradientProbe`. One small batch
(`probe_batch`) goes through the trainer's forward and backward pass, with its packing, kernels, precision and ranks,
and through the plain loop (`plain.update`) twice, in the trainer's precision and in a higher one. How far these two are
apart is how much this model rounds; the trainer may be a small multiple of that away (`likeness`).

The plain loop computes on the CPU, so that a kernel of a GPU is held against something else. It holds a small model
whole, and reads a larger one block by block (`plain.blocks`), so that the comparison stays below what training takes.
What the plain loop does not make is named; of a model with more gradients than `MOST_COMPARED`, some blocks are
compared.
"""

from __future__ import annotations

import gc
import math
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from sharpen.config.run import RunConfig
from sharpen.errors import GradientError, ModelError
from sharpen.evidence.certificate.likeness import FACTOR, SEVERAL, Gap, compare_gradients, in_words
from sharpen.evidence.certificate.plain.begin import PlainStep
from sharpen.evidence.certificate.plain.credit import EntropyClip
from sharpen.evidence.certificate.plain.loss_rules import LossRules
from sharpen.evidence.certificate.plain.model import PlainModel, PlainSequence, may_be_read_by_blocks
from sharpen.evidence.certificate.plain.optimizers import Rates, State
from sharpen.evidence.certificate.plain.quantized import FourBits
from sharpen.evidence.certificate.plain.reread import others
from sharpen.evidence.certificate.plain.saved_state import num_weights, sizes_of
from sharpen.evidence.certificate.plain.steps import episodes, row_loss, without_formula, without_gradient
from sharpen.evidence.certificate.plain.teacher import Teaching, num_ids_of, teacher_folders
from sharpen.evidence.certificate.plain.update import compute_gradients
from sharpen.evidence.certificate.probe_batch import (
    LONGEST,
    SHORTEST,
    Kind,
    experiences,
    num_tokens,
    plain_sequences,
    probe_sequences,
    recorded,
    with_readings,
    with_routes,
)
from sharpen.evidence.certificate.rules import Rules
from sharpen.learning.algorithm.supervised import learns_from_rows
from sharpen.machine import available_bytes, return_freed_bytes
from sharpen.models.files import quiet_transformers
from sharpen.types import Experience

if TYPE_CHECKING:
    from sharpen.learning.trainer.gradients import Arrays, Gradients

ADVICE = (
    "A kernel or a library may compute wrongly on this machine: try trainer.dtype: float32, engine.device: cpu or "
    "another version of torch; check.gradients: false trains without this comparison"
)
"""What to do about gradients that differ."""
CRITIC = "critic "
"""Stands before the names of a critic's tensors."""
_NOT_MADE = Rates(
    peak=0.0,
    warmup=0,
    schedule="constant",
    floor=0.0,
    planned=1,
    betas=(0.0, 0.0),
    eps=1.0,
    decay=0.0,
    max_norm=math.inf,
)
"""The rates of the update, whose gradient alone is wanted."""
WHOLE = 5 * 10**7
"""Weights of a model that the plain loop holds whole, which is faster; a larger one is read block by block."""
_TRAINER_BYTES = 8
"""Bytes for each weight of a trainer that holds its weights and their gradients."""
_BLOCKS, _BESIDE = 4, 400 * 2**20
"""Of a model that is read block by block, how many times a block's size is taken: its weights as they are, with their
adapters, as they are rounded, and a gradient. And what is taken beside it: logits, activations, gaps between
allocations."""
MOST_COMPARED = 2 * 10**8
"""Weights whose gradients are compared at most, of a larger model those of some blocks."""
_USUAL_WORK, _MOST_WORK = 10**11, 2 * 10**12
"""Tokens times weights: the batch is made shorter to stay below the first; beyond the second a processor takes
minutes."""


class ProbedTrainer(Protocol):
    """What is asked for gradients: `trainer.trainer.Trainer`, or `placement.ranks.group.TrainerGroup`."""

    def gradients(self, experiences: Sequence[Experience], names: Collection[str] | None = None) -> Gradients:
        """See `Trainer.gradients`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientProbe:
    """What a probe found: the `gaps` of the tensors that were compared, in the model's order, which are a share of all
    (`compared`), for a batch of so many tokens; or, where nothing was compared, why it was `not_probed`."""

    gaps: tuple[Gap, ...] = ()
    compared: float = 0.0
    num_tokens: int = 0
    seconds: float = 0.0
    not_probed: str = ""

    @property
    def line(self) -> str:
        """What was found, in a line."""
        if self.not_probed:
            return f"not probed: {self.not_probed}"
        if self.problem:
            return self.problem
        furthest = max(self.gaps, key=lambda gap: gap.share)
        part = "all" if self.compared == 1.0 else f"{self.compared:.0%} of the"
        return (
            f"those of a plain loop in {part} tensors, on a batch of {self.num_tokens} tokens; furthest: "
            f"{furthest.name}, at {furthest.share:.0%} of what rounding may explain ({self.seconds:.1f} s)"
        )

    @property
    def problem(self) -> str:
        """What is wrong; empty if nothing is."""
        wrong = [gap for gap in self.gaps if not gap.share <= 1.0]
        if not wrong:
            return ""
        furthest = sorted(wrong, key=lambda gap: gap.share, reverse=True)
        return (
            f"{len(wrong)} of {len(self.gaps)} tensors have another gradient in the trainer than in a plain loop, on a "
            f"batch of {self.num_tokens} tokens. Furthest, in lengths of the gradient: {in_words(furthest)}. "
            + (
                _nearest(wrong)
                if len(wrong) < len(self.gaps)
                else "Not one is right: batch, forward pass or loss differ"
            )
        )

    def to_json(self) -> dict[str, Any]:
        """Return what `certificate.ComparedGradients` keeps, but for step and machine."""
        if self.not_probed or not self.gaps:
            return {"not_compared": self.not_probed or "there is no tensor to compare", "tensors": []}
        furthest = max(self.gaps, key=lambda gap: gap.share)
        return {
            "num_tensors": len(self.gaps),
            "part": self.compared,
            "tensors": [] if self.compared == 1.0 else [gap.name for gap in self.gaps],
            "furthest": furthest.name,
            "share": furthest.share,
            "bound": furthest.bound,
        }

    def check(self) -> None:
        """Raise `GradientError` if something is wrong."""
        if self.problem:
            raise GradientError(f"gradients: {self.problem}. Nothing was trained. {ADVICE}")


def probe_gradients(
    config: RunConfig,
    folder: Path,
    trainer: ProbedTrainer,
    *,
    reference: Path | None = None,
    free: int | None = None,
    whole: int = WHOLE,
) -> GradientProbe:
    """Compare the trainer's gradient with the plain loop's. `folder` has the weights that the trainer now has, and
    `reference` those before training, if they are others; `free` is the memory that the probe may take, in bytes (None:
    what is free), and `whole` the most weights of a model that the plain loop holds at once."""
    try:
        return _probed(config, folder, trainer, reference, available_bytes() if free is None else free, whole)
    finally:
        return_freed_bytes()


def _probed(
    config: RunConfig, folder: Path, trainer: ProbedTrainer, reference: Path | None, free: int, whole: int
) -> GradientProbe:
    began = time.perf_counter()
    quiet_transformers()
    if reason := reason_against(config, folder, free=free):
        return GradientProbe(not_probed=reason)
    with torch.random.fork_rng(devices=[]):
        try:
            plain = _Plain(config, folder, trainer, free, reference, whole)
            found = trainer.gradients(plain.experiences, plain.compared)
            rounded = plain.gradients(exact=False)
            exact = plain.gradients(exact=True)
        except ModelError as error:
            return GradientProbe(not_probed=str(error))
        except (ImportError, RuntimeError, ValueError) as error:  # of transformers' own code, on a processor
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            return GradientProbe(not_probed=f"transformers' model does not compute here ({reason})")
    # a recurrence sums up in another order than transformers' own, and a single small batch measures it once
    factor = FACTOR if found.rounded else SEVERAL * FACTOR
    gaps = [
        *compare_gradients(_arrays(found.policy), exact[""], rounded[""], factor=factor),
        *compare_gradients(_arrays(found.critic), exact[CRITIC], rounded[CRITIC], CRITIC, factor=factor),
    ]
    return GradientProbe(
        gaps=tuple(gaps),
        compared=plain.share,
        num_tokens=sum(len(one.ids_T) for one in plain.experiences),
        seconds=time.perf_counter() - began,
    )


def reason_against(config: RunConfig, folder: Path, *, free: int | None = None, trainer_is_loaded: bool = True) -> str:
    """Say what keeps a probe from being made, as far as it is known before anything is loaded; empty if nothing does.
    For `free` see `probe_gradients`."""
    reasons = [*without_gradient(config)]
    if not learns_from_rows(config.algorithm):
        reasons += without_formula(config)
        if config.distill.teacher_url is not None:
            reasons.append("the teacher is behind an endpoint, which is not asked for a probe")
        if config.expert.dataset is not None:
            reasons.append("an expert's rows train beside the rollouts")
    try:
        teachers = teacher_folders(config).values()
    except ModelError as error:
        return str(error)
    weights, free = num_weights(folder), available_bytes() if free is None else free
    in_4_bits = weights if config.trainer.lora is not None and config.trainer.lora.base == "nf4" else 0
    needed = _least_bytes(folder, in_4_bits) + sum(_least_bytes(one) for one in teachers)
    needed += 0 if trainer_is_loaded else _TRAINER_BYTES * weights
    cases = {
        "the model's files are not safetensors": not weights,
        f"a plain loop of {weights / 1e9:.1f} billion weights takes minutes on a processor": weights
        * num_tokens(SHORTEST)
        > _MOST_WORK,
        f"that takes {needed / 2**30:.1f} GiB of memory, and {free / 2**30:.1f} GiB are free": needed > free,
    }
    reasons += [reason for reason, applies in cases.items() if applies]
    return reasons[0] if reasons else ""


def probe_bytes(weights: int, block: int, compared: int, *, rounded: bool, in_4_bits: int = 0) -> int:
    """Return how much memory a probe takes beside the trainer, in bytes, of a model with so many `weights`, of which
    the largest block has `block` (0: it is held whole, as a small one is). `compared` of them train, if all weights
    train; what a run in bfloat16 rounds is computed in float32, else in float64. Those `in_4_bits` stay in memory in 4
    bits, with a scale of float32 for each 64."""
    each = 4 if rounded else 8
    held = each * weights
    if block and weights > WHOLE:
        held = _BLOCKS * each * block + _BESIDE + in_4_bits // 2 + in_4_bits // 16
    return held + (8 + 2 * each) * min(compared, MOST_COMPARED)


def _least_bytes(folder: Path, in_4_bits: int = 0) -> int:
    """What a model takes before any gradient is compared, at most."""
    blocks: dict[int, int] = {}
    for name, count in sizes_of(folder).items():
        blocks[_block(name)] = blocks.get(_block(name), 0) + count
    largest = (
        0
        if not may_be_read_by_blocks(folder)
        else max((count for block, count in blocks.items() if block >= 0), default=0)
    )
    return probe_bytes(sum(blocks.values()), largest, 0, rounded=False, in_4_bits=in_4_bits)


class _Plain:
    """The plain loop's side of a probe: the batch, and its gradients."""

    def __init__(
        self, config: RunConfig, folder: Path, trainer: ProbedTrainer, free: int, reference: Path | None, whole: int
    ) -> None:
        """Raises `ModelError` for a model whose names are others in the trainer, or whose gradients do not fit."""
        at = self._at = trainer.gradients([], ())
        self._config, self._folder, self._before = config, folder, reference
        self._by_blocks = num_weights(folder) > whole
        lora = config.trainer.lora
        self._scale = None if lora is None else lora.alpha / lora.rank
        self._rows = learns_from_rows(config.algorithm)
        self._kind: Kind = "rollouts" if not self._rows else "rows" if row_loss(config)[1] is None else "pairs"
        self._rounded: PlainModel | None = self._load(exact=False)
        needed = probe_bytes(num_weights(folder), 0, 0, rounded=False)
        if self._by_blocks and self._rounded.is_whole and needed > free:
            raise ModelError(f"its weights cannot be read block by block, and whole take {needed / 2**30:.1f} GiB")
        named = dict(self._rounded.module.named_parameters())
        sizes = {name: named[name].numel() for name in self._rounded.trained_names()}
        if at.rounded and not self._rows and EntropyClip.of(Rules.of(config)) is not None:
            raise ModelError("in bfloat16 rounding decides which tokens lose their advantage")
        if strange := sorted(name for name in at.names if _plain_name(name) not in sizes):
            raise ModelError(f"transformers' model of its text has no {strange[0]}")
        each = 16 if at.rounded else 24  # as in `probe_bytes`
        room = min(MOST_COMPARED, (free - _least_bytes(folder)) // each)
        self.compared = frozenset(at.weights) if at.weights else some_blocks(sizes, room)
        if not self.compared:
            raise ModelError(f"the gradients of a block do not fit into {free / 2**30:.1f} GiB of memory")
        self.share = len(self.compared) / len(at.weights or sizes)
        self._calls = self._batch(self._rounded, trainer, sum(sizes.values()))

    def _load(self, *, exact: bool) -> PlainModel:
        rounded, before = self._at.rounded, self._at.in_4_bits
        dtype = torch.float64 if exact and not rounded else torch.float32
        return PlainModel(
            self._folder,
            rounded=rounded and not exact,
            dtype=dtype,
            adapter_scale=self._scale,
            four_bits=None if before is None else FourBits(before=before, other=not exact),
            by_blocks=self._by_blocks,
        )

    def _teachers(self, *, exact: bool) -> dict[str, PlainModel]:
        rounded, by_blocks = self._at.rounded, self._by_blocks
        dtype = torch.float64 if exact and not rounded else torch.float32
        return {
            name: PlainModel(
                folder, rounded=rounded and not exact, dtype=dtype, adapter_scale=None, by_blocks=by_blocks
            )
            for name, folder in teacher_folders(self._config).items()
        }

    def _batch(self, model: PlainModel, trainer: ProbedTrainer, num_weights: int) -> list[PlainSequence]:
        """Make the batch. Return its calls, with logprobs recorded near the model's own, and the experts that the
        trainer chooses: which are best may be a matter of rounding."""
        other = {} if self._rows else others(self._config, self._folder)
        same = [folder for name, folder in teacher_folders(self._config).items() if name not in other]
        num_ids = min(len(model.module.get_input_embeddings().weight), num_ids_of(same))
        known = np.setdiff1d(np.arange(num_ids), _reserved(model.module.config.to_dict()))
        room = self._config.model.max_model_len - 14
        long = (_USUAL_WORK // max(1, num_weights) - num_tokens(SHORTEST)) // 2 + SHORTEST
        sequences = probe_sequences(known, max(SHORTEST, min(long, room, LONGEST)), self._kind)
        if not self._rows and Rules.of(self._config).advantage == "none":
            sequences = [replace(one, advantage=0.0) for one in sequences]
        if several := list(self._config.distill.teachers):
            sequences = [replace(one, teacher=several[n % len(several)]) for n, one in enumerate(sequences)]
        sequences = with_readings(sequences, {name: int(num_ids_of([folder])) for name, folder in other.items()})
        calls = plain_sequences(sequences, self._kind)
        routes = trainer.gradients(experiences(sequences, calls), ()).routes if self._at.has_experts else ()
        calls = with_routes(sequences, calls, routes)
        if not self._rows:
            weights = self._state(model).copy(model.dtype).weights
            with torch.no_grad():
                found = [logprobs_S for some in model.groups(calls) for logprobs_S, _ in model.logprobs(some, weights)]
            calls = recorded(calls, found)
        self.experiences = experiences(sequences, calls, routes)
        return calls

    def _state(self, model: PlainModel) -> State:
        own = {name: one.detach() for name, one in model.module.named_parameters() if name in self.compared}
        state = State(weights=own if self._scale is None else _arrays(self._at.weights))
        if self._at.critic_weights:
            output, table = model.module.get_output_embeddings().weight, model.module.get_input_embeddings().weight
            unused = {name for name, one in model.module.named_parameters() if one is output and one is not table}
            body = {
                name: one.detach() for name, one in model.module.named_parameters() if name in self.compared - unused
            }
            state.critic = State(weights=body | _arrays(self._at.critic_weights))
        return state

    def gradients(self, *, exact: bool) -> dict[str, dict[str, torch.Tensor]]:
        """Return the gradients of the policy and, under `CRITIC`, those of a critic; first the rounded ones."""
        if exact and self._by_blocks:  # one of them is in memory at a time: they are in circles, which stay for long
            gc.collect()
        model = self._load(exact=True) if exact else self._rounded
        assert model is not None
        self._rounded = None
        state, teachers = self._state(model).copy(model.dtype), self._teachers(exact=exact)
        of_policy, of_critic = compute_gradients(model, state, self._step(), self._reference(model.dtype), teachers)
        return {
            "": _with_all(of_policy, state),
            CRITIC: {} if state.critic is None else _with_all(of_critic, state.critic),
        }

    def _reference(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The weights before training, if they are not the model's: adapters without effect, or those of a folder."""
        if self._scale is not None:
            return {name: torch.zeros_like(one, dtype=dtype) for name, one in _arrays(self._at.weights).items()}
        if self._before is None:
            return {}
        model = PlainModel(self._before, rounded=False, dtype=dtype, adapter_scale=None, by_blocks=self._by_blocks)
        return dict(model.module.named_parameters())

    def _step(self) -> PlainStep:
        config, balance = self._config, self._config.trainer.balance_coef
        if self._rows:
            loss, pairs = row_loss(config)
            return PlainStep(updates=[self._calls], epochs=1, loss=loss, rates=_NOT_MADE, pairs=pairs, balance=balance)
        rules = Rules.of(config)
        return PlainStep(
            updates=[self._calls],
            epochs=1,
            loss=LossRules.of(config),
            rates=_NOT_MADE,
            episodes=episodes(rules, config) if rules.formula.critic else None,
            critic_rates=_NOT_MADE if rules.formula.critic else None,
            entropy_clip=EntropyClip.of(rules),
            token_baseline=rules.formula.token_baseline,
            teaching=Teaching.of(config),
            balance=balance,
        )


def some_blocks(sizes: Mapping[str, int], room: int) -> frozenset[str]:
    """Choose tensors of at most `room` weights, if not all of them: those of whole blocks (the last, the first, some
    between, the others), then those of no block, small ones first."""
    by_block: dict[int, list[str]] = {}
    for name in sizes:
        by_block.setdefault(_block(name), []).append(name)
    apart = sorted(by_block.pop(-1, []), key=lambda name: sizes[name])
    blocks = sorted(by_block)
    order = list(dict.fromkeys([*blocks[-1:], *blocks[:1], *blocks[len(blocks) // 2 :: 4], *blocks]))
    chosen: set[str] = set()
    for names in (*(by_block[block] for block in order), *([name] for name in apart)):
        needed = sum(sizes[name] for name in names)
        if needed <= room:
            chosen.update(names)
            room -= needed
    return frozenset(chosen)


def _block(name: str) -> int:
    """The number of the block that a tensor belongs to; -1 for none."""
    found = re.search(r"\.(\d+)\.", name)
    return -1 if found is None else int(found[1])


def _nearest(wrong: Sequence[Gap]) -> str:
    """Name what is wrong in the last block, which the backward pass reaches first: what is wrong there spreads to the
    blocks before."""
    last = max(_block(gap.name) for gap in wrong)
    names = [gap.name for gap in wrong if _block(gap.name) == last]
    where = "None is in a block" if last < 0 else f"Block {last} is the last with some, the backward pass's first"
    return f"{where}: {', '.join(names[:6])}{' and more' if len(names) > 6 else ''}"


def _plain_name(name: str) -> str:
    """The name of the weight that a parameter is, or adapts."""
    layer, is_adapter, _ = name.partition(".lora_")
    return f"{layer}.weight" if is_adapter else name


def _reserved(settings: Mapping[str, Any]) -> list[int]:
    """The ids that stand for something else than text: ends, padding, places of images."""
    given = [one for name, one in settings.items() if name.endswith(("token_id", "token_index"))]
    return [int(one) for some in given for one in (some if isinstance(some, list) else [some]) if one is not None]


def _with_all(gradients: dict[str, torch.Tensor], state: State) -> dict[str, torch.Tensor]:
    """The gradients of all weights: one that got none has zeros."""
    return {
        name: gradients.get(name, torch.zeros((), dtype=one.dtype)).expand_as(one)
        for name, one in state.weights.items()
    }


def _arrays(arrays: Arrays) -> dict[str, torch.Tensor]:
    # those from another process may be read-only, of which torch would make tensors only with a warning
    return {name: torch.from_numpy(np.require(array, requirements="W")) for name, array in arrays.items()}
