"""What agent frameworks send, taken from their sources: accepted, or refused by the parameter's name."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from pydantic import BaseModel
from scripted import toy_tokenizer

CALLS = '<tool_call>\n{"name": "answer", "arguments": {"value": 4}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"value": {"type": "integer"}}, "required": ["value"]}
TOOL = {
    "type": "function",
    "function": {"name": "answer", "description": "Give it.", "parameters": SCHEMA, "strict": True},
}
NAMED = {"type": "function", "function": {"name": "answer"}}
PARTS = [
    {"role": "system", "name": "system", "content": [{"type": "text", "text": "Be brief."}]},
    {"role": "user", "name": "user", "content": [{"type": "text", "text": "2+2"}]},
]
SENT_BACK = [
    {"role": "user", "content": "2+2"},
    {
        "role": "assistant",
        "name": "Friday",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "answer", "arguments": '{"value": 4}'}},
            {"id": "c2", "type": "function", "function": {"name": "answer", "arguments": '{"value": 5}'}},
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "name": "answer", "content": [{"type": "text", "text": "noted"}]},
    {"role": "tool", "tool_call_id": "c2", "name": "answer", "content": "noted"},
]

ACCEPTED: dict[str, dict[str, Any]] = {
    "agentscope 1, a turn": {"messages": PARTS, "stream": False, "tools": [TOOL], "tool_choice": "auto"},
    "agentscope 1, structured output by a tool": {"messages": PARTS, "tools": [TOOL], "tool_choice": "required"},
    "agentscope 1, its fallback": {"messages": PARTS, "tools": [TOOL], "tool_choice": NAMED},
    "agentscope, the results of two tools": {"messages": SENT_BACK, "tools": [TOOL]},
    "agentscope 2, parameters": {"messages": PARTS, "max_completion_tokens": 64, "temperature": 0.7, "top_p": 1.0},
    "agentscope 2, one tool at a time": {"messages": PARTS, "tools": [TOOL], "parallel_tool_calls": False},
    "langgraph, with_structured_output": {
        "messages": [{"role": "user", "content": "2+2"}],
        "tools": [TOOL],
        "tool_choice": NAMED,
        "parallel_tool_calls": False,
        "max_completion_tokens": 64,
    },
    "openai agents": {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2"}],
        "tools": [TOOL],
        "parallel_tool_calls": True,
        "store": False,
        "stream": False,
        "metadata": {"a": "b"},
    },
}


@pytest.mark.parametrize("options", ACCEPTED.values(), ids=ACCEPTED)
def test_what_frameworks_send_is_accepted(serve: Any, options: dict[str, Any]) -> None:
    session = serve(CALLS).open()
    reply = session.model.sync_client.chat.completions.create(model="toy", **options)
    (call,) = session.close()
    assert call.finish_reason == "stop"
    if "tools" in options:
        assert reply.choices[0].message.tool_calls[0].function.name == "answer"
        assert reply.choices[0].finish_reason == "tool_calls"


def of_litellm(message: Any) -> dict[str, Any]:
    """An assistant message as litellm sends it back."""
    calls = [{**call.model_dump(), "index": at} for at, call in enumerate(message.tool_calls)]
    fields = {"provider_specific_fields": {"refusal": None}, "thinking_blocks": [], "function_call": None}
    return {"role": "assistant", "content": None, "tool_calls": calls, **fields}


def test_a_tool_loop_through_litellm(serve: Any, caplog: Any) -> None:
    """Its messages carry fields that no template reads: the conversation goes on as one sequence, and it is said once.
    Red when `_other_fields` (gateway/requests.py) refuses them."""
    session = serve(CALLS).open()
    create = session.model.sync_client.chat.completions.create
    messages: list[Any] = [{"role": "user", "content": "2+2"}]
    for _ in range(3):
        message = create(model="toy", messages=messages, tools=[TOOL]).choices[0].message
        (call,) = message.tool_calls
        messages += [of_litellm(message), {"role": "tool", "tool_call_id": call.id, "content": "4"}]
    assert [call.parent for call in session.close()] == [None, 0, 1]
    said = [record.message for record in caplog.records]
    assert len(said) == 2
    assert "'provider_specific_fields', which the model's chat template does not read" in said[0]
    caplog.clear()


def test_a_field_that_the_template_reads_is_in_the_prompt(serve: Any, caplog: Any) -> None:
    """Which is what it means to this model; nothing is to be said."""
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.mood }}: {{ message.content }}{% endfor %}"
    served = serve("hi", tokenizer=tokenizer)
    messages: Any = [{"role": "user", "content": "2+2", "mood": "curious"}]
    served.open().model.sync_client.chat.completions.create(model="toy", messages=messages)
    assert tokenizer.decode(served.engine.requests[0].prompt_ids) == "curious: 2+2"
    assert not caplog.records


def test_any_model_name_is_accepted_with_a_warning(serve: Any, caplog: Any) -> None:
    """Frameworks cut names at a slash, or accept only OpenAI's names."""
    session = serve("hi").open()
    for name in ("gpt-4o", "openai/toy", "gpt-4o"):
        reply = session.model.sync_client.chat.completions.create(model=name, messages=PARTS)  # type: ignore[call-overload]
        assert reply.model == "toy"
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "a call asks for the model 'gpt-4o'",
        "a call asks for the model 'openai/toy'",
    ]
    caplog.clear()
    with pytest.raises(openai.BadRequestError, match="must be a string"):
        session.model.sync_client.chat.completions.create(model=7, messages=PARTS)  # type: ignore[call-overload]


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_tool_choice_changes_no_prompt_but_constrains_the_answer(serve: Any, choice: Any) -> None:
    """The tool is strict, so that "auto" constrains its arguments. The scripted engine does as it likes; what it was
    asked is recorded."""
    served = serve("just text")
    session = served.open()
    create = session.model.sync_client.chat.completions.create
    for tool_choice in ("auto", choice):
        message = create(model="toy", messages=PARTS, tools=[TOOL], tool_choice=tool_choice).choices[0].message
        assert (message.content, message.tool_calls) == ("just text", None)
    first, second = served.engine.requests
    assert first.prompt_ids.tolist() == second.prompt_ids.tolist()
    assert (first.constraint.origin, second.constraint.origin) == ("tools", "tool_choice")
    assert [call.constraint for call in session.close()] == [first.constraint, second.constraint]


def test_a_stream_ends_with_its_usage_if_requested(serve: Any) -> None:
    session = serve(CALLS).open()
    options: dict[str, Any] = {"tools": [TOOL], "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(session.model.sync_client.chat.completions.create(model="toy", messages=PARTS, **options))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + chunks[-1].usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


class Answer(BaseModel):
    value: int


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"extra_body": {"reasoning_effort": 5}}, "reasoning_effort"),
        ({"extra_body": {"modalities": ["text", "audio"]}}, "modalities"),
        ({"extra_body": {"parallel_tool_calls": "no"}, "tools": [TOOL]}, "parallel_tool_calls"),
        ({"extra_body": {"stream_options": {"include_usage": True}}}, "stream_options"),
    ],
)
def test_unsupported_parameters_are_a_clear_400(serve: Any, options: dict[str, Any], param: str) -> None:
    """AgentScope 1.0.21 takes the 400 for `response_format` as its sign to ask by a tool instead."""
    session = serve(CALLS).open()
    with pytest.raises(openai.BadRequestError) as caught:
        session.model.sync_client.chat.completions.parse(model="toy", messages=PARTS, **options)
    assert caught.value.param == param
    assert f"'{param}'" in caught.value.message
    assert session.close() == ()
