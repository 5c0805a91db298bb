"""What the tests with real vLLM share: an engine on a serving thread, the quickstart's model, requests, and scores."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Collection, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from vllm_forked import FORKED

from sharpen.contracts import GenerateRequest, Generation
from sharpen.engine.embedded.sampling import truncated_log_softmax
from sharpen.placement.serving import ServingThread
from sharpen.types import Sampling

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
MAX_MODEL_LEN = 512


def vllm_processes() -> list[psutil.Process]:
    """The processes of vLLM that this one has started and that have not ended."""
    found = psutil.Process().children(recursive=True)
    running = [process for process in found if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    return [process for process in running if process.name().startswith("VLLM")]


def vllm_left(known: Collection[int] = ()) -> list[psutil.Process]:
    """Those of them, but for the known ones, that do not end within a while: a killed one takes its time on a busy
    machine."""
    deadline = time.monotonic() + 120
    while True:
        left = [process for process in vllm_processes() if process.pid not in known]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


class Served:
    """An engine on a serving thread, driven from the test's."""

    def __init__(self, engine: Any, thread: ServingThread) -> None:
        self.engine, self.thread = engine, thread

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.thread.call(coroutine, timeout_s=300)

    def generate(self, *requests: GenerateRequest) -> list[Generation]:
        async def together() -> list[Generation]:
            return list(await asyncio.gather(*(self.engine.generate(request) for request in requests)))

        return list(self.run(together()))


def start(thread: ServingThread | None = None, model_path: str = str(MODEL), **settings: Any) -> Served:
    from transformers import AutoTokenizer

    from sharpen.engine.vllm.engine import VLLMEngine

    thread = thread or ServingThread()
    decode = AutoTokenizer.from_pretrained(MODEL).decode
    settings = {"stop_decoder": decode, "max_model_len": MAX_MODEL_LEN, "max_slots": 32, "kv_cache_mb": 128, **settings}
    return Served(thread.call(VLLMEngine.start(model_path, **settings)), thread)


@contextlib.contextmanager
def as_for_users() -> Iterator[None]:
    """vLLM's processes that start here import all anew, have vLLM's threads, and compile its helpers."""
    kept = {name: os.environ.pop(name) for name in ("TORCHDYNAMO_DISABLE", FORKED)}
    try:
        yield
    finally:
        os.environ.update(kept)


@contextlib.asynccontextmanager
async def frozen(engine: Any) -> AsyncIterator[None]:
    """vLLM computes nothing: no call ends, however long the machine takes."""
    await engine._llm.pause_generation(mode="keep", clear_cache=False)
    yield
    await engine._llm.resume_generation()


async def begun(engine: Any, *requests: GenerateRequest) -> list[asyncio.Task[Generation]]:
    """Calls that vLLM knows of; for a frozen engine, where none ends before all are known."""
    before = engine._llm.get_num_unfinished_requests()
    calls = [asyncio.ensure_future(engine.generate(request)) for request in requests]
    while engine._llm.get_num_unfinished_requests() < before + len(calls):
        assert not any(call.done() for call in calls)
        await asyncio.sleep(0.01)
    return calls


@contextlib.contextmanager
def endless(engine: Any) -> Iterator[None]:
    """Calls that begin here end at their `max_tokens` alone."""
    engine._end_ids, ends = [], engine._end_ids
    yield
    engine._end_ids = ends


async def generating(engine: Any, *requests: GenerateRequest) -> list[asyncio.Task[Generation]]:
    """Calls that have sampled a token each, and go on; the engine has no others."""
    calls = [asyncio.ensure_future(engine.generate(request)) for request in requests]
    states = engine._llm.output_processor.request_states
    while len(states) < len(calls) or not all(one.detokenizer.num_output_tokens() for one in states.values()):
        assert not any(call.done() for call in calls)
        await asyncio.sleep(0.001)
    return calls


def read_model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval().requires_grad_(False)


def weights(model: Any) -> Mapping[str, torch.Tensor]:
    return dict(model.named_parameters())


def request(
    prompt: list[int], *, noise: int = 1, top_logprobs: int = 0, max_tokens: int = 24, **sampling: Any
) -> GenerateRequest:
    return GenerateRequest(
        prompt_ids=np.asarray(prompt, dtype=np.int32),
        sampling=Sampling(max_tokens=max_tokens, **sampling),
        noise=noise,
        top_logprobs=top_logprobs,
    )


def scored(model: Any, asked: GenerateRequest, generation: Generation) -> np.ndarray:
    """Logprobs of the sampled ids under the model's own forward pass, in the distribution that was asked for."""
    ids = [*asked.prompt_ids.tolist(), *generation.ids.tolist()]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, len(asked.prompt_ids) - 1 : -1].float()
    sampling = asked.sampling
    if sampling.temperature > 0:
        logits = logits / sampling.temperature
    rows = len(logits)
    cut = (torch.full((rows,), value) for value in (sampling.top_p, sampling.top_k, sampling.min_p))
    distribution = truncated_log_softmax(logits, *cut)
    return distribution.gather(1, torch.tensor(generation.ids.tolist()).unsqueeze(1)).squeeze(1).numpy()
