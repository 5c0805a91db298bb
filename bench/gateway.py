"""What the gateway adds to a call: CPU time beyond the SDK's own, with 1,000 rollouts in flight.

In: nothing (a tokenizer is made here from the quickstart's questions, its chat template is the quickstart's). Out: a
table and `bench/out/gateway.json` with, for each protocol, `added_cpu_ms` (in-process) and `http_added_cpu_ms` (over
sockets, 64 rollouts at a time), both beyond the SDK alone; and `idle_kb`, the memory of a rollout that waits.

Each rollout opens a session, asks two questions (a tool call, then an answer; tool schema in the prompt), and closes.
The SDK alone is the same agent and SDK on a transport that answers from memory. All 1,000 wait at the same time:
neither side answers before every rollout has asked. CPU time (`time.process_time`) is of client and server together;
over sockets these are two processes, since agents that need HTTP are others than the run's. The garbage collector is
set as a run sets it, on both sides: what was loaded before is frozen, and it looks for garbage less often.

More than half of what HTTP adds is the client's own: the SDK's socket, which it pays with any server. `sdk on sockets`
shows it: the same clients against a server that finds the end of a request and writes bytes that it has.
`http_server_cpu_ms` is what our server adds to that; it is reported, the target counts from the SDK alone.

    python bench/gateway.py [--rollouts 1000] [--repeats 5] [--profile]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import gc
import json
import multiprocessing
import pstats
import re
import resource
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from report import finish
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sharpen.cli.starter.tiny_model import TEMPLATE
from sharpen.contracts import GenerateRequest, Generation
from sharpen.gateway.gateway import Gateway
from sharpen.placement.local import NEW_OBJECTS

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart"
SCHEMA: Any = {"type": "object", "properties": {"expression": {"type": "string"}}}
FUNCTION: Any = {"name": "calculator", "description": "Work out an expression."}
TOOL: Any = {"type": "function", "function": {**FUNCTION, "parameters": SCHEMA}}
SYSTEM = "Solve the problem. End with #### and the number."
SAID = ('<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 * (3 + 4)"}}\n</tool_call>', "#### 84")
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
NUM_CALLS = 2
HTTP_CONNECTIONS = 64
ADDED = {"in-process": "added_cpu_ms", "http": "http_added_cpu_ms"}
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
    tokenizer.chat_template = TEMPLATE.read_text()
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


class NullTransport(httpx2.AsyncBaseTransport):
    """Answers from memory with the bytes that the gateway gave to the same agent."""

    def __init__(self, bodies: list[bytes], crowd: Crowd) -> None:
        self._bodies, self._crowd = bodies, crowd

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """The first body to a first question, the second to one with a tool's result."""
        body = self._bodies[b'"84"' in request.content]
        await self._crowd.join()
        return httpx2.Response(200, headers={"content-type": "application/json"}, content=body)


class NullServer(asyncio.Protocol):
    """One connection of an HTTP server that does no more than it must; answers as `NullTransport`."""

    def __init__(self, bodies: list[bytes]) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._answers = [head % len(body) + body for body in bodies]
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep where to write."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer once the request is whole."""
        self._received += data
        head, _, body = self._received.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        if length is not None and len(body) >= int(length[1]):
            self._received = b""
            self._transport.write(self._answers[b'"84"' in body])


async def chat(client: Any, question: str) -> str | None:
    """The quickstart's agent: two calls."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    for _ in range(NUM_CALLS):
        reply = await client.chat.completions.create(model="m", messages=messages, tools=[TOOL], max_tokens=48)
        message = reply.choices[0].message
        if not message.tool_calls:
            return str(message.content)
        messages.append(message.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "84"} for call in message.tool_calls]
    return None


async def responses(client: Any, question: str) -> str | None:
    """The same agent in OpenAI's Responses."""
    tool: Any = {"type": "function", **FUNCTION, "parameters": SCHEMA, "strict": False}
    items: list[Any] = [{"role": "user", "content": question}]
    for _ in range(NUM_CALLS):
        reply = await client.responses.create(
            model="m", instructions=SYSTEM, input=items, tools=[tool], max_output_tokens=48, store=False
        )
        calls = [item for item in reply.output if item.type == "function_call"]
        if not calls:
            return str(reply.output_text)
        items += [item.model_dump(exclude_none=True) for item in reply.output]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "84"} for call in calls]
    return None


async def messages(client: Any, question: str) -> str | None:
    """The same agent in Anthropic's Messages."""
    tool: Any = {**FUNCTION, "input_schema": SCHEMA}
    said: list[Any] = [{"role": "user", "content": question}]
    for _ in range(NUM_CALLS):
        reply = await client.messages.create(model="m", system=SYSTEM, messages=said, tools=[tool], max_tokens=48)
        uses = [block for block in reply.content if block.type == "tool_use"]
        if not uses:
            return str(reply.content[0].text)
        said.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in reply.content]})
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": "84"} for use in uses]
        said.append({"role": "user", "content": results})
    return None


