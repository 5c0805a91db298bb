"""The gateway: answers the chat-completion requests of rollouts and records every call token-exactly.

In: requests from the transports (in-process, HTTP), each with its rollout's key. Out: replies, and `Call`s through
`Session.close`. Runs on the serving loop together with the engine; `open` and sessions may be used from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sharpen.errors import CallError, ConfigError, ContextOverflowError, EngineError, EngineLostError, SamplingError
from sharpen.gateway.body import decode
from sharpen.gateway.busy import BusyClock
from sharpen.gateway.caller import WhoCalls, foreign_error, foreign_use, nobody
from sharpen.gateway.exchange import Exchange, RawRequest, Reply
from sharpen.gateway.formats.format import ParsedText, parse_text
from sharpen.gateway.formats.table import REASONING_FORMATS, TOOL_FORMATS, named
from sharpen.gateway.history import Prompt
from sharpen.gateway.keys import Keys, new_key
from sharpen.gateway.meter import Tally
from sharpen.gateway.model import ChatModel
from sharpen.gateway.render import Renderer
from sharpen.gateway.requests import ApiError, ChatRequest, parse_request, render_message, short_repr
from sharpen.gateway.responses import Choice, assistant_message, completion_reply, error_reply, models_reply
from sharpen.gateway.routes import CHAT, MODELS, not_found, route_of
from sharpen.gateway.server import Server
from sharpen.gateway.session import Entry, Session
from sharpen.gateway.transport import AsyncTransport, Mailbox, SyncTransport
from sharpen.inference.engine import Engine, GenerateRequest, Generation
from sharpen.types import Outcome, Sampling

logger = logging.getLogger(__name__)

MAX_WARNINGS = 100


class Gateway:
    """Serves one model to many rollouts.

    `loop` is the serving loop, which runs on its own thread. `sampling` holds the defaults for calls that do not set
    their own. `who_calls` returns the attempt that the running code belongs to: a session belongs to the attempt that
    opens it, and a call from within another attempt makes both fail. Raises `ConfigError` for an unknown parser, and
    `ModelError` for a tokenizer without a chat template.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        *,
        model_name: str,
        loop: asyncio.AbstractEventLoop,
        sampling: Sampling | None = None,
        enable_thinking: bool | None = None,
        tool_call_parser: str | None = "hermes",
        reasoning_parser: str | None = "deepseek_r1",
        max_calls: int | None = None,
        who_calls: WhoCalls = nobody,
    ) -> None:
        self.model_name = model_name
        self.engine = engine
        self.busy = BusyClock()
        """The time during which the engine had at least one request of this gateway."""
        self.loop = loop
        self._renderer = Renderer(tokenizer)
        self._sampling = sampling or Sampling()
        self._template_kwargs = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._tool_format = named(TOOL_FORMATS, tool_call_parser, "tool_call_parser")
        self._reasoning_format = named(REASONING_FORMATS, reasoning_parser, "reasoning_parser")
        self._max_calls = max_calls
        self._keys: Keys[Session] = Keys()
        self._warnings: set[str] = set()
        self._lost: EngineLostError | None = None
        self._who_calls = who_calls
        self._server = Server(self.start, loop, who_calls)
        inbox = Mailbox()
        self._async_transport = AsyncTransport(self.start, loop, inbox, who_calls)
        self._sync_transport = SyncTransport(self.start, loop, inbox, who_calls)

    def open(
        self,
        rollout_id: str,
        noise_seed: int,
        *,
        sampling: Sampling | None = None,
        max_calls: int | None = None,
        record: bool = True,
        tally: Tally | None = None,
    ) -> Session:
        """Open a session for one rollout. From any thread.

        `sampling` replaces the defaults; if its temperature is 0, every call is greedy whatever the agent asks for
        (evaluation). `record=False` keeps no calls. `tally` counts calls and tokens, and may refuse them. Raises
        `EngineLostError` once a call has found the engine lost.
        """
        if self._lost is not None:
            raise EngineLostError(str(self._lost))
        key = new_key()
        session = Session(
            rollout_id=rollout_id,
            noise_seed=noise_seed,
            sampling=sampling or self._sampling,
            greedy=sampling is not None and sampling.temperature == 0.0,
            max_calls=self._max_calls if max_calls is None else max_calls,
            record=record,
            model=ChatModel(
                name=self.model_name,
                api_key=key,
                server=self._server,
                async_transport=self._async_transport,
                sync_transport=self._sync_transport,
                calls=lambda: session.snapshot(),
                prompt_text=lambda index: session.prompt_text(index),
                count_tokens=self.count_tokens,
                version=lambda: self.engine.version,
                recorded=record,
            ),
            revoke=functools.partial(self._keys.end, key),
            loop=self.loop,
            owner=self._who_calls(),
            tally=tally,
        )
        self._keys.add(key, session)
        return session

    async def count_tokens(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Return the number of tokens of the prompt that these messages render to, without tools. On any loop.

        Raises `ConfigError` if they are not chat messages.
        """
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._count_tokens(messages), self.loop))

    async def _count_tokens(self, messages: Sequence[Mapping[str, Any]]) -> int:
        try:
            rendered = [render_message(dict(message), place) for place, message in enumerate(messages)]
            text = self._renderer.render(rendered, (), self._template_kwargs)
        except ApiError as error:
            raise ConfigError(f"the messages have no prompt: {error}") from error
        return len(self._renderer.encode(text))

    async def close(self) -> None:
        """Close every session and the HTTP server. On the serving loop."""
        for session in self._keys.holders():
            session.close()
            session.discard()
        await self._server.stop()

    def start(self, raw: RawRequest) -> asyncio.Task[Reply]:
        """Start to answer a request, on the serving loop. The task raises only if cancelled, which aborts the call."""
        session = self._keys.holder(raw.key)
        task = self.loop.create_task(self._answer(session, raw))
        if session is not None:
            session.tasks.add(task)
        return task

    async def _answer(self, session: Session | None, raw: RawRequest) -> Reply:
        try:
            if session is None:
                raise self._keys.refusal(raw.key, raw.caller)
            if (misuse := foreign_use(session.owner, raw.caller)) is not None:
                self._note_foreign(session, raw)
                raise foreign_error(misuse)
            route = route_of(raw.method, raw.path)
            if route == CHAT:
                return await self._chat(session, raw)
            if route == MODELS:
                return models_reply(self.model_name)
            raise not_found(raw.method, raw.path)
        except ApiError as error:
            return error_reply(error)
        except Exception as error:
            # The failure boundary between agents and the engine: neither the model nor its agent caused this.
            assert session is not None
            if isinstance(error, EngineLostError):
                self._lost = error  # not logged: the next `open` raises it
            else:
                logger.exception("call of rollout %s failed", session.rollout_id)
            reason = f"{type(error).__name__}: {error}"
            session.fail(Outcome.INFRASTRUCTURE, reason)
            return error_reply(ApiError(reason, status=500, kind="server_error"))

    def _note_foreign(self, session: Session, raw: RawRequest) -> None:
        """Record a call that is refused because another rollout's code made it."""
        with contextlib.suppress(ApiError):  # an invalid request would not have been a call
            request = _parse(raw.body, self.model_name, session)
            session.entry(Exchange(foreign=True), self._prompt(session, request), request)

    async def _chat(self, session: Session, raw: RawRequest) -> Reply:
        request = _parse(raw.body, self.model_name, session)
        self._warn_of_no_effect(request)
        if session.tally is not None and (refusal := session.tally.admit()) is not None:
            raise refusal
        prompt = self._prompt(session, request)
        if not session.admits(request.n):
            message = f"This rollout may make {session.max_calls} calls at most."
            session.fail(Outcome.CALL_LIMIT, message)
            raise ApiError(message, code="call_limit_exceeded")
        exchange = session.exchange(raw)
        entries = [session.entry(exchange, prompt, request) for _ in range(request.n)]
        for entry in entries if request.n > 1 else ():
            entry.first_choice = entries[0].index
        session.count("prompt_tokens", len(prompt.ids_P))
        session.count("forks", int(entries[0].index > 0 and prompt.parent is None))
        try:
            choices = await self._choices(session, entries)
        finally:
            exchange.ended = True
        return completion_reply(
            request,
            choices,
            name=session.name(entries[0].index),
            model=self.model_name,
            created=int(time.time()),
            num_prompt_tokens=len(prompt.ids_P),
            prompt_ids=prompt.ids_P.tolist() if request.return_token_ids else (),
            renderer=self._renderer,
            exchange=exchange,
        )

    def _warn_of_no_effect(self, request: ChatRequest) -> None:
        """Log what the request sets without effect. Each warning is logged once."""
        warnings = [
            f"messages have a field {name!r}, which the model's chat template does not read: it has no effect"
            for name in sorted(request.other_fields)
            if not self._renderer.mentions(name)
        ]
        if request.model != self.model_name:
            warnings.append(
                f"a call asks for the model {short_repr(request.model)}: its key is for {self.model_name}, "
                "which answers it"
            )
        for warning in warnings:
            if warning not in self._warnings and len(self._warnings) < MAX_WARNINGS:
                self._warnings.add(warning)
                logger.warning("%s (reported once)", warning)

    def _prompt(self, session: Session, request: ChatRequest) -> Prompt:
        kwargs = {**self._template_kwargs, **request.template_kwargs}
        text = self._renderer.render(request.rendered, request.tools, kwargs, continue_final=request.continue_final)
        prompt = session.history.prompt(self._renderer, request.rendered, text)
        if len(prompt.ids_P) == 0:
            raise ApiError("The messages render to an empty prompt.", param="messages")
        if len(prompt.ids_P) >= self.engine.max_model_len:
            raise self._overflow(session, prompt)
        return prompt

    def _overflow(self, session: Session, prompt: Prompt) -> ApiError:
        message = (
            f"This model's maximum context length is {self.engine.max_model_len} tokens, "
            f"but the messages have {len(prompt.ids_P)}: no room for an answer."
        )
        session.fail(Outcome.CONTEXT_OVERFLOW, message)
        return ApiError(message, code="context_length_exceeded", param="messages")

    async def _choices(self, session: Session, entries: list[Entry]) -> list[Choice]:
        choices = [self._choice(session, entry, number) for number, entry in enumerate(entries)]
        if len(choices) == 1:
            return [await choices[0]]
        tasks = [self.loop.create_task(choice) for choice in choices]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:  # if one failed, the others are useless
                task.cancel()

    async def _choice(self, session: Session, entry: Entry, number: int) -> Choice:
        prompt, request = entry.prompt, entry.request
        generate_request = GenerateRequest(
            prompt_ids=prompt.ids_P,
            sampling=request.sampling,
            noise=session.noise(entry.index, number, request.seed),
            top_logprobs=request.top_logprobs,
            session=session.rollout_id,
        )
        started = time.perf_counter()
        try:
            with self.busy:
                generation = await self.engine.generate(generate_request)
        except ContextOverflowError:
            raise self._overflow(session, prompt) from None
        except SamplingError as error:
            raise ApiError(f"{error}.", code="invalid_sampling") from error
        entry.seconds = time.perf_counter() - started
        _check(generation)
        parsed = self._parse_sampled(request, prompt, generation)
        message = assistant_message(parsed, session.name(entry.index))
        entry.response = message
        entry.generation = generation
        session.count("sampled_tokens", len(generation.ids))
        session.count("tool_parse_errors", int(parsed.tool_parse_error))
        if generation.finish_reason == "abort":
            raise EngineError("the engine aborted the call")
        sampled_text = self._renderer.decode(prompt.ids_P, generation.ids.tolist())
        response = render_message(message, len(request.messages))
        session.history.add(entry.index, request.rendered, response, prompt, generation.ids, sampled_text)
        # A truncated response is reported as "length" even if it contains a whole tool call.
        calls_tools = bool(parsed.tool_calls) and generation.finish_reason == "stop"
        finish_reason = "tool_calls" if calls_tools else str(generation.finish_reason)
        return Choice(call_index=entry.index, message=message, finish_reason=finish_reason, generation=generation)

    def _parse_sampled(self, request: ChatRequest, prompt: Prompt, generation: Generation) -> ParsedText:
        """Parse the sampled text without its end token. Special tokens are kept only if markup may be made of them:
        that of tools, if the request has any, or of the reasoning."""
        text, reasoning = generation.text, self._reasoning_format
        if text is None:
            ids = generation.ids.tolist()
            if generation.finish_reason == "stop":
                ids = ids[:-1]
            keep = bool(request.tools) or (reasoning is not None and reasoning.special_tokens)
            text = self._renderer.decode(prompt.ids_P, ids if keep else self._renderer.without_special(ids))
        if request.plain_text:
            return ParsedText(content=text)
        return parse_text(
            text,
            tools=request.tools,
            opened=reasoning is not None and reasoning.opened_by(prompt.text),
            tool_format=self._tool_format,
            reasoning_format=reasoning,
        )


def _parse(content: bytes, model_name: str, session: Session) -> ChatRequest:
    return parse_request(decode(content), model_name=model_name, defaults=session.sampling, greedy=session.greedy)


def _check(generation: Generation) -> None:
    """Raise `CallError` for a generation that cannot be trained on exactly; it is never padded."""
    num_ids, num_logprobs, num_versions = len(generation.ids), len(generation.logprobs), len(generation.versions)
    if not num_ids == num_logprobs == num_versions:
        raise CallError(f"the engine returned {num_ids} ids, {num_logprobs} logprobs and {num_versions} versions")
    if not np.isfinite(generation.logprobs).all():
        raise CallError("the engine returned a logprob that is not finite")
    if num_ids == 0 and generation.finish_reason != "abort":
        raise CallError("the engine sampled no token")
