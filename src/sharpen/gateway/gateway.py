"""The gateway: answers the requests of rollouts, in any protocol, and records every call token-exactly.

In: requests from the transports (in-process, HTTP), each with its rollout's key. Out: replies, and `Call`s through
`Session.close`. Runs on the serving loop together with the engine; `open` and sessions may be used from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from sharpen.config.sections import GatewayConfig
from sharpen.contracts import ORIGINAL, Engine
from sharpen.errors import ConfigError, EngineLostError, ImageError
from sharpen.gateway.answers import Delta, Head, Writer
from sharpen.gateway.body import MAX_ITEMS, decode
from sharpen.gateway.caller import Keys, WhoCalls, foreign_error, foreign_use, new_key, nobody
from sharpen.gateway.constraints import constraint_of
from sharpen.gateway.exchange import Exchange, RawRequest, Reply, Stream
from sharpen.gateway.formats.table import AUTO, formats_of, no_format
from sharpen.gateway.history import History, Prompt
from sharpen.gateway.images import MARKS, Album, ImageReader, with_references
from sharpen.gateway.memory import Memory
from sharpen.gateway.meter import BusyClock, Tally
from sharpen.gateway.model import ChatModel
from sharpen.gateway.protocols import messages as messages_api
from sharpen.gateway.protocols.chat import check_message
from sharpen.gateway.protocols.protocol import Context, Parse, Route
from sharpen.gateway.protocols.responses_events import input_page
from sharpen.gateway.render import Renderer
from sharpen.gateway.replies import JSON_TYPE, json_reply, rollout_ended
from sharpen.gateway.requests import (
    EFFORT,
    ApiError,
    CallRequest,
    PromptTooLongError,
    render_message,
    short_repr,
    text_of,
)
from sharpen.gateway.routes import (
    COUNT_TOKENS,
    HEALTH,
    INPUT_ITEMS,
    MODELS,
    Protocols,
    model_body,
    models_body,
    response_id,
    route_of,
)
from sharpen.gateway.sampler import Sampler, overflow
from sharpen.gateway.server import Server
from sharpen.gateway.session import Entry, Session
from sharpen.gateway.transport import InProcess
from sharpen.types import IntArray, Outcome, Sampling

logger = logging.getLogger(__name__)

MAX_WARNINGS = 100
LONG = 16 << 10
"""Bytes of a request that is read on another thread, or characters of the messages whose prompt is made there."""
T = TypeVar("T")
MAX_DECODING = 2
"""How many requests' images are decoded at a time: each takes as much memory as its pixels."""


