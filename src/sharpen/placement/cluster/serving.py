"""The serving side of a run in actors of Ray: engines, and the workers that run the user's code.

In: a `Job`. Out: `RayServing`, which has the same interface as `local.LocalServing`.

    coordinator (this process): loop, journal, runner ──AttemptRequest──► rollout workers ──requests──► engine actors
                                     ▲                 ◄────Attempt──────┘                                   ▲
                                  trainer ───────────── weights, through the object store ───────────────────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sharpen.agent.rollout.in_process import Opener
from sharpen.agent.rollout.runner import RolloutRunner
from sharpen.contracts import Engine
from sharpen.engine.routing import Replicas
from sharpen.errors import EngineError, SharpenError
from sharpen.learning.recipe import Job, Recipe, RolloutRecipe
from sharpen.models.files import quiet_transformers
from sharpen.placement.cluster.attempts import RESTART_S, AuxiliaryTotals, OnWorkers, Worker
from sharpen.placement.cluster.connect import Connection, check_ray
from sharpen.placement.cluster.engine import MAX_RESTARTS, EngineActor, EngineClient, answer, first_line, to_arrays
from sharpen.placement.cluster.placement import (
    engine_names,
    fit_widths,
    needs,
    num_ranks,
    rank_starter,
)
from sharpen.placement.cluster.ranks import StoredWeights
from sharpen.placement.cluster.worker import RolloutWorker, Setup
from sharpen.placement.engine_choice import Machine, check_towers, choose_engine, installed_builds
from sharpen.placement.place import HARD_GRACE_S
from sharpen.placement.probe import sample_probes
from sharpen.placement.ranks.group import StartRanks
from sharpen.placement.serving import ServingThread
from sharpen.placement.sessions import user_functions
from sharpen.placement.user_code import UserCode
from sharpen.types import Experience, IntArray, Mode

if TYPE_CHECKING:
    import torch

log = logging.getLogger("sharpen.engine")

WATCH_EVERY_S = 1.0


@dataclass(slots=True, kw_only=True, eq=False)
class _EngineHandle:
    """An engine's actor. `auxiliary` names the auxiliary model that it serves, None for the trained model."""

    name: str
    actor: Any
    auxiliary: str | None
    max_model_len: int = 0
    alive: bool = True
    busy_s: float = 0.0

    def client(self) -> EngineClient:
        return EngineClient(self.actor, max_model_len=self.max_model_len)


