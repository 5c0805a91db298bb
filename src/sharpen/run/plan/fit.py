"""Find the smallest change of settings with which a run fits, by trying changes on the memory model.

In: a case that does not fit, and a function that says whether a case fits. Out: the settings to change. Smaller sets of
changes are tried first, and sets of the same size in the order of `CHANGES`, cheapest first, each change at its
strongest. In the first set that fits, every change is then weakened as far as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

from sharpen.config.trainer import LoraConfig
from sharpen.run.plan.case import Case
from sharpen.run.plan.engine import in_flight

Fits = Callable[[Case], bool]
Settings = Mapping[str, Any]
Levels = Sequence[Settings]
"""The settings of one change, from its weakest level to its strongest."""
_LEAST_TOKENS = 512
_RANK = 16


def suggest(case: Case, fits: Fits) -> Settings | None:
    """Return the smallest set of changes that fits, by dotted key; None if none does."""
    changes = [levels for levels in (make(case) for make in CHANGES) if levels]
    for count in range(1, len(changes) + 1):
        for chosen in combinations(changes, count):
            strongest = [len(levels) - 1 for levels in chosen]
            changed = case.changed(_settings(chosen, strongest))
            if _possible(changed) and fits(changed):
                return _settings(chosen, _weaken(case, chosen, strongest, fits))
    return None


def _possible(case: Case) -> bool:
    """Whether the changes go together: other optimizers than AdamW do not update sharded weights."""
    return case.config.trainer.optimizer == "adamw" or not case.config.trainer.has_ranks


def _settings(chosen: Sequence[Levels], indices: Sequence[int]) -> dict[str, Any]:
    return {name: value for levels, at in zip(chosen, indices, strict=True) for name, value in levels[at].items()}


def _weaken(case: Case, chosen: Sequence[Levels], indices: Sequence[int], fits: Fits) -> list[int]:
    """Lower each change to the weakest level that still fits with the others, the most expensive change first."""
    weakest = list(indices)
    for number in reversed(range(len(weakest))):
        while weakest[number] > 0:
            tried = [*weakest[:number], weakest[number] - 1, *weakest[number + 1 :]]
            if not fits(case.changed(_settings(chosen, tried))):
                break
            weakest = tried
    return weakest


def _checkpointing(case: Case) -> Levels:
    return [] if case.config.trainer.gradient_checkpointing else [{"trainer.gradient_checkpointing": True}]


def _micro_batch(case: Case) -> Levels:
    """Halve the micro-batch. A longer sequence is computed on its own, so fewer tokens than the longest sequence save
    nothing."""
    least = max(_LEAST_TOKENS, case.workload.longest)
    tokens, levels = case.config.trainer.max_tokens_per_micro_batch, []
    while tokens // 2 >= least:
        tokens //= 2
        levels.append({"trainer.max_tokens_per_micro_batch": tokens})
    if tokens > least:
        levels.append({"trainer.max_tokens_per_micro_batch": least})
    return levels


def _kv_cache(case: Case) -> Levels:
    """Halve the number of sequences computed at the same time."""
    slots, levels = in_flight(case) if case.engine is not None else 1, []
    while slots > 1:
        slots //= 2
        levels.append({"engine.max_slots": slots})
    return levels


def _optimizer(case: Case) -> Levels:
    """Keep the moments in 8 bits."""
    return [{"trainer.optimizer": "adamw_8bit"}] if case.config.trainer.optimizer == "adamw" else []


def _lora(case: Case) -> Levels:
    return [] if case.config.trainer.lora is not None else [{"trainer.lora": LoraConfig(rank=_RANK)}]


def _processes(case: Case) -> Levels:
    """Double the GPUs that train."""
    count, levels = case.num_trainers, []
    while not case.on_cpu and count * 2 <= case.hardware.count:
        count *= 2
        levels.append({"trainer.num_processes": count})
    return levels


def _offload(case: Case) -> Levels:
    return [] if case.config.trainer.cpu_offload or case.on_cpu else [{"trainer.cpu_offload": True}]


CHANGES: tuple[Callable[[Case], Levels], ...] = (
    _checkpointing,
    _micro_batch,
    _kv_cache,
    _optimizer,
    _lora,
    _processes,
    _offload,
)
"""The changes, cheapest first. A change that is not possible has no levels."""
