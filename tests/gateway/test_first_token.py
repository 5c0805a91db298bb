"""The first text reaches the agent before the decode step after the one that sampled it has ended. Counts steps, not
time: that later step waits, within the engine, for the agent's word."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from scripted import ServingLoop
from transformers import AutoTokenizer

from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.gateway.exchange import RawRequest, Reply, Stream
from sharpen.gateway.gateway import Gateway
from sharpen.gateway.transport import _Job

ASKED: Any = {"model": "toy", "messages": [{"role": "user", "content": "?"}], "stream": True, "stop": ["@@@@"]}
PATIENCE_S = 120
"""How long a step waits, which only a failing test needs."""


class Steps:
    """Looks for stop strings, as an engine does within each step. A step after the first text was sampled does not end
    until the agent has it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.arrived = threading.Event()
        self.late = False

    def __call__(self, ids: list[int]) -> str:
        before = self._tokenizer.decode(ids[:-1])
        if before and not before.endswith("\ufffd") and not self.late:
            self.late = not self.arrived.wait(PATIENCE_S)
        return str(self._tokenizer.decode(ids))


@pytest.fixture(scope="module")
def stepping(toy_model_dir: Path, serving: ServingLoop) -> Iterator[tuple[Gateway, Steps]]:
    """A gateway over the embedded engine; `Steps` hold it."""
    tokenizer = AutoTokenizer.from_pretrained(toy_model_dir)
    steps = Steps(tokenizer)
    engine = EmbeddedEngine.from_pretrained(str(toy_model_dir), max_model_len=128, kv_cache_mb=8, stop_decoder=steps)
    gateway = Gateway(engine, tokenizer, model_name="toy", loop=serving.loop)
    yield gateway, steps
    serving.run(gateway.close())
    serving.run(engine.close())


async def ask_async(model: Any, steps: Steps) -> None:
    async for chunk in await model.client.chat.completions.create(max_tokens=12, **ASKED):
        if chunk.choices and chunk.choices[0].delta.content:
            steps.arrived.set()


def ask_blocking(client: Any, steps: Steps) -> None:
    for chunk in client.chat.completions.create(max_tokens=12, **ASKED):
        if chunk.choices and chunk.choices[0].delta.content:
            steps.arrived.set()


@pytest.mark.parametrize("way", ["async", "blocking", "http"])
def test_the_first_text_is_at_the_agent_within_one_step(stepping: tuple[Gateway, Steps], way: str) -> None:
    gateway, steps = stepping
    steps.arrived.clear()
    steps.late = False
    session = gateway.open("g/0", noise_seed=3)
    model = session.model
    if way == "async":
        asyncio.run(ask_async(model, steps))
    elif way == "blocking":
        ask_blocking(model.sync_client, steps)
    else:
        with openai.OpenAI(base_url=model.base_url, api_key=model.api_key, max_retries=0) as client:
            ask_blocking(client, steps)
    (call,) = session.close()
    assert len(call.sampled_ids_S) == 12
    assert steps.arrived.is_set()
    assert not steps.late, "the text came after the end of the step that followed"


def test_a_stream_whose_reader_left_before_its_reply_came_is_stopped() -> None:
    async def scene() -> bool:
        async def sample() -> None:
            await asyncio.Event().wait()

        stream = Stream()
        stream.task = asyncio.create_task(sample())

        async def reply() -> Reply:
            return Reply(status=200, content_type="text/event-stream", stream=stream)

        replied = asyncio.Event()
        raw = RawRequest(method="POST", path="/v1/chat/completions", key="", retry=0, body=b"", caller=None)
        job = _Job(lambda _: asyncio.create_task(reply()), raw, lambda _: replied.set())
        job.run()
        await replied.wait()
        job.cancel()
        await asyncio.wait({stream.task}, timeout=PATIENCE_S)
        return stream.task.cancelled()

    assert asyncio.run(scene())
