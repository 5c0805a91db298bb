"""A conversation with tool calls goes on as one sequence, with each family's chat template, and calls survive it.

The model's answer is parsed, the agent sends the message back, and the next prompt has to begin with the very ids that
were sampled: `parse` must give what the template writes again.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from families import FAMILIES, Family, family_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sharpen.gateway.formats.format import parse_text
from sharpen.gateway.formats.table import AUTO, Formats, formats_of
from sharpen.gateway.render import Renderer

PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "deep": {"type": "boolean"},
    "items": {"type": "array"},
    "point": {"type": "object"},
    "maybe": {"type": ["string", "null"]},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}}
    for name in ("f", "look_up")
]
USER = {"role": "user", "content": "hi"}
ARGUMENTS: dict[str, Any] = {
    "count": -3,
    "deep": False,
    "items": [1, {"k": "v"}, []],
    "maybe": None,
    "share": 2.5,
    "text": 'é 🙂 "a"\\n <b> {c}',
}


def found(family: Family) -> Formats:
    return formats_of(family.template, tool_call_parser=AUTO, reasoning_parser=AUTO)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_the_formats_are_found_in_the_template(family: Family) -> None:
    formats = found(family)
    assert formats.tool is not None
    assert formats.tool.name == family.tool
    assert (formats.reasoning.name if formats.reasoning is not None else None) == family.reasoning


def written(renderer: Renderer, family: Family, calls: list[dict[str, Any]], **fields: Any) -> tuple[str, bool]:
    """What the family's template writes for a message with these calls, without the end token, and whether the prompt
    opens the reasoning."""
    message = {"role": "assistant", "content": "", "tool_calls": calls, **fields}
    prompt = renderer.render([USER], TOOLS, {})
    whole = renderer.render([USER, message, {"role": "user", "content": "so"}], TOOLS, {}, closed=True)
    assert whole.startswith(prompt)
    reasoning = found(family).reasoning
    opened = reasoning is not None and reasoning.opened_by(prompt)
    return whole[len(prompt) :].split(family.end)[0].split("<|user|>")[0].split("<|turn>user")[0], opened


def call_of(name: str, arguments: dict[str, Any], number: int) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"functions.{name}:{number}", "type": "function", "function": function}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("reasoning", ["", "I think\nso"])
def test_the_next_prompt_extends_the_sampled_ids(serve: Any, family: Family, reasoning: str) -> None:
    tokenizer = family_tokenizer(family)
    names = ("f", "look_up") if family.parallel else ("f",)
    arguments = {**ARGUMENTS, "text": "it is"} if family is FAMILIES["lfm2"] else ARGUMENTS
    calls = [call_of(name, arguments, number) for number, name in enumerate(names)]
    fields = {"reasoning_content": reasoning} if reasoning and family.reasoning not in (None, "deepseek_r1") else {}
    content = {"content": "I look it up."} if family.content else {}
    says, _ = written(Renderer(tokenizer), family, calls, **fields, **content)
    answers = iter([says, "done"])
    session = serve(lambda _: next(answers), tokenizer=tokenizer).open()
    create = session.model.sync_client.chat.completions.create
    first = create(model="toy", messages=[USER], tools=TOOLS).choices[0]
    assert [call.function.name for call in first.message.tool_calls] == list(names)
    assert all(json.loads(call.function.arguments) == arguments for call in first.message.tool_calls)
    assert (first.message.content or "") == content.get("content", "")
    assert getattr(first.message, "reasoning_content", "") == fields.get("reasoning_content", "")
    results = [{"role": "tool", "tool_call_id": call.id, "content": "4"} for call in first.message.tool_calls]
    create(model="toy", messages=[USER, first.message, *results], tools=TOOLS)
    assert [call.parent for call in session.close()] == [None, 0]


@pytest.mark.parametrize("name", ["qwen3.5", "gemma4", "llama3", "qwen3"])
def test_arguments_that_an_agent_writes_anew_are_the_same(serve: Any, name: str) -> None:
    """As LangChain's agents do."""
    tokenizer = family_tokenizer(FAMILIES[name])
    says, _ = written(Renderer(tokenizer), FAMILIES[name], [call_of("f", ARGUMENTS, 0)])
    answers = iter([says, "done"])
    session = serve(lambda _: next(answers), tokenizer=tokenizer).open()
    create = session.model.sync_client.chat.completions.create
    message = create(model="toy", messages=[USER], tools=TOOLS).choices[0].message.model_dump(exclude_none=True)
    (call,) = message["tool_calls"]
    call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
    result = {"role": "tool", "tool_call_id": call["id"], "content": "4"}
    create(model="toy", messages=[USER, message, result], tools=TOOLS)
    assert [call.parent for call in session.close()] == [None, 0]


