"""The auxiliary models of a run: served here, each by an engine and a gateway of its own, or by an endpoint.

In: `auxiliary_models` of the configuration, the serving thread. Out: for each attempt an `Access` of
its own to each, so that what they are used for is counted on the right rollout. Their calls are never trained: none is
recorded in the rollout, and their weights are never updated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from sharpen.config.run import AuxiliaryModelConfig, RunConfig
from sharpen.execution.auxiliary.remote import RemoteModel
from sharpen.execution.engines import gateway_of, load_engine
from sharpen.execution.model_files import model_folder
from sharpen.execution.serving import ServingThread
from sharpen.gateway.meter import Meter, Tally
from sharpen.inference.engine import Engine
from sharpen.rollout.models import Access

Load = Callable[[str, AuxiliaryModelConfig], tuple[Any, Engine]]
"""(name, settings) -> (tokenizer, engine)."""


class _Source(Protocol):
    """One auxiliary model of a run."""

    def open(self, rollout_id: str, noise_seed: int, tally: Tally) -> Access: ...
    def close(self) -> None: ...


class AuxiliaryMeters:
    """What the auxiliary models of a run were used for: tokens, by name."""

    def __init__(self, config: RunConfig) -> None:
        self._meters = {
            name: Meter(name, model.model_path, model.max_total_tokens)
            for name, model in config.auxiliary_models.items()
        }

    @property
    def total_tokens(self) -> dict[str, int]:
        """Tokens that the run has used so far, by model."""
        return {name: meter.total_tokens for name, meter in self._meters.items()}

    def restore(self, total_tokens: Mapping[str, int]) -> None:
        """Go on counting where an earlier session of the run stopped."""
        for name, tokens in total_tokens.items():
            if name in self._meters:
                self._meters[name].add(tokens)


class AuxiliaryModels(AuxiliaryMeters):
    """All auxiliary models of a run, by name.

    Loads those that are served here; raises `ModelError` if one cannot be had or served, `ConfigError` for an unknown
    parser or a key that is not there. Close it after the rollouts have ended.
    """

    def __init__(
        self, config: RunConfig, thread: ServingThread, load: Load | None = None, *, alone: bool = True
    ) -> None:
        """`load` gives tokenizer and engine of a model that is served here; None loads it into this process."""
        super().__init__(config)

        def here(_: str, model: AuxiliaryModelConfig) -> tuple[Any, Engine]:
            return load_engine(model, config, model_folder(model.model_path), alone=alone)

        self._sources: dict[str, _Source] = {}
        try:
            for name, model in config.auxiliary_models.items():
                if model.base_url is not None:
                    self._sources[name] = RemoteModel.of(name, model)
                    continue
                self._sources[name] = _LocalModel(model, *(load or here)(name, model), thread)
        except BaseException:  # passed on; what was loaded before is let go
            self.close()
            raise

    def open(self, rollout_id: str, noise_seed: int) -> dict[str, Access]:
        """The models for one attempt, by name. From any thread."""
        return {
            name: source.open(rollout_id, _seed_for(name, noise_seed), Tally(self._meters[name]))
            for name, source in self._sources.items()
        }

    def close(self) -> None:
        """End all of them."""
        for source in self._sources.values():
            source.close()
        self._sources.clear()


class _LocalModel:
    """A model served here, with weights, tokenizer, context and sampling defaults of its own."""

    def __init__(self, model: AuxiliaryModelConfig, tokenizer: Any, engine: Engine, thread: ServingThread) -> None:
        self._engine = engine
        self._thread = thread
        self._gateway = gateway_of(model, engine, tokenizer, thread.loop)

    def open(self, rollout_id: str, noise_seed: int, tally: Tally) -> Access:
        return self._gateway.open(rollout_id, noise_seed, record=False, tally=tally)

    def close(self) -> None:
        self._thread.call(self._gateway.close(), timeout_s=10)
        self._thread.call(self._engine.close(), timeout_s=10)


def _seed_for(name: str, noise_seed: int) -> int:
    """Noise of its own for each model of a rollout."""
    return int.from_bytes(hashlib.blake2b(f"{noise_seed}|{name}".encode(), digest_size=8).digest())
