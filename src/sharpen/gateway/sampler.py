"""Samples the answers to a request, and records and reads them.

In: the entries of a request, one for each choice. Out: the same entries with their generations, and `Choice`s. Errors
of the agent's are `ApiError`s; any other is the engine's.

A streamed answer is read while it is sampled, as `Delta`s, which add up to its reasoning and content. Text is held back
while it may still turn out to be markup (of thinking, of a tool call) or a stop string; once a tool call has begun, all
is held back until the end, when the whole text is parsed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from typing import Literal

import numpy as np

from sharpen.contracts import Engine, GenerateRequest, Generation
from sharpen.errors import CallError, ConstraintError, ContextOverflowError, EngineError, SamplingError
from sharpen.gateway.answers import Choice, Delta, assistant_message
from sharpen.gateway.constraints import invalid_schema
from sharpen.gateway.formats.format import ParsedText, ReasoningFormat, ToolFormat, parse_text
from sharpen.gateway.formats.table import Formats
from sharpen.gateway.history import Prompt
from sharpen.gateway.meter import BusyClock
from sharpen.gateway.render import Renderer, TextStream
from sharpen.gateway.requests import ApiError, CallRequest, PromptTooLongError, render_message
from sharpen.gateway.session import Entry, Session
from sharpen.types import Outcome

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


class Sampler:
    """Samples with one engine. On the serving loop."""

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        busy: BusyClock,
        formats: Formats,
        adapters: Collection[str] = (),
    ) -> None:
        """`busy` runs while the engine has a request. A call of an agent with a policy (`Session.policies`) gets its
        adapter, one that asks for one of the `adapters` that."""
        self._adapters = adapters
        self._engine, self._renderer, self._busy = engine, renderer, busy
        self._tool_format, self._reasoning_format = formats.tool, formats.reasoning

    async def choices(self, session: Session, entries: Sequence[Entry], give: Give | None = None) -> list[Choice]:
        """Sample a choice for each entry, and record it there. `give` receives their text while it is sampled."""
        choices = [self._choice(session, entry, number, give) for number, entry in enumerate(entries)]
        if len(choices) == 1:
            return [await choices[0]]
        tasks = [asyncio.get_running_loop().create_task(choice) for choice in choices]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:  # if one failed, the others are useless
                task.cancel()

    async def _choice(self, session: Session, entry: Entry, number: int, give: Give | None) -> Choice:
        prompt, request = entry.prompt, entry.request
        reader = None if give is None else self._reader(request, prompt, number, give)
        entry.started, began = time.time(), time.perf_counter()
        try:
            generation = await self._generate(session, entry, number, reader)
        finally:
            entry.seconds = time.perf_counter() - began
        _check(generation)
        parsed = self._parse_sampled(request, prompt, generation, reader)
        if reader is not None and generation.finish_reason != "abort":
            reader.finish(parsed)
        message = assistant_message(parsed, session.name(entry.index), self._tool_format)
        entry.response = message
        session.memory.note(message)
        entry.generation = generation
        session.count("sampled_tokens", len(generation.ids))
        session.count("tool_parse_errors", int(parsed.tool_parse_error))
        if generation.finish_reason == "abort":
            raise EngineError("the engine aborted the call")
        sampled_text = self._renderer.decode(prompt.ids_P, generation.ids.tolist())
        if request.prompt is not None:
            session.history.add_raw(entry.index, prompt, generation.ids, sampled_text)
        else:
            response = render_message(message)
            session.history.add(entry.index, request.rendered, response, prompt, generation.ids, sampled_text)
        # A truncated response is reported as "length" even if it contains a whole tool call.
        calls_tools = bool(parsed.tool_calls) and generation.finish_reason == "stop"
        return Choice(
            call_index=entry.index,
            message=message,
            finish_reason="tool_calls" if calls_tools else str(generation.finish_reason),
            generation=generation,
            stop=_stop_string(generation, sampled_text, request.sampling.stop),
        )

    async def _generate(self, session: Session, entry: Entry, number: int, reader: AnswerReader | None) -> Generation:
        request = GenerateRequest(
            prompt_ids=entry.prompt.ids_P,
            sampling=entry.request.sampling,
            noise=session.noise(entry.index, number, entry.request.seed),
            top_logprobs=entry.request.top_logprobs,
            session=session.rollout_id,
            constraint=entry.constraint,
            on_tokens=None if reader is None else reader.add,
            pictures=entry.prompt.pictures,
            prompt_logprobs=entry.request.prompt_logprobs,
            adapter=self._adapter(session, entry),
        )
        try:
            with self._busy:
                generation = await self._engine.generate(request)
        except ContextOverflowError:
            raise overflow(session, len(entry.prompt.ids_P), entry.request, self._engine.max_model_len) from None
        except ConstraintError as error:
            assert entry.constraint is not None
            raise invalid_schema(entry.constraint.origin, error) from error
        except SamplingError as error:
            raise ApiError(f"{error}.", code="invalid_sampling") from error
        if request.prompt_logprobs is not None and generation.prompt_logprobs is None:
            raise ApiError("'echo' with 'logprobs': this engine gives no logprobs of a prompt.", param="echo")
        return generation

    def _adapter(self, session: Session, entry: Entry) -> str:
        asked = entry.request.model if entry.request.model in self._adapters else ""
        return session.policies.get(entry.agent, asked)

    def _reader(self, request: CallRequest, prompt: Prompt, number: int, give: Give) -> AnswerReader:
        plain, reasoning = request.plain_text, self._reasoning_format
        return AnswerReader(
            self._renderer.text_stream(prompt.ids_P, keep_special=self._keeps_special(request)),
            give,
            choice=number,
            reasoning=None if plain else reasoning,
            opened=_opens_reasoning(reasoning, prompt),
            tools=self._tool_format if request.tools and not plain else None,
            stop=request.sampling.stop,
        )

    def _keeps_special(self, request: CallRequest) -> bool:
        """Whether special tokens are kept: markup may be made of them, that of tools or of the reasoning."""
        reasoning = self._reasoning_format
        return bool(request.tools) or (reasoning is not None and reasoning.special_tokens)

    def _parse_sampled(
        self, request: CallRequest, prompt: Prompt, generation: Generation, reader: AnswerReader | None
    ) -> ParsedText:
        """Parse the sampled text without its end token. What a `reader` gave out as content stays content."""
        text = generation.text
        if text is None:
            ids = generation.ids.tolist()
            if generation.finish_reason == "stop":
                ids = ids[:-1]
            kept = ids if self._keeps_special(request) else self._renderer.without_special(ids)
            text = self._renderer.decode(prompt.ids_P, kept)
        if request.plain_text:
            return ParsedText(content=text)
        for reasoning in (self._reasoning_format, None):
            parsed = parse_text(
                text,
                tools=request.tools,
                opened=_opens_reasoning(reasoning, prompt),
                tool_format=self._tool_format,
                reasoning_format=reasoning,
            )
            if reader is None or reader.agrees(parsed):
                return parsed
        return ParsedText(content=text, tool_parse_error=True)


def _opens_reasoning(reasoning: ReasoningFormat | None, prompt: Prompt) -> bool:
    return reasoning is not None and reasoning.opened_by(prompt.text)


def _stop_string(generation: Generation, sampled_text: str, stop: Sequence[str]) -> str | None:
    """Return the stop string that ended a generation, if one did: the text before it is known."""
    if generation.text is None:
        return None
    after = sampled_text[len(generation.text) :]
    return next((one for one in stop if after.startswith(one)), None)


def _check(generation: Generation) -> None:
    """Raise `CallError` for a generation that cannot be trained on exactly; it is never padded."""
    num_ids, num_logprobs, num_versions = len(generation.ids), len(generation.logprobs), len(generation.versions)
    if not num_ids == num_logprobs == num_versions:
        raise CallError(f"the engine returned {num_ids} ids, {num_logprobs} logprobs and {num_versions} versions")
    if not np.isfinite(generation.logprobs).all():
        raise CallError("the engine returned a logprob that is not finite")
    if generation.prompt_logprobs is not None and not np.isfinite(generation.prompt_logprobs.logprobs).all():
        raise CallError("the engine returned a logprob of the prompt that is not finite")
    if num_ids == 0 and generation.finish_reason != "abort":
        raise CallError("the engine sampled no token")


def overflow(session: Session, num_tokens: int, request: CallRequest, limit: int) -> ApiError:
    """Record that a prompt leaves no room in the context, and return the error for the agent."""
    error = PromptTooLongError(num_tokens, limit, request.asked)
    session.fail(Outcome.CONTEXT_OVERFLOW, str(error))
    return error
