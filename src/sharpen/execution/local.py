"""One process: the engines and their gateways on a serving thread, user code on its own loop, the trainer in the
caller's thread.

In: a `RunConfig`, the user's functions. Out: `LocalServing` (what rollouts need: engine, gateway, auxiliary models,
runner).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from sharpen.compat.agentscope import silent_agents
from sharpen.config.run import RunConfig
from sharpen.execution.auxiliary import AuxiliaryModels
from sharpen.execution.engine_choice import choose_engine
from sharpen.execution.engines import load_policy
from sharpen.execution.model_files import model_folder, quiet_transformers
from sharpen.execution.probe import sample_probes
from sharpen.execution.serving import ServingThread
from sharpen.execution.sessions import make_gateway, openers
from sharpen.rollout.in_process import Mode, Opener
from sharpen.rollout.runner import RolloutRunner
from sharpen.types import Experience, IntArray

if TYPE_CHECKING:
    import torch


class LocalServing:
    """Satisfies `execution.place.Serving`."""

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
            self._config = config
            self.tokenizer, self.engine = load_policy(config, self.folder, self.thread)
            undo.callback(self._close_engine)
            self.auxiliary = AuxiliaryModels(config, self.thread)
            undo.callback(self.auxiliary.close)
            self.gateway = make_gateway(config, self.engine, self.tokenizer, self.thread.loop)
            self.modes: Mapping[Mode, Opener] = openers(config, self.gateway, self.auxiliary)
            self.runner = RolloutRunner(
                workflow,
                judge,
                self.modes["sampled"],
                config.rollout,
                config.algorithm.group_size,
                config.seed,
                config.workflow_args,
                needs_reward=needs_reward,
            )
            undo.pop_all()

    @property
    def line(self) -> str:
        """Which engine serves, for the user."""
        return choose_engine(self._config).line

    @property
    def ranks(self) -> None:
        """The trainer has no other place than this machine."""
        return None

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """See `Serving.publish`."""
        self.thread.call(self.engine.load(version, tensors))

    def probe(
        self, prompt_ids_P: IntArray, *, noise: int, temperature: float | None = None
    ) -> Future[tuple[Experience, ...]]:
        """See `Serving.probe`."""
        chosen = self._config.model.temperature if temperature is None else temperature
        return self.thread.start(sample_probes(self.engine, prompt_ids_P, temperature=chosen, noise=noise))

    def generating_s(self) -> float:
        """See `Serving.generating_s`."""
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
