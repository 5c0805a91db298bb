"""Conversion of messages to text and token ids, and back, with the model's own chat template and tokenizer.

In: messages from `requests.render_message`, tools, template arguments. Out: text and token ids.
Shape suffixes: P prompt tokens, S sampled tokens, T tokens of any text.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jinja2 import TemplateError

from sharpen.errors import ModelError
from sharpen.gateway.body import is_shallow, is_text, read_json
from sharpen.gateway.requests import ApiError
from sharpen.types import IntArray

REPLACEMENT = "\ufffd"
PROBE = '{"probe" :1}'
_PARSED_PROBE = re.compile(r"""\{\s*["']probe["']\s*:\s*1\s*\}""")
"""The probe as JSON, or as Python shows it, which a template that expects strings does."""
MAX_CHARACTERS = 16
"""A text with more characters for each token of the context is looked at from its beginning first."""
LONG_TEXT = 1 << 14
"""A text with more characters is encoded without each token's place in it: three times as fast, or more, and other
threads go on meanwhile."""
SHORT_TEXT, MAX_LONG_KEPT = 8192, 16
"""Of texts with more characters only so many are kept with their ids: what others send must not fill the memory."""
CONTEXT_IDS = 4
"""Prompt ids decoded before the sampled ones: some tokenizers drop the leading space of a first token."""


class Renderer:
    """The chat template and tokenizer of one model. From any thread."""

    def __init__(self, tokenizer: Any, *, cache_size: int = 1024) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError("the tokenizer has no chat template: add chat_template.jinja to the model's folder")
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ModelError(f"{type(tokenizer).__name__} is not a fast tokenizer: convert it to a tokenizer.json")
        self._tokenizer = tokenizer
        self._backend = copy.deepcopy(backend)  # others may set truncation and padding, which must not affect prompts
        self._backend.no_truncation()
        self._backend.no_padding()
        self.template = template_text(tokenizer.chat_template)
        self._words = frozenset(re.findall(r"\w+", self.template))
        self._says_thinking = "thinking" in self._words and "reasoning_content" not in self._words  # gpt-oss
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._added = {token.content: number for number, token in self._backend.get_added_tokens_decoder().items()}
        self._encode_short = functools.lru_cache(maxsize=cache_size)(self._encode_uncached)
        self._encode_long = functools.lru_cache(maxsize=MAX_LONG_KEPT)(self._encode_uncached)
        self._context_text = functools.lru_cache(maxsize=cache_size)(self._decode)
        self._string_arguments = self._template_keeps_argument_strings()

    def mentions(self, field: str) -> bool:
        """Whether the template may read a field of this name."""
        return field in self._words

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        *,
        continue_final: bool = False,
        closed: bool = False,
    ) -> str:
        """Return the text of the whole prompt, including the header of the answer.

        With `continue_final` the last message is left open instead; with `closed` the text ends after it. Raises
        `ApiError` (400) for messages that the template refuses.
        """
        messages = list(map(_with_placeholders, messages))
        if not self._string_arguments:
            messages = list(map(_with_parsed_arguments, messages))
        if self._says_thinking:
            messages = list(map(_with_thinking, messages))
        try:
            text = self._apply(messages, tools, kwargs, continue_final=continue_final, closed=closed)
            text.encode()  # raises for a lone surrogate, which no tokenizer accepts
        except Exception as error:  # the template sees only the request, so any error is about the request
            raise ApiError(f"The chat template refused the messages: {error}", param="messages") from error
        return text

    def encode(self, text: str) -> IntArray:
        """Return the token ids of a whole prompt's text, as a read-only array."""
        return self._encode(text)

    def encode_raw(self, text: str) -> IntArray:
        """Return the token ids of a prompt that no template rendered: with what the tokenizer puts before a text."""
        return np.array(self._ids(text, with_special=True), dtype=np.int32)

    def encode_after(self, last_id: int, text: str) -> IntArray:
        """Return the token ids of text that follows the token `last_id`.

        After a special token these are the ids that the whole text would have there. The token is encoded along with
        the text, since some tokenizers encode the beginning of a text differently.
        """
        if last_id in self._special_ids:
            ids_T = self._encode(str(self._backend.id_to_token(last_id)) + text)
            if ids_T[0] == last_id:
                return ids_T[1:]
        return self._encode(text)

    def decode(self, prompt_ids_P: IntArray, ids_S: Sequence[int]) -> str:
        """Return the text that the sampled ids add to the prompt's, including special tokens."""
        context = tuple(prompt_ids_P[-CONTEXT_IDS:].tolist())
        before = self._context_text(context)
        whole = self._decode([*context, *ids_S])
        # If the prompt ends inside a character that the sampled ids complete, they have no text of their own.
        return whole[len(before) :] if whole.startswith(before) else whole + REPLACEMENT

    def text_stream(self, prompt_ids_P: IntArray, *, keep_special: bool) -> TextStream:
        """Return a decoder of ids that come one after the other, after those of a prompt."""
        return TextStream(self, prompt_ids_P, keep_special=keep_special)

    def count_if_over(self, text: str, limit: int) -> int | None:
        """Return the number of a text's tokens, extrapolated from its beginning, if that alone has clearly more than
        `limit`; None for any other text."""
        beginning = text[: MAX_CHARACTERS * limit]
        if len(beginning) == len(text):
            return None
        num_tokens = len(self._ids(beginning))
        return num_tokens * len(text) // len(beginning) if num_tokens > 2 * limit else None

    def added_token(self, text: str) -> int | None:
        """Return the id of the token that was added to the tokenizer for exactly this text, if there is one."""
        return self._added.get(text)

    def spell(self, ids: Sequence[int]) -> str:
        """Return the text of a whole sequence of ids, including special tokens."""
        return self._decode(ids)

    def without_special(self, ids_S: Sequence[int]) -> Sequence[int]:
        """Return the ids that are not special tokens."""
        return ids_S if self._special_ids.isdisjoint(ids_S) else [i for i in ids_S if i not in self._special_ids]

    def token_bytes(self, token_id: int) -> tuple[str, list[int]]:
        """Return a token's text and the text's UTF-8 bytes, as OpenAI's logprobs show them."""
        text = self._context_text((token_id,))
        return text, list(text.encode())

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=False))

    def _ids(self, text: str, *, with_special: bool = False) -> list[int]:
        if len(text) <= LONG_TEXT:
            encoded = self._backend.encode(text, add_special_tokens=with_special)
        else:
            (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=with_special)
        return list(encoded.ids)

    def _encode(self, text: str) -> IntArray:
        return self._encode_short(text) if len(text) <= SHORT_TEXT else self._encode_long(text)

    def _encode_uncached(self, text: str) -> IntArray:
        ids = np.array(self._ids(text), dtype=np.int32)
        ids.flags.writeable = False
        return ids

    def _apply(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        *,
        continue_final: bool = False,
        closed: bool = False,
    ) -> str:
        text = self._tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=not (continue_final or closed),
            continue_final_message=continue_final,
            **kwargs,
        )
        return str(text)

    def _template_keeps_argument_strings(self) -> bool:
        """Whether the template writes argument strings unchanged, where it writes JSON (Qwen3), so that they need not
        be parsed for it. Gemma's writes parsed arguments in a form of its own, but takes strings too."""
        try:
            if PROBE not in self._with_arguments(PROBE):
                return False
        except (TemplateError, TypeError, ValueError):
            return False  # a template that accepts no strings (or no tools) gets parsed arguments
        try:
            return _PARSED_PROBE.search(self._with_arguments(json.loads(PROBE))) is not None
        except (TemplateError, TypeError, ValueError):
            return True  # it accepts nothing but strings

    def _with_arguments(self, arguments: Any) -> str:
        """Return the text of messages with a call that has these arguments."""
        call = {"id": "call00000", "type": "function", "function": {"name": "probe", "arguments": arguments}}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "1", "tool_call_id": "call00000", "name": "probe"},
        ]
        return self._apply(messages, [], {})


