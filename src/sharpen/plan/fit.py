"""The smallest change to the settings with which a run fits: tried on the model, not looked up.

In: a configuration that does not fit, and a function that says what one takes. Out: the changed settings. Sets of
changes are tried by their number, and among as many in the order of `CHANGES`, from what costs least; each at its
strongest first. Of the first set that fits every change is then taken back as far as it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from sharpen.config.run import RunConfig
from sharpen.config.trainer import LoraConfig
from sharpen.plan.engine import in_flight
from sharpen.plan.memory import Roles, num_processes
from sharpen.plan.workload import Workload

Fits = Callable[[RunConfig], bool]
Settings = Mapping[str, Any]
_LEAST_TOKENS = 512
_RANK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How far the changes may go: GPUs that there are (0: a CPU), the longest sequence, and what is in flight."""

    num_gpus: int
    workload: Workload


def suggest(config: RunConfig, limits: Limits, fits: Fits) -> Settings | None:
    """The smallest set of changes that fits, by dotted key; None if none does."""
    families = [levels for levels in (make(config, limits) for make in CHANGES) if levels]
    for count in range(1, len(families) + 1):
        for chosen in combinations(families, count):
            strongest = [len(levels) - 1 for levels in chosen]
            if fits(_changed(config, chosen, strongest)):
                return _settings(chosen, _weakened(config, chosen, strongest, fits))
    return None


def apply(config: RunConfig, settings: Settings) -> RunConfig:
    """The configuration with settings of `section.name` changed."""
    for key, value in settings.items():
        section, name = key.split(".")
        changed = getattr(config, section).model_copy(update={name: value})
        config = config.model_copy(update={section: changed})
    return config


def _changed(config: RunConfig, chosen: Sequence[Sequence[Settings]], places: Sequence[int]) -> RunConfig:
    return apply(config, _settings(chosen, places))


def _settings(chosen: Sequence[Sequence[Settings]], places: Sequence[int]) -> dict[str, Any]:
    return {name: value for levels, at in zip(chosen, places, strict=True) for name, value in levels[at].items()}


def _weakened(config: RunConfig, chosen: Sequence[Sequence[Settings]], places: Sequence[int], fits: Fits) -> list[int]:
    """Each change at the weakest level that still fits with the others', those that cost most taken back first."""
    found = list(places)
    for number in reversed(range(len(found))):
        while found[number] > 0:
            tried = [*found[:number], found[number] - 1, *found[number + 1 :]]
            if not fits(_changed(config, chosen, tried)):
                break
            found = tried
    return found


def _checkpointing(config: RunConfig, limits: Limits) -> Sequence[Settings]:
    return [] if config.trainer.gradient_checkpointing else [{"trainer.gradient_checkpointing": True}]


def _micro_batch(config: RunConfig, limits: Limits) -> Sequence[Settings]:
    """Halves of it; a sequence longer than that goes alone, so that less than the longest saves nothing."""
    least = max(_LEAST_TOKENS, limits.workload.longest)
    tokens, levels = config.trainer.max_tokens_per_micro_batch, []
    while tokens // 2 >= least:
        tokens //= 2
        levels.append({"trainer.max_tokens_per_micro_batch": tokens})
    if tokens > least:
        levels.append({"trainer.max_tokens_per_micro_batch": least})
    return levels


def _kv_cache(config: RunConfig, limits: Limits) -> Sequence[Settings]:
    """Fewer sequences at the same time, by halves."""
    if not Roles.of(config).engine:
        return []
    slots, levels = in_flight(config, limits.workload), []
    while slots > 1:
        slots //= 2
        levels.append({"engine.max_slots": slots})
    return levels


def _lora(config: RunConfig, limits: Limits) -> Sequence[Settings]:
    return [] if config.trainer.lora is not None else [{"trainer.lora": LoraConfig(rank=_RANK)}]


def _processes(config: RunConfig, limits: Limits) -> Sequence[Settings]:
    """More GPUs that train, by doubling; where an engine can, it is spread too."""
    count, levels = num_processes(config), []
    while count * 2 <= limits.num_gpus:
        count *= 2
        levels.append({"trainer.num_processes": count})
    return levels


def _offload(config: RunConfig, limits: Limits) -> Sequence[Settings]:
    if config.trainer.cpu_offload or limits.num_gpus == 0:
        return []
    return [{"trainer.cpu_offload": True}]


CHANGES: tuple[Callable[[RunConfig, Limits], Sequence[Settings]], ...] = (
    _checkpointing,
    _micro_batch,
    _kv_cache,
    _lora,
    _processes,
    _offload,
)
"""From what costs least to what costs most; each gives its levels, from the weakest to the strongest."""
