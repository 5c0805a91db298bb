"""The plan of a run: memory by device and role, what to change if it does not fit, and the time of a step if one was
measured.

In: a `Case`. Out: a `Plan`, which lists its assumptions.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from sharpen.config.recorded import latest_last
from sharpen.config.run import RunConfig
from sharpen.config.trainer import LoraConfig
from sharpen.errors import ConfigError
from sharpen.run.plan.case import Case
from sharpen.run.plan.hardware import GIB, Hardware
from sharpen.run.plan.memory import GAPS, PROCESS, DeviceMemory, in_flight, offloaded_bytes, places
from sharpen.run.plan.record import FILE, read_plan
from sharpen.run.plan.speed import Speed, measure_speed
from sharpen.run.plan.workload import AT_LIMITS

# The time of a step: what an earlier run took, else what the model's computing takes on this processor (`speed`).
#
# In: a case, the directories of earlier runs. Out: a `StepTime` with its source; None if nothing can be measured.

_WITHOUT_EFFECT: dict[str, Any] = {
    **dict.fromkeys(("project", "name", "checkpoint_root_dir", "monitor_type"), True),
    **dict.fromkeys(("monitor_rollouts", "time_limit_s", "seed"), True),
    **dict.fromkeys(("evaluation", "eval_dataset", "check", "certificate"), True),
    "train_dataset": {"total_steps", "total_epochs"},
}
"""Settings that do not affect the time of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step, and where they were measured: in an earlier run, or as `speed` on this processor. `at_most`:
    sequences are rarely as long as it assumes."""

    seconds: float
    source: str
    speed: Speed | None = None
    at_most: bool = False

    def line(self, num_steps: int | None) -> str:
        """Return the sentence for the user. `num_steps`: those of the run, if they are known."""
        total = f", {num_steps:,} steps {about(num_steps * self.seconds)}" if num_steps else ""
        verb = "takes" if self.speed is None else "computes for at most" if self.at_most else "computes for"
        return f"a step {verb} {about(self.seconds)}{total} ({self.source})"


def settings_key(config: RunConfig) -> str:
    """Return a key that is equal for two runs whose steps do the same work."""
    content = config.model_dump(mode="json", exclude=_WITHOUT_EFFECT)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def last_step_time(config: RunConfig, hardware: Hardware, run_dirs: Iterable[Path]) -> StepTime | None:
    """Return the step time of the latest of these runs with the same settings and devices; None if there is none."""
    wanted = settings_key(config), hardware.name
    for run_dir in reversed(latest_last(run_dir for run_dir in run_dirs if (run_dir / FILE).exists())):
        with contextlib.suppress(ConfigError):  # the file of another program may hold anything
            content = read_plan(run_dir)
            before, measured = content["before"], content.get("measured", {})
            if (before.get("settings"), before.get("hardware")) == wanted and measured.get("step_s") is not None:
                source = f"median of {measured['num_steps']} steps of {run_dir.name}"
                return StepTime(seconds=measured["step_s"], source=source)
    return None


def step_time(case: Case, run_dirs: Iterable[Path]) -> StepTime | None:
    """Return what the last run with the same settings and devices took; else what is measured now; None if neither
    can be known. Raises `ModelError` where measuring fails."""
    last = last_step_time(case.config, case.hardware, run_dirs)
    if last is not None:
        return last
    speed = measure_speed(case)
    return None if speed is None else computed_step_time(case, speed)


def computed_step_time(case: Case, speed: Speed) -> StepTime:
    """Return the time in which the model computes a step of the case's workload."""
    generating, training = speed.generating(case.workload), speed.training(case.workload, case.config.trainer.epochs)
    parts = f"generating {about(generating)}, training {about(training)}, " if generating else ""
    source = f"{parts}measured in {speed.took:.0f} s on one and two layers; the agent's own time comes on top"
    at_most = case.workload.source == AT_LIMITS
    if at_most:
        source = f"{AT_LIMITS}: {source}"
    return StepTime(seconds=generating + training, source=source, speed=speed, at_most=at_most)


