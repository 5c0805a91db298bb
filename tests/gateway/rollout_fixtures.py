"""Fixtures of the tests with real agents: rollouts through a gateway over a scripted engine.

A conftest imports them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scripted import ServingLoop, toy_tokenizer
from scripted_rollouts import Rollouts, Script, rollouts_of

__all__ = ["rollouts", "serving", "tokenizer"]


@pytest.fixture(scope="session")
def serving() -> Iterator[ServingLoop]:
    loop = ServingLoop()
    yield loop
    loop.stop()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return toy_tokenizer()


@pytest.fixture
def rollouts(serving: ServingLoop, tokenizer: Any) -> Iterator[Callable[..., Rollouts]]:
    """`rollouts(script)`: the script says what the model samples, from the text of its prompt."""
    made: list[Rollouts] = []

    def make(script: Script | str, **options: Any) -> Rollouts:
        made.append(rollouts_of(tokenizer, serving, script, **options))
        return made[-1]

    yield make
    for each in made:
        serving.run(each.gateway.close())