AGENTS: Mapping[str, Callable[[Any, str], Awaitable[str | None]]] = {
    "chat": chat,
    "responses": responses,
    "messages": messages,
}


def client_of(protocol: str, http_client: Any, url: str, key: str) -> Any:
    """The vendor's client of a protocol, which never retries."""
    options: dict[str, Any] = {"api_key": key, "http_client": http_client, "max_retries": 0, "timeout": None}
    if protocol == "messages":
        return AsyncAnthropic(base_url=url.removesuffix("/v1"), **options)
    return AsyncOpenAI(base_url=url, **options)


def in_process(protocol: str, model: Any) -> Any:
    """The model's own client of a protocol."""
    return model.anthropic_client if protocol == "messages" else model.client


class Clients:
    """The SDKs' clients in a process of their own."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        context.Process(target=run_clients, args=(there,), daemon=True).start()

    async def run(self, *rollouts: Any) -> float:
        """Run rollouts (see `over_sockets`). Returns CPU seconds."""
        self._pipe.send(rollouts)
        return float(await asyncio.to_thread(self._pipe.recv))


def run_clients(pipe: Any) -> None:
    """The clients' process: runs what is sent, until the pipe is closed."""
    as_a_run_does()
    with contextlib.suppress(EOFError):
        while True:
            rollouts = pipe.recv()
            gc.collect()
            began = time.process_time()
            asyncio.run(over_sockets(*rollouts))
            pipe.send(time.process_time() - began)


async def over_sockets(protocol: str, url: str, keys: Sequence[str], questions: Sequence[str]) -> None:
    """Run a rollout for each key, with an HTTP client for each connection: a common pool takes time quadratic in what
    waits for it."""
    http_clients: asyncio.Queue[Any] = asyncio.Queue()
    for _ in range(HTTP_CONNECTIONS):
        http_clients.put_nowait(httpx2.AsyncClient(timeout=None, trust_env=False, verify=False))

    async def rollout(key: str, question: str) -> None:
        http_client = await http_clients.get()
        assert await AGENTS[protocol](client_of(protocol, http_client, url, key), question) == SAID[1]
        http_clients.put_nowait(http_client)

    await asyncio.gather(*(rollout(key, question) for key, question in zip(keys, questions, strict=True)))
    while not http_clients.empty():
        await http_clients.get_nowait().aclose()


def as_a_run_does() -> None:
    """Set the garbage collector as a run sets it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])


class Bench:
    """A gateway on its serving thread, and the four ways to run the same rollouts in one protocol."""

    def __init__(self, protocol: str, num_rollouts: int, clients: Clients | None = None) -> None:
        self._clients = clients or Clients()
        self.protocol, self.agent = protocol, AGENTS[protocol]
        texts = questions()
        self.questions = [texts[number // GROUP_SIZE] for number in range(num_rollouts)]
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.tokenizer = make_tokenizer(texts)
        self.bodies = self._bodies()
        as_a_run_does()

    def gateway(self, crowd: Crowd) -> Gateway:
        """A fresh gateway: nothing cached from the last repeat."""
        self.engine = NullEngine(self.tokenizer, crowd)
        return Gateway(self.engine, self.tokenizer, model_name="m", loop=self.loop)

    async def through_gateway(self) -> None:
        """In-process: open, two calls, close; checked."""
        gateway = self.gateway(Crowd(len(self.questions)))

        async def rollout(number: int, question: str) -> None:
            session = gateway.open(f"g/{number}", noise_seed=number)
            answer = await self.agent(in_process(self.protocol, session.model), question)
            calls = session.close()
            assert answer == SAID[1]
            assert [call.parent for call in calls] == [None, 0]

        await asyncio.gather(*(rollout(number, question) for number, question in enumerate(self.questions)))

    async def through_nothing(self) -> None:
        """The SDK alone, a client for each rollout as the gateway makes them."""
        transport = NullTransport(self.bodies, Crowd(len(self.questions)))

        async def rollout(question: str) -> None:
            http_client: Any = httpx2.AsyncClient(transport=transport, timeout=None, trust_env=False)
            client = client_of(self.protocol, http_client, "http://null.invalid/v1", "k")
            assert await self.agent(client, question) == SAID[1]

        await asyncio.gather(*(rollout(question) for question in self.questions))

    async def through_http(self) -> float:
        """Over loopback HTTP. Returns the CPU seconds of the clients' process."""
        gateway = self.gateway(Crowd(1))
        sessions = [gateway.open(f"g/{number}", noise_seed=number) for number in range(len(self.questions))]
        keys = [session.model.api_key for session in sessions]
        seconds = await self._clients.run(self.protocol, sessions[0].model.base_url, keys, self.questions)
        assert all(call.trainable for session in sessions for call in session.close())
        asyncio.run_coroutine_threadsafe(gateway.close(), self.loop).result()
        return seconds

    async def through_sockets(self) -> float:
        """The SDK over loopback HTTP, with a server that does nothing else. Returns what `through_http` does."""
        listening = self.loop.create_server(lambda: NullServer(self.bodies), "127.0.0.1", 0)

        async def listen() -> Any:
            return await listening

        server = asyncio.run_coroutine_threadsafe(listen(), self.loop).result()
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        seconds = await self._clients.run(self.protocol, url, ["k"] * len(self.questions), self.questions)
        self.loop.call_soon_threadsafe(server.close)
        return seconds

    def _bodies(self) -> list[bytes]:
        gateway = self.gateway(Crowd(1))
        bodies: list[bytes] = []

        async def record() -> None:
            session = gateway.open("g/0", noise_seed=0)

            async def keep(response: httpx2.Response) -> None:
                bodies.append(await response.aread())

            client = in_process(self.protocol, session.model)
            client._client.event_hooks = {"response": [keep]}
            await self.agent(client, self.questions[0])
            session.close()

        asyncio.run(record())
        return bodies


