"""One process: the engines and their gateways on a serving thread, user code on its own loop (or in processes of its
own, see `isolated.pool`), the trainer in the caller's thread.

In: a `Job`. Out: `LocalServing` (what rollouts need: engine, gateway, auxiliary models, runner).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from sharpen.agent.agentscope.console import silent_agents
from sharpen.agent.rollout.in_process import Opener, no_silent_exit
from sharpen.agent.rollout.runner import RolloutRunner
from sharpen.learning.recipe import Job, Recipe
from sharpen.machine import return_freed_bytes
from sharpen.models.files import quiet_transformers
from sharpen.placement.auxiliary.models import AuxiliaryModels, loading
from sharpen.placement.engines import load_policy, make_gateway
from sharpen.placement.place import Place, Serving
from sharpen.placement.policies import adapters_of, train_beside
from sharpen.placement.probe import sample_probes
from sharpen.placement.serving import ServingThread
from sharpen.placement.sessions import attempt_runner, opened, opener, openers, user_functions
from sharpen.types import Experience, IntArray, Mode

if TYPE_CHECKING:
    import torch


_MANY_BYTES = 2**29
"""So much that a step has freed goes back to the system before the engine's cache is taken; of a small model it stays,
since getting it again costs a tenth of a step."""
NEW_OBJECTS = 10_000
"""While agents run, the garbage collector looks for garbage after so many new objects. After 700, Python's default, it
walks again and again over the rollouts in flight, whose objects live on."""
_MANY_OBJECTS = 100_000
"""So many that have long been there are taken out of the collector's walks: each stops agents and gateway, 0.1 s for a
million."""


class LocalServing:
    """Satisfies `placement.place.Serving`."""

    _walked_if_unfrozen = 0
    """How many objects walks would go over if what the owner of this process has frozen no longer were."""

    def __init__(self, job: Job[Recipe]) -> None:
        """Load the job's models into engines and start serving them.

        Raises `ModelError` if one cannot be found or served, `ConfigError` for a wrong signature.
        """
        quiet_transformers()
        assert job.engine is not None
        config, alone = job.config, not job.recipe.overlaps
        self.folder, self.line, self._seed = job.folder, job.engine.line, config.seed
        with contextlib.ExitStack() as undo:  # closes the earlier parts if a later one fails
            self._silence = undo.enter_context(contextlib.ExitStack())
            self._silence.enter_context(silent_agents())
            if config.rollout.isolation == "none":
                self._silence.enter_context(no_silent_exit())
            self.thread = ServingThread()
            undo.callback(self.thread.close)
            self.tokenizer, self.engine = load_policy(
                config.model,
                config.engine,
                job.folder,
                self.thread,
                type=job.engine.type,
                deterministic=config.deterministic,
                alone=alone,
                adapters=job.adapters,
            )
            undo.callback(self._close_engine)
            train_beside(self.engine, config.policies, config.trainer.lora)
            load = loading(config.engine, deterministic=config.deterministic, alone=alone)
            self.auxiliary = AuxiliaryModels(config.auxiliary_models, self.thread, load, listen=config.gateway)
            undo.callback(self.auxiliary.close)
            self.gateway = make_gateway(
                config.model,
                self.engine,
                self.tokenizer,
                self.thread.loop,
                listen=config.gateway,
                max_calls=config.rollout.max_calls,
                policies=adapters_of(config.policies),
            )
            self.modes: Mapping[Mode, Opener] = openers(
                self.gateway, self.auxiliary, max_tokens=config.model.max_tokens
            )
            functions = user_functions(job)
            self.runner = RolloutRunner(
                attempt_runner(functions, config.rollout),
                opener(self.gateway.open, self.auxiliary),
                config.rollout,
                config.algorithm.group_size,
                config.seed,
                whole_groups=functions.whole_groups,
                frozen=frozenset(config.policies),
            )
            undo.pop_all()
        self._spare_walks()

    def _spare_walks(self) -> None:
        """Let the garbage collector walk less often, and not over what is loaded, until `close`. Where the owner has
        frozen much, who knows better what stays, nothing is. Counting that is a walk of its own, made once."""
        self._thresholds, self._freezes = gc.get_threshold(), False
        walked = len(gc.get_objects(2))
        if walked >= max(_MANY_OBJECTS, self._walked_if_unfrozen):
            frozen = gc.get_freeze_count()
            self._freezes = frozen <= NEW_OBJECTS
            LocalServing._walked_if_unfrozen = 0 if self._freezes else walked + frozen
        if self._freezes:
            gc.collect()
            gc.freeze()
        if self._thresholds[0]:  # 0: the owner has switched the collector off
            gc.set_threshold(max(NEW_OBJECTS, self._thresholds[0]), *self._thresholds[1:])

    @property
    def ranks(self) -> None:
        """None: the trainer runs on this machine."""
        return None

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """See `Serving.publish`."""
        self.thread.call(self.engine.load(version, tensors))
        return_freed_bytes(_MANY_BYTES)  # what the step has trained with, before the engine takes its cache

    def rest(self) -> None:
        """See `Serving.rest`."""
        from sharpen.engine.embedded.engine import EmbeddedEngine

        if isinstance(self.engine, EmbeddedEngine):
            self.thread.call(self.engine.rest())

    def probe(self, prompt_ids_P: IntArray, *, noise: int, temperature: float) -> Future[tuple[Experience, ...]]:
        """See `Serving.probe`."""
        return self.thread.start(sample_probes(self.engine, prompt_ids_P, temperature=temperature, noise=noise))

    def auxiliary_models(self, name: str) -> contextlib.AbstractContextManager[Mapping[str, Any]]:
        """See `Serving.auxiliary_models`."""
        return opened(self.auxiliary, name, self._seed)

    def num_answered(self) -> int:
        """See `Serving.num_answered`."""
        return self.gateway.busy.num_ended

    def generating_s(self) -> float:
        """See `Serving.generating_s`."""
        return self.gateway.busy.seconds()

    def close(self) -> None:
        """Close rollouts, gateways, engines and thread, in this order."""
        gc.set_threshold(*self._thresholds)
        if self._freezes:
            gc.unfreeze()
        self.runner.close()
        self.thread.call(self.gateway.close(), timeout_s=10)
        self._close_engine()
        self.auxiliary.close()
        self.thread.close()
        self._silence.close()

    def _close_engine(self) -> None:
        self.thread.call(self.engine.close(), timeout_s=30)


# Starts the serving side of a run, in this process or in actors of Ray.
#
# In: a `Job`. Out: `Serving`, the interface that the coordinator uses.


def start_serving(job: Job[Recipe]) -> Serving:
    """Load the job's models and start serving them; see `local.LocalServing` and `cluster.serving.RayServing`."""
    if not job.config.uses_ray:
        return LocalServing(job)
    from sharpen.placement.cluster.serving import RayServing

    return RayServing(job)


def start_training(job: Job[Recipe]) -> Place | None:
    """Reserve the place of a trainer without engines; None is this machine. Raises `ConfigError` if Ray is not
    available."""
    if not job.config.uses_ray:
        return None
    from sharpen.placement.cluster.placement import RayTraining

    return RayTraining(job.config)
