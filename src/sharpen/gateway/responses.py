"""Chat-completion responses as JSON bodies and server-sent events.

In: the `Choice`s of one request. Out: bytes in OpenAI's format. A stream is made from the whole response, since tool
calls can only be parsed from the whole text: it arrives at once, in valid chunks.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sharpen.gateway.exchange import Exchange, Reply
from sharpen.gateway.formats.format import ParsedText
from sharpen.gateway.render import Renderer
from sharpen.gateway.requests import ApiError, ChatRequest
from sharpen.inference.engine import Generation

JSON_TYPE, EVENTS_TYPE = "application/json", "text/event-stream"


def error_reply(error: ApiError) -> Reply:
    """Return the reply for an error, in OpenAI's format."""
    return Reply(status=error.status, content_type=JSON_TYPE, body=dump(error.body()))


def reply_of(task: asyncio.Task[Reply]) -> Reply:
    """Return the reply of a finished task. A cancelled task means that its rollout has been closed: a 401."""
    if not task.cancelled():
        return task.result()
    return error_reply(
        ApiError("The rollout has ended.", status=401, code="invalid_api_key", kind="authentication_error")
    )


def assistant_message(parsed: ParsedText, name: str) -> dict[str, Any]:
    """Return the assistant message of a choice. The ids of its tool calls are made from the call's `name`."""
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content or None}
    if not parsed.tool_calls and not parsed.reasoning:
        message["content"] = parsed.content
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.tool_calls:
        message["tool_calls"] = [
            {
                "id": f"call_{name}{position:02x}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for position, call in enumerate(parsed.tool_calls)
        ]
    return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One choice of a response: the index of its call, its message, OpenAI's finish reason, and what was sampled."""

    call_index: int
    message: Mapping[str, Any]
    finish_reason: str
    generation: Generation


def completion_reply(
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
    """Return the whole response of a request, as one body or as events."""
    num_sampled = sum(len(choice.generation.ids) for choice in choices)
    usage = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt_tokens + num_sampled,
    }
    head: dict[str, Any] = {"id": f"chatcmpl-{name}", "created": created, "model": model}
    if request.return_token_ids:
        head["prompt_token_ids"] = list(prompt_ids)
    bodies = [_choice_body(request, index, choice, renderer) for index, choice in enumerate(choices)]
    if request.stream:
        events = _events(head, bodies, usage if request.include_usage else None)
        body = b"".join(b"data: " + dump(event) + b"\n\n" for event in events) + b"data: [DONE]\n\n"
        return Reply(status=200, content_type=EVENTS_TYPE, body=body, exchange=exchange)
    whole = {**head, "object": "chat.completion", "choices": bodies, "usage": usage}
    return Reply(status=200, content_type=JSON_TYPE, body=dump(whole), exchange=exchange)


def models_reply(model: str) -> Reply:
    """Return the reply that lists the one model served."""
    entry = {"id": model, "object": "model", "created": 0, "owned_by": "sharpen"}
    return Reply(status=200, content_type=JSON_TYPE, body=dump({"object": "list", "data": [entry]}))


def _choice_body(request: ChatRequest, index: int, choice: Choice, renderer: Renderer) -> dict[str, Any]:
    body: dict[str, Any] = {
        "index": index,
        "message": choice.message,
        "finish_reason": choice.finish_reason,
        "logprobs": _logprobs(choice.generation, renderer) if request.logprobs else None,
    }
    if request.return_token_ids:
        body["token_ids"] = choice.generation.ids.tolist()
    if request.plain_text:
        body["call_index"] = choice.call_index
    return body


def _logprobs(generation: Generation, renderer: Renderer) -> dict[str, Any]:
    tops = generation.top_logprobs or ((),) * len(generation.ids)
    content = []
    for token_id, logprob, top in zip(generation.ids.tolist(), generation.logprobs.tolist(), tops, strict=True):
        entry = _token(renderer, token_id, logprob)
        entry["top_logprobs"] = [_token(renderer, other_id, other) for other_id, other in top]
        content.append(entry)
    return {"content": content, "refusal": None}


def _token(renderer: Renderer, token_id: int, logprob: float) -> dict[str, Any]:
    text, text_bytes = renderer.token_bytes(token_id)
    # JSON has no infinity; like OpenAI, use -9999 for a token of probability 0.
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": text_bytes}


def _events(
    head: Mapping[str, Any], bodies: Sequence[Mapping[str, Any]], usage: Mapping[str, Any] | None
) -> Iterator[dict[str, Any]]:
    def event(body: Mapping[str, Any], delta: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        choice = {"index": body["index"], "delta": delta, "finish_reason": None, "logprobs": None, **more}
        return {**head, "object": "chat.completion.chunk", "choices": [choice]}

    for body in bodies:
        message = body["message"]
        yield event(body, {"role": "assistant", "content": ""})
        if "reasoning_content" in message:
            yield event(body, {"reasoning_content": message["reasoning_content"]})
        extra = {"token_ids": body["token_ids"]} if "token_ids" in body else {}
        delta = {"content": message["content"]} if message["content"] else {}
        yield event(body, delta, logprobs=body["logprobs"], **extra)
        for position, call in enumerate(message.get("tool_calls", ())):
            yield event(body, {"tool_calls": [{"index": position, **call}]})
        yield event(body, {}, finish_reason=body["finish_reason"])
    if usage is not None:
        yield {**head, "object": "chat.completion.chunk", "choices": [], "usage": usage}


def dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
