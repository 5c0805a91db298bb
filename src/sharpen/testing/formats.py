"""Tries formats of tool calls and of reasoning: reads what a model wrote, whole and torn, and what the format's own
grammar lets be sampled.

In: a format, and texts as its models write them. Out: nothing, or an `AssertionError`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from sharpen.gateway.formats.format import ParsedCalls, ReasoningFormat, ToolFormat
from sharpen.gateway.formats.grammar import GrammarWriter, OfferedTool

PLAIN = ("", " plain\n", "a < b > c [1] {x} | 'q' \"é\" 🙂")
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a tool without arguments."""
_TORN, _SAMPLED, _LONGEST = 100, 20, 600


def check_tool_format(form: ToolFormat, written: Sequence[str]) -> None:
    """Raise `AssertionError` if `form` does not keep the contract of `ToolFormat`.

    `written` are texts with calls as the models write them. They are read as calls; cut, mixed and repeated they are
    read as calls or stay content to the last letter, and nothing raises. Whatever `form.markup` lets be sampled is read
    as calls of the tools that were offered.
    """
    assert isinstance(form, ToolFormat), f"a format of tool calls is a ToolFormat, got {type(form).__name__}"
    assert form.opens, f"{form.name} has no `opens`: nothing could be streamed before it is known that there is no call"
    assert written, "check_tool_format needs a text with a call"
    for text in PLAIN:
        found = _parsed(form, text, "f")
        assert found == (text, (), False), f"{form.name} reads {text!r}, which has no markup, as {found}"
    for text in written:
        _check_written(form, text)
    for seed in range(_TORN):
        _check_torn(form, _torn((*form.opens, *form.begins), written, random.Random(seed)))
    for several in (False, True):
        _check_sampled(form, several)


def check_reasoning_format(form: ReasoningFormat, written: Sequence[str]) -> None:
    """Raise `AssertionError` if `form` does not keep the contract of `ReasoningFormat`.

    `written` are texts that begin with reasoning, with its opening, and have an answer after it. Reasoning and answer
    are read of them, also where the prompt has written the opening; torn texts are read without an error.
    """
    assert isinstance(form, ReasoningFormat), f"a format of reasoning is a ReasoningFormat, got {type(form).__name__}"
    assert form.opens, f"{form.name} has no `opens`"
    assert form.closes, f"{form.name} has no `closes`"
    assert written, "check_reasoning_format needs a text with reasoning and an answer"
    for text in PLAIN:
        found = _thought(form, text, opened=False)
        assert found == ("", text), f"{form.name} reads {text!r}, which has no reasoning, as {found}"
    for opening in form.opens:
        assert form.opened_by(f"<prompt>{opening}\n"), f"{form.name}: a prompt that ends in {opening!r} opens nothing"
    for text in written:
        reasoning, rest = _thought(form, text, opened=False)
        assert reasoning, f"{form.name} reads no reasoning in {text!r}"
        assert rest, f"{form.name} reads no answer in {text!r}"
        assert not any(tag in reasoning for tag in (*form.opens, *form.closes)), (
            f"{form.name} leaves its tags in the reasoning {reasoning!r}"
        )
        begins = next((tag for tag in form.opens if text.startswith(tag)), None)
        assert begins is not None, f"{text!r} begins with none of `opens` {form.opens}"
        found = _thought(form, text[len(begins) :], opened=True)
        assert found == (reasoning, rest), f"{form.name} reads {found} in {text!r} if the prompt has written {begins!r}"
    for seed in range(_TORN):
        torn = _torn((*form.opens, *form.closes), written, random.Random(seed))
        for opened in (False, True):
            _thought(form, torn, opened=opened)


def _thought(form: ReasoningFormat, text: str, *, opened: bool) -> tuple[str, str]:
    try:
        found, again = form.parse(text, opened), form.parse(text, opened)
    except Exception as error:
        raise AssertionError(f"{form.name} raised {type(error).__name__} for {text!r}: {error}") from error
    assert found == again, f"{form.name} reads {text!r} in two ways"
    return found


