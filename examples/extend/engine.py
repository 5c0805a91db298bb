"""An engine of one's own: plain forward passes of transformers, a whole sequence for each token. Slow, easy to read.

sharpen run --config run.yaml --set engine.type=examples/extend/engine.py:PlainEngine
"""

import asyncio
from collections.abc import Mapping

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from sharpen.contracts import Engine, EngineSettings, GenerateRequest, Generation
from sharpen.engine.requests import check_request, find_stop
from sharpen.errors import EngineError, ModelError, SamplingError


class PlainEngine:
    """Serves one policy. Requests take turns token by token; whatever a token needs is computed anew."""

    def __init__(self, settings: EngineSettings) -> None:
        dtype = torch.bfloat16 if settings.dtype == "bfloat16" else torch.float32
        self._model = AutoModelForCausalLM.from_pretrained(settings.folder, dtype=dtype).eval()
        self._decode = settings.tokenizer.decode
        ends = self._model.generation_config.eos_token_id
        self._end_ids = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
        self._slots = asyncio.Semaphore(settings.max_slots)
        self._running: set[asyncio.Task[Generation]] = set()
        self._closed = False
        self.max_model_len, self.version = settings.max_model_len, 0

    @classmethod
    async def start(cls, settings: EngineSettings) -> Engine:
        """Load the model of `settings.folder`."""
        return cls(settings)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one continuation."""
        if self._closed:
            raise EngineError("the engine is closed")
        if request.constraint is not None or request.pictures:
            raise SamplingError("the plain engine keeps no constraints and sees no images")
        room = check_request(
            request, max_model_len=self.max_model_len, vocab_size=self._model.config.get_text_config().vocab_size
        )
        task = asyncio.ensure_future(self._sample(request, room))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await task
        except asyncio.CancelledError:  # whoever waits was cancelled, and so the task too; or `close` did it
            if self._closed:
                raise EngineError("the engine was closed") from None
            raise

    async def load(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the weights into the model: no token is being computed now, since each is without a pause."""
        own = dict(self._model.named_parameters())
        if wrong := (own.keys() ^ tensors.keys()) - {"lm_head.weight"}:
            raise ModelError(f"weights that are missing, or that nobody knows: {sorted(wrong)[:5]}")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(tensors[name])
        self.version = version

    async def close(self) -> None:
        """Abort what runs."""
        self._closed = True
        for task in self._running:
            task.cancel()

    async def _sample(self, request: GenerateRequest, room: int) -> Generation:
        ids, logprobs, versions, top = [], [], [], []
        text, reason = None, "length"
        async with self._slots:
            while len(ids) < room and reason == "length":
                distribution, plain = self._next(request, ids)
                chosen = (
                    int(distribution.argmax())
                    if request.sampling.temperature == 0
                    else _drawn(distribution, request.noise, len(ids))
                )
                ids.append(chosen)
                logprobs.append(float(distribution[chosen]))
                versions.append(self.version)
                if request.top_logprobs:
                    best = plain.topk(request.top_logprobs)
                    top.append(tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
                if chosen in self._end_ids:
                    reason = "stop"
                elif request.sampling.stop:
                    text = find_stop(ids, request.sampling.stop, self._decode)
                    reason = "length" if text is None else "stop"
                if reason == "length" and request.on_tokens is not None:
                    request.on_tokens([chosen])
                await asyncio.sleep(0)
        return Generation(
            ids=np.asarray(ids, np.int32),
            logprobs=np.asarray(logprobs, np.float32),
            versions=np.asarray(versions, np.int32),
            finish_reason=reason,
            text=text,
            top_logprobs=tuple(top),
        )

    @torch.no_grad()
    def _next(self, request: GenerateRequest, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logprobs of the next token: those to draw from, and those of the temperature alone."""
        sampling = request.sampling
        context = torch.tensor([[*request.prompt_ids.tolist(), *ids]])
        logits = self._model(input_ids=context, use_cache=False).logits[0, -1].float() / (sampling.temperature or 1.0)
        plain = logits.log_softmax(-1)
        if sampling.temperature == 0 or sampling.full_support:
            return plain, plain
        order = logits.argsort(descending=True)
        order = order[: sampling.top_k] if sampling.top_k else order
        mass = logits[order].softmax(-1)
        kept = order[mass.cumsum(-1) - mass < sampling.top_p]
        cut = torch.full_like(logits, -torch.inf)
        cut[kept] = logits[kept]
        return cut.log_softmax(-1), plain


def _drawn(logprobs: torch.Tensor, noise: int, position: int) -> int:
    """Draw a token by randomness that is a function of (noise, position) alone."""
    uniform = np.random.default_rng((noise, position)).random()
    mass = logprobs.double().exp().cumsum(-1)
    return int(torch.searchsorted(mass, uniform * float(mass[-1]), right=True).clamp(max=len(mass) - 1))
