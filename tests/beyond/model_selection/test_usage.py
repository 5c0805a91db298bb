"""Tokens of AgentScope's models, read from their answers: plain ones, streams, and answers that do not say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable
from dataclasses import dataclass
from typing import Any

import pytest

from sharpen.beyond.trials.models import Usage, counted, is_countable


@dataclass
class ChatUsage:
    input_tokens: int
    output_tokens: int


@dataclass
class ChatResponse:
    """As AgentScope's, which answers `hasattr` with a KeyError."""

    usage: ChatUsage | None

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


ChatModelBase = type("ChatModelBase", (), {"__module__": "agentscope.model._model_base"})


class Scripted(ChatModelBase):  # type: ignore[misc,valid-type]
    """Answers with the usages that it was given: a list of them is a stream."""

    def __init__(self, *script: Any) -> None:
        self.script, self.client = list(script), object()

    async def __call__(self, messages: list[Any]) -> Any:
        usage = self.script.pop(0)
        if not isinstance(usage, list):
            return ChatResponse(usage)

        async def stream() -> Any:
            for one in usage:
                yield ChatResponse(one)

        return stream()


async def use(model: Any, times: int) -> None:
    for _ in range(times):
        answer = await model([])
        if isinstance(answer, AsyncIterable):
            assert len([chunk async for chunk in answer]) == 3


def test_plain_answers_and_streams_are_added_up() -> None:
    model, usage = Scripted(ChatUsage(10, 3), [ChatUsage(5, 1), ChatUsage(5, 2), None]), Usage()
    copy = counted(model, usage)
    asyncio.run(use(copy, 2))
    assert usage == Usage(input_tokens=15, output_tokens=5, num_answers=2)
    assert isinstance(copy, Scripted)
    assert type(copy).__name__ == "Scripted"
    assert copy.client is model.client
    assert not hasattr(model, "sharpen_usage")


def test_a_stream_that_is_left_early_counts_what_is_known() -> None:
    async def leave() -> None:
        chunks = await counted(Scripted([ChatUsage(5, 1), ChatUsage(5, 2)]), usage)([])
        async for _ in chunks:
            break
        await chunks.aclose()

    usage = Usage()
    asyncio.run(leave())
    assert usage == Usage(input_tokens=5, output_tokens=1, num_answers=1)


def test_two_copies_count_apart() -> None:
    model, first, second = Scripted(*[ChatUsage(1, 1)] * 3), Usage(), Usage()
    one, other = counted(model, first), counted(model, second)
    asyncio.run(use(one, 2))
    asyncio.run(use(other, 1))
    assert (first.input_tokens, second.input_tokens) == (2, 1)


@pytest.mark.parametrize("said", [None, ChatUsage(1, None)])  # type: ignore[arg-type]
def test_an_answer_that_does_not_say_makes_the_count_unknown(said: Any) -> None:
    usage = Usage()
    asyncio.run(use(counted(Scripted(ChatUsage(1, 1), said), usage), 2))
    assert (usage.num_answers, usage.complete) == (2, False)


def test_only_models_of_agentscope_can_be_counted() -> None:
    assert is_countable(Scripted())
    assert not is_countable(object())
    assert not is_countable("gpt")
