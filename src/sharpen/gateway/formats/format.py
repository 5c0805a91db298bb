"""What a format is: how a family of models writes tool calls, or its reasoning, into the sampled text.

In: the sampled text (end token removed), the tools that were offered, whether the prompt itself opened the reasoning.
Out: `ParsedText`. Text that does not parse stays in the content unchanged, so that the agent sees it.

At the end are the formats of reasoning between two tags, which many families share. Source: the chat templates of
Qwen/Qwen3-0.6B, deepseek-ai/DeepSeek-R1 and zai-org/GLM-4.5-Air.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sharpen.gateway.formats.grammar import GrammarWriter, Markup, OfferedTool

Tools = Sequence[Mapping[str, Any]]
"""The tools of a request, in OpenAI's form: an object with the type "function" and the function's schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A function's name and its arguments: the text of a JSON object, as it was sampled where the format has JSON.

    `id` is the call's id if the model sampled one, which the chat template then writes again.
    """

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedText:
    """The parts of an assistant message. `tool_parse_error`: the text had tool-call markup that is not a valid call."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_parse_error: bool = False


ParsedCalls = tuple[str, tuple[ToolCall, ...], bool]
"""Content, calls, and whether the markup was malformed: then the whole text is content, without calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How tool calls are written.

    `opens`: the texts with which markup begins, wherever it stands. What stands before the first of them is content,
    and may be streamed, unless the text begins with one of `begins`: markup that only a whole text can be. `marks`: a
    chat template with all texts of one of these tuples has this format. `vllm`: the name of the parser in vLLM, empty
    if it has none. `parse` is a function of text and tools alone, called on several threads, and raises nothing.
    `markup` writes the grammar of calls of some tools; the bool says whether several calls are allowed. `names` is the
    pattern of the names of tools that can be written so.
    `short_ids`: the templates of these models accept only ids of nine letters and digits.
    """

    name: str
    parse: Callable[[str, Tools], ParsedCalls]
    opens: tuple[str, ...]
    marks: tuple[tuple[str, ...], ...] = ()
    vllm: str = ""
    markup: Callable[[GrammarWriter, Sequence[OfferedTool], bool], Markup]
    names: str = r"[^\s<>\[\]{}:]+"
    begins: tuple[str, ...] = ()
    short_ids: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How reasoning is written. `parse` takes the text and whether the prompt ended in one of `opens`, and returns the
    reasoning and what remains: the content, with the markup of tool calls.

    `opens` and `closes`: the texts around reasoning. `special_tokens`: they are made of the tokenizer's special tokens,
    which must then stay in the text. `holds`: texts with which something else than content begins, after the reasoning
    or instead of it. `marks` and `vllm`: as for tools.
    `before` writes the grammar of what may stand before an answer, where that is more than one text between two tags;
    the bool says whether the prompt opened it. `header`: the markup with which content begins.
    """

    name: str
    parse: Callable[[str, bool], tuple[str, str]]
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    marks: tuple[tuple[str, ...], ...] = ()
    vllm: str = ""
    special_tokens: bool = False
    holds: tuple[str, ...] = ()
    before: Callable[[GrammarWriter, bool], str] | None = None
    header: str = ""

    def opened_by(self, prompt: str) -> bool:
        """Whether the prompt ends inside reasoning that it opened itself."""
        return prompt.rstrip().endswith(self.opens)


def parse_text(
    text: str, *, tools: Tools, opened: bool, tool_format: ToolFormat | None, reasoning_format: ReasoningFormat | None
) -> ParsedText:
    """Parse reasoning, then tool calls in the remaining text (only if tools were offered)."""
    reasoning = ""
    if reasoning_format is not None:
        reasoning, text = reasoning_format.parse(text, opened)
    if not tools or tool_format is None:
        return ParsedText(content=text, reasoning=reasoning)
    content, calls, malformed = tool_format.parse(text, tools)
    return ParsedText(content=content, reasoning=reasoning, tool_calls=calls, tool_parse_error=malformed)


OPEN, CLOSE = "<think>", "</think>"


def between(text: str, opens: str, closes: str, *, opened: bool) -> tuple[str, str]:
    """Return the reasoning between two tags, and the rest, both without the newlines beside the tags.

    The text has to begin with the first tag, unless it was `opened` before; else everything is content.
    """
    begins = text.lstrip().startswith(opens)
    if not opened and not begins:
        return "", text
    head, _, tail = text.partition(closes)
    reasoning = head.lstrip().removeprefix(opens) if begins else head
    return reasoning.strip("\n"), tail.lstrip("\n")


QWEN3 = ReasoningFormat(
    name="qwen3",
    parse=lambda text, opened: between(text, OPEN, CLOSE, opened=opened),
    opens=(OPEN,),
    closes=(CLOSE,),
    marks=((OPEN,), (CLOSE,)),
    vllm="qwen3",
)
DEEPSEEK_R1 = ReasoningFormat(
    name="deepseek_r1",
    # The opening tag may be missing: the closing one is enough.
    parse=lambda text, opened: between(text, OPEN, CLOSE, opened=opened or CLOSE in text),
    opens=(OPEN,),
    closes=(CLOSE,),
    marks=((CLOSE, "<｜Assistant｜>"),),
    vllm="deepseek_r1",
)
