"""A client protocol of one's own: Ollama's `/api/chat`, whole and as lines of JSON.

sharpen run --config run.yaml --set 'gateway.protocols=[examples/extend/protocol.py:OLLAMA]'

In the workflow: `ollama.AsyncClient(host=model.keyed_url.removesuffix("/v1"))`.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Required

from pydantic import Field, with_config
from typing_extensions import TypedDict

from sharpen.gateway.answers import Choice, Delta, Head, Writer
from sharpen.gateway.door import CLOSED, OPEN, Door, openai_place
from sharpen.gateway.memory import Memory
from sharpen.gateway.protocols import chat
from sharpen.gateway.protocols.protocol import ClientProtocol, Context
from sharpen.gateway.render import Renderer
from sharpen.gateway.replies import dump
from sharpen.gateway.requests import ApiError, CallRequest, given_fields

OPTIONS = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "seed": "seed", "stop": "stop"}
"""Sampling by Ollama's names, and by those of chat completions."""


@with_config(OPEN)
class Function(TypedDict):
    """The function that a tool call names, with its arguments as an object."""

    name: str
    arguments: dict[str, Any]


@with_config(OPEN)
class ToolCall(TypedDict):
    """A tool call; what else it has is not read."""

    function: Function


@with_config(CLOSED)
class Message(TypedDict, total=False):
    """A message; a tool's result follows the message with its call."""

    role: Required[Literal["system", "user", "assistant", "tool"]]
    content: str | None
    thinking: str | None
    images: list[str] | None
    tool_calls: list[ToolCall] | None
    tool_name: str | None


@with_config(CLOSED)
class Request(TypedDict, total=False):
    """A request. `keep_alive` and `num_ctx` have no effect, nor does `think` make the model think: that says
    `model.enable_thinking`."""

    model: Required[str]
    messages: Required[Annotated[list[Message], Field(min_length=1)]]
    tools: list[dict[str, Any]] | None
    format: Literal["", "json"] | dict[str, Any] | None
    options: dict[str, Any] | None
    stream: bool | None
    think: bool | str | None
    keep_alive: float | str | None


DOOR = Door(Request, openai_place)


def parse_request(body: Any, context: Context) -> tuple[CallRequest, Writer]:
    """Read a body: the door checks its form, and chat completions, in whose words it is put, all else."""
    DOOR.check(body)
    given = given_fields(body)
    options = given_fields(given.get("options", {}))
    if others := options.keys() - OPTIONS.keys() - {"num_predict", "num_ctx"}:
        raise ApiError(f"options: {sorted(others)[0]!r} is not supported here.", param="options")
    asked: dict[str, Any] = {
        "model": given["model"],
        "messages": list(_messages(given["messages"], context.memory)),
        "tools": given.get("tools", []),
        "stream": given.get("stream", True),
        **{name: options[theirs] for theirs, name in OPTIONS.items() if theirs in options},
    }
    if options.get("num_predict", -1) != -1:
        asked["max_tokens"] = options["num_predict"]
    if form := given.get("format"):
        schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": form, "strict": True}}
        asked["response_format"] = {"type": "json_object"} if form == "json" else schema
    request, _ = chat.parse_request(asked, context)
    return request, OllamaWriter(think=given.get("think") is not False)


def _messages(messages: Sequence[Mapping[str, Any]], memory: Memory) -> Iterator[dict[str, Any]]:
    """Yield the conversation as chat completions have it. Calls have no ids here: they get those by which the rollout
    remembers what it sampled, so that their arguments stay as they were."""
    waiting: list[str] = []
    sampled = Counter[str]()
    for place, message in enumerate(messages):
        found = {"role": message["role"], "content": message.get("content") or ""}
        if message["role"] == "tool":
            yield {**found, "tool_call_id": waiting.pop(0) if waiting else f"none_{place}"}
            continue
        if images := message.get("images"):
            parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}} for image in images]
            found["content"] = [{"type": "text", "text": found["content"]}, *parts]
        if message.get("thinking"):
            found["reasoning_content"] = message["thinking"]
        waiting = []
        for number, call in enumerate(message.get("tool_calls") or ()):
            function = call["function"]
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            same = [id_ for id_, text in memory.arguments.items() if json.loads(text) == function["arguments"]]
            at = min(sampled[arguments], len(same) - 1)
            sampled[arguments] += 1
            waiting.append(same[at] if same else f"call_{place}_{number}")
            called = {"name": function["name"], "arguments": arguments}
            found.setdefault("tool_calls", []).append({"id": waiting[-1], "type": "function", "function": called})
        yield found


class OllamaWriter(Writer):
    """Writes an answer. `think`: reasoning is given out."""

    stream_type = "application/x-ndjson"

    def __init__(self, *, think: bool) -> None:
        self._think = think

    def whole(self, head: Head, choices: Sequence[Choice], renderer: Renderer) -> dict[str, Any]:
        """Return the body of the whole answer."""
        (choice,) = choices
        message = {"content": choice.message["content"] or "", **self._calls(choice)}
        if self._think and choice.message.get("reasoning_content"):
            message["thinking"] = choice.message["reasoning_content"]
        return {**_part(head, **message), **_end(head, choice)}

    def begin(self, head: Head) -> bytes:
        """Return nothing: a stream begins with text."""
        return b""

    def delta(self, head: Head, delta: Delta) -> bytes:
        """Return the line of new text."""
        if delta.kind == "content":
            return _line(_part(head, content=delta.text))
        return _line(_part(head, content="", thinking=delta.text)) if self._think else b""

    def end(self, head: Head, choices: Sequence[Choice], renderer: Renderer) -> bytes:
        """Return the line of the tool calls, and the last one."""
        (choice,) = choices
        calls = self._calls(choice)
        lines = _line(_part(head, content="", **calls)) if calls else b""
        return lines + _line({**_part(head, content=""), **_end(head, choice)})

    def error(self, error: ApiError) -> bytes:
        """Return the line of an error."""
        return _line(error_body(error))

    def _calls(self, choice: Choice) -> dict[str, Any]:
        calls = [
            {"function": {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}}
            for call in choice.message.get("tool_calls", ())
        ]
        return {"tool_calls": calls} if calls else {}


def _part(head: Head, **message: Any) -> dict[str, Any]:
    created = datetime.fromtimestamp(head.created, UTC).isoformat()
    return {"model": head.model, "created_at": created, "message": {"role": "assistant", **message}, "done": False}


def _end(head: Head, choice: Choice) -> dict[str, Any]:
    reason = "length" if choice.finish_reason == "length" else "stop"
    counts = {"prompt_eval_count": len(head.prompt_ids_P), "eval_count": len(choice.generation.ids)}
    return {"done": True, "done_reason": reason, **counts}


def _line(body: Mapping[str, Any]) -> bytes:
    return dump(body) + b"\n"


def error_body(error: ApiError) -> dict[str, Any]:
    """Return an error as Ollama has it."""
    return {"error": str(error)}


def tags(model: str) -> dict[str, Any]:
    """Return the list of models, which some clients ask for first."""
    return {"models": [{"name": model, "model": model}]}


OLLAMA = ClientProtocol(
    name="ollama",
    calls={("POST", "/api/chat"): parse_request},
    pages={("GET", "/api/tags"): tags},
    error=error_body,
)
