"""Answers that are sampled under the grammar of a format are read by the parser of that format, whatever is sampled."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from families import FAMILIES, Family, family_tokenizer
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from pydantic import BaseModel, ConfigDict, Field

from sharpen.gateway.constraints import constraint_of
from sharpen.gateway.formats.format import ParsedText, parse_text
from sharpen.gateway.formats.table import AUTO, Formats, formats_of
from sharpen.gateway.protocols.chat import parse_request
from sharpen.gateway.protocols.protocol import Context
from sharpen.gateway.render import Renderer
from sharpen.types import Sampling

USER = [{"role": "user", "content": "hi"}]


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    x: int = Field(ge=-3, le=30)
    tags: list[str] = Field(max_length=2)
    of: Place | None = None


class Everything(BaseModel):
    """Every kind of value, some of which may be missing."""

    model_config = ConfigDict(extra="forbid", strict=True)
    zone: str
    code: str = Field(min_length=2, max_length=4)
    count: int
    share: float = 0.5
    sure: bool
    maybe: str | None
    many: list[int | bool] = Field(min_length=1, max_length=3)
    at: Place
    either: Place | None = None
    other: str | list[int] | None = None
    size: str = Field(json_schema_extra={"enum": ["small", "not so small", "7"]})


class Nothing(BaseModel):
    model_config = ConfigDict(extra="forbid")


TOOLS: Mapping[str, type[BaseModel]] = {"look_up": Everything, "stop": Nothing}
PLACE = {
    "type": "json_schema",
    "json_schema": {"name": "place", "strict": True, "schema": Place.model_json_schema()},
}
WISHES = [
    {"type": "function", "function": {"name": name, "parameters": model.model_json_schema(), "strict": True}}
    for name, model in TOOLS.items()
]


ENDS = [
    *('"', "'", "}", "]", ")", ",", "\n</parameter>", "</arg_value>", '<|"|>', "<escape>", "</think>", "<channel|>"),
    *(
        "<|end|>",
        "<|channel|>",
        "</tool_call>",
        "<｜tool▁calls▁end｜>",
        "<|tool_calls_section_end|>",
        "<|tool_call_end|>",
    ),
]


class Sampled:
    """Samples at random under a request's constraint, with an inclination to end what has begun."""

    def __init__(self, family: Family, body: Mapping[str, Any]) -> None:
        self.tokenizer = family_tokenizer(family)
        self.formats: Formats = formats_of(family.template, tool_call_parser=AUTO, reasoning_parser=AUTO)
        self.renderer = Renderer(self.tokenizer)
        self.request, _ = parse_request({"messages": USER, **body}, Context(model_name="toy", defaults=Sampling()))
        self.prompt = self.renderer.render(self.request.rendered, self.request.tools, {})
        constraint, self.notes = constraint_of(self.request, self.prompt, self.formats, self.renderer.added_token)
        assert constraint is not None
        self._matcher = LLMatcher(from_tokenizer(self.tokenizer), constraint.grammar, log_level=0)
        assert not self._matcher.is_error(), self._matcher.get_error()[:1500]
        encode = self.tokenizer.encode
        formats = filter(None, (self.formats.tool, self.formats.reasoning))
        opens = [text for one in formats for text in one.opens]
        begins = [*opens, '{"name":', "[stop(", "[look_up("]
        self._ends, self._begins = (
            [encode(one, add_special_tokens=False) for one in texts] for texts in (ENDS, begins)
        )

    def text(self, seed: int) -> str | None:
        """An answer; None for one that is too long."""
        matcher, dice, ids = self._matcher.deep_copy(), random.Random(seed), []
        while not matcher.is_stopped():
            chosen = self._choose(matcher, dice, eager=len(ids) > 60)
            if chosen == [self.tokenizer.eos_token_id]:
                break
            ids += chosen
            assert matcher.consume_tokens(chosen), matcher.get_error()
            if len(ids) > 2000:
                return None
        return str(self.tokenizer.decode(ids))

    def _choose(self, matcher: LLMatcher, dice: random.Random, *, eager: bool) -> list[int]:
        if matcher.is_accepting() and (eager or dice.random() < 0.3):
            return [self.tokenizer.eos_token_id]
        inclined = self._begins if matcher.is_accepting() else self._ends
        urges = [urge for urge in inclined if matcher.validate_tokens(urge) == len(urge)]
        if urges and (eager or dice.random() < 0.5):
            return dice.choice(urges)
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        return [int(dice.choice(np.flatnonzero(bits).tolist()))]

    def parsed(self, text: str) -> ParsedText:
        reasoning = self.formats.reasoning
        return parse_text(
            text,
            tools=self.request.tools,
            opened=reasoning is not None and reasoning.opened_by(self.prompt),
            tool_format=self.formats.tool,
            reasoning_format=reasoning,
        )


EVERY = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def answers(sampled: Sampled, kinds: int) -> Iterator[tuple[str, ParsedText]]:
    """At least a dozen answers, and as many as it takes to see so many `kinds` of them: what is called, and whether
    there is text and reasoning."""
    seen = set()
    for seed in range(1000):
        text = sampled.text(seed)
        if text is None:
            continue
        parsed = sampled.parsed(text)
        yield text, parsed
        seen.add(parsed.tool_calls[0].name if parsed.tool_calls else None)
        if len(seen) == kinds and seed > 10:
            return
    raise AssertionError(f"only {seen} were sampled")


def check_calls(parsed: ParsedText, text: str) -> None:
    assert not parsed.tool_parse_error, text
    for call in parsed.tool_calls:
        TOOLS[call.name].model_validate_json(call.arguments)


@EVERY
def test_forced_calls_are_read_as_calls_with_arguments_of_their_schemas(family: Family) -> None:
    sampled = Sampled(family, {"tools": WISHES, "tool_choice": "required"})
    assert not sampled.notes
    for text, parsed in answers(sampled, kinds=2):
        assert parsed.tool_calls, text
        assert not parsed.content.strip(), text
        check_calls(parsed, text)


@EVERY
def test_a_named_tool_is_called_once(family: Family) -> None:
    sampled = Sampled(family, {"tools": WISHES, "tool_choice": {"type": "function", "function": {"name": "stop"}}})
    for text, parsed in answers(sampled, kinds=1):
        assert [(call.name, json.loads(call.arguments)) for call in parsed.tool_calls] == [("stop", {})], text


@EVERY
def test_strict_calls_between_text_are_read_with_arguments_of_their_schemas(family: Family) -> None:
    for text, parsed in answers(Sampled(family, {"tools": WISHES}), kinds=3):
        check_calls(parsed, text)


@EVERY
def test_an_answer_of_a_schema_follows_the_reasoning(family: Family) -> None:
    sampled = Sampled(family, {"response_format": PLACE})
    thinks = family.reasoning is not None and not sampled.prompt.rstrip().endswith("</think>")
    thoughts = 0
    for _, parsed in answers(sampled, kinds=1):
        Place.model_validate_json(parsed.content)
        thoughts += bool(parsed.reasoning)
    assert bool(thoughts) == thinks


@EVERY
def test_with_tools_and_a_schema_the_answer_is_either(family: Family) -> None:
    for text, parsed in answers(Sampled(family, {"response_format": PLACE, "tools": WISHES}), kinds=3):
        if parsed.tool_calls:
            check_calls(parsed, text)
        else:  # whatever markup its strings may spell
            Place.model_validate_json(parsed.content)