def cpu_ms_per_call(run: Callable[[], Awaitable[float | None]], num_calls: int) -> float:
    """CPU milliseconds for each call: of this process, and the seconds of another that `run` returns."""

    async def main() -> float:
        return await run() or 0.0

    gc.collect()
    began = time.process_time()
    elsewhere = asyncio.run(main())
    return (time.process_time() - began + elsewhere) / num_calls * 1e3


def profile(bench: Bench) -> None:
    """Where the serving thread's time goes, function by function."""
    profiler = cProfile.Profile()
    bench.loop.call_soon_threadsafe(profiler.enable)
    asyncio.run(bench.through_gateway())
    bench.loop.call_soon_threadsafe(profiler.disable)
    time.sleep(0.1)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(32)


def idle_kb(bench: Bench) -> float:
    """Kilobytes of memory for each rollout that has asked once and waits for its agent."""
    gateway = bench.gateway(Crowd(1))
    sessions: list[Any] = []

    async def ask(number: int, question: str) -> None:
        session = gateway.open(f"g/{number}", noise_seed=number)
        messages: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        client = session.model.client
        await client.chat.completions.create(model="m", messages=messages, tools=[TOOL], max_tokens=48)
        sessions.append(session)

    async def everyone(questions: list[str]) -> None:
        await asyncio.gather(*(ask(number, question) for number, question in enumerate(questions)))

    asyncio.run(everyone(bench.questions[:100]))  # what the first ones load
    gc.collect()
    before = rss_kb()
    asyncio.run(everyone(bench.questions))
    gc.collect()
    used = (rss_kb() - before) / len(bench.questions)
    for session in sessions:
        session.close()
    return used


def rss_kb() -> float:
    """The memory of this process in kilobytes (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1024


def main() -> int:
    """Measure, print, write; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description="CPU time that the gateway adds to a call")
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--protocols", nargs="+", choices=[*AGENTS], default=[*AGENTS])
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if options.profile:
        profile(Bench(options.protocols[0], options.rollouts))
        return 0
    clients = Clients()
    rows, measured = [], {}
    ratios = {
        "idle_kb": idle_kb(Bench("chat", options.rollouts, clients))
    }  # first: later memory is some that was freed
    for protocol in options.protocols:
        bench = Bench(protocol, options.rollouts, clients)
        times = measured[protocol] = measure(bench, options.repeats)
        for side, of_side in times.items():
            added = statistics.median(ms - base for ms, base in zip(of_side, times["sdk alone"], strict=True))
            rows.append((f"{protocol}, {side}", statistics.median(of_side), min(of_side), max(of_side), added))
            if side in ADDED:
                ratios[f"{protocol}_{ADDED[side]}"] = added
        own = (ms - base for ms, base in zip(times["http"], times["sdk on sockets"], strict=True))
        ratios[f"{protocol}_http_server_cpu_ms"] = statistics.median(own)
    targets = {name: 1.5 if "http" in name else 0.6 for name in ratios if name.endswith("added_cpu_ms")}
    return finish(
        "gateway",
        header=("protocol and transport", "cpu ms/call", "min", "max", "added"),
        rows=rows,
        ratios=ratios,
        at_most={**targets, "idle_kb": 50.0},
        extra={"measured": measured, "rollouts": options.rollouts},
    )


def measure(bench: Bench, repeats: int) -> dict[str, list[float]]:
    """CPU milliseconds a call of each side, in each repeat."""
    num_calls = len(bench.questions) * NUM_CALLS
    sides = {
        "sdk alone": bench.through_nothing,
        "in-process": bench.through_gateway,
        "sdk on sockets": bench.through_sockets,
        "http": bench.through_http,
    }
    measured: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name, run in sides.items():
            cpu_ms = cpu_ms_per_call(run, num_calls)
            if repeat > 0:  # the first one warms up
                measured[name].append(cpu_ms)
    return measured


if __name__ == "__main__":
    sys.exit(main())
