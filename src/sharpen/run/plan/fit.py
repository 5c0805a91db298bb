"""The settings that a run chooses by itself, so that it fits into the memory that is free and computes fast.

In: a `Case`; of a run that continues, what it chose before. Out: a `Fitted`: the case with the chosen settings. A
setting that the user gave is kept. `sharpen plan` and the run itself both ask `fit`.

    compute type           bfloat16 on a CPU whose products are `LEAST_SPEEDUP` times as fast in it, for dense models
                           from `LEAST_ROUNDED` parameters on; a GPU's is bfloat16 anyway
    the others             the first of `_rungs` with which the predicted peak leaves a tenth: from what is fastest to
                           what takes least. A large model on a CPU begins where memory is small: there, a product is
                           no faster with more rows, and computing activations again costs a third of the training

A run that continues keeps its compute type and its kind of frozen weights, which are fixed. The other settings it
takes up again where they still fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sharpen.config.resuming import may_change
from sharpen.config.run import RunConfig
from sharpen.run.plan.case import Case
from sharpen.run.plan.hardware import GIB, bfloat16_speedup
from sharpen.run.plan.memory import DeviceMemory, cache_mb, in_flight, places

LEAST_SPEEDUP = 1.3
"""A smaller gain is not worth the rounding."""
LEAST_ROUNDED = 10_000_000
"""A model with fewer parameters computes in float32 on a CPU: its products are too small to gain."""
LARGE = 100_000_000
"""From so many parameters on a run on a CPU begins with small micro-batches and recomputed activations."""
TRAINER_TYPE, ENGINE_TYPE, BASE = "trainer.dtype", "engine.dtype", "trainer.lora.base"
AGAIN, TOKENS = "trainer.gradient_checkpointing", "trainer.max_tokens_per_micro_batch"
CACHE = "engine.kv_cache_mb"
_FAST_TOKENS, _FEW_TOKENS = (8192, 4096, 2048), (1024, 512)
_LEAST_SLOTS = 4

Settings = Mapping[str, Any]
Speedup = Callable[[int, int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A case with the settings that were `chosen` for it, by dotted name. `rounded` are the types that the user set to
    bfloat16 on this CPU. `speedup` is that of bfloat16, if it was measured."""

    case: Case
    chosen: Settings
    rounded: Sequence[str] = ()
    speedup: float | None = None

    def line(self, devices: Sequence[DeviceMemory]) -> str:
        """Return what was chosen, and what the run then needs of the fullest device; empty if nothing was."""
        said = list(_in_words(self.chosen, self.speedup))
        if not said:
            return ""
        place = max(devices, key=lambda place: place.peak / place.capacity)
        free = " free" if self.case.on_cpu else ""
        return f"memory: {', '.join(said)}: about {place.peak / GIB:,.1f} of {place.capacity / GIB:,.1f} GiB{free}"

    def warning(self) -> str:
        """Return which settings of the user's make the run slow here; empty if none do."""
        if not self.rounded or self.speedup is None or self.speedup >= 1:
            return ""
        return (
            f"  ! bfloat16 is {self.speedup:.2f} times as fast here as float32, and in a backward pass far slower: "
            f"leave out {' and '.join(self.rounded)}, unless memory is short"
        )


def fit(case: Case, before: Settings | None = None, speedup: Speedup = bfloat16_speedup) -> Fitted:
    """Choose the settings that the user left open. `before`: those that the run chose when it began, if it continues.
    Nothing is chosen for a run on Ray, whose machines are not known yet. `speedup` measures the gain of bfloat16 for a
    layer's (outputs, inputs)."""
    if case.config.uses_ray:
        return Fitted(case=case, chosen={})
    rounded = tuple(_types(case, "bfloat16"))
    measured = speedup(*_largest(case)) if rounded or (before is None and _may_round(case)) else None
    if before is not None:
        kept = {name: value for name, value in before.items() if not may_change(name)}
        begun = _open(case.config, kept, continues=False)
    else:
        gains = not rounded and measured is not None and measured >= LEAST_SPEEDUP
        begun = dict.fromkeys(_types(case, "auto"), "bfloat16") if gains else {}
    rungs = [_open(case.config, rung, continues=before is not None) for rung in _rungs(case.changed(begun), before)]
    chosen = {**begun, **_first_that_fits(case.changed(begun), rungs)}
    return Fitted(case=case.changed(chosen), chosen=chosen, rounded=rounded, speedup=measured)