def template_text(template: Any) -> str:
    """Return the text of a chat template; of all, if there are several by name."""
    return "\n".join(map(str, template.values())) if isinstance(template, Mapping) else str(template)


def _with_thinking(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message with its reasoning by gpt-oss' name. Its template raises an error for reasoning beside content
    and calls, which its model may well write: there the content is kept."""
    reasoning = message.get("reasoning_content")
    if not reasoning:
        return message
    if message.get("content") and message.get("tool_calls"):
        return {name: value for name, value in message.items() if name not in ("reasoning_content", "thinking")}
    return {"thinking": reasoning, **message}


MAX_INCOMPLETE = 32
"""A stream of ids that completes no character for so long holds none: it gives out no more text."""


class TextStream:
    """Decodes sampled ids as they come. A character is given out once all its ids are there; the cost of an id does not
    depend on how many came before."""

    def __init__(self, renderer: Renderer, prompt_ids_P: IntArray, *, keep_special: bool) -> None:
        self._renderer = renderer
        self._keep_special = keep_special
        self._context = prompt_ids_P[-CONTEXT_IDS:].tolist()
        self._new: list[int] = []

    def add(self, ids: Sequence[int]) -> str:
        """Return the text that these ids complete."""
        if len(self._new) > MAX_INCOMPLETE:
            return ""
        self._new += ids if self._keep_special else self._renderer.without_special(ids)
        before = self._renderer.spell(self._context)
        whole = self._renderer.spell([*self._context, *self._new])
        if whole.endswith(REPLACEMENT) or not whole.startswith(before):
            return ""  # a character is not complete
        self._context, self._new = [*self._context, *self._new][-CONTEXT_IDS:], []
        return whole[len(before) :]


def _with_placeholders(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message with its images as templates know them: which they are is not said there."""
    if isinstance(message["content"], str):
        return message
    parts = [{"type": "image"} if part["type"] == "image" else part for part in message["content"]]
    return {**message, "content": parts}


def _with_parsed_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        try:
            arguments = read_json(function["arguments"])
            if not is_shallow(arguments) or not is_text(json.dumps(arguments, ensure_ascii=False)):
                arguments = function["arguments"]
        except (ValueError, RecursionError):
            arguments = function["arguments"]  # not JSON, too deep to encode, or too much: rendered unchanged
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}