def test_made_ids_are_those_that_the_templates_accept(serve: Any) -> None:
    """Nine letters and digits for Mistral, whose templates refuse others; each call of a rollout has its own."""
    says = "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[ARGS]{}"
    session = serve(lambda _: says, tokenizer=family_tokenizer(FAMILIES["mistral"])).open()
    create = session.model.sync_client.chat.completions.create
    messages = [create(model="toy", messages=[USER], tools=TOOLS).choices[0].message for _ in range(2)]
    ids = [call.id for message in messages for call in message.tool_calls]
    assert len(set(ids)) == 4
    assert all(re.fullmatch("[a-z0-9]{9}", one) for one in ids)


def test_an_id_that_the_model_samples_twice_is_not_used(serve: Any) -> None:
    says = "[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{}[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{}"
    session = serve(lambda _: says, tokenizer=family_tokenizer(FAMILIES["mistral_ids"])).open()
    message = session.model.sync_client.chat.completions.create(model="toy", messages=[USER], tools=TOOLS)
    assert len({call.id for call in message.choices[0].message.tool_calls}) == 2


def test_a_preamble_with_reasoning_and_a_call_is_no_error_for_gpt_oss(serve: Any) -> None:
    """The template of gpt-oss refuses the three together, though its model writes them: the agent must not get that
    error for a message that it only sends back."""
    says = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"
    )
    answers = iter([says, "<|channel|>final<|message|>done"])
    session = serve(lambda _: next(answers), tokenizer=family_tokenizer(FAMILIES["harmony"])).open()
    create = session.model.sync_client.chat.completions.create
    message = create(model="toy", messages=[USER], tools=TOOLS).choices[0].message
    assert (message.content, message.reasoning_content, len(message.tool_calls)) == ("I look.", "hm", 1)
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "4"}
    again = create(model="toy", messages=[USER, message, result], tools=TOOLS).choices[0].message
    assert again.content == "done"
    assert [call.parent for call in session.close()] == [None, None]


LEAF = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.sampled_from("aé🙂 \n\t\\\"'<>{}[](),:=;/_0"), max_size=12)
JSON = st.recursive(LEAF | TEXT, lambda inner: st.lists(inner, max_size=3), max_leaves=5)
KEYS = st.sampled_from(["a", "b_c", "Key"])
DRAWN = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXT,
        "count": st.integers(-(2**40), 2**40),
        "share": st.floats(allow_nan=False, allow_infinity=False).map(lambda value: value + 0.0),
        "deep": st.booleans(),
        "items": st.lists(JSON, max_size=3),
        "point": st.dictionaries(KEYS, JSON, max_size=3),
        "maybe": st.none() | st.just("so"),
    },
)


@pytest.mark.parametrize(
    "family",
    [family for name, family in FAMILIES.items() if name != "lfm2"],
    ids=[name for name in FAMILIES if name != "lfm2"],
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_what_a_template_writes_is_read_as_it_was(family: Family, data: st.DataObject) -> None:
    """LFM2 is left out: its template writes strings into quotes as they are, which is not always readable."""
    renderer = Renderer(family_tokenizer(family))
    drawn = data.draw(st.lists(st.tuples(st.sampled_from(["f", "look_up"]), DRAWN), min_size=1, max_size=3))
    if not family.parallel:
        drawn = drawn[:1]
    calls = [call_of(name, arguments, number) for number, (name, arguments) in enumerate(drawn)]
    says, opened = written(renderer, family, calls)
    formats = found(family)
    parsed = parse_text(says, tools=TOOLS, opened=opened, tool_format=formats.tool, reasoning_format=formats.reasoning)
    assert not parsed.tool_parse_error, says
    assert [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls] == drawn
    assert parsed.content.strip() == ""
