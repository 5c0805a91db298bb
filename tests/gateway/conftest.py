"""Fixtures of the gateway's tests: a serving loop, toy tokenizers, and a gateway over a scripted engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from rollout_fixtures import serving, tokenizer
from scripted import Script, ScriptedEngine, ServingLoop

from sharpen.gateway.gateway import Gateway
from sharpen.gateway.session import Session

__all__ = ["serve", "serving", "tokenizer"]


@dataclass
class Served:
    """A gateway, its engine and its loop."""

    gateway: Gateway
    engine: ScriptedEngine
    serving: ServingLoop

    def open(self, rollout_id: str = "g/0", **options: Any) -> Session:
        return self.gateway.open(rollout_id, **{"noise_seed": 7, **options})


@pytest.fixture
def serve(serving: ServingLoop, tokenizer: Any) -> Iterator[Callable[..., Served]]:
    """Make a gateway over a script: `serve(script, tokenizer=..., max_model_len=..., **options of Gateway)`."""
    gateways: list[Gateway] = []

    def make(script: Script | str, *, tokenizer: Any = tokenizer, max_model_len: int = 4096, **options: Any) -> Served:
        answer = script if callable(script) else lambda request: script
        engine = ScriptedEngine(tokenizer, answer, max_model_len=max_model_len)
        gateway = Gateway(engine, tokenizer, model_name="toy", loop=serving.loop, **options)
        gateways.append(gateway)
        return Served(gateway, engine, serving)

    yield make
    for gateway in gateways:
        serving.run(gateway.close())
