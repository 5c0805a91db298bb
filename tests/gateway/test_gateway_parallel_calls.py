"""Several tool calls in one answer, through both vendors' SDKs: their results come back, and the ids go on."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import numpy as np
import openai
import pytest

SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALLS = "\n".join(
    f'<tool_call>\n{{"name": "{name}", "arguments": {{"a":  {a}}}}}\n</tool_call>'
    for name, a in (("add", 1), ("add", 2), ("take", 3))
)
ASKED = [("add", {"a": 1}), ("add", {"a": 2}), ("take", {"a": 3})]


def chat(client: Any, stream: bool) -> tuple[list[tuple[str, Any]], str | None]:
    functions = [{"name": name, "parameters": SCHEMA} for name in ("add", "take")]
    tools: Any = [{"type": "function", "function": function} for function in functions]
    said: list[Any] = [{"role": "user", "content": "go"}]
    if stream:
        with client.chat.completions.stream(model="toy", messages=said, tools=tools) as events:
            message = events.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(model="toy", messages=said, tools=tools).choices[0].message
    said.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
    said += [{"role": "tool", "tool_call_id": call.id, "content": call.id[-2:]} for call in message.tool_calls]
    last = client.chat.completions.create(model="toy", messages=said, tools=tools).choices[0].message.content
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls], last


def responses(client: Any, stream: bool) -> tuple[list[tuple[str, Any]], str | None]:
    tools: Any = [{"type": "function", "name": name, "parameters": SCHEMA, "strict": False} for name in ("add", "take")]
    if stream:
        with client.responses.stream(model="toy", input="go", tools=tools) as events:
            first = events.get_final_response()
    else:
        first = client.responses.create(model="toy", input="go", tools=tools)
    calls = [item for item in first.output if item.type == "function_call"]
    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": call.call_id[-2:]} for call in calls]
    last = client.responses.create(model="toy", input=outputs, tools=tools, previous_response_id=first.id)
    return [(call.name, json.loads(call.arguments)) for call in calls], last.output_text


def messages(client: Any, stream: bool) -> tuple[list[tuple[str, Any]], str | None]:
    tools: Any = [{"name": name, "input_schema": SCHEMA} for name in ("add", "take")]
    options: Any = {"model": "toy", "max_tokens": 300, "tools": tools}
    said: list[Any] = [{"role": "user", "content": "go"}]
    if stream:
        with client.messages.stream(messages=said, **options) as events:
            first = events.get_final_message()
    else:
        first = client.messages.create(messages=said, **options)
    uses = [block for block in first.content if block.type == "tool_use"]
    said.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]})
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": use.id[-2:]} for use in uses]
    said.append({"role": "user", "content": results})
    return [(use.name, use.input) for use in uses], client.messages.create(messages=said, **options).content[0].text


@pytest.mark.parametrize("over_http", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("agent", [chat, responses, messages])
def test_all_calls_of_an_answer_are_answered_at_once(serve: Any, agent: Any, stream: bool, over_http: bool) -> None:
    answers: Iterator[str] = iter((f"all three\n{CALLS}", "done"))
    session = serve(lambda request: next(answers)).open()
    model = session.model
    with contextlib.ExitStack() as stack:
        client: Any = model.sync_anthropic_client if agent is messages else model.sync_client
        if over_http:
            sdk: Any = anthropic.Anthropic if agent is messages else openai.OpenAI
            url = model.base_url.removesuffix("/v1") if agent is messages else model.base_url
            client = stack.enter_context(sdk(base_url=url, api_key=model.api_key, max_retries=0))
        assert agent(client, stream) == (ASKED, "done")
    one, two = session.close()
    ids = np.concatenate([one.prompt_ids_P, one.sampled_ids_S])
    assert two.parent == one.index
    assert np.array_equal(two.prompt_ids_P[: len(ids)], ids)
    assert [message["role"] for message in two.messages] == ["user", "assistant", "tool", "tool", "tool"]
    assert len({message["content"] for message in two.messages[2:]}) == 3
