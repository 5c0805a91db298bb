"""What stands where a model and a trainer are, in the benchmark of capacity."""

import asyncio
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sharpen.contracts import GenerateRequest
from sharpen.types import Sampling

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    module = importlib.import_module("at_once")
    tokenizer = SimpleNamespace(encode=lambda text, **_: [len(word) for word in text.split()])
    yield asyncio.run(module.AtOnce.start(SimpleNamespace(tokenizer=tokenizer, max_model_len=4096)))
    del sys.modules["at_once"]


def request(noise, size):
    return GenerateRequest(prompt_ids=np.zeros(1, np.int32), sampling=Sampling(max_tokens=size), noise=noise)


def test_the_engine_gives_as_many_tokens_as_are_asked_for_and_others_for_other_noise(engine):
    """Break: the text without what is behind its end, and the last noise gives too few."""
    for noise in (0, 1, engine._places - 1, 2**64 - 1):
        found = asyncio.run(engine.generate(request(noise, 1000)))
        assert len(found.ids) == len(found.logprobs) == len(found.versions) == 1000
    first, again, other = (asyncio.run(engine.generate(request(noise, 64))).ids.tolist() for noise in (5, 5, 6))
    assert first == again != other


def test_nobody_is_answered_before_all_wait(engine):
    """Break: `hold` that is never set back, and the next call waits for ever."""
    seen = []
    engine.hold, engine.when_full = 3, lambda: seen.append(len(engine._waiting))

    async def all_three():
        return await asyncio.gather(*(engine.generate(request(noise, 4)) for noise in range(3)))

    assert len(asyncio.run(all_three())) == 3
    assert seen == [3]
    last = asyncio.run(asyncio.wait_for(engine.generate(request(9, 4)), timeout=5))
    assert len(last.ids) == 4
