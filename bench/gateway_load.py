"""What the gateway keeps under load: every call where it belongs, through new weights, and streams without delay.

In: nothing. Out: a table and `bench/out/gateway_load.json`. Three scenes, each checked call by call:

- 2,000 rollouts make 10 calls each, all 20,000 in flight at the same time. Every answer is made from its own prompt, so
  that an answer or a record that went elsewhere shows: `lost` and `misattributed` calls, both 0.
- The embedded engine with a small random model, 16 agents without a pause, half of them streaming, while its weights
  are replaced 100 times: `failed_requests`, 0. `mixed_calls` began before new weights and ended after.
- One stream at a time: `first_token_steps`, the decode steps that the engine had made after the one that sampled the
  first token when its text reached the agent (median of 20 streams); at most 1. Text that may be markup is held back
  by design; there are no tools here.

    python bench/gateway_load.py [--rollouts 2000] [--moves 100]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import gateway as shared
import numpy as np
import torch
from report import finish
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from sharpen.contracts import GenerateRequest, Generation
from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.gateway.gateway import Gateway
from sharpen.types import CallStatus

CALLS, AGENTS = 10, 16
TARGETS = {"lost": 0, "misattributed": 0, "failed_requests": 0, "first_token_steps": 1}


def serving_loop() -> asyncio.AbstractEventLoop:
    """A loop that runs on a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


class Echo(shared.NullEngine):
    """Says the number in the question: the prompt's digits, in their order. Answers once everybody has asked."""

    def __init__(self, tokenizer: Any, crowd: shared.Crowd) -> None:
        super().__init__(tokenizer, crowd)
        self._digits = {tokenizer.convert_tokens_to_ids(digit) for digit in "0123456789"}
        self._end = tokenizer.eos_token_id

    async def generate(self, request: GenerateRequest) -> Generation:
        """The digits of the prompt, and the end."""
        await self._crowd.join()
        return self._generation([*(i for i in request.prompt_ids.tolist() if i in self._digits), self._end])


async def crowd(num_rollouts: int, tokenizer: Any) -> dict[str, int]:
    """All calls of all rollouts in flight at once; what was lost, and what came to another."""
    loop = serving_loop()
    gateway = Gateway(
        Echo(tokenizer, shared.Crowd(num_rollouts * CALLS)), tokenizer, model_name="m", loop=loop, tool_call_parser=None
    )
    found = {"lost": 0, "misattributed": 0}

    async def rollout(number: int) -> None:
        session = gateway.open(f"g/{number}", noise_seed=number)
        asked = [f"{number:05d}{call:02d}" for call in range(CALLS)]
        said = await asyncio.gather(*(ask(session.model, text) for text in asked))
        calls = session.close()
        used = [call for call in calls if call.status is CallStatus.USED]
        found["lost"] += CALLS - len(used)
        recorded = [(str(call.messages[0]["content"]), call.response["content"]) for call in used]
        sampled = [tokenizer.decode(call.sampled_ids_S[:-1]) for call in used]
        wrong = [pair for pair, ids in zip(recorded, sampled, strict=True) if pair[0] != pair[1] or ids != pair[0]]
        found["misattributed"] += len(wrong) + sum(one != other for one, other in zip(asked, said, strict=True))
        found["misattributed"] += len({text for text, _ in recorded} - set(asked))

    await asyncio.gather(*(rollout(number) for number in range(num_rollouts)))
    return found


async def ask(model: Any, text: str, *, stream: bool = False, **more: Any) -> str:
    """One call, whole or streamed; its text."""
    messages: Any = [{"role": "user", "content": text}]
    reply = await model.client.chat.completions.create(model="m", messages=messages, stream=stream, **more)
    if not stream:
        return reply.choices[0].message.content or ""
    return "".join([chunk.choices[0].delta.content or "" async for chunk in reply])


