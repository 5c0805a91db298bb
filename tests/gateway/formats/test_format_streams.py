"""Streamed text adds up to the parsed answer, in every format."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from families import FAMILIES, Family, family_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_format_tables import GOOD, TOOLS

from sharpen.gateway.formats.format import parse_text
from sharpen.gateway.formats.table import AUTO, formats_of
from sharpen.gateway.render import Renderer
from sharpen.gateway.sampler import AnswerReader

HERMES = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_the_deltas_are_the_answer(family: Family, data: st.DataObject) -> None:
    formats = formats_of(family.template, tool_call_parser=AUTO, reasoning_parser=AUTO)
    tool, reasoning = formats.tool, formats.reasoning
    assert tool is not None
    good = GOOD.get(tool.name, HERMES)
    tags = [*tool.opens, *tool.begins, good, good[: len(good) // 2], f"a\n\n{good}", "<|channel|>final<|message|>"]
    if reasoning is not None:
        tags += [*reasoning.opens, *reasoning.closes, *reasoning.holds]
    text = "".join(data.draw(st.lists(st.sampled_from([*tags, "\n", " ", "a", "é", "<", "🙂"]), max_size=8)))
    tools, opened = data.draw(st.booleans()), data.draw(st.booleans()) and reasoning is not None
    tokenizer = family_tokenizer(family)
    streamed: dict[str, str] = {"reasoning": "", "content": ""}

    def give(delta: Any) -> None:
        streamed[delta.kind] += delta.text

    reader = AnswerReader(
        Renderer(tokenizer).text_stream(np.array([5, 6, 7], np.int32), keep_special=True),
        give,
        choice=0,
        reasoning=reasoning,
        opened=opened,
        tools=tool if tools else None,
        stop=(),
    )
    for token in tokenizer.encode(text, add_special_tokens=False):
        reader.add([token])
    parsed = parse_text(text, tools=TOOLS if tools else (), opened=opened, tool_format=tool, reasoning_format=reasoning)
    if reasoning is not None and reasoning.name == "deepseek_r1" and not reader.agrees(parsed):
        # That a closing tag ends reasoning which nothing opened cannot be known before: the sampler then takes what was
        # given out as content.
        parsed = parse_text(text, tools=TOOLS if tools else (), opened=False, tool_format=tool, reasoning_format=None)
    assert reader.agrees(parsed), (streamed, parsed)
    reader.finish(parsed)
    assert streamed == {"reasoning": parsed.reasoning, "content": parsed.content}


@pytest.mark.parametrize(
    ("name", "text", "first"),
    [
        ("gemma4", "<|channel>thought\nI think\n<channel|>It is", "I think"),
        ("harmony", "<|channel|>analysis<|message|>I think<|end|><|start|>assistant", "I think"),
        ("llama3", "It is", "It"),
    ],
)
def test_text_comes_before_the_end(name: str, text: str, first: str) -> None:
    """Also reasoning that is made of special tokens."""
    tokenizer, given_out = family_tokenizer(FAMILIES[name]), []
    formats = formats_of(FAMILIES[name].template, tool_call_parser=AUTO, reasoning_parser=AUTO)
    reader = AnswerReader(
        Renderer(tokenizer).text_stream(np.array([5, 6, 7], np.int32), keep_special=True),
        lambda delta: given_out.append(delta.text),
        choice=0,
        reasoning=formats.reasoning,
        opened=False,
        tools=formats.tool,
        stop=(),
    )
    for token in tokenizer.encode(text, add_special_tokens=False):
        reader.add([token])
    assert "".join(given_out).startswith(first)


def test_the_markup_between_messages_is_never_streamed(serve: Any) -> None:
    """gpt-oss answers in several messages, also without tools."""
    says = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes"
    session = serve(says, tokenizer=family_tokenizer(FAMILIES["harmony"])).open()
    options: Any = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    deltas = [chunk.choices[0].delta for chunk in session.model.sync_client.chat.completions.create(**options)]
    assert "".join(delta.content or "" for delta in deltas) == "yes"
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hm"
