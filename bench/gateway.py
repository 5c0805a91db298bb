"""What the gateway adds to a call: CPU time beyond the SDK's own, with 1,000 rollouts in flight.

In: nothing (a tokenizer is made here from the quickstart's questions, its chat template is the quickstart's). Out: a
table and `bench/out/gateway.json` with `added_cpu_ms` (in-process, at most 1.0) and `http_added_cpu_ms` (reported:
sockets, client and server side together, 64 rollouts at a time).

Each rollout opens a session, asks two questions (a tool call, then an answer; tool schema in the prompt), and closes.
The other side is the same agent and SDK on a transport that answers from memory. All 1,000 wait at the same time:
neither side answers before every rollout has asked. CPU time is of the whole process (`time.process_time`).

    python bench/gateway.py [--rollouts 1000] [--repeats 5] [--profile]
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import pstats
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from openai import AsyncOpenAI
from report import finish
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sharpen.gateway.gateway import Gateway
from sharpen.inference.engine import GenerateRequest, Generation

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart"
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Work out an expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
SAID = ('<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 * (3 + 4)"}}\n</tool_call>', "#### 84")
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
NUM_CALLS = 2
HTTP_CONNECTIONS = 64
GROUP_SIZE = 8


def questions() -> list[str]:
    """The quickstart's training questions."""
    lines = (QUICKSTART / "data" / "train.jsonl").read_text().splitlines()
    return [str(json.loads(line)["question"]) for line in lines]


