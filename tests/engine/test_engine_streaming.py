"""Requests that are told of their tokens: each one at the step that sampled it, and the same tokens as without."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from toy_engines import make_engine, make_model, prompt_of, request, run_all

from sharpen.contracts import GenerateRequest, Generation
from sharpen.engine.routing import Replicas
from sharpen.errors import EngineError, EngineLostError

LONG = {"max_tokens": 12}


def endless() -> Any:
    """A model that stops at no token."""
    model = make_model("qwen3")
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    return model


def test_all_but_the_last_ids_are_told_one_a_step() -> None:
    """Red when `watched_S` leaves such requests out, or `_accept` tells of the last id too."""
    model, told = endless(), []
    plain = [request(prompt_of(5 + n, n), noise=n, **LONG) for n in range(3)]
    expected = run_all(make_engine(model), plain)
    engine = make_engine(endless())
    steps: list[int] = []

    def on_tokens(ids: Sequence[int]) -> None:
        told.append(list(ids))
        steps.append(engine.stats.steps)

    found = run_all(engine, [plain[0], replace(plain[1], on_tokens=on_tokens), plain[2]])
    assert [one.ids.tolist() for one in found] == [one.ids.tolist() for one in expected]
    assert told == [[token] for token in found[1].ids.tolist()[:-1]]
    assert np.diff(steps).tolist() == [1] * (len(steps) - 1)


def test_new_weights_in_the_middle_repeat_no_token() -> None:
    told: list[int] = []
    engine = make_engine(endless())
    other = {name: tensor.clone() for name, tensor in make_model("qwen3", seed=1).state_dict().items()}

    async def main() -> Generation:
        asked = replace(request(prompt_of(5, 0), **LONG), on_tokens=told.extend)
        call = asyncio.ensure_future(engine.generate(asked))
        while len(told) < 4:
            await asyncio.sleep(0)
        await engine.load(1, other)
        return await call

    generation = asyncio.run(main())
    assert set(generation.versions.tolist()) == {0, 1}
    assert told == generation.ids.tolist()[:-1]


def test_a_cancelled_request_is_told_of_one_more_token_at_most() -> None:
    told: list[int] = []
    engine = make_engine(endless())

    async def main() -> int:
        asked = replace(request(prompt_of(5, 0), max_tokens=40), on_tokens=told.extend)
        call = asyncio.ensure_future(engine.generate(asked))
        while len(told) < 4:
            await asyncio.sleep(0)
        call.cancel()
        seen = len(told)
        with pytest.raises(asyncio.CancelledError):
            await call
        await engine.generate(request(prompt_of(6, 1), **LONG))  # the engine goes on without it
        return seen

    seen = asyncio.run(main())
    assert len(told) <= seen + 1


class Lost:
    """A replica that is lost after it told of so many tokens."""

    max_model_len, version = 64, 0

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    async def generate(self, request: GenerateRequest) -> Generation:
        for token in range(self.tokens):
            assert request.on_tokens is not None
            request.on_tokens([token])
        raise EngineLostError("gone")


@pytest.mark.parametrize(("tokens", "repeated"), [(0, True), (2, False)])
def test_a_stream_that_has_begun_is_not_repeated_elsewhere(tokens: int, repeated: bool) -> None:
    """Another replica may sample other tokens than those that the agent has. Red when `_Told` is not asked."""
    told: list[int] = []
    good: Any = make_engine(endless())
    lost: Any = Lost(tokens)
    asked = replace(request([5, 6, 7], **LONG), on_tokens=told.extend)

    async def main() -> Generation:
        return await Replicas([lost, good]).generate(asked)

    if repeated:
        assert told == asyncio.run(main()).ids.tolist()[:-1]
    else:
        with pytest.raises(EngineError, match="gone"):
            asyncio.run(main())
        assert told == [0, 1]
