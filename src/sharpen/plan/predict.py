"""The plan of a run: memory by device and role, what to change if it does not fit, the time of a step if one was
measured.

In: a run's configuration and the devices that it is for. Out: a `Plan`, which says what it assumes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError
from sharpen.plan.fit import Limits, Settings, suggest
from sharpen.plan.hardware import GIB, Hardware
from sharpen.plan.memory import (
    PROCESS,
    SLACK,
    Models,
    Place,
    Roles,
    is_offloaded,
    num_processes,
    offloaded_bytes,
    places,
)
from sharpen.plan.sizes import read_model_config, sizes_of
from sharpen.plan.timing import StepTime, settings_key
from sharpen.plan.workload import Workload

MB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is predicted. `suggestion` is the smallest change with which it fits: None where it fits, or none helps.
    `comparable_mb` is the part that the coordinator's process can measure of itself; None if the trainer is in others.
    `settings` is equal for runs whose steps do the same work."""

    hardware: Hardware
    models: Models
    workload: Workload
    places: tuple[Place, ...]
    time: StepTime | None
    missing_devices: int
    suggestion: Settings | None
    assumptions: tuple[str, ...]
    comparable_mb: float | None
    settings: str

    @property
    def fits(self) -> bool:
        """Whether every device has room, and there are enough of them."""
        return self.missing_devices == 0 and all(place.fits for place in self.places)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON, for `plan.json`."""
        return {
            "hardware": self.hardware.name,
            "settings": self.settings,
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
            "comparable_mb": self.comparable_mb,
            "step_s": None if self.time is None else round(self.time.seconds, 3),
            "computed_tokens": round(self.workload.computed_tokens),
            "longest": self.workload.longest,
            "assumptions": list(self.assumptions),
        }


def read_models(config: RunConfig) -> Models:
    """The sizes of every model of a run that lies on its devices. Raises `ModelError`, `ConfigError`."""
    roles = Roles.of(config)
    own = read_model_config(config.model.model_path)
    teacher = None
    if roles.teacher:
        if config.distill.teacher_path is None:
            raise ConfigError(f"{config.algorithm.algorithm_type!r} needs a teacher: set distill.teacher_path")
        teacher = sizes_of(read_model_config(config.distill.teacher_path, "distill.teacher_path"))
    auxiliary = {
        name: sizes_of(read_model_config(model.model_path, f"auxiliary_models.{name}.model_path"))
        for name, model in config.auxiliary_models.items()
        if model.base_url is None
    }
    return Models(config=own, policy=sizes_of(own), teacher=teacher, auxiliary=auxiliary)


def plan(
    config: RunConfig,
    models: Models,
    hardware: Hardware,
    workload: Workload,
    *,
    vllm: bool = False,
    time: StepTime | None = None,
    suggests: bool = True,
) -> Plan:
    """Predict memory, and where it does not fit look for the smallest change (unless not asked to). `time` is what was
    measured of a step."""
    found = places(config, models, hardware, workload, vllm=vllm)
    missing = _missing(found, hardware)

    def fits(changed: RunConfig) -> bool:
        sure = places(changed, models, hardware, workload, vllm=vllm, certain=True)  # looks at no activations
        if _missing(sure, hardware) or not all(one.fits for one in sure):
            return False
        return all(place.fits for place in places(changed, models, hardware, workload, vllm=vllm))

    suggestion = None
    if suggests and (missing or not all(place.fits for place in found)):
        gpus = hardware.count if hardware.kind == "cuda" else 0
        suggestion = suggest(config, Limits(num_gpus=gpus, workload=workload), fits)
    return Plan(
        hardware=hardware,
        models=models,
        workload=workload,
        places=found,
        time=time,
        missing_devices=missing,
        suggestion=suggestion,
        assumptions=tuple(_assumptions(config, models, hardware, workload, vllm)),
        comparable_mb=_comparable_mb(config, found[0], hardware, vllm=vllm),
        settings=settings_key(config),
    )


def _missing(found: tuple[Place, ...], hardware: Hardware) -> int:
    """GPUs that are needed over those that there are."""
    return max(0, sum(place.count for place in found) - hardware.count) if hardware.kind == "cuda" else 0


def _comparable_mb(config: RunConfig, place: Place, hardware: Hardware, *, vllm: bool) -> float | None:
    """On a CPU what the process holds, on a GPU what its allocator gave out; without an engine in another process."""
    on_gpu = hardware.kind == "cuda"
    if num_processes(config) > 1 or config.trainer.cpu_offload or (config.uses_ray and on_gpu):
        return None
    left_out: tuple[str, ...] = (PROCESS,) if on_gpu else ()
    if vllm or config.uses_ray:
        left_out = (*left_out, "engine: ")
    own = Place(
        name=place.name,
        count=1,
        capacity=place.capacity,
        items=tuple(item for item in place.items if not item.role.startswith(left_out)),
    )
    return round((own.phase_peak if on_gpu else own.peak) / MB, 1)


def _assumptions(
    config: RunConfig, models: Models, hardware: Hardware, workload: Workload, vllm: bool
) -> Iterator[str]:
    yield (
        f"lengths: {workload.source}: {workload.prompt_tokens:,.0f} prompt + {workload.answer_tokens:,.0f} "
        f"{'sampled' if workload.generates else 'taught'} tokens, {workload.sequences:,} sequences a step"
    )
    if Roles.of(config).engine:
        given = config.engine.kv_cache_mb
        limit = f"{given} MB" if given is not None else "a quarter of the memory free at the start"
        yield f"engine: {'vLLM' if vllm else 'the embedded engine'}; KV cache at most {limit}"
    yield f"{SLACK:.0%} of the memory is lost to gaps between allocations"
    if hardware.kind == "cuda":
        yield "CUDA's own memory is assumed, not measured"
        if is_offloaded(config, hardware):
            on_host = offloaded_bytes(config, models, hardware)
            yield f"the host's memory has room for {on_host / GIB:,.1f} GiB of weights and moments"
        if num_processes(config) > 1:
            yield "weights, gradients and moments are shared out evenly over the trainer's processes (FSDP2)"
