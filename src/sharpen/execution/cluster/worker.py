"""A process in which the user's workflow and judge run: an actor with a gateway, a user loop, and engines elsewhere.

In: `AttemptRequest` from the coordinator. Out: `Attempt`, with calls recorded here token-exactly. What user code does
to its process (a crash, a hang that nobody can interrupt) it does to this one alone; Ray starts it again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sharpen.compat.agentscope import silent_agents
from sharpen.config.functions import FILE_MODULE
from sharpen.config.run import AuxiliaryModelConfig, RunConfig
from sharpen.errors import ConfigError
from sharpen.execution.auxiliary.models import AuxiliaryModels
from sharpen.execution.cluster.engine import EngineClient
from sharpen.execution.engines import gateway_of
from sharpen.execution.model_files import model_folder, quiet_transformers
from sharpen.execution.serving import ServingThread
from sharpen.execution.sessions import openers
from sharpen.execution.threads import let_idle_workers_sleep
from sharpen.inference.engine import Engine
from sharpen.inference.routing import Replicas
from sharpen.rollout.attempt import UserFunctions
from sharpen.rollout.in_process import Attempt, AttemptRequest, InProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a worker needs. `functions` are `pickled`; `policy` are the engines of the model that is
    tuned, `auxiliary` those of the auxiliary models that are not at an endpoint, by name; `paths` is where the
    coordinator finds the user's modules."""

    config: RunConfig
    paths: Sequence[str]
    functions: bytes
    policy: Sequence[EngineClient]
    auxiliary: Mapping[str, Sequence[EngineClient]]


def pickled(functions: UserFunctions) -> bytes:
    """The user's functions as they travel to workers. Raises `ConfigError` if they cannot."""
    import ray.cloudpickle

    for name, module in list(sys.modules.items()):
        if name.startswith(FILE_MODULE):  # named by a file (a class behind the workflow may be): not importable there
            ray.cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(ray.cloudpickle.dumps(functions))
    except Exception as error:  # whatever the user's objects raise
        raise ConfigError(
            f"the workflow or the judge cannot be sent to a rollout worker: {type(error).__name__}: {error}; make what "
            "cannot be pickled (connections, locks, clients) inside the function"
        ) from error


class RolloutWorker:
    """An actor."""

    def __init__(self) -> None:
        import openai  # noqa: F401  what takes a while is loaded while the engines start
        import transformers  # noqa: F401

        self._attempts: InProcess | None = None
        self._policy: Sequence[EngineClient] = ()
        self._starting = asyncio.Lock()

    async def start(self, setup: Setup, version: int) -> str:
        """Get ready to run attempts, unless it is; the id of its machine in the cluster. Raises `ConfigError` if the
        user's functions cannot be had here."""
        import ray

        async with self._starting:
            if self._attempts is None:
                await asyncio.to_thread(self._start, setup)
            await self.serve(version)
        return str(ray.get_runtime_context().get_node_id())

    async def run(self, request: AttemptRequest) -> Attempt:
        """See `rollout.in_process.AttemptRunner`."""
        assert self._attempts is not None
        assert isinstance(request.opener, str)
        return await self._attempts.run(dataclasses.replace(request, opener=self._modes[request.opener]))

    async def serve(self, version: int) -> None:
        """The engine serves this version from now on (`model.version` in the workflow). Also a sign of life."""
        for engine in self._policy:
            engine.version = version

    def _start(self, setup: Setup) -> None:
        import ray.cloudpickle

        def load_auxiliary(name: str, model: AuxiliaryModelConfig) -> tuple[Any, Engine]:
            return _tokenizer(model.model_path), _one_of(setup.auxiliary[name])

        let_idle_workers_sleep()
        quiet_transformers()
        os.environ.update(setup.config.rollout.env_vars)
        sys.path.extend(path for path in setup.paths if path not in sys.path)
        try:
            functions = ray.cloudpickle.loads(setup.functions)
        except Exception as error:  # the user's modules are imported by it
            raise ConfigError(
                f"the workflow or the judge cannot be loaded in a rollout worker: {type(error).__name__}: {error}; the "
                "code must be importable on every machine of the cluster (docs/use/ray.md)"
            ) from error
        self._silence = silent_agents()
        self._silence.__enter__()
        thread = ServingThread()
        models = AuxiliaryModels(setup.config, thread, load=load_auxiliary)
        self._policy = setup.policy
        tokenizer = _tokenizer(setup.config.model.model_path)
        gateway = gateway_of(
            setup.config.model, _one_of(self._policy), tokenizer, thread.loop, max_calls=setup.config.rollout.max_calls
        )
        self._modes = openers(setup.config, gateway, models)
        self._attempts = InProcess(functions, setup.config.rollout.timeout_s)


def _one_of(engines: Sequence[EngineClient]) -> Engine:
    """The engines of one model as one."""
    return engines[0] if len(engines) == 1 else Replicas(engines)


def _tokenizer(model_path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder(model_path))