def about(seconds: float) -> str:
    """Return a time in words: seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.2g} s"
    if seconds < 600:
        return f"{seconds / 60:.2g} minutes"
    return f"{seconds / 60:.0f} minutes" if seconds < 100 * 60 else f"{seconds / 3600:.1f} hours"


# Find the smallest change of settings with which a run fits, by trying changes on the memory model.
#
# In: a case that does not fit, and a function that says whether a case fits. Out: the settings to change. Smaller sets
# of changes are tried first, and sets of the same size in the order of `CHANGES`, cheapest first, each change at its
# strongest. In the first set that fits, every change is then weakened as far as possible.

Fits = Callable[[Case], bool]
Settings = Mapping[str, Any]
Levels = Sequence[Settings]
"""The settings of one change, from its weakest level to its strongest."""
_LEAST_TOKENS = 512
_LEAST_CONTEXT = 256
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


def _context(case: Case) -> Levels:
    """Halve the longest sequence; more than once or twice is another task."""
    tokens, levels = case.config.model.max_model_len, []
    while tokens // 2 >= max(_LEAST_CONTEXT, case.config.model.max_model_len // 4):
        tokens //= 2
        levels.append({"model.max_model_len": tokens})
    return levels


def _lora(case: Case) -> Levels:
    """Train adapters; with one copy of the frozen weights; with that in 4 bits."""
    lora = case.config.trainer.lora or LoraConfig(rank=_RANK)
    bases = ("own", "shared", "nf4")
    least = 0 if case.config.trainer.lora is None else bases.index(lora.base) + 1
    return [
        {"trainer.lora": lora.model_copy(update={"base": base})}
        for base in bases[least:]
        if base == "own" or case.may_share_base or (base == "nf4" and case.engine is None)
    ]


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
    _context,
    _lora,
    _processes,
    _offload,
)
"""The changes, cheapest first. A change that is not possible has no levels."""


MB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A prediction. `suggestion` is the smallest change with which the run fits; None if it fits already, or if none
    helps."""

    case: Case
    places: tuple[DeviceMemory, ...]
    time: StepTime | None
    suggestion: Settings | None

    @property
    def missing_devices(self) -> int:
        """How many more GPUs the run needs than there are."""
        return _num_missing(self.case, self.places)

    @property
    def fits(self) -> bool:
        """Whether there are enough devices, and each has room."""
        return _fits(self.case, self.places)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON, for `plan.json`."""
        return {
            "hardware": self.case.hardware.name,
            "settings": settings_key(self.case.config),
            "fits": self.fits,
            "places": [
                {
                    "name": place.name,
                    "count": place.count,
                    "capacity_mb": round(place.capacity / MB),
                    "peak_mb": round(place.peak / MB),
                    "items_mb": {f"{item.role} ({item.when})": round(item.num_bytes / MB, 1) for item in place.items},
                }
                for place in self.places
            ],
            "comparable_mb": _comparable_mb(self.case, self.places[0]),
            "step_s": None if self.time is None else round(self.time.seconds, 3),
            "speed": None if self.time is None or self.time.speed is None else asdict(self.time.speed),
            "computed_tokens": round(self.case.workload.computed_tokens),
            "longest": self.case.workload.longest,
            "evaluated": self.case.workload.evaluated,
            "assumptions": list(assumptions(self.case)),
        }


def plan(case: Case, *, time: StepTime | None = None, suggests: bool = True) -> Plan:
    """Predict the memory of a run and, with `suggests`, find the smallest change if it does not fit. `time` is the
    measured time of a step."""
    devices = places(case)
    suggestion = find_change(case) if suggests and not _fits(case, devices) else None
    return Plan(case=case, places=devices, time=time, suggestion=suggestion)


def find_change(case: Case) -> Settings | None:
    """Return the smallest change with which the run fits; None if none helps."""

    def fits(changed: Case) -> bool:
        certain = places(changed, certain=True)  # fast, as it leaves out the activations
        return _fits(changed, certain) and _fits(changed, places(changed))

    return suggest(case, fits)


def plain_settings(suggestion: Settings) -> dict[str, Any]:
    """Return suggested settings as they are written in a file."""

    def plain(value: Any) -> Any:
        is_lora = isinstance(value, LoraConfig)
        return {"rank": value.rank, **value.model_dump(exclude_defaults=True)} if is_lora else value

    return {name: plain(value) for name, value in suggestion.items()}


def advice(suggestion: Settings | None) -> str:
    """Return a suggestion as a sentence."""
    if suggestion is None:
        return "No change of settings makes it fit: take a smaller model, or a machine with more memory"
    settings = ", ".join(f"{name}: {json.dumps(value)}" for name, value in plain_settings(suggestion).items())
    return f"The smallest change with which it fits: {settings}"


def _fits(case: Case, devices: tuple[DeviceMemory, ...]) -> bool:
    return _num_missing(case, devices) == 0 and all(device.fits for device in devices)


def _num_missing(case: Case, devices: tuple[DeviceMemory, ...]) -> int:
    return 0 if case.on_cpu else max(0, sum(device.count for device in devices) - case.hardware.count)


def _comparable_mb(case: Case, place: DeviceMemory) -> float | None:
    """Return the part of the peak that the coordinator's process can measure of itself: on a CPU its memory, on a GPU
    what its allocator reserved, without an engine in another process. None if the trainer runs in other processes."""
    config = case.config
    if case.num_trainers > 1 or config.trainer.cpu_offload or (config.uses_ray and not case.on_cpu):
        return None
    others = () if case.on_cpu else (PROCESS, GAPS)
    if case.vllm or config.uses_ray:
        others = (*others, "engine: ")
    own = tuple(item for item in place.items if not item.role.startswith(others))
    return round(replace(place, items=own).peak / MB, 1)


def assumptions(case: Case) -> Iterator[str]:
    """Yield the plan's assumptions, one sentence each."""
    work, kv_cache_mb = case.workload, case.config.engine.kv_cache_mb
    yield (
        f"lengths: {work.source}: {work.prompt_tokens:,.0f} prompt + {work.answer_tokens:,.0f} "
        f"{'sampled' if work.generates else 'taught'} tokens, {work.sequences:,} sequences a step"
    )
    if case.engine is not None:
        limit = f"{kv_cache_mb} MB" if kv_cache_mb is not None else "a quarter of the memory free at the start"
        yield f"engine: {'vLLM' if case.vllm else 'the embedded engine'}; KV cache at most {limit}"
    if not case.on_cpu:
        yield "CUDA's own memory and the gaps between allocations are estimates, not measurements"
        if on_host := offloaded_bytes(case):
            yield f"the host's memory has room for {on_host / GIB:,.1f} GiB of weights and moments"
        if case.num_trainers > 1:
            yield "weights, gradients and moments are split evenly among the trainer's processes (FSDP2)"
