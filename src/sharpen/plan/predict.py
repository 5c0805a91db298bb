"""The plan of a run: memory by device and role, what to change if it does not fit, the time of a step if one was
measured.

In: a `Case`. Out: a `Plan`, which says what it assumes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from sharpen.plan.case import Case
from sharpen.plan.fit import Settings, suggest
from sharpen.plan.hardware import GIB
from sharpen.plan.memory import GAPS, PROCESS, DeviceMemory, offloaded_bytes, places
from sharpen.plan.timing import StepTime, settings_key

MB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is predicted. `suggestion` is the smallest change with which it fits: None where it fits, or none helps."""

    case: Case
    places: tuple[DeviceMemory, ...]
    time: StepTime | None
    suggestion: Settings | None

    @property
    def missing_devices(self) -> int:
        """GPUs that are needed over those that there are."""
        return _missing(self.case, self.places)

    @property
    def fits(self) -> bool:
        """Whether every device has room, and there are enough of them."""
        return _fits(self.case, self.places)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON, for `plan.json`."""
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
            "computed_tokens": round(self.case.workload.computed_tokens),
            "longest": self.case.workload.longest,
            "assumptions": list(assumptions(self.case)),
        }


def plan(case: Case, *, time: StepTime | None = None, suggests: bool = True) -> Plan:
    """Predict memory, and where it does not fit look for the smallest change (unless not asked to). `time` is what was
    measured of a step."""
    found, suggestion = places(case), None

    def fits(changed: Case) -> bool:
        sure = places(changed, certain=True)  # looks at no activations
        return _fits(changed, sure) and _fits(changed, places(changed))

    if suggests and not _fits(case, found):
        suggestion = suggest(case, fits)
    return Plan(case=case, places=found, time=time, suggestion=suggestion)


def _fits(case: Case, found: tuple[DeviceMemory, ...]) -> bool:
    return _missing(case, found) == 0 and all(place.fits for place in found)


def _missing(case: Case, found: tuple[DeviceMemory, ...]) -> int:
    return 0 if case.on_cpu else max(0, sum(place.count for place in found) - case.hardware.count)


def _comparable_mb(case: Case, place: DeviceMemory) -> float | None:
    """What the coordinator's process can measure of itself: on a CPU what it holds, on a GPU what its allocator gave
    out; without an engine in another process. None where the trainer is in others."""
    config = case.config
    if case.num_trainers > 1 or config.trainer.cpu_offload or (config.uses_ray and not case.on_cpu):
        return None
    others = () if case.on_cpu else (PROCESS, GAPS)
    if case.vllm or config.uses_ray:
        others = (*others, "engine: ")
    own = tuple(item for item in place.items if not item.role.startswith(others))
    return round(replace(place, items=own).peak / MB, 1)


def assumptions(case: Case) -> Iterator[str]:
    """What the plan takes for granted, in sentences."""
    work, given = case.workload, case.config.engine.kv_cache_mb
    yield (
        f"lengths: {work.source}: {work.prompt_tokens:,.0f} prompt + {work.answer_tokens:,.0f} "
        f"{'sampled' if work.generates else 'taught'} tokens, {work.sequences:,} sequences a step"
    )
    if case.engine is not None:
        limit = f"{given} MB" if given is not None else "a quarter of the memory free at the start"
        yield f"engine: {'vLLM' if case.vllm else 'the embedded engine'}; KV cache at most {limit}"
    if not case.on_cpu:
        yield "CUDA's own memory and gaps between allocations are assumed, not measured"
        if on_host := offloaded_bytes(case):
            yield f"the host's memory has room for {on_host / GIB:,.1f} GiB of weights and moments"
        if case.num_trainers > 1:
            yield "weights, gradients and moments are shared out evenly over the trainer's processes (FSDP2)"
