"""One process: the engine and the gateway on a serving thread, user code on its own loop, the trainer in the caller's
thread.

In: a `RunConfig`, the user's functions. Out: `Serving` (what rollouts need: engine, gateway, runner).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agenttune.config.run import RunConfig
from agenttune.execution.model_files import model_folder, quiet_transformers
from agenttune.execution.serving import ServingThread
from agenttune.gateway.gateway import Gateway
from agenttune.gateway.session import Session
from agenttune.rollout.runner import OpenSession, RolloutRunner
from agenttune.sync.weights import publish
from agenttune.types import Sampling

if TYPE_CHECKING:
    import torch

    from agenttune.inference.embedded import EmbeddedEngine


Mode = Literal["greedy", "sampled"]


class Serving:
    """A model that serves rollouts. `runner` runs them; `recorded` opens sessions for
    training, `modes` for evaluation."""

    def __init__(
        self,
        config: RunConfig,
        workflow: Callable[..., Any],
        judge: Callable[..., Any] | None,
    ) -> None:
        """Load the configured model into an engine and start serving it.

        Raises `ModelError` if it cannot be had or served, `ConfigError` for a wrong signature.
        """
        quiet_transformers()
        self.folder = model_folder(config.model.model_path)
        self.tokenizer, self.engine = _load_engine(config, self.folder)
        self.thread = ServingThread()
        sampling = Sampling(
            temperature=config.model.temperature, top_p=config.model.top_p, max_tokens=config.model.max_tokens
        )
        self.gateway = Gateway(
            self.engine,
            self.tokenizer,
            model_name=config.model.model_path,
            loop=self.thread.loop,
            sampling=sampling,
            enable_thinking=config.model.enable_thinking,
            tool_call_parser=config.model.tool_call_parser,
            reasoning_parser=config.model.reasoning_parser,
            max_calls=config.rollout.max_calls,
        )
        self.recorded: OpenSession = functools.partial(_open, self.gateway, None, True)
        greedy = Sampling(temperature=0.0, max_tokens=config.model.max_tokens)
        self.modes: Mapping[Mode, OpenSession] = {
            "greedy": functools.partial(_open, self.gateway, greedy, False),
            "sampled": functools.partial(_open, self.gateway, None, False),
        }
        self.runner = RolloutRunner(
            workflow, judge, self.recorded, config.rollout, config.algorithm.group_size, config.seed
        )

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load new weights into the engine; returns when it serves them."""
        self.thread.call(publish(version, tensors, [self.engine]))

    def close(self) -> None:
        """End rollouts, gateway, engine and thread, in this order."""
        self.runner.close()
        self.thread.call(self.gateway.close(), timeout_s=10)
        self.thread.call(self.engine.close(), timeout_s=10)
        self.thread.close()


def _open(gateway: Gateway, sampling: Sampling | None, record: bool, rollout_id: str, noise_seed: int) -> Session:
    return gateway.open(rollout_id, noise_seed=noise_seed, sampling=sampling, record=record)


def _load_engine(config: RunConfig, folder: Path) -> tuple[Any, EmbeddedEngine]:
    from transformers import AutoTokenizer

    from agenttune.inference.embedded import EmbeddedEngine

    tokenizer = AutoTokenizer.from_pretrained(folder)
    engine = EmbeddedEngine.from_pretrained(
        str(folder),
        max_model_len=config.model.max_model_len,
        device=config.engine.device,
        dtype=config.engine.dtype,
        max_slots=config.engine.max_slots,
        kv_cache_mb=config.engine.kv_cache_mb,
        deterministic=config.deterministic,
        stop_decoder=tokenizer.decode,
    )
    return tokenizer, engine
