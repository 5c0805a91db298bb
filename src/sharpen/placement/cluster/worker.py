"""The process of the user's workflow and judge: an actor with a gateway and a user loop, whose engines are elsewhere.

In: `AttemptRequest` from the coordinator. Out: `Attempt`, with calls recorded here token-exactly. If user code crashes
or blocks its process, only this actor is lost, and Ray restarts it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sharpen.agent.agentscope.console import silent_agents
from sharpen.agent.rollout.in_process import Attempt, AttemptRequest, InProcess
from sharpen.config.load import know_secrets
from sharpen.config.run import AuxiliaryModelConfig, RunConfig
from sharpen.contracts import Engine
from sharpen.engine.routing import Replicas
from sharpen.machine import let_idle_workers_sleep
from sharpen.models.files import model_folder, quiet_transformers
from sharpen.placement.auxiliary.models import AuxiliaryModels
from sharpen.placement.cluster.engine import EngineClient
from sharpen.placement.engines import make_gateway
from sharpen.placement.serving import ServingThread
from sharpen.placement.sessions import openers
from sharpen.placement.user_code import UserCode


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a worker needs to start: the user's functions, the engines of the trained model (`policy`) and the engine of
    each auxiliary model without an endpoint."""

    config: RunConfig
    code: UserCode
    policy: Sequence[EngineClient]
    auxiliary: Mapping[str, Sequence[EngineClient]]


class RolloutWorker:
    """An actor that runs attempts."""

    def __init__(self) -> None:
        import openai  # noqa: F401  imported while the engines start, because it is slow
        import transformers  # noqa: F401

        self._attempts: InProcess | None = None
        self._policy: Sequence[EngineClient] = ()
        self._starting = asyncio.Lock()

    async def start(self, setup: Setup, version: int) -> str:
        """Prepare to run attempts, if that is not done yet, and return the id of its machine in the cluster. Raises
        `ConfigError` if the user's functions cannot be loaded here."""
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
        """Set the version that the engine serves (`model.version` in the workflow). Also used as a sign of life."""
        for engine in self._policy:
            engine.version = version

    def _start(self, setup: Setup) -> None:
        def load_auxiliary(name: str, model: AuxiliaryModelConfig) -> tuple[Any, Engine]:
            return _tokenizer(model.model_path), _single_engine(setup.auxiliary[name])

        config = setup.config
        let_idle_workers_sleep()
        quiet_transformers()
        os.environ.update(config.rollout.env_vars)
        know_secrets(config)
        functions = setup.code.load()
        self._silence = silent_agents()
        self._silence.__enter__()
        thread = ServingThread()
        models = AuxiliaryModels(config.auxiliary_models, thread, load_auxiliary, listen=config.gateway)
        self._policy = setup.policy
        tokenizer = _tokenizer(config.model.model_path)
        gateway = make_gateway(
            config.model,
            _single_engine(self._policy),
            tokenizer,
            thread.loop,
            listen=config.gateway,
            max_calls=config.rollout.max_calls,
        )
        self._modes = openers(gateway, models, max_tokens=config.model.max_tokens)
        self._attempts = InProcess(functions, config.rollout.timeout_s)


def _single_engine(engines: Sequence[EngineClient]) -> Engine:
    """Return the engines of one model as a single engine."""
    return engines[0] if len(engines) == 1 else Replicas(engines)


def _tokenizer(model_path: str) -> Any:
    from sharpen.models.configuration import load_tokenizer

    return load_tokenizer(model_folder(model_path))
