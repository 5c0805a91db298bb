"""Prompts without a chat template: OpenAI's legacy Completions API.

In: the decoded JSON body of one request, whose `prompt` is a text or a list of token ids. Out: a `ChatRequest` with
that prompt and nothing to render, or `ApiError`; and the response in the API's own format. A text gets what the
tokenizer puts before any text (Llama's begin token); ids are used as they are. `max_tokens` is the run's
unless the request has its own (OpenAI's is 16).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sharpen.gateway.exchange import Exchange, Reply
from sharpen.gateway.render import Renderer
from sharpen.gateway.requests import ApiError, ChatRequest, parse_request, short_repr
from sharpen.gateway.responses import EVENTS_TYPE, JSON_TYPE, Choice, dump
from sharpen.inference.engine import Generation
from sharpen.types import Sampling

SHARED = frozenset(
    {
        *("frequency_penalty", "logit_bias", "max_tokens", "metadata", "model", "n", "presence_penalty"),
        *("return_token_ids", "seed", "stop", "store", "stream", "stream_options", "temperature", "top_k", "top_p"),
        "user",
    }
)
"""Parameters with the same name and meaning as in chat completions, where they are validated."""
MAX_LOGPROBS = 5
MAX_ID = 2**31 - 1


def parse_completion(body: Any, *, model_name: str, defaults: Sampling, greedy: bool) -> ChatRequest:
    """Validate a decoded body. `greedy` overrides the request's own temperature. Raises `ApiError`."""
    if not isinstance(body, dict):
        raise ApiError("The request body must be a JSON object.")
    given = {key: value for key, value in body.items() if value is not None}
    prompt = _prompt(given.pop("prompt", None))
    logprobs = _logprobs_wanted(given.pop("logprobs", None))
    best_of, num = given.pop("best_of", None), given.get("n", 1)
    if best_of is not None and best_of != num:
        raise ApiError(f"'best_of' is {short_repr(best_of)}; it must equal 'n' ({short_repr(num)}).", param="best_of")
    if given.pop("echo", False) is not False:
        raise ApiError("'echo' is not supported: the prompt is the request's own.", param="echo")
    if given.pop("suffix", "") != "":
        raise ApiError("'suffix' is not supported: text is continued, not filled in.", param="suffix")
    for key in given.keys() - SHARED:
        raise ApiError(f"Unrecognized or unsupported request argument: {key!r}.", param=key)
    as_chat = {**given, "messages": [{"role": "user", "content": ""}], "logprobs": logprobs is not None}
    request = parse_request(
        {**as_chat, "top_logprobs": logprobs or 0}, model_name=model_name, defaults=defaults, greedy=greedy
    )
    return replace(request, messages=(), rendered=(), prompt=prompt, plain_text=True)


def text_reply(
    request: ChatRequest,
    choices: Sequence[Choice],
    *,
    name: str,
    model: str,
    created: int,
    num_prompt_tokens: int,
    prompt_ids: Sequence[int],
    renderer: Renderer,
    exchange: Exchange,
) -> Reply:
    """Return the whole response of a request, as one body or as events. Each choice has the index of its call."""
    num_sampled = sum(len(choice.generation.ids) for choice in choices)
    usage = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt_tokens + num_sampled,
    }
    head = {"id": f"cmpl-{name}", "object": "text_completion", "created": created, "model": model}
    bodies = [_choice_body(request, index, choice, prompt_ids, renderer) for index, choice in enumerate(choices)]
    if request.stream:
        events = _events(head, bodies, usage if request.include_usage else None)
        body = b"".join(b"data: " + dump(event) + b"\n\n" for event in events) + b"data: [DONE]\n\n"
        return Reply(status=200, content_type=EVENTS_TYPE, body=body, exchange=exchange)
    whole = {**head, "choices": bodies, "usage": usage}
    return Reply(status=200, content_type=JSON_TYPE, body=dump(whole), exchange=exchange)


def _prompt(given: Any) -> str | tuple[int, ...]:
    """A text, or token ids. A list with one prompt is that prompt."""
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        given = given[0]
    if isinstance(given, str):
        return given
    if isinstance(given, list) and given and all(type(item) is int and 0 <= item <= MAX_ID for item in given):
        return tuple(given)
    several = isinstance(given, list) and len(given) > 1 and all(isinstance(item, str | list) for item in given)
    what = f"{len(given)} prompts" if several else short_repr(given)
    raise ApiError(
        f"'prompt' is {what}; it must be one prompt, a string or a list of token ids (several: send a request each).",
        param="prompt",
    )


def _logprobs_wanted(given: Any) -> int | None:
    if given is None or (type(given) is int and 0 <= given <= MAX_LOGPROBS):
        return given
    raise ApiError(
        f"'logprobs' is {short_repr(given)}; it must be an integer from 0 to {MAX_LOGPROBS}.", param="logprobs"
    )


def _choice_body(
    request: ChatRequest, index: int, choice: Choice, prompt_ids: Sequence[int], renderer: Renderer
) -> dict[str, Any]:
    body: dict[str, Any] = {
        "index": index,
        "text": choice.message["content"],
        "finish_reason": choice.finish_reason,
        "logprobs": _logprobs(choice.generation, renderer) if request.logprobs else None,
        "call_index": choice.call_index,
    }
    if request.return_token_ids:
        body |= {"prompt_token_ids": list(prompt_ids), "token_ids": choice.generation.ids.tolist()}
    return body


def _logprobs(generation: Generation, renderer: Renderer) -> dict[str, Any]:
    """The logprobs in this API's format: a list for each fact, `text_offset` counted from the answer's beginning."""
    ids, logprobs = generation.ids.tolist(), [max(one, -9999.0) for one in generation.logprobs.tolist()]
    texts = [renderer.token_bytes(token_id)[0] for token_id in ids]
    offsets = list(itertools.accumulate(map(len, texts[:-1]), initial=0))
    tops = generation.top_logprobs or ((),) * len(ids)
    top_logprobs = [{renderer.token_bytes(one)[0]: max(value, -9999.0) for one, value in top} for top in tops]
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": top_logprobs, "text_offset": offsets}


def _events(
    head: Mapping[str, Any], bodies: Sequence[Mapping[str, Any]], usage: Mapping[str, Any] | None
) -> Iterator[dict[str, Any]]:
    for body in bodies:
        yield {**head, "choices": [{**body, "finish_reason": None}]}
        last = {"index": body["index"], "text": "", "logprobs": None, "finish_reason": body["finish_reason"]}
        yield {**head, "choices": [last]}
    if usage is not None:
        yield {**head, "choices": [], "usage": usage}
