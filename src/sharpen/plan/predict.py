"""The plan of a run: memory by device and role, the time of a step, and what to change if it does not fit.

In: a run's configuration and the devices that it is for. Out: a `Plan`, which says what it assumes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError
from sharpen.plan.fit import Limits, Suggestion, suggest
from sharpen.plan.hardware import Hardware
from sharpen.plan.memory import SLACK, Models, Place, Roles, num_processes, offloaded_bytes, places
from sharpen.plan.sizes import read_model_config, sizes_of
from sharpen.plan.timing import EFFICIENCIES, StepTime, step_time
from sharpen.plan.workload import Workload

MB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is predicted. `suggestion` is the smallest change with which it fits: None where it fits, or none helps.
    `engine_apart` and `trainer_apart` say whether engine and trainer are in processes of their own."""

    hardware: Hardware
    models: Models
    workload: Workload
    places: tuple[Place, ...]
    time: StepTime | None
    missing_devices: int
    suggestion: Suggestion | None
    assumptions: tuple[str, ...]
    engine_apart: bool
    trainer_apart: bool

    @property
    def fits(self) -> bool:
        """Whether every device has room, and there are enough of them."""
        return self.missing_devices == 0 and all(place.fits for place in self.places)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON, for `plan.json`."""
        return {
            "hardware": self.hardware.name,
            "fits": self.fits,
            "rates": {name: getattr(self.hardware, name) for name in ("bfloat16_flops", "float32_flops", "bandwidth")},
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
            "step_s": None if self.time is None else round(self.time.likely_s, 3),
            "step_low_s": None if self.time is None else round(self.time.low_s, 3),
            "step_high_s": None if self.time is None else round(self.time.high_s, 3),
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
    suggests: bool = True,
) -> Plan:
    """Predict, and where it does not fit look for the smallest change (unless not asked to)."""
    found = places(config, models, hardware, workload, vllm=vllm)
    missing = max(0, devices_needed(found) - hardware.count) if hardware.kind == "cuda" else 0

    def fits(changed: RunConfig) -> bool:
        sure = places(changed, models, hardware, workload, vllm=vllm, certain=True)  # looks at no activations
        if (hardware.kind == "cuda" and devices_needed(sure) > hardware.count) or not all(one.fits for one in sure):
            return False
        return all(place.fits for place in places(changed, models, hardware, workload, vllm=vllm))

    suggestion = None
    if suggests and (missing or not all(place.fits for place in found)):
        gpus = hardware.count if hardware.kind == "cuda" else 0
        suggestion = suggest(config, Limits(num_gpus=gpus, workload=workload, models=models), fits)
    return Plan(
        hardware=hardware,
        models=models,
        workload=workload,
        places=found,
        time=step_time(config, models, hardware, workload),
        missing_devices=missing,
        suggestion=suggestion,
        engine_apart=vllm or config.uses_ray,
        trainer_apart=num_processes(config) > 1
        or config.trainer.cpu_offload
        or (config.uses_ray and hardware.kind == "cuda"),
        assumptions=tuple(_assumptions(config, models, hardware, workload, vllm)),
    )


def devices_needed(found: tuple[Place, ...]) -> int:
    """Over all places."""
    return sum(place.count for place in found)


def _assumptions(config: RunConfig, models: Models, hardware: Hardware, workload: Workload, vllm: bool) -> list[str]:
    lines = [
        f"lengths: {workload.source}: {workload.prompt_tokens:,.0f} prompt + {workload.answer_tokens:,.0f} "
        f"{'sampled' if workload.generates else 'taught'} tokens, {workload.sequences:,} sequences a step"
    ]
    if Roles.of(config).engine:
        name = "vLLM" if vllm else "the embedded engine"
        lines.append(f"engine: {name}; KV cache {_kv_rule(config)}")
    lines.append(f"{SLACK:.0%} of the memory is lost to gaps between allocations")
    if hardware.bandwidth is not None:
        rates = "measured here, briefly" if hardware.measured else "of the data sheet"
        high, low = EFFICIENCIES[hardware.kind]
        lines.append(
            f"time: between {high:.0%} and {low:.0%} of the peak rates {rates}; what tools and judge take is not in it"
        )
    if hardware.kind == "cuda":
        lines.append("CUDA's own memory is assumed, not measured")
        if on_host := offloaded_bytes(config, models, hardware):
            lines.append(f"the host's memory has room for {on_host / 2**30:,.1f} GiB of weights and moments")
        if num_processes(config) > 1:
            lines.append("weights, gradients and moments are shared out evenly over the trainer's processes (FSDP2)")
    return lines


def _kv_rule(config: RunConfig) -> str:
    given = config.engine.kv_cache_mb
    return f"at most {given} MB" if given is not None else "at most a quarter of the memory free at the start"