def make_tokenizer(texts: list[str]) -> Any:
    """A byte-level BPE in the quickstart's manner."""
    bpe = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        [*texts[:2000], *SAID, json.dumps(TOOL)],
        trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False),
    )
    bpe.add_special_tokens([AddedToken(text, special=True) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    bpe.add_tokens([AddedToken(text, special=False) for text in ("<tool_call>", "</tool_call>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = (QUICKSTART / "chat_template.jinja").read_text()
    return tokenizer


class Crowd:
    """Lets everybody go when so many are there."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._waiting: list[asyncio.Future[None]] = []

    async def join(self) -> None:
        """Wait for the others."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        if len(self._waiting) == self._size:
            waiting, self._waiting = self._waiting, []
            for other in waiting:
                other.set_result(None)
        await future


class NullEngine:
    """Knows what to say: the tool call to a first question, the answer to one that holds a tool's result."""

    max_model_len = 4096
    version = 0

    def __init__(self, tokenizer: Any, crowd: Crowd) -> None:
        self._crowd = crowd
        end = tokenizer.eos_token_id
        self._said = [self._generation([*tokenizer.encode(text, add_special_tokens=False), end]) for text in SAID]
        self.num_prompt_tokens = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        """The next thing to say in this conversation, told from how many turns have ended in the prompt."""
        self.num_prompt_tokens += len(request.prompt_ids)
        await self._crowd.join()
        end = self._said[0].ids[-1]
        return self._said[0 if np.count_nonzero(request.prompt_ids == end) == 2 else 1]

    async def load(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Nothing to load."""

    async def close(self) -> None:
        """Nothing to close."""

    @staticmethod
    def _generation(ids: list[int]) -> Generation:
        size = len(ids)
        return Generation(
            ids=np.array(ids, np.int32),
            logprobs=np.full(size, -0.5, np.float32),
            versions=np.zeros(size, np.int32),
            finish_reason="stop",
        )


class NullTransport(httpx.AsyncBaseTransport):
    """Answers from memory with the bytes that the gateway gave to the same agent."""

    def __init__(self, bodies: list[bytes], crowd: Crowd) -> None:
        self._bodies, self._crowd = bodies, crowd

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """The first body to a first question, the second to one with a tool's result."""
        body = self._bodies[b'"role":"tool"' in request.content]
        await self._crowd.join()
        return httpx.Response(200, headers={"content-type": "application/json"}, content=body)


async def agent(client: AsyncOpenAI, question: str) -> str | None:
    """The quickstart's agent: two calls."""
    messages: list[Any] = [
        {"role": "system", "content": "Solve the problem. End with #### and the number."},
        {"role": "user", "content": question},
    ]
    for _ in range(NUM_CALLS):
        reply = await client.chat.completions.create(model="m", messages=messages, tools=[TOOL], max_tokens=48)
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "84"} for call in message.tool_calls]
    return None


class Bench:
    """A gateway on its serving thread, and the three ways to run the same rollouts."""

    def __init__(self, num_rollouts: int) -> None:
        texts = questions()
        self.questions = [texts[number // GROUP_SIZE] for number in range(num_rollouts)]
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.tokenizer = make_tokenizer(texts)
        self.bodies = self._bodies()

    def gateway(self, crowd: Crowd) -> Gateway:
        """A fresh gateway: nothing cached from the last repeat."""
        self.engine = NullEngine(self.tokenizer, crowd)
        return Gateway(self.engine, self.tokenizer, model_name="m", loop=self.loop)

    async def through_gateway(self) -> None:
        """In-process: open, two calls, close; checked."""
        gateway = self.gateway(Crowd(len(self.questions)))

        async def rollout(number: int, question: str) -> None:
            session = gateway.open(f"g/{number}", noise_seed=number)
            answer = await agent(session.model.client, question)
            calls = session.close()
            assert answer == SAID[1]
            assert [call.parent for call in calls] == [None, 0]

        await asyncio.gather(*(rollout(number, question) for number, question in enumerate(self.questions)))

    async def through_nothing(self) -> None:
        """The SDK alone, a client for each rollout as the gateway makes them."""
        transport = NullTransport(self.bodies, Crowd(len(self.questions)))

        async def rollout(question: str) -> None:
            http_client: Any = httpx.AsyncClient(transport=transport, timeout=None, trust_env=False)
            client = AsyncOpenAI(
                api_key="k", base_url="http://null.invalid/v1", http_client=http_client, max_retries=0, timeout=None
            )
            assert await agent(client, question) == SAID[1]

        await asyncio.gather(*(rollout(question) for question in self.questions))

    async def through_http(self) -> None:
        """Loopback HTTP, a client for each connection: a common pool takes time quadratic in what waits for it."""
        gateway = self.gateway(Crowd(1))
        http_clients: asyncio.Queue[Any] = asyncio.Queue()
        for _ in range(HTTP_CONNECTIONS):
            http_clients.put_nowait(httpx.AsyncClient(timeout=None, trust_env=False, verify=False))

        async def rollout(number: int, question: str) -> None:
            http_client = await http_clients.get()
            session = gateway.open(f"g/{number}", noise_seed=number)
            model = session.model
            client = AsyncOpenAI(
                api_key=model.api_key, base_url=model.base_url, http_client=http_client, max_retries=0, timeout=None
            )
            assert await agent(client, question) == SAID[1]
            assert all(call.trainable for call in session.close())
            http_clients.put_nowait(http_client)

        await asyncio.gather(*(rollout(number, question) for number, question in enumerate(self.questions)))
        while not http_clients.empty():
            await http_clients.get_nowait().aclose()
        asyncio.run_coroutine_threadsafe(gateway.close(), self.loop).result()

    def _bodies(self) -> list[bytes]:
        gateway = self.gateway(Crowd(1))
        bodies: list[bytes] = []

        async def record() -> None:
            session = gateway.open("g/0", noise_seed=0)

            async def keep(response: httpx.Response) -> None:
                bodies.append(await response.aread())

            http_client: Any = session.model.client._client
            http_client.event_hooks = {"response": [keep]}
            await agent(session.model.client, self.questions[0])
            session.close()

        asyncio.run(record())
        return bodies


def cpu_ms_per_call(run: Callable[[], Awaitable[None]], num_calls: int) -> float:
    """CPU milliseconds of the whole process for each call."""

    async def main() -> None:
        await run()

    gc.collect()
    began = time.process_time()
    asyncio.run(main())
    return (time.process_time() - began) / num_calls * 1e3


def profile(bench: Bench) -> None:
    """Where the serving thread's time goes, function by function."""
    profiler = cProfile.Profile()
    bench.loop.call_soon_threadsafe(profiler.enable)
    asyncio.run(bench.through_gateway())
    bench.loop.call_soon_threadsafe(profiler.disable)
    time.sleep(0.1)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(32)


def main() -> int:
    """Measure, print, write; 1 if the target is missed."""
    parser = argparse.ArgumentParser(description="CPU time that the gateway adds to a call")
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    bench = Bench(options.rollouts)
    if options.profile:
        profile(bench)
        return 0
    num_calls = options.rollouts * NUM_CALLS
    sides = {"sdk alone": bench.through_nothing, "in-process": bench.through_gateway, "http": bench.through_http}
    measured: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(options.repeats + 1):
        for name, run in sides.items():
            cpu_ms = cpu_ms_per_call(run, num_calls)
            if repeat > 0:  # the first one warms up
                measured[name].append(cpu_ms)
    alone = measured["sdk alone"]
    added = {
        name: statistics.median(ms - base for ms, base in zip(times, alone, strict=True))
        for name, times in measured.items()
    }
    print(
        f"{options.rollouts} rollouts in flight, {bench.engine.num_prompt_tokens / num_calls:.0f} prompt tokens a call"
    )
    return finish(
        "gateway",
        header=("transport", "cpu ms/call", "min", "max", "added"),
        rows=[
            (name, statistics.median(times), min(times), max(times), added[name]) for name, times in measured.items()
        ],
        ratios={"added_cpu_ms": added["in-process"], "http_added_cpu_ms": added["http"]},
        at_most={"added_cpu_ms": 1.0},
        extra={"measured": measured, "rollouts": options.rollouts},
    )


if __name__ == "__main__":
    sys.exit(main())
