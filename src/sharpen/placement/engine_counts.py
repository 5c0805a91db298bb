"""Fits the number of engines, and the devices of each, to this machine.

In: the run's configuration and the machine. Out: the configuration with the numbers used here, and a line for each
model whose configured numbers do not apply. Not for runs on Ray, which has other machines.
"""

from __future__ import annotations

from sharpen.config.public import TunerModelConfig
from sharpen.config.run import RunConfig
from sharpen.placement.engine_choice import Machine, vllm_serves

COUNTS = ("inference_engine_num", "tensor_parallel_size")
_ONE = "in one process all engines but vLLM are one, on one device (docs/use/vllm.md)"
_AUXILIARY = "in one process it is served by one engine, on one device (Ray with vLLM places more: docs/use/ray.md)"


def fit_engines(config: RunConfig, machine: Machine) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the configuration with the engines that fit this machine, and lines about configured numbers that do not
    apply."""
    lines: list[str] = []
    model, line = _fit_policy(config, machine)
    if line:
        lines.append(line)
    auxiliary = dict(config.auxiliary_models)
    for name, one in config.auxiliary_models.items():
        if given := list_counts(one):
            auxiliary[name] = one.model_copy(update=dict.fromkeys(COUNTS, 1))
            lines.append(f"auxiliary_models.{name}: {given}: without effect: {_AUXILIARY}")
    if not lines:
        return config, ()
    return config.model_copy(update={"model": model, "auxiliary_models": auxiliary}), tuple(lines)


def list_counts(model: TunerModelConfig) -> str:
    """List the numbers of engines and devices that are not 1, for a message; empty if all are 1."""
    return ", ".join(f"{name} = {value}" for name in COUNTS if (value := getattr(model, name)) != 1)


def _fit_policy(config: RunConfig, machine: Machine) -> tuple[TunerModelConfig, str]:
    model = config.model
    if not vllm_serves(config, machine):
        given = list_counts(model)
        return model.model_copy(update=dict.fromkeys(COUNTS, 1)), (
            f"model: {given}: without effect: {_ONE}" if given else ""
        )
    width, count = fit_counts(model, machine)
    if (width, count) == (model.tensor_parallel_size, model.inference_engine_num):
        return model, ""
    line = (
        f"model: {list_counts(model)}: vLLM has {machine.num_devices} {machine.device_name}(s) here, so that it is "
        f"{count} engine(s) with {width} each"
    )
    return model.model_copy(update={"inference_engine_num": count, "tensor_parallel_size": width}), line


def fit_counts(model: TunerModelConfig, machine: Machine) -> tuple[int, int]:
    """Return (devices of one engine, engines) as configured, or the most that vLLM has devices for. A width that is too
    large is replaced by its largest divisor that fits, since it must divide the model's attention heads. Engines of one
    core each may share cores."""
    width, count, here = model.tensor_parallel_size, model.inference_engine_num, machine.num_devices
    width = max(part for part in range(1, width + 1) if width % part == 0 and part <= max(here, 1))
    if width > 1 or not machine.vllm_for_cpu:
        count = max(1, min(count, here // width))
    return width, count
