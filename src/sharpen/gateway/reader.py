"""Reads the text of an answer while it is sampled.

In: sampled ids, as they come; at the end, the parsed answer. Out: `Delta`s, which add up to the answer's reasoning
and content. Text is held back while it may still turn out to be markup (of thinking, of a tool call) or a stop string;
once a tool call has begun, all is held back until the end, when the whole text is parsed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from sharpen.gateway.answers import Delta
from sharpen.gateway.formats.format import ParsedText, ReasoningFormat, ToolFormat
from sharpen.gateway.render import TextStream

Give = Callable[[Delta], None]

_NEWLINES = "\n"


class AnswerReader:
    """Reads one choice, and gives its text to `give`.

    `opened`: the prompt opened the reasoning. `tools` is the format of tool calls, if there may be any; `stop` are the
    request's stop strings.
    """

    def __init__(
        self,
        text: TextStream,
        give: Give,
        *,
        choice: int,
        reasoning: ReasoningFormat | None,
        opened: bool,
        tools: ToolFormat | None,
        stop: Sequence[str],
    ) -> None:
        self._text = text
        self._give_out = give
        self._choice = choice
        self._opens, self._closes = ((), ()) if reasoning is None else (reasoning.opens, reasoning.closes)
        tags = () if tools is None else tools.opens
        self._begins = () if tools is None else tools.begins
        holds = () if reasoning is None else reasoning.holds
        self._tags = (*stop, *holds, *tags, *(f"\n{tag}" for tag in tags), *(f"\n\n{tag}" for tag in tags))
        self._pending = ""
        self._given = {"reasoning": "", "content": ""}
        self._phase: Literal["start", "reasoning", "content", "held"] = "start"
        self._opened, self._thought = opened, False
        if reasoning is None:
            self._phase = "content"

    def add(self, ids: Sequence[int]) -> None:
        """Give out what these ids add."""
        if self._phase == "held":
            return
        self._pending += self._text.add(ids)
        if self._phase == "start":
            self._start()
        if self._phase == "reasoning":
            self._reasoning()
        if self._phase == "content":
            self._content()

    def agrees(self, parsed: ParsedText) -> bool:
        """Whether the parsed answer begins with all that was given out."""
        return parsed.content.startswith(self._given["content"]) and parsed.reasoning.startswith(
            self._given["reasoning"]
        )

    def finish(self, parsed: ParsedText) -> None:
        """Give out what of the parsed answer, with which this reader `agrees`, was not given out yet."""
        self._give("reasoning", parsed.reasoning[len(self._given["reasoning"]) :])
        self._give("content", parsed.content[len(self._given["content"]) :])

    def _start(self) -> None:
        """Find out whether the text begins with the opening tag, as soon as that can be known."""
        begun = self._pending.lstrip()
        opening = next((one for one in self._opens if begun.startswith(one)), None)
        if opening is not None:
            self._pending, self._phase = begun.removeprefix(opening), "reasoning"
        elif not any(one.startswith(begun) for one in self._opens):
            self._phase = "reasoning" if self._opened else "content"

    def _reasoning(self) -> None:
        if not self._given["reasoning"]:
            self._pending = self._pending.lstrip(_NEWLINES)
        text = self._pending
        found = [(at, tag) for tag in self._closes if (at := text.find(tag)) >= 0]
        if found:
            at, tag = min(found)
            self._give("reasoning", text[:at].rstrip(_NEWLINES))
            self._pending, self._phase, self._thought = text[at + len(tag) :], "content", True
            return
        kept = text[: len(text) - _held(text, (*self._closes, *self._tags))].rstrip(_NEWLINES)
        self._pending = text[len(kept) :]
        self._give("reasoning", kept)

    def _content(self) -> None:
        if self._thought and not self._given["content"]:
            self._pending = self._pending.lstrip(_NEWLINES)
        if self._begins and not self._given["content"]:
            begun = self._pending.lstrip()
            if not begun or begun.startswith(self._begins):
                self._phase = "held" if begun else "content"
                return
        starts = [at for tag in self._tags if (at := self._pending.find(tag)) >= 0]
        if starts:
            self._phase = "held"
            self._give("content", self._pending[: min(starts)])
            return
        end = len(self._pending) - _held(self._pending, self._tags)
        self._give("content", self._pending[:end])
        self._pending = self._pending[end:]

    def _give(self, kind: Literal["reasoning", "content"], text: str) -> None:
        if text:
            self._given[kind] += text
            self._give_out(Delta(kind=kind, text=text, choice=self._choice))


def _held(text: str, tags: Sequence[str]) -> int:
    """Return the length of the longest end of the text with which one of the tags may begin."""
    longest = max((len(tag) for tag in tags), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(tag.startswith(text[-length:]) for tag in tags):
            return length
    return 0
