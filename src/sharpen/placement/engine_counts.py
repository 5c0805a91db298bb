"""Fits the number of engines, and the devices of each, to this machine.

In: the settings of a run's models, and the machine. Out: the settings with the numbers used here, and a line for each
model whose configured numbers do not apply. Not for runs on Ray, which has other machines.
"""

from __future__ import annotations

from collections.abc import Mapping

from sharpen.config.public import TunerModelConfig
from sharpen.config.run import AuxiliaryModelConfig
from sharpen.placement.engine_choice import Machine

COUNTS = ("inference_engine_num", "tensor_parallel_size")
_ONE = "in one process all engines but vLLM are one, on one device (docs/use/vllm.md)"
_AUXILIARY = "in one process it is served by one engine, on one device (Ray with vLLM places more: docs/use/ray.md)"


def fit_auxiliary(
    models: Mapping[str, AuxiliaryModelConfig],
) -> tuple[dict[str, AuxiliaryModelConfig], tuple[str, ...]]:
    """Return the auxiliary models with one engine each, and a line for each whose numbers do not apply."""
    lines = tuple(
        f"auxiliary_models.{name}: {given}: without effect: {_AUXILIARY}"
        for name, model in models.items()
        if (given := list_counts(model))
    )
    one = dict.fromkeys(COUNTS, 1)
    return {name: model.model_copy(update=one) for name, model in models.items()}, lines


def list_counts(model: TunerModelConfig) -> str:
    """List the numbers of engines and devices that are not 1, for a message; empty if all are 1."""
    return ", ".join(f"{name} = {value}" for name in COUNTS if (value := getattr(model, name)) != 1)


def fit_policy(model: TunerModelConfig, machine: Machine, *, vllm: bool) -> tuple[TunerModelConfig, tuple[str, ...]]:
    """Return the trained model with the engines that fit this machine, where `vllm` serves it or another; and a line if
    its numbers do not apply."""
    given = list_counts(model)
    if not vllm:
        one = model.model_copy(update=dict.fromkeys(COUNTS, 1))
        return one, (f"model: {given}: without effect: {_ONE}",) if given else ()
    width, count = fit_counts(model, machine)
    if (width, count) == (model.tensor_parallel_size, model.inference_engine_num):
        return model, ()
    line = (
        f"model: {given}: vLLM has {machine.num_devices} {machine.device_name}(s) here, so that it is {count} "
        f"engine(s) with {width} each"
    )
    return model.model_copy(update={"inference_engine_num": count, "tensor_parallel_size": width}), (line,)


def fit_counts(model: TunerModelConfig, machine: Machine) -> tuple[int, int]:
    """Return (devices of one engine, engines) as configured, or the most that vLLM has devices for. A width that is too
    large is replaced by its largest divisor that fits, since it must divide the model's attention heads. Engines of one
    core each may share cores."""
    width, count, here = model.tensor_parallel_size, model.inference_engine_num, machine.num_devices
    width = max(part for part in range(1, width + 1) if width % part == 0 and part <= max(here, 1))
    if width > 1 or not machine.vllm_for_cpu:
        count = max(1, min(count, here // width))
    return width, count