def _may_round(case: Case) -> bool:
    """Whether the run may choose bfloat16: a dense model, whose types are left open."""
    is_open = len([*_types(case, "auto")]) == (1 if case.engine is None else 2)
    return is_open and case.models.policy.is_dense and not case.config.deterministic


def _types(case: Case, value: str) -> Iterator[str]:
    """Yield the settings that give this compute type to a model which is not small, on a CPU and in one process."""
    config = case.config
    known = case.on_cpu and config.mode == "both" and case.engine in (None, "embedded")
    if known and case.models.policy.parameters >= LEAST_ROUNDED:
        if config.trainer.dtype == value:
            yield TRAINER_TYPE
        if case.engine is not None and config.engine.dtype == value:
            yield ENGINE_TYPE


def _largest(case: Case) -> tuple[int, int]:
    """Return (outputs, inputs) of the largest layer of a block."""
    return max(((out, into) for _, out, into in case.models.policy.linears), key=lambda shape: shape[0] * shape[1])


def _rungs(case: Case, before: Settings | None) -> Iterator[Settings]:
    """Yield settings from those with which the run is fastest to those with which it takes least memory."""
    thrifty = case.on_cpu and case.models.policy.parameters >= LARGE
    lora = case.config.trainer.lora
    shared = {BASE: "shared"} if lora is not None and lora.base == "own" and case.may_share_base else {}
    if before is not None:
        yield {name: value for name, value in before.items() if may_change(name)}
    if not thrifty:
        yield {}
        for again in ({}, {AGAIN: True}):
            for tokens in _FAST_TOKENS:
                yield {**shared, **again, **_at_most(case, tokens)}
    least = {**shared, AGAIN: True}
    for tokens in (*(_FAST_TOKENS[-1:] if thrifty else ()), *_FEW_TOKENS):
        yield {**least, **_at_most(case, tokens)}
    slots = in_flight(case) if case.engine is not None else 1
    while slots // 2 >= _LEAST_SLOTS:
        slots //= 2
        yield {**least, **_at_most(case, _FEW_TOKENS[-1]), CACHE: cache_mb(case.changed(least), slots)}


def _at_most(case: Case, tokens: int) -> Settings:
    """A longer sequence is computed on its own, so that fewer tokens than it has save nothing."""
    return {TOKENS: max(tokens, case.workload.longest)}


def _open(config: RunConfig, rung: Settings, *, continues: bool) -> Settings:
    """Return what of these settings the user left open, and is not so already."""
    found = {}
    for name, value in rung.items():
        section: Any = config
        *sections, last = name.split(".")
        for part in sections:
            section = getattr(section, part)
        is_given = last in section.model_fields_set or (continues and not may_change(name))
        if not is_given and getattr(section, last) != value:
            found[name] = value
    return found


def _first_that_fits(case: Case, rungs: Sequence[Settings]) -> Settings:
    """Return the first of the settings with which the case has room, the last if none has. What a rung takes falls from
    one to the next, so that a few are tried."""
    if _has_room(case.changed(rungs[0])):
        return rungs[0]
    low, high = 0, len(rungs) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if _has_room(case.changed(rungs[middle])):
            high = middle
        else:
            low = middle
    return rungs[high]


def _has_room(case: Case) -> bool:
    return all(
        place.has_room
        for certain in (True, False)  # what is quickly known, first
        for place in places(case, certain=certain)
    )


def _in_words(chosen: Settings, speedup: float | None) -> Iterator[str]:
    if TRAINER_TYPE in chosen:
        yield "bfloat16" if speedup is None else f"bfloat16 ({speedup:.1f} times as fast here as float32)"
    if TOKENS in chosen:
        yield f"micro-batches of {chosen[TOKENS]:,} tokens"
    if chosen.get(AGAIN):
        yield "activations computed again"
    if BASE in chosen:
        yield "one copy of the frozen weights"
    if CACHE in chosen:
        yield f"a KV cache of {chosen[CACHE]:,} MB"
