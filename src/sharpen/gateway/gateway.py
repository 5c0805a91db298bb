"""The gateway: answers chat-completion requests of rollouts with the engine, and records every call token-exactly.

In: requests from the transports (in-process, HTTP), each with its rollout's key. Out: replies, and `Call`s through
`Session.close`. Lives on the serving loop together with the engine; `open`, and sessions, may be used from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from sharpen.errors import CallError, ConfigError, ContextOverflowError, EngineError, EngineLostError, SamplingError
from sharpen.gateway.body import decode
from sharpen.gateway.busy import BusyClock
from sharpen.gateway.caller import WhoCalls, foreign_error, foreign_use, nobody
from sharpen.gateway.exchange import Exchange, RawRequest, Reply
from sharpen.gateway.history import Prompt
from sharpen.gateway.keys import Keys, new_key
from sharpen.gateway.meter import Tally
from sharpen.gateway.model import ChatModel
from sharpen.gateway.parsers import REASONING_PARSERS, THINK, TOOL_PARSERS, ParsedText, parse_text
from sharpen.gateway.render import Renderer
from sharpen.gateway.requests import ApiError, ChatRequest, parse_request, render_message, shown
from sharpen.gateway.responses import Choice, assistant_message, completion_reply, error_reply, models_reply
from sharpen.gateway.routes import CHAT, MODELS, not_found, route_of
from sharpen.gateway.server import Server
from sharpen.gateway.session import Entry, Session
from sharpen.gateway.transport import AsyncTransport, Mailbox, SyncTransport
from sharpen.inference.engine import Engine, GenerateRequest, Generation
from sharpen.types import Outcome, Sampling

logger = logging.getLogger(__name__)

Parser = TypeVar("Parser")

MOST_REMARKS = 100


class Gateway:
    """Serves one model to many rollouts.

    `loop` is the serving loop; it runs on a thread of its own. `sampling` holds the defaults of calls that do not set
    their own. `who_calls` says which attempt of a rollout the running code belongs to: a session belongs to the one in
    whose context it is opened, and a call from within another one makes both fail. Raises `ConfigError` for an unknown
    parser, `ModelError` for a tokenizer without a chat template.
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
        """How long the engine has had a request of ours."""
        self.loop = loop
        self._renderer = Renderer(tokenizer)
        self._sampling = sampling or Sampling()
        self._template_kwargs = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._tool_parser = _named(TOOL_PARSERS, tool_call_parser, "tool_call_parser")
        self._reasoning_parser = _named(REASONING_PARSERS, reasoning_parser, "reasoning_parser")
        self._max_calls = max_calls
        self._keys: Keys[Session] = Keys()
        self._said: set[str] = set()
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
        """A session for one rollout. `sampling` replaces the defaults; with temperature 0 in it every call is greedy,
        whatever the agent asks for (evaluation). `record=False` keeps no calls. `tally` counts calls and tokens, and
        may refuse them. From any thread. Raises `EngineLostError` once a call has found the engine lost.
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

    async def close(self) -> None:
        """Close every session and the HTTP server. On the serving loop."""
        for session in self._keys.holders():
            session.close()
        await self._server.stop()

    def start(self, raw: RawRequest) -> asyncio.Task[Reply]:
        """Answer a request, on the serving loop. Cancelling the task aborts it; nothing else makes it raise."""
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
            # The failure boundary between agents and the engine: what broke is no doing of the model or its agent.
            assert session is not None
            if isinstance(error, EngineLostError):
                self._lost = error  # said once, by whoever wants to open the next session
            else:
                logger.exception("call of rollout %s failed", session.rollout_id)
            reason = f"{type(error).__name__}: {error}"
            session.fail(Outcome.INFRASTRUCTURE, reason)
            return error_reply(ApiError(reason, status=500, kind="server_error"))

    def _note_foreign(self, session: Session, raw: RawRequest) -> None:
        """Record a call that is refused since it came from within another rollout."""
        with contextlib.suppress(ApiError):  # what is no request would have been no call
            request = _parse(raw.body, self.model_name, session)
            session.entry(Exchange(foreign=True), self._prompt(session, request), request)

    async def _chat(self, session: Session, raw: RawRequest) -> Reply:
        request = _parse(raw.body, self.model_name, session)
        self._remark(request)
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
            entry.first = entries[0].index
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

    def _remark(self, request: ChatRequest) -> None:
        """Say once what was accepted without effect."""
        remarks = [
            f"messages have a field {name!r}, which the model's chat template does not read: it changes nothing"
            for name in sorted(request.further_fields)
            if not self._renderer.mentions(name)
        ]
        if request.model != self.model_name:
            remarks.append(
                f"a call asks for the model {shown(request.model)}: its key is for {self.model_name}, which answers it"
            )
        for remark in remarks:
            if remark not in self._said and len(self._said) < MOST_REMARKS:
                self._said.add(remark)
                logger.warning("%s (said once)", remark)

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
            for task in tasks:  # where one failed, the others are of no use
                task.cancel()

    async def _choice(self, session: Session, entry: Entry, number: int) -> Choice:
        prompt, request = entry.prompt, entry.asked
        wanted = GenerateRequest(
            prompt_ids=prompt.ids_P,
            sampling=request.sampling,
            noise=session.noise(entry.index, number, request.seed),
            top_logprobs=request.top_logprobs,
            session=session.rollout_id,
        )
        started = time.perf_counter()
        try:
            with self.busy:
                generation = await self.engine.generate(wanted)
        except ContextOverflowError:
            raise self._overflow(session, prompt) from None
        except SamplingError as error:
            raise ApiError(f"{error}.", code="invalid_sampling") from error
        entry.seconds = time.perf_counter() - started
        _check(generation)
        parsed = self._parsed(request, prompt, generation)
        message = assistant_message(parsed, session.name(entry.index))
        entry.response = message
        entry.generation = generation
        session.count("sampled_tokens", len(generation.ids))
        session.count("tool_parse_errors", int(parsed.tool_parse_error))
        if generation.finish_reason == "abort":
            raise EngineError("the engine aborted the call")
        sampled_text = self._renderer.decode(prompt.ids_P, generation.ids.tolist())
        said = render_message(message, len(request.messages))
        session.history.add(entry.index, request.rendered, said, prompt, generation.ids, sampled_text)
        # Truncation is what the engine says it is, also where a whole tool call came before the cut.
        calls_tools = bool(parsed.tool_calls) and generation.finish_reason == "stop"
        finish_reason = "tool_calls" if calls_tools else str(generation.finish_reason)
        return Choice(call_index=entry.index, message=message, finish_reason=finish_reason, generation=generation)

    def _parsed(self, request: ChatRequest, prompt: Prompt, generation: Generation) -> ParsedText:
        """The sampled text without its end token, read. Special tokens stay only beside tools, which may use them."""
        text = generation.text
        if text is None:
            ids = generation.ids.tolist()
            if generation.finish_reason == "stop":
                ids = ids[:-1]
            text = self._renderer.decode(prompt.ids_P, ids if request.tools else self._renderer.without_special(ids))
        if request.plain_text:
            return ParsedText(content=text)
        return parse_text(
            text,
            tools=bool(request.tools),
            opened=prompt.text.rstrip().endswith(THINK),
            tool_parser=self._tool_parser,
            reasoning_parser=self._reasoning_parser,
        )


def _parse(content: bytes, model_name: str, session: Session) -> ChatRequest:
    return parse_request(decode(content), model_name=model_name, defaults=session.sampling, greedy=session.greedy)


def _check(generation: Generation) -> None:
    """Refuse, rather than pad, what cannot be trained on exactly."""
    num_ids, num_logprobs, num_versions = len(generation.ids), len(generation.logprobs), len(generation.versions)
    if not num_ids == num_logprobs == num_versions:
        raise CallError(f"the engine gave {num_ids} ids, {num_logprobs} logprobs and {num_versions} versions")
    if not np.isfinite(generation.logprobs).all():
        raise CallError("the engine gave a logprob that is not finite")
    if num_ids == 0 and generation.finish_reason != "abort":
        raise CallError("the engine sampled no token")


def _named(parsers: Mapping[str, Parser], name: str | None, setting: str) -> Parser | None:
    if name is None:
        return None
    if name not in parsers:
        raise ConfigError(f"{setting} is {name!r}; it must be one of {sorted(parsers)} or None")
    return parsers[name]