class RayServing:
    """Satisfies `placement.place.Serving`."""

    def __init__(self, job: Job[Recipe], *, grace_s: float = HARD_GRACE_S) -> None:
        """Start or join Ray, place the actors, load the models.

        `grace_s` as in `OnWorkers`. Raises `ConfigError` if Ray or its resources are not available, and what
        `local.LocalServing` raises.
        """
        check_ray()
        import ray.cloudpickle

        quiet_transformers()
        self.folder = job.folder
        config = job.config
        self._alone = not job.recipe.overlaps
        functions = user_functions(job)
        self._code = UserCode.of(functions, ray.cloudpickle)
        self._published: tuple[int, Any] = (0, None)
        self._generating_s = 0.0
        self._grace_s = grace_s
        self._failed: Future[Exception] = Future()
        self.auxiliary = AuxiliaryTotals(config.auxiliary_models)
        with contextlib.ExitStack() as undo:
            self.thread = ServingThread()
            undo.callback(self.thread.close)
            names = engine_names(config)
            self._ray = Connection(
                config.cluster, len(names) + config.cluster.num_workers + config.trainer.num_processes
            )
            undo.callback(self._ray.close)
            machine = Machine(builds=installed_builds(), num_gpus=self._ray.num_gpus)
            width = config.model.tensor_parallel_size
            self._choice = choose_engine(config.engine, machine, deterministic=config.deterministic, width=width)
            if isinstance(job.recipe, RolloutRecipe) and config.trainer.train_towers:
                check_towers(self._choice.type, self.folder)
            config, self._notices = fit_widths(config, self._choice.type)
            self._config = config
            self._num_ranks = num_ranks(config, self._ray.num_gpus)
            self._ray.reserve(needs(config, self._ray.num_gpus, self._choice.type))
            self._engines = [self._place_engine(name, index) for index, name in enumerate(names)]
            self._actors: list[Any] = []
            undo.callback(self._end_actors)
            self._actors += [self._place_worker(index) for index in range(config.cluster.num_workers)]
            self.thread.call(self._serve_all())
            policy = [placed.client() for placed in self._policy]
            self.engine: Engine = policy[0] if len(policy) == 1 else Replicas(policy)
            self._clients = policy
            self.modes: Mapping[Mode, Opener] = {"greedy": "greedy", "sampled": "sampled"}
            self._start_workers()
            self.runner = RolloutRunner(
                self._workers,
                self.modes["sampled"],
                config.rollout,
                config.algorithm.group_size,
                config.seed,
                whole_groups=functions.whole_groups,
            )
            undo.callback(self.runner.close)
            self._watches = [self.thread.start(self._watch(placed)) for placed in self._engines]
            self._end = undo.pop_all()

    @property
    def line(self) -> str:
        """What runs where, for the user."""
        return (
            f"execution: ray ({self._ray.line}), {len(self._policy)} engine(s) ({self._choice.type}) and "
            f"{self._config.cluster.num_workers} rollout worker(s) in actors, the trainer "
            + (f"in {self._num_ranks} more" if self._num_ranks else "in this process")
            + "".join(f"\n{notice}" for notice in self._notices)
        )

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """See `Serving.publish`."""
        import ray

        stored = tensors.reference if isinstance(tensors, StoredWeights) else ray.put(to_arrays(tensors))
        self._published = (version, stored)
        self.thread.call(self._publish(version))
        for client in self._clients:
            client.version = version
        self._workers.version = version
        for worker in self._placed_workers:
            worker.actor.serve.remote(version)

    @property
    def ranks(self) -> StartRanks | None:
        """Starts the trainer's ranks in actors; None if the trainer runs in the coordinator's process."""
        if not self._num_ranks:
            return None
        if self._config.cluster.colocate:
            return rank_starter(self._ray, self._num_ranks, "engine", share=2)
        return rank_starter(self._ray, self._num_ranks)

    def rest(self) -> None:
        """Do nothing: the engines have processes of their own."""

    def probe(self, prompt_ids_P: IntArray, *, noise: int, temperature: float) -> Future[tuple[Experience, ...]]:
        """See `Serving.probe`."""
        return self.thread.start(sample_probes(self.engine, prompt_ids_P, temperature=temperature, noise=noise))

    def auxiliary_models(self, name: str) -> contextlib.AbstractContextManager[Mapping[str, Any]]:
        """None: they serve in actors, for the workers."""
        return contextlib.nullcontext({})

    def num_answered(self) -> int:
        """None is known here: each worker has a gateway of its own."""
        return 0

    def generating_s(self) -> float:
        """See `Serving.generating_s`."""
        self.thread.call(self._read_busy())
        return self._generating_s

    def close(self) -> None:
        """Close rollouts, engines, and a Ray that was started here, in this order."""
        for watch in self._watches:
            watch.cancel()
        self._end.close()

    @property
    def _policy(self) -> list[_EngineHandle]:
        return [placed for placed in self._engines if placed.auxiliary is None]

    def _place_engine(self, auxiliary: str | None, index: int) -> _EngineHandle:
        import ray
        import torch

        options = {"max_restarts": MAX_RESTARTS, "max_task_retries": -1, "max_concurrency": 100_000}
        share = 2 if self._config.cluster.colocate and auxiliary is None else 1
        actor = ray.remote(EngineActor).options(**options, **self._ray.options("engine", index, share=share))
        name = f"engine {index}" if auxiliary is None else f"the engine of auxiliary model {auxiliary!r}"
        config = self._config
        model = config.model if auxiliary is None else config.auxiliary_models[auxiliary]
        placed = actor.remote(
            model.model_copy(update={"inference_engine_num": 1}),
            config.engine.model_copy(update={"type": self._choice.type}),
            torch.get_num_threads(),
            auxiliary=auxiliary is not None,
            deterministic=config.deterministic,
            alone=self._alone,
        )
        return _EngineHandle(name=name, actor=placed, auxiliary=auxiliary)

    def _place_worker(self, index: int) -> Any:
        import ray

        options = {"max_restarts": -1, "max_task_retries": 0, "max_concurrency": 100_000}
        return ray.remote(RolloutWorker).options(**options, **self._ray.options("rollout worker", index)).remote()

    async def _serve_all(self) -> None:
        found = await asyncio.gather(*(answer(placed.actor.serve.remote(0, None)) for placed in self._engines))
        for placed, max_model_len in zip(self._engines, found, strict=True):
            placed.max_model_len = max_model_len

    def _start_workers(self) -> None:
        """Start the rollout workers with the user's functions."""
        import ray

        auxiliary: dict[str, list[EngineClient]] = {}
        for placed in self._engines:
            if placed.auxiliary is not None:
                auxiliary.setdefault(placed.auxiliary, []).append(placed.client())
        setup = ray.put(
            Setup(
                config=self._config,
                code=self._code,
                policy=tuple(self._clients),
                auxiliary=auxiliary,
            )
        )
        nodes = self.thread.call(_start_workers(self._actors, setup))
        self._placed_workers = [
            Worker(name=f"rollout worker {index}", actor=actor, node=node)
            for index, (actor, node) in enumerate(zip(self._actors, nodes, strict=True))
        ]
        self._workers = OnWorkers(
            self._placed_workers,
            setup,
            self.auxiliary,
            self._failed,
            timeout_s=self._config.rollout.timeout_s,
            most=self._config.cluster.rollouts_per_worker,
            grace_s=self._grace_s,
        )

    async def _publish(self, version: int) -> None:
        _, reference = self._published
        calls = (answer(placed.actor.serve.remote(version, reference)) for placed in self._policy if placed.alive)
        ended = await asyncio.gather(*calls, return_exceptions=True)
        failures = [one for one in ended if isinstance(one, BaseException)]
        if failures and (len(failures) == len(ended) or not isinstance(failures[0], EngineError)):
            raise failures[0]

    async def _watch(self, placed: _EngineHandle) -> None:
        """Send the weights to the engine whenever Ray has restarted it. Report it once it cannot be restarted."""
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            try:
                async with asyncio.timeout(RESTART_S):
                    if await answer(placed.actor.serves.remote()):
                        continue
                    version, reference = self._published if placed.auxiliary is None else (0, None)
                    log.warning("%s died: restarted with the weights of version %d", placed.name, version)
                    await answer(placed.actor.serve.remote(version, reference))
            except (SharpenError, TimeoutError) as error:
                placed.alive = False
                reason = f"{placed.name} died and cannot be restarted: {first_line(error) or 'no answer'}"
                log.warning("%s", reason)
                same = [one for one in self._engines if one.auxiliary == placed.auxiliary]
                if not any(one.alive for one in same):
                    with contextlib.suppress(InvalidStateError):
                        self._failed.set_result(EngineError(reason))
                return

    async def _read_busy(self) -> None:
        spans = []
        for placed in self._policy:
            with contextlib.suppress(EngineError):
                now = await answer(placed.actor.busy_s.remote())
                spans.append(now - placed.busy_s if now >= placed.busy_s else now)
                placed.busy_s = now
        self._generating_s += max(spans, default=0.0)

    def _end_actors(self) -> None:
        import ray

        async def close() -> None:
            with contextlib.suppress(TimeoutError, EngineError):
                async with asyncio.timeout(10):
                    await asyncio.gather(*(answer(one.actor.close.remote()) for one in self._engines if one.alive))

        self.thread.call(close())
        for actor in (*self._actors, *(placed.actor for placed in self._engines)):
            ray.kill(actor)


async def _start_workers(actors: Sequence[Any], setup: Any) -> list[str]:
    return list(await asyncio.gather(*(answer(actor.start.remote(setup, 0)) for actor in actors)))
