"""Prompts without a chat template: OpenAI's legacy Completions API.

In: the decoded JSON body of one request, whose `prompt` is a text or a list of token ids. Out: a `CallRequest` with
that prompt and nothing to render, or `ApiError`; and the answer in the API's own words. A text gets what the
tokenizer puts before any text (Llama's begin token); ids are used as they are. `max_tokens` is the run's
unless the request has its own (OpenAI's is 16). With `echo` the answer begins with the prompt, and `logprobs` are those
of both: what evaluations by likelihood read.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Required

from pydantic import Field, with_config

from sharpen.contracts import Generation
from sharpen.gateway.answers import Choice, Delta, Head, Writer
from sharpen.gateway.door import CLOSED, MAX_INT32, Door, Items, SomeItems, openai_place, unsupported
from sharpen.gateway.protocols import chat
from sharpen.gateway.protocols.chat_schema import Shared
from sharpen.gateway.protocols.protocol import Context
from sharpen.gateway.render import Renderer
from sharpen.gateway.requests import ApiError, CallRequest, given_fields, short_repr

MAX_LOGPROBS = 5
LOWEST = -9999.0
"""What stands for a logprob of minus infinity, which JSON does not have."""
TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
NOT_SUFFIX = unsupported("text is continued, not filled in")


@with_config(CLOSED)
class CompletionRequest(Shared, total=False):
    """A request of Completions, for one prompt: a text or token ids."""

    prompt: Required[str | SomeItems[TokenId] | Items[str] | Items[SomeItems[TokenId]]]
    best_of: int | None
    echo: bool | None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None
    suffix: NOT_SUFFIX  # type: ignore[valid-type]


# Prompts without a chat template: OpenAI's legacy Completions API.

DOOR = Door(CompletionRequest, openai_place, chat.unknown)


def parse_request(body: Any, context: Context) -> tuple[CallRequest, CompletionsWriter]:
    """Read a decoded body. Raises `ApiError`."""
    DOOR.check(body)
    given = given_fields(body)
    prompt, logprobs, echo = _prompt(given.pop("prompt")), given.pop("logprobs", None), given.pop("echo", False)
    if echo and given.get("stream", False):
        raise ApiError("'echo' is true: it goes with whole answers, not with 'stream'.", param="echo")
    best_of, num = given.get("best_of"), given.get("n", 1)
    if best_of is not None and best_of != num:
        raise ApiError(f"'best_of' is {short_repr(best_of)}; it must equal 'n' ({short_repr(num)}).", param="best_of")
    as_chat = {**given, "messages": [{"role": "user", "content": ""}], "logprobs": logprobs is not None}
    request, writer = chat.read_request({**as_chat, "top_logprobs": logprobs or 0}, context)
    raw = replace(request, messages=(), rendered=(), prompt=prompt, plain_text=True)
    return replace(raw, prompt_logprobs=logprobs if echo else None), CompletionsWriter(
        logprobs=writer.logprobs,
        include_usage=writer.include_usage,
        return_token_ids=writer.return_token_ids,
        echo=echo,
    )


def _prompt(given: str | list[Any]) -> str | tuple[int, ...]:
    """A text, or token ids. A list with one prompt is that prompt."""
    if isinstance(given, str):
        return given
    if given and isinstance(given[0], int):
        return tuple(given)
    if len(given) != 1:
        raise ApiError(
            f"'prompt' has {len(given)} prompts; it must be one, a string or a list of token ids (several: send a "
            "request each).",
            param="prompt",
        )
    return given[0] if isinstance(given[0], str) else tuple(given[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionsWriter(Writer):
    """Writes one answer as completions have it. Each choice has the index of its call.

    `logprobs`, `return_token_ids`: each choice holds them; in a stream, they come after its text. `echo`: each begins
    with the prompt, and so do its logprobs.
    """

    logprobs: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    echo: bool = False

    def whole(self, head: Head, choices: Sequence[Choice], renderer: Renderer) -> dict[str, Any]:
        """Return the body of the whole answer."""
        before = renderer.spell(head.prompt_ids_P.tolist()) if self.echo else ""
        bodies = [
            {**self._last(head, index, choice, renderer), "text": f"{before}{choice.message['content']}"}
            for index, choice in enumerate(choices)
        ]
        return {**_head(head), "choices": bodies, "usage": chat.usage(head, choices)}

    def begin(self, head: Head) -> bytes:
        """Return nothing: these streams begin with text."""
        return b""

    def delta(self, head: Head, delta: Delta) -> bytes:
        """Return the chunk of new text."""
        choice = {"index": delta.choice, "text": delta.text, "logprobs": None, "finish_reason": None}
        return chat.events([{**_head(head), "choices": [choice]}])

    def end(self, head: Head, choices: Sequence[Choice], renderer: Renderer) -> bytes:
        """Return the last chunk of each choice, and usage."""
        chunks = [
            {**_head(head), "choices": [self._last(head, index, choice, renderer)]}
            for index, choice in enumerate(choices)
        ]
        if self.include_usage:
            chunks.append({**_head(head), "choices": [], "usage": chat.usage(head, choices)})
        return chat.events(chunks) + chat.DONE

    def error(self, error: ApiError) -> bytes:
        """Return the event of an error, which OpenAI's clients raise."""
        return chat.events([error.body()])

    def _last(self, head: Head, index: int, choice: Choice, renderer: Renderer) -> dict[str, Any]:
        body: dict[str, Any] = {
            "index": index,
            "text": "",
            "finish_reason": choice.finish_reason,
            "logprobs": self._logprobs(head, choice.generation, renderer) if self.logprobs else None,
            "call_index": choice.call_index,
        }
        if self.return_token_ids:
            body |= {"prompt_token_ids": head.prompt_ids_P.tolist(), "token_ids": choice.generation.ids.tolist()}
        return body

    def _logprobs(self, head: Head, generation: Generation, renderer: Renderer) -> dict[str, Any]:
        """The logprobs in this API's format: a list for each fact, `text_offset` counted from the text's beginning. The
        first token of an echoed prompt has none."""
        ids: list[int] = generation.ids.tolist()
        logprobs: list[float | None] = [*generation.logprobs.tolist()]
        tops = [*(generation.top_logprobs or ((),) * len(ids))]
        top_logprobs: list[dict[str, float] | None] = [_by_text(top, renderer) for top in tops]
        if self.echo and (before := generation.prompt_logprobs) is not None:
            ids = [*head.prompt_ids_P.tolist(), *ids]
            logprobs = [None, *before.logprobs.tolist(), *logprobs]
            top_logprobs = [None, *(_by_text(top, renderer) for top in before.top_logprobs), *top_logprobs]
        texts = [renderer.token_bytes(token_id)[0] for token_id in ids]
        return {
            "tokens": texts,
            "token_logprobs": [None if one is None else max(one, LOWEST) for one in logprobs],
            "top_logprobs": top_logprobs,
            "text_offset": list(itertools.accumulate(map(len, texts[:-1]), initial=0)),
        }


def _head(head: Head) -> dict[str, Any]:
    return {"id": f"cmpl-{head.name}", "object": "text_completion", "created": head.created, "model": head.model}


def _by_text(top: Sequence[tuple[int, float]], renderer: Renderer) -> dict[str, float]:
    """Alternatives by their text. Of tokens with one text, such as parts of characters, the likeliest counts."""
    return {renderer.token_bytes(one)[0]: max(value, LOWEST) for one, value in reversed(top)}
