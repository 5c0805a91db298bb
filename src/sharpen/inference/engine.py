"""The engine interface: token ids in, sampled token ids out. Knows nothing of chat, tools, or text (but for stop
strings).

In: `GenerateRequest`. Out: `Generation`. Implementations: `embedded.EmbeddedEngine`, `vllm.VLLMEngine`,
and `routing.Replicas` over several of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from sharpen.types import FinishReason, FloatArray, IntArray, Sampling

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One continuation to sample.

    `noise` is a 64-bit key: the randomness of the token at position t is a function of (noise, t) alone, never of what
    else the engine is doing. `top_logprobs` asks for that many alternatives at each position. `session` says who asks
    (a rollout's id): where several engines serve, its requests go to the one that has its prefix. Empty: to any.
    """

    prompt_ids: IntArray
    sampling: Sampling
    noise: int
    top_logprobs: int = 0
    session: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What was sampled: ids (the end token included), the logprob and policy version of each, why it stopped.

    `text` is None unless a stop string ended it: then the decoded text up to the stop string. `top_logprobs` holds, for
    each position, the (id, logprob) pairs asked for.
    """

    ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    finish_reason: FinishReason
    text: str | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()


class Engine(Protocol):
    """Serves one policy. All coroutines run on the serving loop (`execution`), where the engine also does its steps."""

    @property
    def max_model_len(self) -> int:
        """Prompt plus sampled tokens of one request, at most."""

    @property
    def version(self) -> int:
        """Policy version of the weights in place."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one continuation. Cancelling the awaiting task aborts the request and frees its slot.

        Raises `ContextOverflowError` if the prompt leaves no room for one token. `max_tokens` beyond the context is
        cut to what fits (finish reason "length"). `EngineLostError` says that the engine is of no use any more.
        """

    async def load(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy new weights in (Hugging Face parameter names) between two decode steps.

        Afterwards no token is computed from KV of older weights, and new tokens carry `version`.
        """

    async def close(self) -> None:
        """Abort what is running and free memory."""
