"""A scripted engine and a toy tokenizer: what the gateway is tested with.

In: a function from a request to text or ids. Out: an `Engine` that samples just that, and remembers what it was asked.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sharpen.contracts import GenerateRequest, Generation

END = "<|im_end|>"
CHATML = """
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools or system %}
    {{- '<|im_start|>system\\n' + system }}
    {%- for tool in tools or [] %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content and KEEP_THINKING %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
            {{- tool_call.function.arguments | tojson if REPARSE else tool_call.function.arguments }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' }}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {{- '<think>\\n' if enable_thinking }}
{%- endif %}"""
"""ChatML with Hermes tool calls, in Qwen's manner; three switches are filled in by `chat_template`."""


def chat_template(*, keep_thinking: bool = True, reparse: bool = False) -> str:
    """The template; `keep_thinking=False` strips thinking from history, `reparse` writes arguments through `tojson`."""
    return CHATML.replace("KEEP_THINKING", str(keep_thinking)).replace("REPARSE", str(reparse))


def toy_tokenizer(**switches: bool) -> Any:
    """A byte-level BPE of about 330 entries, its chat template included."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        ["the name of the tool is name and the arguments are arguments", "user assistant system answer\n\n"] * 4,
        trainers.BpeTrainer(vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False),
    )
    bpe.add_special_tokens([AddedToken(text, special=True) for text in ("<|endoftext|>", "<|im_start|>", END)])
    bpe.add_tokens([AddedToken(text, special=False) for text in ("<tool_call>", "</tool_call>", "<think>", "</think>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token="<|endoftext|>")
    tokenizer.chat_template = chat_template(**switches)
    return tokenizer


def spaced_tokenizer() -> Any:
    """Sentencepiece's manner: spaces are letters, and a text that begins with no special token gets one."""
    letters = sorted(set("▁ask: helloanswer:yesgo on"))
    bpe = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    bpe.decoder = decoders.Metaspace(prepend_scheme="first")
    bpe.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>")
    tokenizer.chat_template = (
        "{%- for message in messages %}"
        "{{- 'ask: ' + message.content + ' answer:' if message.role == 'user' else message.content + '</s>' }}"
        "{%- endfor %}"
    )
    return tokenizer


Script = Callable[[GenerateRequest], "str | Sequence[int] | Generation | Awaitable[str]"]


class ScriptedEngine:
    """Samples what `script` says: a text (tokenized, an end token added), also one that it waits for, ids (as they
    are), or a whole `Generation`.

    `hold` makes requests wait until `release`d; `cancelled` counts those that were aborted meanwhile.
    """

    def __init__(self, tokenizer: Any, script: Script, *, max_model_len: int = 4096) -> None:
        self.tokenizer = tokenizer
        self.script = script
        self.requests: list[GenerateRequest] = []
        self.cancelled = 0
        self.version = 0
        self.waiting = threading.Semaphore(0)
        self._max_model_len = max_model_len
        self._gate: asyncio.Event | None = None
        self.step_by_step: asyncio.Semaphore | None = None
        """Each token of a streamed answer takes one permit, if there is such a semaphore."""

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    def hold(self) -> None:
        self._gate = asyncio.Event()

    def release(self) -> None:
        """On the serving loop."""
        assert self._gate is not None
        self._gate.set()

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        self.waiting.release()
        try:
            await (self._gate.wait() if self._gate else asyncio.sleep(0))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        said = self.script(request)
        if isinstance(said, Awaitable):
            said = await said
        if isinstance(said, Generation):
            return said
        if isinstance(said, str):
            said = [*self.tokenizer.encode(said, add_special_tokens=False), self.tokenizer.eos_token_id]
        made = generation(said, version=self.version, limit=request.sampling.max_tokens)
        for token in made.ids.tolist()[:-1] if request.on_tokens is not None else ():
            await self._step()
            request.on_tokens([token])
        return made

    async def _step(self) -> None:
        """Wait until the next token may come: at once, or `step_by_step`, when a test says so."""
        if self.step_by_step is None:
            await asyncio.sleep(0)
            return
        try:
            await self.step_by_step.acquire()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def load(self, version: int, tensors: Mapping[str, Any]) -> None:
        self.version = version

    async def close(self) -> None:
        pass


def generation(ids: Sequence[int], *, version: int = 0, limit: int = 1024, **fields: Any) -> Generation:
    """A generation of these ids, cut to the limit; logprobs are -0.5, -1, -1.5, …"""
    kept = list(ids)[:limit]
    defaults: dict[str, Any] = {
        "ids": np.array(kept, np.int32),
        "logprobs": -0.5 * np.arange(1, len(kept) + 1, dtype=np.float32),
        "versions": np.full(len(kept), version, np.int32),
        "finish_reason": "length" if len(kept) < len(ids) else "stop",
    }
    return Generation(**{**defaults, **fields})


class ServingLoop:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Any) -> Any:
        """The coroutine's result, run on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(120)

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        self.loop.call_soon_threadsafe(function, *args)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


def eventually(condition: Callable[[], bool]) -> None:
    """Return once a condition holds that another thread brings about."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
