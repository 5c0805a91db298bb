"""Counts the tokens that a chat model of AgentScope uses, from the usage in its responses.

In: a chat model of AgentScope 1.x or 2.x. Out: a copy that counts; the original does not change.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, kw_only=True)
class Usage:
    """Tokens used so far, and the number of answers that the agent received. If an answer reports no usage, the token
    counts are unknown (`complete` is false)."""

    input_tokens: int = 0
    output_tokens: int = 0
    num_answers: int = 0
    complete: bool = True

    def add(self, answer: Any) -> None:
        """Count an answer (of a stream, its last chunk)."""
        self.num_answers += 1
        used = getattr(answer, "usage", None)
        sizes = [getattr(used, name, None) for name in ("input_tokens", "output_tokens")]
        if not all(isinstance(size, int) for size in sizes):
            self.complete = False
            return
        self.input_tokens += sizes[0] or 0
        self.output_tokens += sizes[1] or 0


def is_countable(model: Any) -> bool:
    """Return whether `model` is a chat model of AgentScope."""
    return any(
        kind.__name__ == "ChatModelBase" and kind.__module__.split(".")[0] == "agentscope"
        for kind in type(model).__mro__
    )


def counted(model: Any, usage: Usage) -> Any:
    """Return a shallow copy of a chat model of AgentScope that adds to `usage` and shares the client."""
    kind: Any = type(model)
    twin = copy.copy(model)
    twin.__class__ = _counting(kind)
    twin.sharpen_usage = usage
    return twin


@functools.cache
def _counting(base: Any) -> Any:
    """Return a subclass of a model class, with the same name, that counts its answers.

    It overrides the method that all calls go through: `_call_api` in AgentScope 2, `__call__` in AgentScope 1.
    """
    method = "_call_api" if hasattr(base, "_call_api") else "__call__"
    inner = getattr(base, method)

    async def call(self: Any, *arguments: Any, **named: Any) -> Any:
        answer = await inner(self, *arguments, **named)
        if isinstance(answer, AsyncIterable):  # not `hasattr`: AgentScope's responses raise KeyError
            return _stream(answer, self.sharpen_usage)
        self.sharpen_usage.add(answer)
        return answer

    return type(base.__name__, (base,), {method: call, "__module__": base.__module__, "__doc__": base.__doc__})


async def _stream(chunks: Any, usage: Usage) -> AsyncIterator[Any]:
    """Yield the chunks, then count the answer, also if the agent stops reading early. A chunk's usage covers the whole
    answer so far."""
    last = None
    try:
        async for chunk in chunks:
            if last is None or getattr(chunk, "usage", None) is not None:
                last = chunk
            yield chunk
    finally:
        if last is not None:
            usage.add(last)