def _check_written(form: ToolFormat, text: str) -> None:
    content, calls, malformed = _parsed(form, text, "f")
    assert calls, f"{form.name} reads no call in {text!r}{' but markup that is malformed' if malformed else ''}"
    assert not malformed, f"{form.name} reads calls in {text!r}, and says that it is malformed"
    for call in calls:
        assert call.name, f"{form.name} reads a call without a name in {text!r}"
        _check_arguments(form, call.arguments, text)
    names = [call.name for call in calls]
    assert _parsed(form, text, *names)[1] == calls or len(set(names)) < len(names), (
        f"{form.name} reads other calls in {text!r} when exactly these tools are offered"
    )
    starts = [at for mark in form.opens if (at := text.find(mark)) >= 0]
    begins = any(text.lstrip().startswith(mark) for mark in form.begins)
    assert starts or begins, f"{form.name} reads a call in {text!r}, where nothing of `opens` {form.opens} stands"
    if not begins:
        early = text[: min(starts)].rstrip()
        assert content.startswith(early), (
            f"{form.name}: {early!r} stands before the markup, was streamed, and is not in the content {content!r}"
        )


def _torn(tags: Sequence[str], written: Sequence[str], dice: random.Random) -> str:
    """Pieces of what models write, in any order."""
    pieces = [*tags, "x", "\n", *written]
    for text in written:
        at = dice.randrange(len(text))
        pieces += [text[:at], text[at:]]
    return "".join(dice.choices(pieces, k=dice.randrange(1, 5)))


def _check_torn(form: ToolFormat, text: str) -> None:
    content, calls, malformed = _parsed(form, text, "f")
    assert calls or content == text, f"{form.name} reads no call in {text!r}, and its content is {content!r}"
    assert not (calls and malformed), f"{form.name} reads calls in {text!r}, and says that it is malformed"
    for call in calls:
        _check_arguments(form, call.arguments, text)


def _check_arguments(form: ToolFormat, arguments: str, text: str) -> None:
    try:
        value = json.loads(arguments)
    except ValueError as error:
        raise AssertionError(f"{form.name} reads arguments in {text!r} that are no JSON: {arguments!r}") from error
    assert isinstance(value, dict), f"{form.name} reads arguments in {text!r} that are no object: {arguments!r}"


def _parsed(form: ToolFormat, text: str, *names: str) -> ParsedCalls:
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in names]
    try:
        content, calls, malformed = form.parse(text, tools)
        again = form.parse(text, tools)
    except Exception as error:
        raise AssertionError(f"{form.name} raised {type(error).__name__} for {text!r}: {error}") from error
    assert again == (content, calls, malformed), f"{form.name} reads {text!r} in two ways"
    return content, tuple(calls), malformed


def _check_sampled(form: ToolFormat, several: bool) -> None:
    """Read what the grammar of forced calls lets be sampled, byte by byte."""
    from llguidance import LLMatcher, LLTokenizer

    tokenizer, names, count = LLTokenizer("byte"), ("look_up", "stop"), 0
    writer = GrammarWriter(lambda text: None)
    offered = [OfferedTool(number=at, name=name, schema=NOTHING, strict=True) for at, name in enumerate(names)]
    markup = form.markup(writer, offered, several)
    for rule in (markup.forced, markup.free):
        matcher = LLMatcher(tokenizer, writer.text(rule), log_level=0)
        assert not matcher.is_error(), f"the grammar of {form.name} is none: {matcher.get_error()}"
    grammar = writer.text(markup.forced)
    for seed in range(_SAMPLED):
        text = _sampled(LLMatcher(tokenizer, grammar, log_level=0), tokenizer.eos_token, random.Random(seed))
        if text is None:
            continue
        count += 1
        content, calls, malformed = _parsed(form, text, *names)
        assert calls, f"the grammar of {form.name} lets {text!r} be sampled, and no call is read in it"
        assert not malformed, f"the grammar of {form.name} lets {text!r} be sampled, which is read as malformed"
        assert not content.strip(), f"the grammar of {form.name} forces calls, and {text!r} has the content {content!r}"
        assert {call.name for call in calls} <= {*names}, f"{form.name} reads other names in {text!r}: {calls}"
        assert several or len(calls) == 1, f"the grammar of {form.name} allows one call, and {text!r} has {len(calls)}"
    assert count, f"no call of the grammar of {form.name} ended within {_LONGEST} bytes"


def _sampled(matcher: Any, end: int, dice: random.Random) -> str | None:
    """An answer; None for one that is too long."""
    import numpy as np

    sampled: list[int] = []
    while not matcher.is_stopped() and len(sampled) <= _LONGEST:
        if matcher.is_accepting() and dice.random() < 0.5:
            return bytes(sampled).decode()
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        chosen = dice.choice(np.flatnonzero(bits).tolist())
        if chosen == end:
            break
        sampled.append(chosen)
        matcher.consume_token(chosen)
    return bytes(sampled).decode() if matcher.is_accepting() or matcher.is_stopped() else None
