"""OpenAI's Responses: its answers, whole and as events; and the input of a stored one, page by page.

In: the internal answer; the `input` of a request, and the query of a later one. Out: a response with items (reasoning,
message, calls), or the events that build it; what `GET /v1/responses/{id}/input_items` gives. Those items are of that
request alone: what an earlier response brought by `previous_response_id` is in the input of that one. They are kept
with references in place of their images, since clients send these again with every request.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

from sharpen.gateway.answers import Choice, Delta, Head, Writer
from sharpen.gateway.memory import Memory, StoredResponse
from sharpen.gateway.protocols.chat import logprobs_of
from sharpen.gateway.render import Renderer
from sharpen.gateway.replies import dump
from sharpen.gateway.requests import REFERENCE, ApiError, short_repr
from sharpen.types import Picture

Items = Sequence[Mapping[str, Any]]
MAX_LIMIT, DEFAULT_LIMIT = 100, 20


def input_items(given: Any, response_id: str) -> Items:
    """Return the items of a valid `input`, each with an id. A text is a message of the user."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    items = []
    for place, item in enumerate(given):
        item = {"id": f"in_{response_id.removeprefix('resp_')}_{place}", "type": "message", **item}
        if isinstance(item.get("content"), str) and item["type"] == "message":
            kind = "output_text" if item.get("role") == "assistant" else "input_text"
            item["content"] = [{"type": kind, "text": item["content"]}]
        items.append(item)
    return items


def with_urls(items: Any, change: Callable[[str], str]) -> Any:
    """Return items with the URL of each image changed. What is no list of items is returned as it is."""
    if not isinstance(items, list):
        return items

    def changed(part: Any) -> Any:
        if (
            not isinstance(part, dict)
            or part.get("type") != "input_image"
            or not isinstance(part.get("image_url"), str)
        ):
            return part
        return {**part, "image_url": change(part["image_url"])}

    return [
        {name: [changed(part) for part in value] if isinstance(value, list) else value for name, value in item.items()}
        for item in items
    ]


def input_page(items: Items, query: str, pictures: Mapping[str, Picture]) -> dict[str, Any]:
    """Return one page: the newest first, unless `order` is `asc`; from behind the item `after`; `limit` at most.
    `pictures` are those that references stand for, by hash.

    Raises `ApiError` for a value that cannot be, and for another parameter.
    """
    asked = dict(parse_qsl(query))
    order, after = asked.pop("order", "desc"), asked.pop("after", None)
    limit = asked.pop("limit", str(DEFAULT_LIMIT))
    if (unknown := next((name for name in asked if name not in ("include", "include[]")), None)) is not None:
        raise ApiError(f"Unknown parameter: '{unknown[:100]}'.", code="unknown_parameter", param=unknown[:100])
    if order not in ("asc", "desc"):
        raise ApiError(f"'order' is {short_repr(order)}; it must be 'asc' or 'desc'.", param="order")
    if not (limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= MAX_LIMIT):
        raise ApiError(f"'limit' is {short_repr(limit)}; it must be from 1 to {MAX_LIMIT}.", param="limit")
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        places = [place for place, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise ApiError(f"'after' is {short_repr(after)}; there is no such item.", param="after")
        ordered = ordered[places[0] + 1 :]

    def data_url(url: str) -> str:
        picture = pictures.get(url.removeprefix(REFERENCE))
        return url if picture is None else picture.data_url

    page = with_urls(ordered[: int(limit)], data_url)
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(ordered) > len(page),
    }


SEALED = "sharpen."
"""Begins the `encrypted_content` that is given out: the text of the reasoning, in base64."""
_ECHOED: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
"""What a response says of its request, with the values of fields that were not given."""


