"""What a part must be for others to work with it, whoever writes it: ours and yours (docs/use/extending.md).

An `Engine`: token ids in (`GenerateRequest`), sampled token ids out (`Generation`). It knows nothing of chat, tools or
text, except stop strings. Ours are in `engine/`: `embedded.EmbeddedEngine`, `vllm.VLLMEngine`, and `routing.Replicas`
over several of them.

A `Sink`, of a monitor: the numbers of a run in, whatever shows them out. Ours are in `show/monitor/`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from sharpen.types import Constraint, FinishReason, FloatArray, IntArray, PictureSpan, RouteArray, Sampling, Supports

if TYPE_CHECKING:
    import torch


OnTokens = Callable[[Sequence[int]], None]
ORIGINAL = "original"
"""The adapter that a request asks for to be answered by the weights before training (`GenerateRequest.adapter`), of an
engine that keeps them beside the trained ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One continuation to sample.

    `noise` is a 64-bit key: the randomness of the token at position t is a function of (noise, t) only, never of other
    requests. `top_logprobs` is the number of alternatives to return at each position. `session` is a rollout's id: with
    several engines, its requests go to the engine that has its prefix cached. Empty: to any engine. With a
    `constraint`, only tokens that it allows are sampled, and their logprobs are relative to these.

    `on_tokens` is called on the serving loop with the ids that each step adds, but for those that end the generation.
    From an engine in another process, the ids of several steps may come together.

    `pictures` are the images in the prompt, in their order; their image tokens are in `prompt_ids`. An engine that
    keeps no constraint, or is shown no images, raises `SamplingError` for a request with them.

    `prompt_logprobs` asks for the logprobs of the prompt's own tokens, with so many alternatives at each: 0 for none.
    None: they are not computed, and what is cached of the prompt is used.

    `adapter` names one of those that the engine serves beside the model's own weights; empty: these alone. An engine
    that serves none by name raises `SamplingError`.
    """

    prompt_ids: IntArray
    sampling: Sampling
    noise: int
    top_logprobs: int = 0
    session: str = ""
    constraint: Constraint | None = None
    on_tokens: OnTokens | None = None
    pictures: tuple[PictureSpan, ...] = ()
    prompt_logprobs: int | None = None
    adapter: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """The logprobs of a prompt's tokens but the first, each given those before it, at temperature 1 and with the whole
    vocabulary; and the likeliest (id, logprob) pairs in the place of each, as many as were asked for."""

    logprobs: FloatArray
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A sampled continuation: ids (including the end token), the logprob and policy version of each, why it stopped.

    `text` is the decoded text up to the stop string if one ended the continuation, else None. `top_logprobs` holds the
    requested (id, logprob) pairs of each position. `routes_NLK` are the experts of every token of prompt and
    continuation but the last (N) in each layer of a mixture of experts (L); None for a dense model. `prompt_logprobs`
    are there if the request asks for them; None from an engine that has none, which is then refused by the gateway.
    `supports` are the ids that tokens sampled with `top_p`, `top_k` or `min_p` were drawn from; without them, only
    algorithms that need no probability ratio train such tokens.
    """

    ids: IntArray
    logprobs: FloatArray
    versions: IntArray
    finish_reason: FinishReason
    text: str | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    routes_NLK: RouteArray | None = None
    prompt_logprobs: PromptLogprobs | None = None
    supports: Supports | None = None


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

        A logprob is that of the distribution from which the token was drawn, after temperature, top-p and top-k; of a
        greedy token (temperature 0) it is that of the plain softmax. `max_tokens` beyond the context is cut to what
        fits (finish reason "length"). Raises `SamplingError` for parameters or ids that are none,
        `ContextOverflowError` if the prompt leaves no room for one token, `EngineLostError` if the engine can serve no
        more requests, and another `EngineError` if this one failed or the engine is closed.
        """

    async def load(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load new weights (all parameters by Hugging Face names) between two decode steps: requests go on.

        The tensors are the trainer's own, which it changes later: copy what is kept. Afterwards no token is computed
        from the KV of older weights, and new tokens have `version`. Raises `ModelError` for wrong names or shapes, and
        then has the weights of before.
        """

    async def close(self) -> None:
        """Abort running requests and free memory. Closing again does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What an engine is started with: the folder of a Hugging Face model, its tokenizer (for stop strings and
    constraints alone), and the settings of `engine` and `model`.

    `device` is `auto`, `cpu`, `cuda` or `cuda:<number>`, `dtype` is `auto`, `float32` or `bfloat16`. `kv_cache_mb` None
    leaves the size of the cache to the engine. `alone`: nothing else in this process computes at the same time.
    """

    folder: Path
    tokenizer: Any
    max_model_len: int
    device: str
    dtype: str
    max_slots: int
    kv_cache_mb: int | None
    tensor_parallel_size: int
    alone: bool


StartEngine = Callable[[EngineSettings], Awaitable[Engine]]
"""What `engine.type` names: a coroutine function, or a class with `async def start(settings)`, that starts an engine
with the weights of its folder as version 0. It runs on the serving loop. Raises `ModelError` for a model that the
engine cannot serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitoredRun:
    """The run that a monitor shows: its folder, its project and name, and its settings (flat: `{"loss.kl": "k3"}`).

    A monitor that keeps files keeps them below `run_dir / "monitor"`, which exists. `resume_step` is the step from
    which a run goes on: what was written of later steps comes again. None in a run that begins.
    """

    run_dir: Path
    project: str
    name: str
    settings: Mapping[str, Any]
    resume_step: int | None = None


class Sink(Protocol):
    """Where a monitor's numbers go: `monitor_type` names a class that makes one of a `MonitoredRun`.

    It is made, called and closed on one thread, which is no other part's: it may take its time. What it raises neither
    ends nor holds the run: the same call comes again, with what is new or after a while. So it is in order, and a call
    that raised may have been taken.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write numbers of a step, named `reward/mean`; some may be NaN or infinite. A step has several calls. If they
        go to a file, they survive a kill of the process once this returns."""

    def close(self) -> None:
        """Finish writing."""


Rows = Sequence[Mapping[str, str | float | None]]
"""A table: rows with the same columns in the same order."""


@runtime_checkable
class TakesSamples(Protocol):
    """A sink that can also show texts."""

    def sample(self, step: int, text: str) -> None:
        """Show what the model said in a step, in Markdown."""


@runtime_checkable
class TakesRollouts(Protocol):
    """A sink that can also show tables: `monitor_rollouts` asks for them."""

    def rollouts(self, step: int, rows: Rows) -> None:
        """Show rollouts of a step, a row each; there is at least one."""


RowSource = Callable[[str | None, str | None], Iterable[Mapping[str, Any]]]
"""What `path` of a dataset may name: a function of the dataset's `name` and `split` that gives its rows, each a mapping
of names to values. The same rows come in the same order at every call: a row's place is the id of its task, and a run
that goes on compares them. A sequence is read row by row, in any order; anything else whole. Raises any error for a
name or a split that it does not have."""
