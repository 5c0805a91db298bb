"""How many actors of each role a run has, and what each needs of the cluster.

In: a `RunConfig`, the GPUs of the cluster. Out: bundles of resources by role, the engine's type; or a `ConfigError` for
what does not fit together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError
from sharpen.execution.cluster.connect import Bundle, Role
from sharpen.execution.engine_choice import Machine, installed_builds, vllm_choice
from sharpen.execution.trainers import check_offload, trains_on_gpus
from sharpen.recipe import EngineChoice, EngineType


def choose(config: RunConfig, num_gpus: int) -> EngineChoice:
    """The engine of each actor, in a cluster with so many GPUs."""
    machine = Machine(builds=installed_builds(), num_gpus=num_gpus)
    return vllm_choice(of_one_engine(config, config.engine.type), machine)


def of_one_engine(config: RunConfig, type_: str) -> RunConfig:
    """What the actor of one engine, of this type, needs to know."""
    one = {"inference_engine_num": 1}
    auxiliary = {name: model.model_copy(update=one) for name, model in config.auxiliary_models.items()}
    engine = config.engine.model_copy(update={"type": type_})
    return config.model_copy(
        update={"model": config.model.model_copy(update=one), "auxiliary_models": auxiliary, "engine": engine}
    )


def fit_widths(config: RunConfig, type_: EngineType) -> tuple[RunConfig, tuple[str, ...]]:
    """The configuration with the devices that an engine of this type computes on, and what to tell of that: an embedded
    engine is on one."""
    models = {"model": config.model} | {
        f"auxiliary_models.{name}": model for name, model in config.auxiliary_models.items()
    }
    lines = tuple(
        f"{place}.tensor_parallel_size = {model.tensor_parallel_size}: without effect: an embedded engine is on one "
        "device (engine.type: vllm has several)"
        for place, model in models.items()
        if model.tensor_parallel_size != 1
    )
    if type_ == "vllm" or not lines:
        return config, ()
    narrow = {"tensor_parallel_size": 1}
    auxiliary = {name: model.model_copy(update=narrow) for name, model in config.auxiliary_models.items()}
    model = config.model.model_copy(update=narrow)
    return config.model_copy(update={"model": model, "auxiliary_models": auxiliary}), lines


def engine_names(config: RunConfig) -> list[str | None]:
    """For each engine the auxiliary model that it serves, None for the one that is tuned."""
    here = {name: model for name, model in config.auxiliary_models.items() if model.base_url is None}
    auxiliary = [name for name, model in here.items() for _ in range(model.inference_engine_num)]
    return [*[None] * config.model.inference_engine_num, *auxiliary]


def num_ranks(config: RunConfig, num_gpus: int) -> int:
    """Ranks of the trainer that are actors; 0 if it trains in the coordinator's process, on the CPU."""
    check_offload(config, num_gpus=num_gpus, where="in the Ray cluster")
    count = config.trainer.num_processes
    return count if count > 1 or trains_on_gpus(config, num_gpus) else 0


def needs(config: RunConfig, num_gpus: int, type_: EngineType) -> Mapping[Role, Sequence[Bundle]]:
    """What the run's actors need of a cluster with so many GPUs, with engines of this type."""
    on_gpus, names, ranks = trains_on_gpus(config, num_gpus), engine_names(config), num_ranks(config, num_gpus)
    workers: list[Bundle] = [{"CPU": 1}] * config.cluster.num_workers
    if config.cluster.colocate:
        _check_colocated(config, on_gpus)
        pair: Bundle = {"CPU": 2, "GPU": 1}
        engines = [pair if name is None else _of_auxiliary(config, name, on_gpus, type_) for name in names]
        return {"engine": engines, "rollout worker": workers}
    policy = _bundle(on_gpus, config.model.tensor_parallel_size)
    engines = [policy if name is None else _of_auxiliary(config, name, on_gpus, type_) for name in names]
    return {"engine": engines, "trainer rank": rank_bundles(config, num_gpus, ranks), "rollout worker": workers}


def rank_bundles(config: RunConfig, num_gpus: int, ranks: int) -> Sequence[Bundle]:
    """What so many ranks of the trainer need: a GPU each where there are GPUs."""
    return [_bundle(trains_on_gpus(config, num_gpus), 1)] * ranks


def _of_auxiliary(config: RunConfig, name: str, on_gpus: bool, type_: EngineType) -> Bundle:
    """What an engine of an auxiliary model needs; an embedded one is on the CPU."""
    return _bundle(on_gpus and type_ == "vllm", config.auxiliary_models[name].tensor_parallel_size)


def _bundle(on_gpus: bool, width: int) -> Bundle:
    """What so many processes of an engine or a trainer compute on: GPUs, or a core for each."""
    return {"CPU": 1, "GPU": width} if on_gpus else {"CPU": width}


def _check_colocated(config: RunConfig, on_gpus: bool) -> None:
    if not on_gpus:
        raise ConfigError("cluster.colocate is true, but nothing computes on GPUs: it has no effect, leave it out")
    engines, ranks = config.model.inference_engine_num, config.trainer.num_processes
    if (width := config.model.tensor_parallel_size) != 1 or engines != ranks:
        raise ConfigError(
            f"cluster.colocate puts one engine and one rank of the trainer on each GPU, but there are {engines} "
            f"engine(s) with {width} GPU(s) each (model.inference_engine_num, model.tensor_parallel_size) and {ranks} "
            "rank(s) (trainer.num_processes): make the numbers equal, with one GPU each"
        )
