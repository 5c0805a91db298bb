"""The plan of a run: memory by device and role, what to change if it does not fit, and the time of a step if one was
measured.

In: a `Case`. Out: a `Plan`, which lists its assumptions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from sharpen.run.plan.case import Case
from sharpen.run.plan.fit import Settings, suggest
from sharpen.run.plan.hardware import GIB
from sharpen.run.plan.memory import GAPS, PROCESS, DeviceMemory, offloaded_bytes, places
from sharpen.run.plan.timing import StepTime, settings_key

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
            "computed_tokens": round(self.case.workload.computed_tokens),
            "longest": self.case.workload.longest,
            "assumptions": list(assumptions(self.case)),
        }


def plan(case: Case, *, time: StepTime | None = None, suggests: bool = True) -> Plan:
    """Predict the memory of a run and, with `suggests`, find the smallest change if it does not fit. `time` is the
    measured time of a step."""
    devices, suggestion = places(case), None

    def fits(changed: Case) -> bool:
        certain = places(changed, certain=True)  # fast, as it leaves out the activations
        return _fits(changed, certain) and _fits(changed, places(changed))

    if suggests and not _fits(case, devices):
        suggestion = suggest(case, fits)
    return Plan(case=case, places=devices, time=time, suggestion=suggestion)


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