def small_model(tokenizer: Any, seed: int) -> Any:
    """A random model over this tokenizer, which ends nowhere of its own."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    config = Qwen3Config(
        vocab_size=len(tokenizer), num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, **sizes
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=tokenizer.pad_token_id)
    return model


async def moving_weights(tokenizer: Any, moves: int) -> dict[str, int]:
    """Agents that ask without a pause while the weights move; how many requests there were, and how many failed."""
    loop = serving_loop()
    engine = EmbeddedEngine(small_model(tokenizer, 0), max_model_len=1024, kv_cache_mb=64)
    gateway = Gateway(engine, tokenizer, model_name="m", loop=loop)
    sets = itertools.cycle(
        [{name: value.clone() for name, value in small_model(tokenizer, s).state_dict().items()} for s in (1, 2)]
    )
    found = {"requests": 0, "failed_requests": 0, "mixed_calls": 0, "moves": 0}
    moved = asyncio.Event()

    async def agent(number: int) -> None:
        for turn in itertools.count():
            session = gateway.open(f"g/{number}.{turn}", noise_seed=number)
            try:
                await ask(session.model, f"{turn} of {number}", stream=number % 2 == 0, max_tokens=24)
            except Exception as error:
                found["failed_requests"] += 1
                print("failed:", repr(error))
            found["requests"] += 1
            (call,) = session.close()
            found["failed_requests"] += int(call.status is not CallStatus.USED)
            found["mixed_calls"] += int(len(set(call.versions_S.tolist())) > 1)
            if moved.is_set():
                return

    async def move() -> None:
        for version in range(1, moves + 1):
            before = found["requests"]
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(engine.load(version, next(sets)), loop))
            found["moves"] += 1
            while found["requests"] < before + AGENTS // 2:  # some go on through it, some begin after it
                await asyncio.sleep(0.001)
        moved.set()

    await asyncio.gather(move(), *(agent(number) for number in range(AGENTS)))
    return found


class Noting(EmbeddedEngine):
    """Notes the decode step that sampled the first text: the first ids that decode to whole characters."""

    def note(self, tokenizer: Any) -> None:
        """Forget the last stream."""
        self.tokenizer, self.sampled_at = tokenizer, 0

    async def generate(self, request: GenerateRequest) -> Generation:
        """As `EmbeddedEngine`."""
        give, ids = request.on_tokens, list[int]()

        def on_tokens(new: Sequence[int]) -> None:
            ids.extend(new)
            if not self.sampled_at and not self.tokenizer.decode(ids).endswith("\ufffd"):
                self.sampled_at = self.stats.steps
            assert give is not None
            give(new)

        return await super().generate(replace(request, on_tokens=on_tokens))


async def first_token(tokenizer: Any, repeats: int = 20) -> int:
    """The decode steps by which the engine was ahead when the first text was at the agent: the median of streams."""
    loop = serving_loop()
    engine = Noting(small_model(tokenizer, 0), max_model_len=1024, kv_cache_mb=64)
    gateway = Gateway(engine, tokenizer, model_name="m", loop=loop)
    behind = []
    for number in range(repeats):
        session = gateway.open(f"g/{number}", noise_seed=number)
        engine.note(tokenizer)
        messages: Any = [{"role": "user", "content": "?"}]
        create = session.model.client.chat.completions.create
        async for chunk in await create(model="m", messages=messages, max_tokens=64, stream=True):
            if chunk.choices[0].delta.content:
                behind.append(engine.stats.steps - engine.sampled_at)
                break
        session.close()
    return int(np.median(behind))


def main() -> int:
    """Measure, print, write; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description="What the gateway keeps under load")
    parser.add_argument("--rollouts", type=int, default=2000)
    parser.add_argument("--moves", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = shared.make_tokenizer(shared.questions())
    found: dict[str, int] = asyncio.run(crowd(options.rollouts, tokenizer))
    found |= {"calls": options.rollouts * CALLS, **asyncio.run(moving_weights(tokenizer, options.moves))}
    found["first_token_steps"] = asyncio.run(first_token(tokenizer))
    return finish(
        "gateway_load", header=("what", "seen"), rows=list(found.items()), ratios=found, at_most=TARGETS, extra={}
    )


if __name__ == "__main__":
    sys.exit(main())
