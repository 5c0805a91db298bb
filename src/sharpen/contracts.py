"""What a part must be for others to work with it, whoever writes it: today an `Engine`.

Token ids in (`GenerateRequest`), sampled token ids out (`Generation`). An engine knows nothing of chat, tools or text,
except stop strings. Ours are in `engine/`: `embedded.EmbeddedEngine`, `vllm.VLLMEngine`, and `routing.Replicas` over
several of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from sharpen.types import Constraint, FinishReason, FloatArray, IntArray, PictureSpan, RouteArray, Sampling

if TYPE_CHECKING:
    import torch


OnTokens = Callable[[Sequence[int]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One continuation to sample.

    `noise` is a 64-bit key: the randomness of the token at position t is a function of (noise, t) only, never of other
    requests. `top_logprobs` is the number of alternatives to return at each position. `session` is a rollout's id: with
    several engines, its requests go to the engine that has its prefix cached. Empty: to any engine. With a
    `constraint`, only tokens that it allows are sampled, and their logprobs are relative to these.

    `on_tokens` is called on the serving loop with the ids that each step adds, but for those that end the generation.
    From an engine in another process, the ids of several steps may come together.

    `pictures` are the images in the prompt, in their order; their image tokens are in `prompt_ids`.
    """

    prompt_ids: IntArray
    sampling: Sampling
    noise: int
    top_logprobs: int = 0
    session: str = ""
    constraint: Constraint | None = None
    on_tokens: OnTokens | None = None
    pictures: tuple[PictureSpan, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A sampled continuation: ids (including the end token), the logprob and policy version of each, why it stopped.

    `text` is the decoded text up to the stop string if one ended the continuation, else None. `top_logprobs` holds the
    requested (id, logprob) pairs of each position. `routes_NLK` are the experts of every token of prompt and
    continuation but the last (N) in each layer of a mixture of experts (L); None for a dense model.
    """

    ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    finish_reason: FinishReason
    text: str | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    routes_NLK: RouteArray | None = None


class Engine(Protocol):
    """Serves one policy. All coroutines run on the serving loop (`placement`), where the engine also runs its steps."""

    @property
    def max_model_len(self) -> int:
        """The maximum of prompt plus sampled tokens of one request."""

    @property
    def version(self) -> int:
        """The policy version of the loaded weights."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one continuation. Cancelling the awaiting task aborts the request and frees its slot.

        `max_tokens` beyond the context is cut to what fits (finish reason "length"). Raises `ContextOverflowError` if
        the prompt leaves no room for one token, and `EngineLostError` if the engine can serve no more requests.
        """

    async def load(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load new weights (by Hugging Face parameter names) between two decode steps.

        Afterwards no token is computed from the KV of older weights, and new tokens have `version`.
        """

    async def close(self) -> None:
        """Abort running requests and free memory."""
