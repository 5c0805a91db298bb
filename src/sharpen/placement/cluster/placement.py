"""The number of actors of each role in a run, and the resources that each needs.

In: a `RunConfig`, the number of GPUs of the cluster. Out: bundles of resources by role. Raises
`ConfigError` for settings that contradict each other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError
from sharpen.learning.recipe import EngineType
from sharpen.learning.trainer.roles import TrainerPlan
from sharpen.placement.cluster.connect import Bundle, Connection, Role
from sharpen.placement.cluster.ranks import RankActor, RayRanks
from sharpen.placement.ranks.group import StartRanks
from sharpen.placement.trainers import check_offload, trains_on_gpus


def fit_widths(config: RunConfig, type_: EngineType) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the configuration with `tensor_parallel_size` 1 for embedded engines, which use one device, and a line for
    each setting that this changes."""
    models = {"model": config.model} | {
        f"auxiliary_models.{name}": model for name, model in config.auxiliary_models.items()
    }
    lines = tuple(
        f"{place}.tensor_parallel_size = {model.tensor_parallel_size}: without effect: all engines but vLLM are on one "
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
    """Return for each engine the auxiliary model that it serves, None for the trained model."""
    here = {name: model for name, model in config.auxiliary_models.items() if model.base_url is None}
    auxiliary = [name for name, model in here.items() for _ in range(model.inference_engine_num)]
    return [*[None] * config.model.inference_engine_num, *auxiliary]


def num_ranks(config: RunConfig, num_gpus: int) -> int:
    """Return the number of trainer ranks in actors; 0 if the trainer runs in the coordinator's process, on the CPU."""
    check_offload(config.trainer, config.engine.device, num_gpus=num_gpus, where="in the Ray cluster")
    count = config.trainer.num_processes
    return count if count > 1 or trains_on_gpus(config.engine.device, num_gpus) else 0


def needs(config: RunConfig, num_gpus: int, type_: EngineType) -> Mapping[Role, Sequence[Bundle]]:
    """Return the bundles of the run's actors, by role, in a cluster with `num_gpus` GPUs and engines of this type."""
    on_gpus, names = trains_on_gpus(config.engine.device, num_gpus), engine_names(config)
    ranks = num_ranks(config, num_gpus)
    workers: list[Bundle] = [{"CPU": 1}] * config.cluster.num_workers
    if config.cluster.colocate:
        _check_colocated(config, on_gpus)
        pair: Bundle = {"CPU": 2, "GPU": 1}
        engines = [pair if name is None else _auxiliary_bundle(config, name, on_gpus, type_) for name in names]
        return {"engine": engines, "rollout worker": workers}
    policy = _bundle(on_gpus, config.model.tensor_parallel_size)
    engines = [policy if name is None else _auxiliary_bundle(config, name, on_gpus, type_) for name in names]
    return {"engine": engines, "trainer rank": rank_bundles(config, num_gpus, ranks), "rollout worker": workers}


def rank_bundles(config: RunConfig, num_gpus: int, ranks: int) -> Sequence[Bundle]:
    """Return the bundles of the trainer's ranks: a GPU each if the trainer uses GPUs, else a CPU each."""
    return [_bundle(trains_on_gpus(config.engine.device, num_gpus), 1)] * ranks


def _auxiliary_bundle(config: RunConfig, name: str, on_gpus: bool, type_: EngineType) -> Bundle:
    """Return the bundle of an auxiliary model's engine; an embedded one runs on the CPU."""
    return _bundle(on_gpus and type_ == "vllm", config.auxiliary_models[name].tensor_parallel_size)


def _bundle(on_gpus: bool, width: int) -> Bundle:
    """Return the bundle of an engine or a rank with `width` processes: a GPU or a CPU for each."""
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


# Places the ranks of a trainer in Ray, with engines or alone.
#
# In: a `Connection` with resources reserved for the ranks, or a `RunConfig`. Out: `StartRanks`; `RayTraining`, the
# place of a run without engines.


def rank_starter(connection: Connection, count: int, role: Role = "trainer rank", *, share: int = 1) -> StartRanks:
    """Return a function that starts `count` ranks. Rank i gets the role's bundle i, or one of `share` equal parts of
    it."""

    def start(plan: TrainerPlan) -> RayRanks:
        import ray

        options = [connection.options(role, rank, share=share) for rank in range(count)]
        return RayRanks(plan, [ray.remote(RankActor).options(**one).remote() for one in options])

    return start


class RayTraining:
    """Satisfies `placement.place.Place` for a trainer without engines. Even a single rank runs in an actor."""

    def __init__(self, config: RunConfig) -> None:
        """Start or join Ray and reserve the ranks' resources. Raises `ConfigError` as `cluster.serving.RayServing`."""
        with contextlib.ExitStack() as undo:
            self._ray = Connection(config.cluster, config.trainer.num_processes)
            undo.callback(self._ray.close)
            self._num_ranks = num_ranks(config, self._ray.num_gpus) or 1
            self._ray.reserve({"trainer rank": rank_bundles(config, self._ray.num_gpus, self._num_ranks)})
            self.ranks = rank_starter(self._ray, self._num_ranks)
            undo.pop_all()

    @property
    def line(self) -> str:
        """What runs where, for the user."""
        return f"execution: ray ({self._ray.line}), the trainer in {self._num_ranks} actor(s)"

    def close(self) -> None:
        """Release the resources, and end a Ray that was started here."""
        self._ray.close()
