"""The smallest change to the settings with which a run fits: tried on the model, not looked up.

In: a case that does not fit, and a function that says whether one does. Out: the settings to change. Sets of changes
are tried by their number, and among as many in the order of `CHANGES`, from what costs least; each at its strongest
first. Of the first set that fits every change is then taken back as far as it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

from sharpen.config.trainer import LoraConfig
from sharpen.plan.case import Case
from sharpen.plan.engine import in_flight

Fits = Callable[[Case], bool]
Settings = Mapping[str, Any]
Levels = Sequence[Settings]
"""One change, from its weakest to its strongest."""
_LEAST_TOKENS = 512
_RANK = 16


def suggest(case: Case, fits: Fits) -> Settings | None:
    """The smallest set of changes that fits, by dotted key; None if none does."""
    changes = [levels for levels in (make(case) for make in CHANGES) if levels]
    for count in range(1, len(changes) + 1):
        for chosen in combinations(changes, count):
            strongest = [len(levels) - 1 for levels in chosen]
            if fits(case.changed(_settings(chosen, strongest))):
                return _settings(chosen, _weakened(case, chosen, strongest, fits))
    return None


def _settings(chosen: Sequence[Levels], places: Sequence[int]) -> dict[str, Any]:
    return {name: value for levels, at in zip(chosen, places, strict=True) for name, value in levels[at].items()}


def _weakened(case: Case, chosen: Sequence[Levels], places: Sequence[int], fits: Fits) -> list[int]:
    """Each change at the weakest level that still fits with the others', those that cost most taken back first."""
    found = list(places)
    for number in reversed(range(len(found))):
        while found[number] > 0:
            tried = [*found[:number], found[number] - 1, *found[number + 1 :]]
            if not fits(case.changed(_settings(chosen, tried))):
                break
            found = tried
    return found


def _checkpointing(case: Case) -> Levels:
    return [] if case.config.trainer.gradient_checkpointing else [{"trainer.gradient_checkpointing": True}]


def _micro_batch(case: Case) -> Levels:
    """Halves of it; a sequence longer than that goes alone, so that less than the longest saves nothing."""
    least = max(_LEAST_TOKENS, case.workload.longest)
    tokens, levels = case.config.trainer.max_tokens_per_micro_batch, []
    while tokens // 2 >= least:
        tokens //= 2
        levels.append({"trainer.max_tokens_per_micro_batch": tokens})
    if tokens > least:
        levels.append({"trainer.max_tokens_per_micro_batch": least})
    return levels


def _kv_cache(case: Case) -> Levels:
    """Fewer sequences at the same time, by halves."""
    slots, levels = in_flight(case) if case.engine is not None else 1, []
    while slots > 1:
        slots //= 2
        levels.append({"engine.max_slots": slots})
    return levels


def _lora(case: Case) -> Levels:
    return [] if case.config.trainer.lora is not None else [{"trainer.lora": LoraConfig(rank=_RANK)}]


def _processes(case: Case) -> Levels:
    """More GPUs that train, by doubling; where an engine can, it is spread too."""
    count, levels = case.num_trainers, []
    while not case.on_cpu and count * 2 <= case.hardware.count:
        count *= 2
        levels.append({"trainer.num_processes": count})
    return levels


def _offload(case: Case) -> Levels:
    return [] if case.config.trainer.cpu_offload or case.on_cpu else [{"trainer.cpu_offload": True}]


CHANGES: tuple[Callable[[Case], Levels], ...] = (_checkpointing, _micro_batch, _kv_cache, _lora, _processes, _offload)
"""From what costs least to what costs most; a change that cannot be made has no levels."""
