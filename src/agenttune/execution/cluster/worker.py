"""A process in which the user's workflow and judge run: an actor with a gateway, a user loop, and engines elsewhere.

In: `Asked` from the coordinator. Out: `Attempted`, with calls recorded here token-exactly. What user code does to its
process (a crash, a hang that nobody can interrupt) it does to this one alone; Ray starts it again.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any

from agenttune.compat.agentscope import silent_agents
from agenttune.config.run import AuxiliaryModelConfig, RunConfig
from agenttune.errors import ConfigError
from agenttune.execution.auxiliary import AuxiliaryModels
from agenttune.execution.cluster.engine import EngineClient
from agenttune.execution.model_files import model_folder, quiet_transformers
from agenttune.execution.serving import ServingThread
from agenttune.execution.sessions import make_gateway, session_kinds
from agenttune.execution.threads import let_idle_workers_sleep
from agenttune.inference.engine import Engine
from agenttune.rollout.in_process import Asked, Attempted, InProcess


class RolloutWorker:
    """An actor. `functions` is a pickled `UserFunctions`; `policy` serves the model that is tuned, `auxiliary` the
    auxiliary models that are not at an endpoint, by name."""

    def __init__(
        self, config: RunConfig, functions: bytes, policy: EngineClient, auxiliary: Mapping[str, EngineClient]
    ) -> None:
        self._config, self._functions = config, functions
        self._policy, self._engines = policy, auxiliary
        self._attempts: InProcess | None = None
        self._starting = asyncio.Lock()

    async def start(self, version: int) -> str:
        """Get ready to run attempts, unless it is; the id of its machine in the cluster. Raises `ConfigError` if the
        user's functions cannot be had here."""
        import ray

        async with self._starting:
            self._policy.version = version
            if self._attempts is None:
                await asyncio.to_thread(self._start)
        return str(ray.get_runtime_context().get_node_id())

    async def run(self, asked: Asked) -> Attempted:
        """See `rollout.in_process.Attempts`."""
        assert self._attempts is not None
        assert isinstance(asked.opens, str)
        return await self._attempts.run(dataclasses.replace(asked, opens=self._kinds[asked.opens]))

    async def serve(self, version: int) -> None:
        """The engine serves this version from now on (`model.version` in the workflow). Also a sign of life."""
        self._policy.version = version

    def _start(self) -> None:
        import ray.cloudpickle

        let_idle_workers_sleep()
        quiet_transformers()
        try:
            functions = ray.cloudpickle.loads(self._functions)
        except Exception as error:  # the user's modules are imported by it
            raise ConfigError(
                f"the workflow or the judge cannot be loaded in a rollout worker: {type(error).__name__}: {error}; the "
                "code must be importable on every machine of the cluster (docs/ray.md)"
            ) from error
        self._silence = silent_agents()
        self._silence.__enter__()
        thread = ServingThread()
        models = AuxiliaryModels(self._config, thread, load=self._load_auxiliary)
        tokenizer = _tokenizer(self._config.model.model_path)
        gateway = make_gateway(self._config, self._policy, tokenizer, thread.loop)
        self._kinds = session_kinds(self._config, gateway, models)
        self._attempts = InProcess(functions, self._config.rollout.timeout_s)

    def _load_auxiliary(self, name: str, model: AuxiliaryModelConfig) -> tuple[Any, Engine]:
        return _tokenizer(model.model_path), self._engines[name]


def _tokenizer(model_path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder(model_path))
