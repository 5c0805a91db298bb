"""One process: the engines and their gateways on a serving thread, user code on its own loop, the trainer in the
caller's thread.

In: a `RunConfig`, the user's functions. Out: `Serving` (what rollouts need: engine, gateway, auxiliary models, runner).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal

from agenttune.compat.agentscope import silent_agents
from agenttune.config.run import RunConfig
from agenttune.execution.auxiliary import AuxiliaryModels
from agenttune.execution.engines import load_policy, sampling_of
from agenttune.execution.model_files import model_folder, quiet_transformers
from agenttune.execution.probe import sample_probes
from agenttune.execution.serving import ServingThread
from agenttune.execution.sessions import RolloutSession
from agenttune.gateway.gateway import Gateway
from agenttune.rollout.attempt import Session
from agenttune.rollout.runner import OpenSession, RolloutRunner
from agenttune.sync.weights import publish
from agenttune.types import Experience, IntArray, Sampling

if TYPE_CHECKING:
    import torch


Mode = Literal["greedy", "sampled"]


class Serving:
    """A model that serves rollouts, and the auxiliary models beside it. `runner` runs them; `recorded` opens sessions
    for training, `baseline` greedy ones beside them, `modes` those for evaluation."""

    def __init__(
        self,
        config: RunConfig,
        workflow: Callable[..., Any],
        judge: Callable[..., Any] | None,
        *,
        needs_reward: bool = True,
    ) -> None:
        """Load the configured models into engines and start serving them. Without `needs_reward` rollouts may end well
        without a reward.

        Raises `ModelError` if one cannot be had or served, `ConfigError` for a wrong signature.
        """
        quiet_transformers()
        self.folder = model_folder(config.model.model_path)
        with contextlib.ExitStack() as undo:  # what was begun, if a later part fails
            self._silence = contextlib.ExitStack()
            self._silence.enter_context(silent_agents())
            undo.callback(self._silence.close)
            self.thread = ServingThread()
            undo.callback(self.thread.close)
            self._temperature = config.model.temperature
            self.tokenizer, self.engine = load_policy(config, self.folder, self.thread)
            undo.callback(self._close_engine)
            self.auxiliary = AuxiliaryModels(config, self.thread)
            undo.callback(self.auxiliary.close)
            self.gateway = Gateway(
                self.engine,
                self.tokenizer,
                model_name=config.model.model_path,
                loop=self.thread.loop,
                sampling=sampling_of(config.model),
                enable_thinking=config.model.enable_thinking,
                tool_call_parser=config.model.tool_call_parser,
                reasoning_parser=config.model.reasoning_parser,
                max_calls=config.rollout.max_calls,
            )
            greedy = Sampling(temperature=0.0, max_tokens=config.model.max_tokens)
            self.recorded: OpenSession = functools.partial(self._open, None, True)
            self.baseline: OpenSession = functools.partial(self._open, greedy, True)
            self.modes: Mapping[Mode, OpenSession] = {
                "greedy": functools.partial(self._open, greedy, False),
                "sampled": functools.partial(self._open, None, False),
            }
            self.runner = RolloutRunner(
                workflow,
                judge,
                self.recorded,
                config.rollout,
                config.algorithm.group_size,
                config.seed,
                config.workflow_args,
                needs_reward=needs_reward,
            )
            undo.pop_all()

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load new weights into the engine; returns when it serves them. Those of auxiliary models never change."""
        self.thread.call(publish(version, tensors, [self.engine]))

    def probe(self, prompt_ids_P: IntArray, *, noise: int) -> Future[tuple[Experience, ...]]:
        """Begin to sample probes with the weights that serve; see `execution.probe`."""
        return self.thread.start(sample_probes(self.engine, prompt_ids_P, temperature=self._temperature, noise=noise))

    def generating_s(self) -> float:
        """Seconds so far in which the engine had a request to work on."""
        return self.gateway.busy.seconds()

    def close(self) -> None:
        """End rollouts, gateways, engines and thread, in this order."""
        self.runner.close()
        self.thread.call(self.gateway.close(), timeout_s=10)
        self._close_engine()
        self.auxiliary.close()
        self.thread.close()
        self._silence.close()

    def _close_engine(self) -> None:
        self.thread.call(self.engine.close(), timeout_s=30)

    def _open(self, sampling: Sampling | None, record: bool, rollout_id: str, noise_seed: int) -> Session:
        policy = self.gateway.open(rollout_id, noise_seed=noise_seed, sampling=sampling, record=record)
        return RolloutSession(policy, self.auxiliary.open(rollout_id, noise_seed))
