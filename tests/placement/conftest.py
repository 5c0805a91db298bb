"""Auxiliary models over a scripted endpoint and over tiny real engines, closed at the end of each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_endpoint import FakeEndpoint, completion

from sharpen.agent.rollout.models import RolloutModels
from sharpen.config.public import DatasetConfig, TunerModelConfig
from sharpen.config.run import AuxiliaryModelConfig, RunConfig
from sharpen.placement.auxiliary.models import AuxiliaryModels, loading
from sharpen.placement.serving import ServingThread

MakeConfig = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def endpoint_server() -> Iterator[FakeEndpoint]:
    server = FakeEndpoint()
    yield server
    server.stop()


@pytest.fixture
def endpoint(endpoint_server: FakeEndpoint) -> FakeEndpoint:
    """The module's server, as new."""
    endpoint_server.bodies.clear()
    endpoint_server.headers.clear()
    endpoint_server.keys.clear()
    endpoint_server.others.clear()
    endpoint_server.answer = lambda body: completion()
    return endpoint_server


@pytest.fixture
def make_config(toy_model_dir: Path) -> MakeConfig:
    """A run's configuration with auxiliary models: keyword arguments are names and settings."""

    def make(**auxiliary: dict[str, Any]) -> RunConfig:
        return RunConfig(
            train_dataset=DatasetConfig(path="none"),
            model=TunerModelConfig(model_path=str(toy_model_dir), max_model_len=64, max_tokens=4),
            auxiliary_models={
                name: AuxiliaryModelConfig(**{"model_path": "m", "max_model_len": 64, **settings})
                for name, settings in auxiliary.items()
            },
        )

    return make


@dataclass
class WithoutPolicy:
    """Opens the models of attempts that make no call of the policy."""

    auxiliary: AuxiliaryModels

    def open(self, rollout_id: str, noise_seed: int) -> RolloutModels:
        nothing: Any = SimpleNamespace(model=None, counts={}, close=tuple, discard=tuple)
        return RolloutModels(nothing, self.auxiliary.open(rollout_id, noise_seed))


@pytest.fixture
def open_models() -> Iterator[Any]:
    """Start the auxiliary models of a configuration."""
    thread = ServingThread()
    started: list[AuxiliaryModels] = []

    def start(config: RunConfig) -> WithoutPolicy:
        load = loading(config.engine, deterministic=config.deterministic)
        started.append(AuxiliaryModels(config.auxiliary_models, thread, load, listen=config.gateway))
        return WithoutPolicy(started[-1])

    yield start
    for models in started:
        models.close()
    thread.close()
