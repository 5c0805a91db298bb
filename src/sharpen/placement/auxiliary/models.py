"""The auxiliary models of a run, each served by its own engine and gateway, or by an endpoint.

In: `auxiliary_models` of the configuration, the serving thread. Out: for each attempt its own `Access` to each model,
so that usage is counted on the right rollout. Their calls are not recorded and never trained on, and their weights
never change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from sharpen.agent.rollout.models import Access
from sharpen.config.run import AuxiliaryModelConfig, EngineConfig
from sharpen.config.sections import GatewayConfig
from sharpen.contracts import Engine
from sharpen.gateway.meter import Meter, Tally
from sharpen.models.files import model_folder
from sharpen.placement.auxiliary.remote import RemoteModel
from sharpen.placement.engines import load_engine, make_gateway
from sharpen.placement.serving import ServingThread

Load = Callable[[str, AuxiliaryModelConfig], tuple[Any, Engine]]
"""(name, settings) -> (tokenizer, engine)."""


def loading(engine: EngineConfig, *, deterministic: bool, alone: bool = True) -> Load:
    """Return what loads a model into this process, with the settings of the run's engine."""

    def load(_: str, model: AuxiliaryModelConfig) -> tuple[Any, Engine]:
        return load_engine(model, engine, model_folder(model.model_path), deterministic=deterministic, alone=alone)

    return load


class _Source(Protocol):
    """One auxiliary model of a run."""

    def open(self, rollout_id: str, noise_seed: int, tally: Tally) -> Access: ...
    def close(self) -> None: ...


class AuxiliaryMeters:
    """The tokens used of each auxiliary model of a run, by name."""

    def __init__(self, models: Mapping[str, AuxiliaryModelConfig]) -> None:
        self._meters = {name: Meter(name, model.model_path, model.max_total_tokens) for name, model in models.items()}

    @property
    def total_tokens(self) -> dict[str, int]:
        """Tokens that the run has used so far, by model."""
        return {name: meter.total_tokens for name, meter in self._meters.items()}

    def restore(self, total_tokens: Mapping[str, int]) -> None:
        """Continue the counts of an earlier session of the run."""
        for name, tokens in total_tokens.items():
            if name in self._meters:
                self._meters[name].add(tokens)


class AuxiliaryModels(AuxiliaryMeters):
    """All auxiliary models of a run, by name.

    Loads the models that are served here. Raises `ModelError` if one cannot be found or served, `ConfigError` for
    an unknown parser or a missing key. Close it after the rollouts have ended.
    """

    def __init__(
        self,
        models: Mapping[str, AuxiliaryModelConfig],
        thread: ServingThread,
        load: Load,
        *,
        listen: GatewayConfig,
    ) -> None:
        """`load` returns tokenizer and engine of a model without an endpoint; see `loading`."""
        super().__init__(models)
        listen = listen.model_copy(update={"port": 0})  # the port is the trained model's
        self._sources: dict[str, _Source] = {}
        try:
            for name, model in models.items():
                if model.base_url is not None:
                    self._sources[name] = RemoteModel.of(name, model, listen)
                    continue
                self._sources[name] = _LocalModel(model, *load(name, model), thread, listen)
        except BaseException:  # whatever it is: close the models loaded before
            self.close()
            raise

    def open(self, rollout_id: str, noise_seed: int) -> dict[str, Access]:
        """Open the models for one attempt, by name. From any thread."""
        return {
            name: source.open(rollout_id, _seed_for(name, noise_seed), Tally(self._meters[name]))
            for name, source in self._sources.items()
        }

    def close(self) -> None:
        """Close all models."""
        for source in self._sources.values():
            source.close()
        self._sources.clear()


class _LocalModel:
    """A model served here, with its own weights, tokenizer, context length and sampling defaults."""

    def __init__(
        self,
        model: AuxiliaryModelConfig,
        tokenizer: Any,
        engine: Engine,
        thread: ServingThread,
        listen: GatewayConfig,
    ) -> None:
        self._engine = engine
        self._thread = thread
        self._gateway = make_gateway(model, engine, tokenizer, thread.loop, listen=listen)

    def open(self, rollout_id: str, noise_seed: int, tally: Tally) -> Access:
        return self._gateway.open(rollout_id, noise_seed, record=False, tally=tally)

    def close(self) -> None:
        self._thread.call(self._gateway.close(), timeout_s=10)
        self._thread.call(self._engine.close(), timeout_s=10)


def _seed_for(name: str, noise_seed: int) -> int:
    """Return a different seed for each model of a rollout."""
    return int.from_bytes(hashlib.blake2b(f"{noise_seed}|{name}".encode(), digest_size=8).digest())
