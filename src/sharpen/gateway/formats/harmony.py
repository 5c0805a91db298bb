"""Harmony, the format of gpt-oss: an answer is several messages, each for a channel, and some to a recipient.

The `analysis` channel is reasoning, `final` and commentary without a recipient are content, and a message to
`functions.name` is a call with JSON arguments. The reasoning parser takes out what is reasoning and the headers of
content, and leaves messages to recipients, which the tool parser reads.
Source: OpenAI's description of the format, and the chat template of openai/gpt-oss-20b.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sharpen.gateway.formats.format import ParsedCalls, ReasoningFormat, ToolCall, ToolFormat, Tools
from sharpen.gateway.formats.grammar import ANY, GrammarWriter, Markup, OfferedTool, literal, one_of, pattern
from sharpen.gateway.formats.scan import container_end, element_value, object_at

START, CHANNEL, MESSAGE = "<|start|>assistant", "<|channel|>", "<|message|>"
END = "<|end|>"
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
_ANALYSIS = re.compile(r"\s*(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>")
_HEADER = re.compile(
    r"(?:<\|start\|>assistant)?(?:\s+to=(?P<to>[^\s<]+))?<\|channel\|>(?P<channel>\w+)(?:\s+to=(?P<also_to>[^\s<]+))?"
    r"\s*(?:<\|constrain\|>)?\w*<\|message\|>"
)
_CLOSES = re.compile(r"\s*(?:<\|end\|>|<\|call\|>|<\|return\|>|\Z)")
_TAG = re.compile(r"<\|(?:start|channel|message|constrain|end|call|return)\|>")
_FUNCTIONS = "functions."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """One message: its channel, its recipient if it has one, its body, and all of it as sampled."""

    channel: str
    recipient: str | None
    body: str
    text: str


def _messages(text: str) -> tuple[str, list[_Message]] | None:
    """Return the text before the first message, and the messages up to the text's end; None for another text."""
    first = _HEADER.search(text)
    begin = at = len(text) if first is None else first.start()
    messages = []
    while at < len(text):
        header = _HEADER.match(text, at)
        if header is None:
            return None
        body, end = _body(text, header.end())
        if body is None:
            return None
        whole = text[at:end]
        messages.append(
            _Message(
                channel=header["channel"],
                recipient=header["to"] or header["also_to"],
                body=body,
                text=whole if whole.startswith(START) else START + whole,
            )
        )
        at = end
    return None if _TAG.search(text[:begin]) else (text[:begin], messages)


def _body(text: str, at: int) -> tuple[str | None, int]:
    """Return the body of a message from `at`, and the place after its end tag. None: other tags stand in it, which may
    only stand within the strings of JSON."""
    found = element_value(text, at, _CLOSES)
    assert found is not None  # the text's end closes it too
    body, end = found
    outside = body[container_end(body, 0) or 0 :]
    return None if _TAG.search(outside) else body, end


def _parse_reasoning(text: str, opened: bool) -> tuple[str, str]:
    """Take out the messages of the analysis channel. The first ones end at `<|end|>`, whatever stands in them."""
    reasoning = []
    rest = ANALYSIS + text if opened and _ANALYSIS.match(text) is None else text
    while (match := _ANALYSIS.match(rest)) is not None:
        body, _, rest = rest[match.end() :].partition(END)
        reasoning.append(body.strip("\n"))
        rest = rest.lstrip("\n")
    if (found := _messages(rest)) is None:
        return "\n".join(reasoning), rest
    before, messages = found
    content = [message.body for message in messages if message.channel != "analysis" and message.recipient is None]
    calls = [message.text for message in messages if message.recipient is not None]
    reasoning += [message.body for message in messages if message.channel == "analysis" and message.recipient is None]
    return "\n".join(reasoning), before + "\n".join(content) + "".join(calls)


def parse(text: str, _: Tools) -> ParsedCalls:
    """Read the calls. Messages to nobody stay in the text as they are."""
    found = _messages(text)
    if found is None:
        return text, (), True
    content, calls = found[0], []
    for message in found[1]:
        if message.recipient is None:
            content += message.text
            continue
        arguments = object_at(message.body, 0)
        name = message.recipient.removeprefix(_FUNCTIONS)
        if arguments is None or message.body[arguments[1] :].strip() or name == message.recipient or not name:
            return text, (), True
        calls.append(ToolCall(name=name, arguments=arguments[0]))
    return (content, tuple(calls), False) if calls else (text, (), False)


def _before(writer: GrammarWriter, opened: bool) -> str:
    """Messages of the analysis channel, each with the header of the next message."""
    thought, header = writer.up_to("thought", END), writer.markup(START)
    whole = f"{writer.markup(ANALYSIS)} {thought} {header}"
    return f"{thought} {header} ({whole})*" if opened else f"({whole})*"


def markup(writer: GrammarWriter, tools: Sequence[OfferedTool], _: bool) -> Markup:
    """The grammar of one call, which ends the answer: the model's end token stands behind it. Its recipient is named
    behind the channel, as the models write, or before it, as the template does."""
    constrain, message = writer.markup("<|constrain|>"), writer.markup(MESSAGE)
    header = f'" " {constrain}? "json" {message}'
    calls = []
    for tool in tools:
        to = literal(f" to={_FUNCTIONS}{tool.name}")
        names = [f"{writer.markup(f'{CHANNEL}commentary')} {to}", f"{to} {writer.markup(f'{CHANNEL}commentary')}"]
        calls.append(f"{one_of(names)} {header} {writer.arguments(tool)}")
    call = writer.add("call", " | ".join(calls))
    said = writer.up_to("said", END)
    tag = pattern("<|")
    last = writer.add("LAST", f"/{ANY}*/ & ~/{ANY}*{tag}{ANY}*/")
    channel = one_of([writer.markup(f"{CHANNEL}{name}{MESSAGE}") for name in ("commentary", "final")])
    return Markup(forced=call, free=f"({channel} {said} {writer.markup(START)})* ({channel} {last} | {call})")


HARMONY = ToolFormat(
    name="harmony",
    parse=parse,
    opens=("<|start|>", CHANNEL, " to="),
    marks=((CHANNEL, MESSAGE, _FUNCTIONS),),
    vllm="openai",
    markup=markup,
)
HARMONY_ANALYSIS = ReasoningFormat(
    name="harmony",
    parse=_parse_reasoning,
    opens=(ANALYSIS,),
    closes=(END,),
    marks=((f"{CHANNEL}analysis",), (CHANNEL, "analysis", "final")),
    vllm="openai_gptoss",
    special_tokens=True,
    holds=("<|start|>", CHANNEL),
    before=_before,
    header=f"{CHANNEL}final{MESSAGE}",
)
