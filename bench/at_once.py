"""What `capacity.py` puts where a model, an agent and a trainer are: each does its part of a run and computes nothing.

In: the engine's contract, a task, drawn batches. Out: `AtOnce` answers at once with tokens of a recorded text; `Asker`
makes calls in one conversation, by the SDK in the process, by the SDK over HTTP, or over HTTP without an SDK;
`NoTrainer` says what a trainer says after a step, without an update.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx2
import numpy as np
from openai import AsyncOpenAI

from sharpen import JudgeOutput, WorkflowOutput
from sharpen.contracts import Engine, EngineSettings, GenerateRequest, Generation
from sharpen.learning.experience.draw import Batch
from sharpen.learning.trainer.measured import StepMetrics
from sharpen.types import CallEntropies, Experience

QUESTIONS = Path(__file__).parent.parent / "examples" / "quickstart" / "data" / "train.jsonl"
ENTROPY = 0.5
"""In nats, and a token's logprob with the other sign: about what a model has that has learnt its task."""


class AtOnce:
    """An engine whose tokens are those of the quickstart's questions, from a place that the request's noise chooses, so
    that rollouts differ. With `hold`, nobody is answered before so many wait; then `when_full` is called first."""

    def __init__(self, settings: EngineSettings) -> None:
        questions = [json.loads(line)["question"] for line in QUESTIONS.read_text().splitlines()[:400]]
        ids = [settings.tokenizer.encode(f"{question} ", add_special_tokens=False) for question in questions]
        self._places = sum(map(len, ids))
        self._ids = np.resize(np.concatenate(ids).astype(np.int32), self._places + settings.max_model_len)
        self._logprobs = np.full(settings.max_model_len, -ENTROPY, np.float32)
        self._versions = np.zeros(settings.max_model_len, np.int32)
        self.max_model_len, self.version = settings.max_model_len, 0
        self.hold = 0
        self.when_full: Any = None
        self._waiting: list[asyncio.Future[None]] = []

    @classmethod
    async def start(cls, settings: EngineSettings) -> Engine:
        """Read the text."""
        return cls(settings)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return `max_tokens` tokens."""
        if self.hold:
            await self._join()
        size = request.sampling.max_tokens
        assert size is not None, "the agents here say how many tokens they want"
        place = request.noise % self._places
        return Generation(
            ids=self._ids[place : place + size].copy(),  # of its own, as memory is measured
            logprobs=self._logprobs[:size].copy(),
            versions=self._versions[:size].copy(),
            finish_reason="length",
        )

    async def load(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Nothing to load: `NoTrainer` has no new version."""

    async def close(self) -> None:
        """Nothing to close."""

    async def _join(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        if len(self._waiting) == self.hold:
            self.when_full()
            waiting, self._waiting, self.hold = self._waiting, [], 0
            for one in waiting:
                one.set_result(None)
        await future


@dataclass(frozen=True, kw_only=True)
class Asker:
    """The agent: so many calls in one conversation, of so many sampled tokens each. `way`: `in process`, `http` (both
    by OpenAI's client) or `raw` (over HTTP by aiohttp)."""

    way: str
    calls: int
    tokens: int

    async def talk(self, task: dict[str, Any], model: Any) -> WorkflowOutput:
        """The workflow."""
        if self.way == "in process":
            return await self._by_sdk(model.client, task, model)
        if self.way == "http":
            async with httpx2.AsyncClient(timeout=None, trust_env=False, verify=False) as http_client:
                options: Any = {"http_client": http_client, "max_retries": 0}
                return await self._by_sdk(
                    AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, **options), task, model
                )
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {model.api_key}"}) as session:
            messages = [_user(task["question"])]
            text = ""
            for number in range(self.calls):
                body = {"model": model.name, "messages": messages, "max_tokens": self.tokens}
                async with session.post(f"{model.base_url}/chat/completions", json=body) as reply:
                    text = (await reply.json())["choices"][0]["message"]["content"]
                messages += [{"role": "assistant", "content": text}, _user(f"And {number}?")]
        return WorkflowOutput(response=text)

    async def _by_sdk(self, client: Any, task: dict[str, Any], model: Any) -> WorkflowOutput:
        messages = [_user(task["question"])]
        text = ""
        for number in range(self.calls):
            reply = await client.chat.completions.create(model=model.name, messages=messages, max_tokens=self.tokens)
            text = reply.choices[0].message.content
            messages += [{"role": "assistant", "content": text}, _user(f"And {number}?")]
        return WorkflowOutput(response=text)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def judge(task: dict[str, Any], response: Any) -> JudgeOutput:
    """Return 1 or 0, about equally often."""
    return JudgeOutput(reward=float(zlib.crc32(str(response).encode()) % 2))


class NoTrainer:
    """Satisfies of `AnyTrainer` what a run without evaluation and checkpoints asks of it. Its version stays 0."""

    version = 0
    rounding = None
    lines: Sequence[str] = ()

    def save_start(self, folder: Path) -> None:
        """Save nothing."""

    def train_step(self, batches: Sequence[Batch], *, step: int, probe: Sequence[Experience] = ()) -> StepMetrics:
        """Return what is measured in a step of equal entropies, and train nothing."""
        experiences = [one for batch in batches for one in batch.experiences]
        loss_tokens = sum(batch.num_loss_tokens for batch in batches)
        tokens = sum(len(one.ids_T) for one in experiences)
        return StepMetrics(
            version=0,
            num_updates=len(batches),
            trained_tokens=loss_tokens,
            computed_tokens=tokens,
            sequence_tokens=tokens,
            skipped_tokens=0,
            seconds=0.0,
            values={"loss": 0.0, "entropy": ENTROPY},
            entropies=tuple(found for one in experiences for found in _entropies(one)),
        )


def _entropies(experience: Experience) -> list[CallEntropies]:
    places_S = np.flatnonzero(experience.loss_mask_T)
    calls_S = experience.calls_T[places_S]
    found = []
    for of_call_S in np.split(places_S, np.flatnonzero(np.diff(calls_S)) + 1):
        size = len(of_call_S)
        found.append(
            CallEntropies(
                rollout_id=experience.rollout_id,
                call=int(experience.calls_T[of_call_S[0]]),
                places_S=of_call_S.astype(np.int32),
                entropies_S=np.full(size, ENTROPY, np.float16),
                log_ratios_S=np.zeros(size, np.float16),
                clipped_S=np.zeros(size, bool),
                entropy=ENTROPY * size,
                varentropy=float(size),
                cumulative=size / 2,
            )
        )
    return found