class Gateway:
    """Serves one model to many rollouts.

    `loop` is the serving loop, which runs on its own thread. `sampling` holds the defaults for calls that do not set
    their own. `who_calls` returns the attempt that the running code belongs to: a session belongs to the attempt that
    opens it, and a call from within another attempt makes both fail. `adapters` are names of adapters that the engine
    serves beside the model: then a call must ask for one of them or for the model. `policies` are adapters by the name
    of the agent whose calls they answer, whatever model these ask for. `listen` is where the HTTP server
    listens. `album` keeps the images that the model is shown, if it can see. Raises `ConfigError` for an unknown
    parser, and `ModelError` for a tokenizer without a chat template.
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
        tool_call_parser: str | None = AUTO,
        reasoning_parser: str | None = AUTO,
        max_calls: int | None = None,
        who_calls: WhoCalls = nobody,
        listen: GatewayConfig | None = None,
        album: Album | None = None,
        adapters: Sequence[str] = (),
        policies: Mapping[str, str] | None = None,
    ) -> None:
        self.model_name = model_name
        self.adapters = tuple(adapters)
        self._policies = dict(policies or {})
        self.engine = engine
        self.busy = BusyClock()
        """The time during which the engine had at least one request of this gateway."""
        self.loop = loop
        self._renderer = Renderer(tokenizer)
        self._sampling = sampling or Sampling()
        self._template_kwargs = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        formats = formats_of(
            self._renderer.template, tool_call_parser=tool_call_parser, reasoning_parser=reasoning_parser
        )
        self._formats = formats
        self._lacks_tool_format = tool_call_parser == AUTO and formats.tool is None
        self._sampler = Sampler(engine, self._renderer, self.busy, formats, self.adapters)
        self._album = album or Album(lack=f"the model {model_name} reads only text")
        self._threads = ThreadPoolExecutor(MAX_DECODING, thread_name_prefix="sharpen-requests")
        self._max_calls = max_calls
        self._keys: Keys[Session] = Keys()
        self._warnings: set[str] = set()
        self._lost: EngineLostError | None = None
        self._who_calls = who_calls
        self.protocols = Protocols(() if listen is None else listen.protocols)
        self._server = Server(self.start, loop, who_calls, listen)
        self._inside = InProcess(self.start, loop, who_calls, self.protocols)

    def open(
        self,
        rollout_id: str,
        noise_seed: int,
        *,
        sampling: Sampling | None = None,
        max_calls: int | None = None,
        record: bool = True,
        tally: Tally | None = None,
        original: bool = False,
    ) -> Session:
        """Open a session for one rollout. From any thread.

        `sampling` replaces the defaults; if its temperature is 0, every call is greedy whatever the agent asks for
        (evaluation). `record=False` keeps no calls. `tally` counts calls and tokens, and may refuse them. With
        `original`, every policy is the original model (evaluation). Raises `EngineLostError` once a call has found the
        engine lost.
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
                inside=self._inside,
                calls=lambda: session.snapshot(),
                prompt_text=lambda index: session.prompt_text(index),
                count_tokens=self.count_tokens,
                version=lambda: self.engine.version,
                recorded=record,
                policies=frozenset(self._policies),
            ),
            revoke=partial(self._keys.end, key),
            loop=self.loop,
            owner=self._who_calls(),
            tally=tally,
            policies=dict.fromkeys(self._policies, ORIGINAL) if original else self._policies,
        )
        self._keys.add(key, session)
        return session

    @property
    def lost(self) -> bool:
        """Whether a call has found that the engine can serve no more."""
        return self._lost is not None

    async def count_tokens(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Return the number of tokens of the prompt that these messages render to, without tools. On any loop.

        Raises `ConfigError` if they are not chat messages.
        """
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._count_tokens(messages), self.loop))

    async def _count_tokens(self, messages: Sequence[Mapping[str, Any]]) -> int:
        memory = Memory()
        images = ImageReader(self._album, memory)
        try:
            given = [_as_dict(message) for message in messages]
            for place, message in enumerate(given):
                check_message(message, place)
            rendered = [render_message(with_references(message, place, images)) for place, message in enumerate(given)]
            text = self._renderer.render(rendered, (), self._template_kwargs)
            prompt = History().prompt(self._renderer, rendered, text, self._album.sight(rendered, memory))
        except (ApiError, ImageError) as error:
            raise ConfigError(f"the messages have no prompt: {error}") from error
        return len(prompt.ids_P)

    async def close(self) -> None:
        """Close every session and the HTTP server. On the serving loop."""
        for session in self._keys.holders():
            session.close()
            session.discard()
        await self._server.stop()
        self._threads.shutdown(wait=False)

    def start(self, raw: RawRequest) -> asyncio.Task[Reply]:
        """Start to answer a request, on the serving loop. The task raises only if cancelled, which aborts the call."""
        session = self._keys.holder(raw.key)
        task = self.loop.create_task(self._answer(session, raw))
        if session is not None:
            session.tasks.add(task)
        return task

    async def _answer(self, session: Session | None, raw: RawRequest) -> Reply:
        try:
            route = route_of(raw.method, raw.path)
            if (raw.method, raw.path) in HEALTH:
                return Reply(status=200, content_type=JSON_TYPE, body=b"{}")
            if session is None:
                raise self._keys.refusal(raw.key, raw.caller)
            if (misuse := foreign_use(session.owner, raw.caller)) is not None:
                await self._note_foreign(session, raw)
                raise foreign_error(misuse)
            if (parse := self.protocols.parser(route)) is not None:
                return await self._call(session, raw, parse)
            return await self._describe(session, raw, route)
        except ApiError as error:
            return self.protocols.refusal(error, raw.path)
        except Exception as error:
            assert session is not None
            return self.protocols.refusal(self._failed(session, error), raw.path)

    async def _describe(self, session: Session, raw: RawRequest, route: Route) -> Reply:
        """Answer a request that samples nothing."""
        if route == MODELS:
            return json_reply(models_body(self.model_name, *self.adapters))
        if (page := self.protocols.page(route)) is not None:
            return json_reply(page(self.model_name))
        if route in {("GET", f"/models/{name}") for name in self._names}:
            return json_reply(model_body(route[1].removeprefix("/models/")))
        if route == COUNT_TOKENS:
            request, _ = await self._parse(session, raw, messages_api.parse_count)
            return json_reply(
                {"input_tokens": await self._beside(raw, request, partial(self._count, session, request))}
            )
        if (name := response_id(route)) is not None:
            return await self._stored(session, name, raw)
        if route[0] == "GET" and route[1].startswith("/models/"):
            raise self._no_model(route[1].removeprefix("/models/"))
        raise self.protocols.not_found(raw.method, raw.path)

    @property
    def _names(self) -> tuple[str, ...]:
        return (self.model_name, *self.adapters)

    def _no_model(self, name: str) -> ApiError:
        return ApiError(
            f"The model {short_repr(name)} does not exist: this key is for {', '.join(map(repr, self._names))}.",
            status=404,
            code="model_not_found",
            param="model",
        )

    async def _stored(self, session: Session, name: str, raw: RawRequest) -> Reply:
        stored = session.memory.responses.get(name)
        if stored is None:
            raise ApiError(f"Response with id {short_repr(name)} not found.", status=404, code="not_found")
        if raw.path.rstrip("/").endswith(INPUT_ITEMS):
            items, pictures = stored.input_items, session.memory.pictures
            return await self.loop.run_in_executor(
                self._threads, lambda: json_reply(input_page(items, raw.query, pictures))
            )
        if raw.method == "GET":
            return json_reply(stored.body)
        del session.memory.responses[name]
        return json_reply({"id": name, "object": "response", "deleted": True})

    def _failed(self, session: Session, error: Exception) -> ApiError:
        """Record a failure that neither the model nor its agent caused, and return what the agent is told: the boundary
        between agents and the engine."""
        if isinstance(error, EngineLostError):
            self._lost = error  # not logged: the next `open` raises it
        else:
            logger.error("call of rollout %s failed", session.rollout_id, exc_info=error)
        reason = f"{type(error).__name__}: {error}"
        session.fail(Outcome.INFRASTRUCTURE, reason)
        return ApiError(reason, status=500, kind="server_error")

    async def _note_foreign(self, session: Session, raw: RawRequest) -> None:
        """Record a call that is refused because another rollout's code made it."""
        parse = self.protocols.parser(route_of(raw.method, raw.path))
        with contextlib.suppress(ApiError):  # an invalid request would not have been a call
            if parse is not None:
                request, _ = await self._parse(session, raw, parse)
                prompt = await self._prompt(session, raw, request)
                session.entry(Exchange(foreign=True), prompt, request)

    async def _parse(self, session: Session, raw: RawRequest, parse: Parse) -> tuple[CallRequest, Writer]:
        """Read a request: on another thread if it is long or has images, whose decoding would hold up all rollouts."""
        has_images = self._album.eyes is not None and any(mark in raw.body for mark in MARKS)
        if len(raw.body) <= LONG and not has_images:
            return self._read(session, raw, parse)
        return await self.loop.run_in_executor(self._threads, self._read, session, raw, parse)

    def _read(self, session: Session, raw: RawRequest, parse: Parse) -> tuple[CallRequest, Writer]:
        context = Context(
            model_name=self.model_name,
            defaults=session.sampling,
            greedy=session.greedy,
            memory=session.memory,
            images=ImageReader(self._album, session.memory),
            beta=raw.beta,
        )
        request, writer = parse(decode(raw.body, MAX_ITEMS + self.engine.max_model_len), context)
        return replace(request, rendered=tuple(map(session.memory.as_sampled, request.rendered))), writer

    async def _call(self, session: Session, raw: RawRequest, parse: Parse) -> Reply:
        try:
            try:
                async with session.arrival:
                    request, writer = await self._parse(session, raw, parse)
                    entries = await self._admitted(session, raw, request)
            except asyncio.CancelledError:
                session.cancelled(raw)
                raise
            return await self._reply(session, entries, writer)
        except PromptTooLongError as error:  # of a request that was read
            if not (request.stream and writer.streams_overflow):
                raise
            told = writer.begin(self._head(session.name(-1), np.zeros(0, np.int32), request)) + writer.error(error)
            return Reply(status=200, content_type=writer.stream_type, body=told)

    async def _admitted(self, session: Session, raw: RawRequest, request: CallRequest) -> list[Entry]:
        """Return the entries of a call that may be made, one for each choice. Raises `ApiError`."""
        if self.adapters and request.model not in self._names:
            raise self._no_model(request.model)
        self._warn_of_no_effect(request)
        if session.tally is not None and (refusal := session.tally.admit()) is not None:
            raise refusal
        prompt = await self._prompt(session, raw, request)
        made = partial(constraint_of, request, prompt.text, self._formats, self._renderer.added_token)
        constraint, notes = await self._beside(raw, request, made)
        self._warn(notes)
        if not session.admits(request.n):
            message = f"This rollout may make {session.max_calls} calls at most."
            session.fail(Outcome.CALL_LIMIT, message)
            raise ApiError(message, code="call_limit_exceeded")
        exchange = session.exchange(raw)
        entries = [session.entry(exchange, prompt, request, raw.agent, constraint) for _ in range(request.n)]
        for entry in entries if request.n > 1 else ():
            entry.first_choice = entries[0].index
        session.count("prompt_tokens", len(prompt.ids_P))
        session.count("forks", int(entries[0].index > 0 and prompt.parent is None))
        return entries

    async def _reply(self, session: Session, entries: list[Entry], writer: Writer) -> Reply:
        first = entries[0]
        head = self._head(session.name(first.index), first.prompt.ids_P, first.request)
        if first.request.stream:
            return await self._stream(session, entries, head, writer)
        try:
            choices = await self._sampler.choices(session, entries)
        finally:
            first.exchange.ended = True
        return json_reply(writer.whole(head, choices, self._renderer), first.exchange)

    def _head(self, name: str, prompt_ids_P: IntArray, request: CallRequest) -> Head:
        return Head(
            name=name,
            model=request.model if request.model in self.adapters else self.model_name,
            created=int(time.time()),
            prompt_ids_P=prompt_ids_P,
            num_choices=request.n,
        )

    async def _stream(self, session: Session, entries: list[Entry], head: Head, writer: Writer) -> Reply:
        """Return a reply that is being sampled, once there is something to send. Raises the error of a call that failed
        before that."""
        stream = Stream()
        stream.task = self.loop.create_task(self._write(session, entries, head, writer, stream))
        session.tasks.add(stream.task)
        begun = self.loop.create_task(stream.begun.wait())
        try:
            await asyncio.wait({stream.task, begun}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            stream.cancel()
            raise
        finally:
            begun.cancel()
        if not stream.begun.is_set():
            await stream.task  # raises
        return Reply(status=200, content_type=writer.stream_type, exchange=entries[0].exchange, stream=stream)

    async def _write(self, session: Session, entries: list[Entry], head: Head, writer: Writer, stream: Stream) -> None:
        """Sample, and push events as tokens come. Errors after the first event are events too."""

        def give(delta: Delta) -> None:
            if not stream.begun.is_set():
                stream.push(writer.begin(head))
            stream.push(writer.delta(head, delta))

        try:
            choices = await self._sampler.choices(session, entries, give)
            if not stream.begun.is_set():
                stream.push(writer.begin(head))
            stream.end(writer.end(head, choices, self._renderer), complete=True)
        except asyncio.CancelledError:
            stream.end(writer.error(rollout_ended()), complete=False)
            raise
        except Exception as error:
            if not stream.begun.is_set():
                raise
            told = error if isinstance(error, ApiError) else self._failed(session, error)
            stream.end(writer.error(told), complete=False)
        finally:
            entries[0].exchange.ended = True

    def _warn_of_no_effect(self, request: CallRequest) -> None:
        """Log what the request sets without effect, or with less than it expects. Each warning is logged once."""
        not_read = (name for name in request.other_fields if not self._renderer.mentions(name))
        warnings = [
            f"messages have a field {short_repr(name)}, which the model's chat template does not read: it has no effect"
            for name in sorted(itertools.islice(not_read, MAX_WARNINGS))
        ]
        if EFFORT in request.template_kwargs and not self._renderer.mentions(EFFORT):
            warnings.append(f"{EFFORT} has no effect: the model's chat template does not read it")
        if request.tools and self._lacks_tool_format:
            warnings.append(no_format(self.model_name))
        if request.model not in self._names:
            warnings.append(
                f"a call asks for the model {short_repr(request.model)}: its key is for {self.model_name}, "
                "which answers it"
            )
        self._warn([*warnings, *request.notes])

    def _warn(self, warnings: Sequence[str]) -> None:
        for warning in itertools.islice(warnings, MAX_WARNINGS):
            if warning not in self._warnings and len(self._warnings) < MAX_WARNINGS:
                self._warnings.add(warning)
                logger.warning("%s (reported once)", warning)

    def _count(self, session: Session, request: CallRequest) -> int:
        try:
            text = self._text(request)
        except PromptTooLongError as error:
            return error.num_tokens
        return len(self._from_history(session, request, text).ids_P)

    def _text(self, request: CallRequest) -> str:
        """Return the text of a prompt. Raises `PromptTooLongError` for one that is far too long, which its beginning
        shows: all else would wait on this loop for the rest."""
        if request.prompt is None:
            self._check_length("".join(text_of(message["content"]) for message in request.rendered), request)
            kwargs = {**self._template_kwargs, **request.template_kwargs}
            text = self._renderer.render(request.rendered, request.tools, kwargs, continue_final=request.continue_final)
        elif isinstance(request.prompt, str):
            text = request.prompt
        elif len(request.prompt) >= self.engine.max_model_len:
            raise PromptTooLongError(len(request.prompt), self.engine.max_model_len, request.asked)
        else:
            text = ""
        self._check_length(text, request)
        return text

    def _check_length(self, text: str, request: CallRequest) -> None:
        limit = self.engine.max_model_len
        if (num_tokens := self._renderer.count_if_over(text, limit)) is not None:
            raise PromptTooLongError(num_tokens, limit, request.asked)

    def _from_history(self, session: Session, request: CallRequest, text: str) -> Prompt:
        if request.prompt is not None:
            return session.history.raw_prompt(self._renderer, request.prompt)
        sight = self._album.sight(request.rendered, session.memory)
        try:
            return session.history.prompt(self._renderer, request.rendered, text, sight)
        except ImageError as error:
            raise ApiError(f"The images have no place in the prompt: {error}.", param=request.asked) from error

    async def _prompt(self, session: Session, raw: RawRequest, request: CallRequest) -> Prompt:
        try:
            prompt = await self._beside(raw, request, partial(self._made, session, request))
        except PromptTooLongError as error:
            raise overflow(session, error.num_tokens, request, error.limit) from None
        if len(prompt.ids_P) == 0:
            raise ApiError(f"The prompt that {request.asked!r} makes is empty.", param=request.asked)
        return prompt

    def _made(self, session: Session, request: CallRequest) -> Prompt:
        """Return a prompt. Changes nothing. Raises `PromptTooLongError`."""
        prompt = self._from_history(session, request, self._text(request))
        if len(prompt.ids_P) >= self.engine.max_model_len:
            raise PromptTooLongError(len(prompt.ids_P), self.engine.max_model_len, request.asked)
        return prompt

    async def _beside(self, raw: RawRequest, request: CallRequest, work: Callable[[], T]) -> T:
        """Return what `work` makes of a request: on another thread if that takes long, since all others would wait."""
        if len(raw.body) <= LONG and not _is_heavy(request.rendered):
            return work()
        return await self.loop.run_in_executor(self._threads, work)


def _as_dict(message: Any) -> Any:
    """Return a message as a dict, if it is a mapping or an SDK's object; else as it came."""
    try:
        return dict(message)
    except (TypeError, ValueError):
        return message  # which the door refuses


def _is_heavy(rendered: Sequence[Mapping[str, Any]]) -> bool:
    """Whether it takes long to make the prompt of messages, however short the request: a megabyte of text takes
    tokenizers seconds, and a small file may be a large image. A request continues stored messages by their id."""
    size = 0
    for message in rendered:
        if not isinstance(message["content"], str):
            return True
        size += len(message["content"]) + len(message.get("reasoning_content", ""))
        size += sum(len(call["function"]["arguments"]) for call in message.get("tool_calls", ()))
    return size > LONG