class ResponsesWriter(Writer):
    """Writes one answer as Responses have it, and stores it in the rollout's memory if the request wants that.

    `conversation` is what the answer is to; `custom` are the names of custom tools. `sealed`: reasoning is also given
    as `encrypted_content`. `summary`: it is also given as its own summary, which clients show. `logprobs`: of the text.
    """

    streams_overflow = True

    def __init__(
        self,
        *,
        memory: Memory,
        given: Mapping[str, Any],
        conversation: Sequence[Mapping[str, Any]],
        custom: frozenset[str],
        store: bool,
        sealed: bool,
        summary: bool,
        logprobs: bool,
    ) -> None:
        self._memory, self._given, self._conversation, self._custom = memory, given, conversation, custom
        self._store, self._sealed, self._summary, self._logprobs = store, sealed, summary, logprobs
        self._numbers = itertools.count()
        self._open: str | None = None
        self._text = ""
        self._output: list[dict[str, Any]] = []
        self._head: Head | None = None

    def whole(self, head: Head, choices: Sequence[Choice], renderer: Renderer) -> dict[str, Any]:
        """Return the body of the whole answer."""
        (choice,) = choices
        message, output = choice.message, []
        if message.get("reasoning_content"):
            output.append(self._reasoning_item(head, message["reasoning_content"]))
        if message["content"] or not message.get("tool_calls"):
            output.append(self._message_item(head, message["content"] or "", choice, renderer))
        output += [self._call_item(call) for call in message.get("tool_calls", ())]
        return self._finished(head, choice, output, renderer)

    def begin(self, head: Head) -> bytes:
        """Return the events that begin the response."""
        self._head = head
        response = self._response(head, status="in_progress", output=[])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def delta(self, head: Head, delta: Delta) -> bytes:
        """Return the events of new text, in an item of its kind."""
        opened = self._switch(head, delta.kind)
        self._text += delta.text
        if delta.kind == "content":
            return opened + self._part_event("response.output_text.delta", delta=delta.text, logprobs=[])
        added = self._part_event("response.reasoning_text.delta", delta=delta.text)
        if self._summary:
            added += self._summary_event("response.reasoning_summary_text.delta", delta=delta.text)
        return opened + added

    def end(self, head: Head, choices: Sequence[Choice], renderer: Renderer) -> bytes:
        """Return the events of what was not text, and the completed response."""
        (choice,) = choices
        events = []
        if not self._output and self._open != "content" and not choice.message.get("tool_calls"):
            events.append(self._switch(head, "content"))
        events.append(self._close(head, choice, renderer))
        for call in choice.message.get("tool_calls", ()):
            events.append(self._call_events(self._call_item(call)))
        response = self._finished(head, choice, self._output, renderer)
        events.append(self._event(f"response.{response['status']}", response=response))
        return b"".join(events)

    def error(self, error: ApiError) -> bytes:
        """Return the event of a response that failed."""
        assert self._head is not None
        told = {"code": error.code or "server_error", "message": str(error)}
        response = {**self._response(self._head, status="failed", output=self._output), "error": told}
        return self._event("response.failed", response=response)

    def _finished(self, head: Head, choice: Choice, output: list[dict[str, Any]], renderer: Renderer) -> dict[str, Any]:
        cut = choice.finish_reason == "length"
        response = self._response(head, status="incomplete" if cut else "completed", output=output)
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        reasoning = choice.message.get("reasoning_content")
        num_prompt, num_sampled = len(head.prompt_ids_P), len(choice.generation.ids)
        response["usage"] = {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": num_sampled,
            "output_tokens_details": {"reasoning_tokens": len(renderer.encode(reasoning)) if reasoning else 0},
            "total_tokens": num_prompt + num_sampled,
        }
        if self._store:
            messages = [*self._conversation, choice.message]
            self._memory.responses[response["id"]] = StoredResponse(
                body=response, messages=messages, input_items=input_items(self._given.get("input", []), response["id"])
            )
        return response

    def _response(self, head: Head, *, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        echoed = {name: self._given.get(name, default) for name, default in _ECHOED.items()}
        return {
            "id": f"resp_{head.name}",
            "object": "response",
            "created_at": head.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": head.model,
            "output": list(output),
            "reasoning": {"effort": None, "summary": None, **self._given.get("reasoning", {})},
            "store": self._store,
            "usage": None,
            **echoed,
        }

    def _reasoning_item(self, head: Head, text: str) -> dict[str, Any]:
        sealed = SEALED + base64.b64encode(text.encode()).decode() if self._sealed else None
        return {
            "id": f"rs_{head.name}",
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": text}] if self._summary else [],
            "content": [{"type": "reasoning_text", "text": text}],
            "encrypted_content": sealed,
            "status": "completed",
        }

    def _message_item(self, head: Head, text: str, choice: Choice | None, renderer: Renderer | None) -> dict[str, Any]:
        part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        if self._logprobs and choice is not None and renderer is not None:
            part["logprobs"] = logprobs_of(choice.generation, renderer)["content"]
        message = {"id": f"msg_{head.name}", "type": "message", "role": "assistant"}
        return {**message, "status": "completed", "content": [part]}

    def _call_item(self, call: Mapping[str, Any]) -> dict[str, Any]:
        name, arguments, call_id = call["function"]["name"], call["function"]["arguments"], call["id"]
        item_id = call_id.replace("call_", "fc_")
        about = {"id": item_id, "call_id": call_id, "name": name, "status": "completed"}
        if name in self._custom:
            given = json.loads(arguments).get("input", "")
            return {
                **about,
                "type": "custom_tool_call",
                "input": given if isinstance(given, str) else json.dumps(given),
            }
        return {**about, "type": "function_call", "arguments": arguments}

    def _switch(self, head: Head, kind: str) -> bytes:
        """Return the events that end the open item and begin one of this kind; none if it is open."""
        if self._open == kind:
            return b""
        closed = self._close(head, None, None)
        self._open, self._text = kind, ""
        if kind == "content":
            item = {**self._message_item(head, "", None, None), "status": "in_progress", "content": []}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            added = self._item_event("response.output_item.added", item)
            return closed + added + self._part_event("response.content_part.added", part=part)
        item = {**self._reasoning_item(head, ""), "status": "in_progress", "summary": [], "content": []}
        added = self._item_event("response.output_item.added", item)
        part = {"type": "reasoning_text", "text": ""}
        added += self._part_event("response.content_part.added", part=part)
        if self._summary:
            part = {"type": "summary_text", "text": ""}
            added += self._summary_event("response.reasoning_summary_part.added", part=part)
        return closed + added

    def _close(self, head: Head, choice: Choice | None, renderer: Renderer | None) -> bytes:
        """Return the events that end the open item."""
        if self._open is None:
            return b""
        kind, text = self._open, self._text
        if kind == "content":
            item = self._message_item(head, text, choice, renderer)
            part = item["content"][0]
            done = self._part_event("response.output_text.done", text=text, logprobs=part["logprobs"])
        else:
            item = self._reasoning_item(head, text)
            part = item["content"][0]
            done = self._part_event("response.reasoning_text.done", text=text)
            if self._summary:
                done += self._summary_event("response.reasoning_summary_text.done", text=text)
                done += self._summary_event("response.reasoning_summary_part.done", part=item["summary"][0])
        done += self._part_event("response.content_part.done", part=part)
        done += self._item_event("response.output_item.done", item)
        self._output.append(item)
        self._open = None
        return done

    def _call_events(self, item: dict[str, Any]) -> bytes:
        field = "input" if item["type"] == "custom_tool_call" else "arguments"
        name = "response.custom_tool_call_input" if field == "input" else "response.function_call_arguments"
        events = self._item_event("response.output_item.added", {**item, field: "", "status": "in_progress"})
        about = {"item_id": item["id"], "output_index": len(self._output)}
        events += self._event(f"{name}.delta", **about, delta=item[field])
        events += self._event(f"{name}.done", **about, **{field: item[field], "name": item["name"]})
        events += self._item_event("response.output_item.done", item)
        self._output.append(item)
        return events

    def _item_event(self, type: str, item: Mapping[str, Any]) -> bytes:
        return self._event(type, output_index=len(self._output), item=item)

    def _part_event(self, type: str, **fields: Any) -> bytes:
        return self._event(type, **self._place(), content_index=0, **fields)

    def _summary_event(self, type: str, **fields: Any) -> bytes:
        return self._event(type, **self._place(), summary_index=0, **fields)

    def _place(self) -> dict[str, Any]:
        assert self._head is not None
        prefix = "msg" if self._open == "content" else "rs"
        return {"item_id": f"{prefix}_{self._head.name}", "output_index": len(self._output)}

    def _event(self, type: str, **fields: Any) -> bytes:
        body = {"type": type, "sequence_number": next(self._numbers), **fields}
        return b"event: " + type.encode() + b"\ndata: " + dump(body) + b"\n\n"
