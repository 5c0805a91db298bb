"""Models at an OpenAI-compatible endpoint: real OpenAI clients whose requests are checked and may be counted.

In: an endpoint's settings. Out: for each attempt a `RemoteSession`, counted (auxiliary models) or not (a policy that is
evaluated). Its clients and its loopback URL all send through one HTTP client on a separate thread, so that all rollouts
share connections, on any loop or thread.

    openai client ─► RemoteTransport / SyncRemoteTransport ─┐
    base_url (HTTP) ─► loopback server ─────────────────────┴─► RemoteSession.send ─► httpx.AsyncClient ─► endpoint
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, Self

import httpx

from sharpen.agent.rollout.user_loop import owner
from sharpen.config.run import AuxiliaryModelConfig
from sharpen.config.sections import GatewayConfig
from sharpen.errors import TokenCapError
from sharpen.gateway.caller import OTHER_HEADERS, Caller, Keys, foreign_error, foreign_use, new_key
from sharpen.gateway.exchange import RawRequest, Reply
from sharpen.gateway.meter import Tally
from sharpen.gateway.replies import error_reply
from sharpen.gateway.requests import ApiError
from sharpen.gateway.server import Server
from sharpen.gateway.session import TaskSet
from sharpen.placement.auxiliary.endpoint import Endpoint
from sharpen.placement.auxiliary.remote_transport import (
    Bridge,
    Content,
    RemoteResponse,
    RemoteTransport,
    SyncRemoteTransport,
    address,
    route_of,
)
from sharpen.placement.auxiliary.settings import endpoint_key
from sharpen.placement.serving import ServingThread
from sharpen.types import Call, Outcome

log = logging.getLogger("sharpen.auxiliary")

BAD_REQUEST = frozenset({400, 413, 422})
"""Status codes of a bad request (too long, malformed). Any other error status is a failure of the endpoint."""
CONNECTIONS = httpx.Limits(max_connections=1000, max_keepalive_connections=100)
LOOPBACK_TIMEOUT_S = 600.0
HOP_HEADERS = frozenset({"content-encoding", "content-length", "transfer-encoding", "connection"})
"""Headers that describe the encoded body, dropped because the body was decoded here."""

KEY_HEADERS = frozenset({"authorization", *OTHER_HEADERS})
"""Where the session's key is replaced by the endpoint's."""
EXTENSIONS = frozenset({"timeout"})
"""What a request may ask of `httpx` besides. `target` would replace its checked path, `trace` would see its key."""


class RemoteModel:
    """One endpoint. `defaults` are added to the bodies of chat completions that do not set these fields."""

    def __init__(
        self,
        *,
        name: str,
        model_name: str,
        base_url: str,
        api_key: str,
        defaults: Mapping[str, Any] | None = None,
        listen: GatewayConfig | None = None,
    ) -> None:
        self.name, self.model_name = name, model_name
        given = httpx.URL(base_url.rstrip("/"))
        self.base = given.copy_with(userinfo=b"")
        self.base_url = str(self.base)
        """Without a name and a password in it: it is written and told."""
        self.api_key = api_key
        self.defaults = defaults or {}
        self.thread = ServingThread()
        auth = httpx.BasicAuth(given.username, given.password) if given.userinfo else None
        self.http = httpx.AsyncClient(timeout=LOOPBACK_TIMEOUT_S, limits=CONNECTIONS, auth=auth)
        self.server = Server(self._start, self.thread.loop, owner.get, listen)
        self.keys: Keys[RemoteSession] = Keys()
        self._warned = False

    @classmethod
    def of(cls, name: str, model: AuxiliaryModelConfig, listen: GatewayConfig | None = None) -> Self:
        """Make an auxiliary model. Raises `ConfigError` if its key is not in the environment."""
        assert model.base_url is not None
        return cls(
            name=name,
            model_name=model.model_path,
            base_url=model.base_url,
            api_key=endpoint_key(name, model),
            defaults=_defaults(model),
            listen=listen,
        )

    def open(self, rollout_id: str, noise_seed: int, tally: Tally | None = None) -> RemoteSession:
        """Open a session for one attempt. `noise_seed` has no effect: the endpoint samples with its own noise."""
        session = RemoteSession(self, rollout_id, tally)
        self.keys.add(session.key, session)
        return session

    def close(self) -> None:
        """Close the server, the connections and the thread."""
        self.thread.call(self.server.stop(), timeout_s=10)
        self.thread.call(self.http.aclose(), timeout_s=10)
        self.thread.close()

    def usage_unknown(self, what: str) -> None:
        """Warn, once, that the counts are too low."""
        if not self._warned:
            self._warned = True
            log.warning(
                "auxiliary model %r: a response of %s has no usage, so %s are not counted (calls are); "
                'request it for streams with stream_options={"include_usage": True}',
                self.name,
                self.base_url,
                what,
            )

    def _start(self, raw: RawRequest) -> asyncio.Task[Reply]:
        task = self.thread.loop.create_task(self._answer(raw))
        if (session := self.keys.holder(raw.key)) is not None:
            session.tasks.add(task)
        return task

    async def _answer(self, raw: RawRequest) -> Reply:
        """Forward a request that came over the loopback URL."""
        session = self.keys.holder(raw.key)
        if session is None:
            return error_reply(self.keys.refusal(raw.key, raw.caller))
        headers = {"authorization": f"Bearer {session.key}", "content-type": "application/json"}
        try:
            url = address(self.base, raw.method, raw.path.removeprefix("/v1"))
            request = self.http.build_request(raw.method, url, headers=headers, content=raw.body)
            response = await session.send(request, raw.caller)
            content = b"".join([part async for part in response.content])
        except ApiError as error:
            return error_reply(error)
        except httpx.RequestError as error:
            reason = f"{type(error).__name__}: {error}"
            return error_reply(ApiError(reason, status=502, kind="server_error"))
        kind = response.headers.get("content-type", "application/json")
        return Reply(status=response.status, body=content, content_type=kind)


class RemoteSession:
    """One attempt's access to an endpoint; satisfies `rollout.models.Access`. Refuses requests once closed.

    The endpoint's own key is in none of what the attempt is given. With a `tally` requests are counted, also those over
    the loopback URL, and refused once the run's tokens are used up.
    """

    def __init__(self, remote: RemoteModel, rollout_id: str, tally: Tally | None) -> None:
        self.remote, self.rollout_id, self.tally = remote, rollout_id, tally
        self.owner = owner.get()
        self.key = new_key()
        self.tasks = TaskSet(remote.thread.loop)
        """The tasks that send its requests."""
        bridge = Bridge(self.send, self.tasks, remote.thread.loop)
        self.model = Endpoint(
            base_url=remote.base_url,
            name=remote.model_name,
            api_key=self.key,
            async_transport=RemoteTransport(bridge),
            sync_transport=SyncRemoteTransport(bridge),
            loopback=remote.server,
        )
        self.num_answers = 0
        """Successful requests that generate."""
        self._failures: dict[int, str] = {}

    @property
    def failure(self) -> Outcome | None:
        """INFRASTRUCTURE if the endpoint made a call fail and the same request did not succeed later."""
        return Outcome.INFRASTRUCTURE if self._failures else None

    @property
    def failure_reason(self) -> str | None:
        """The first failure of the endpoint."""
        return next(iter(list(self._failures.values())), None)

    @property
    def counts(self) -> dict[str, float]:
        """Calls and tokens; empty without a tally."""
        return {} if self.tally is None else self.tally.counts

    @property
    def cut(self) -> bool:
        """False: an endpoint does not tell whether an answer was cut."""
        return False

    @property
    def exhausted(self) -> TokenCapError | None:
        """The error of a request made after the run had used up the model's tokens."""
        return None if self.tally is None else self.tally.refused

    def allow(self, num_rollouts: int) -> None:
        """Calls of an endpoint are not limited."""

    def close(self) -> tuple[Call, ...]:
        """Cancel running requests and refuse later ones. Returns no calls, since none are recorded. From any thread."""
        self.model.commands.stop()
        self.remote.keys.end(self.key)
        self.tasks.close()
        return ()

    def discard(self) -> None:
        """Remove the folders of its commands. From any thread."""
        self.model.commands.remove()

    async def send(self, request: httpx.Request, caller: Caller | None) -> RemoteResponse:
        """Send a request whose body was read, with the endpoint's key in place of the session's. Runs on the endpoint's
        loop.

        A request for another address, or from another rollout's code, is refused and gets no key. Raises
        `httpx.RequestError`.
        """
        generates = request.method == "POST"
        if self.tasks.closed:
            return _refused(self.remote.keys.refusal(self.key, caller))
        if (misuse := foreign_use(self.owner, caller)) is not None:
            return _refused(foreign_error(misuse))
        if self.tally is not None and generates and (refusal := self.tally.admit()) is not None:
            return _refused(refusal)
        exchange = hash((request.url.path, request.content))
        repeats = exchange in self._failures  # an equal request that was sent concurrently is not a retry
        try:
            request = self._outgoing(request)
        except ApiError as error:
            return _refused(error)
        try:
            response = await self.remote.http.send(request, stream=True)
        except httpx.RequestError as error:
            self._fail(exchange, f"{self.remote.base_url}: {type(error).__name__}: {error}")
            raise
        if response.status_code >= 400:
            if response.status_code not in BAD_REQUEST:
                self._fail(exchange, f"{self.remote.base_url} answered {response.status_code}")
            content = self._stream(exchange, response)
        else:
            if repeats:
                self._failures.pop(exchange, None)
            content = self._stream(exchange, response)
            self.num_answers += generates
            if self.tally is not None and generates:
                self.tally.add(calls=1)
                content = self._count(self.tally, response, content)
        headers = {name: value for name, value in response.headers.items() if name not in HOP_HEADERS}
        return RemoteResponse(response.status_code, headers, _close_after(response, content))

    def _outgoing(self, request: httpx.Request) -> httpx.Request:
        """Return the request for the endpoint, with its key. Raises `ApiError` for another address."""
        remote = self.remote
        url = address(remote.base, request.method, route_of(remote.base, request.url))
        url = url.copy_with(query=request.url.query or None)
        headers = {
            name: value.replace(self.key, remote.api_key) if name in KEY_HEADERS else value
            for name, value in request.headers.items()
        }
        headers.pop("content-length", None)
        return httpx.Request(
            request.method,
            url,
            headers={**headers, "host": url.netloc.decode("ascii")},
            content=_with_defaults(request, remote.defaults),
            extensions={name: value for name, value in request.extensions.items() if name in EXTENSIONS},
        )

    async def _stream(self, exchange: int, response: httpx.Response) -> Content:
        try:
            async for part in response.aiter_bytes():
                yield part
        except httpx.RequestError as error:
            self._fail(exchange, f"{self.remote.base_url}: {type(error).__name__} while reading the answer: {error}")
            raise

    async def _count(self, tally: Tally, response: httpx.Response, content: Content) -> Content:
        reader = UsageReader(response.headers.get("content-type", ""), tally, self.remote.usage_unknown)
        complete = False
        try:
            async for part in content:
                reader.feed(part)
                yield part
            complete = True
        finally:
            reader.end(complete=complete)
            await content.aclose()

    def _fail(self, exchange: int, reason: str) -> None:
        if not self.tasks.closed:
            self._failures.setdefault(exchange, reason)


async def _close_after(response: httpx.Response, content: Content) -> Content:
    try:
        async for part in content:
            yield part
    finally:
        await content.aclose()
        await response.aclose()


def _defaults(model: AuxiliaryModelConfig) -> dict[str, Any]:
    """Return the configured sampling settings as body fields, for requests that do not set them."""
    fields: dict[str, Any] = {
        name: getattr(model, name)
        for name in ("temperature", "top_p", "top_k", "min_p", "max_tokens")
        if name in model.model_fields_set
    }
    if model.enable_thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": model.enable_thinking}
    return fields


def _with_defaults(request: httpx.Request, defaults: Mapping[str, Any]) -> bytes:
    """Return the body of a request, with defaults added for the fields that it does not set."""
    if not defaults or request.method != "POST" or not request.url.path.endswith("/chat/completions"):
        return request.content
    try:
        body = json.loads(request.content)
    except ValueError:  # the endpoint will reject it
        return request.content
    if not isinstance(body, dict):
        return request.content
    added = {name: value for name, value in defaults.items() if body.get(name) is None}
    if body.get("max_completion_tokens") is not None:
        added.pop("max_tokens", None)
    return json.dumps({**body, **added}).encode()


def _refused(error: ApiError) -> RemoteResponse:
    reply = error_reply(error)

    async def content() -> Content:
        yield reply.body

    return RemoteResponse(reply.status, {"content-type": reply.content_type}, content())


# Counts the tokens of an endpoint's response while its bytes are passed on.
#
# In: the bytes of a response, whole or streamed (server-sent events). Out: tokens added to a `Tally`. The endpoint's
# own `usage` counts. In a stream without usage each chunk with content counts as one sampled token, a lower bound.

DATA = b"data:"
END_OF_STREAM = b"[DONE]"


class UsageReader:
    """Reads one successful response: `feed` it the decoded bytes, then `end`. `unknown` is called with a description of
    the missing counts if there was no usage."""

    def __init__(self, content_type: str, tally: Tally, unknown: Callable[[str], None]) -> None:
        self._streamed = content_type.startswith("text/event-stream")
        self._tally = tally
        self._unknown = unknown
        self._rest = bytearray()
        self._counted = 0
        self._known = False
        self._end_mark = False
        self._ended = False

    def feed(self, content: bytes) -> None:
        """Read the next bytes. Streams are counted as they arrive."""
        self._rest += content
        if not self._streamed:
            return
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        for line in lines:
            self._read_line(line)

    def end(self, *, complete: bool) -> None:
        """Finish the count: the response is `complete`, or its reader stopped early. A second call does nothing."""
        if self._ended:
            return
        self._ended = True
        if self._streamed:
            self._read_line(bytes(self._rest))
        else:
            self._read_usage(_decoded(bytes(self._rest)))
        if (complete or self._end_mark) and not self._known:
            self._unknown("the prompt's tokens" if self._streamed else "its tokens")

    def _read_line(self, line: bytes) -> None:
        if not line.startswith(DATA):
            return
        data = line.removeprefix(DATA).strip()
        if data == END_OF_STREAM:
            self._end_mark = True
            return
        chunk = _decoded(data)
        if not self._read_usage(chunk) and not self._known and _has_content(chunk):
            self._counted += 1
            self._tally.add(tokens=1)

    def _read_usage(self, body: dict[str, Any]) -> bool:
        """Count the body's usage; return False if it has none. The last usage of a stream counts."""
        nested = body.get("response")  # events of the Responses API hold it one level down
        tokens = _tokens(body.get("usage") or (nested.get("usage") if isinstance(nested, dict) else None))
        if tokens is None:
            return False
        self._known = True
        self._tally.add(tokens=tokens - self._counted)
        self._counted = tokens
        return True


def _decoded(text: bytes) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except ValueError:  # a cut-off body, or no JSON at all: no usage in it
        return {}
    return body if isinstance(body, dict) else {}


def _tokens(usage: Any) -> int | None:
    """Return prompt plus sampled tokens; None if the usage has neither."""
    if not isinstance(usage, dict):
        return None
    if isinstance(total := usage.get("total_tokens"), int):
        return total
    parts = ("prompt_tokens", "input_tokens", "completion_tokens", "output_tokens")
    known = [usage[name] for name in parts if isinstance(usage.get(name), int)]
    return sum(known) if known else None


def _has_content(chunk: dict[str, Any]) -> bool:
    choices = chunk.get("choices")
    deltas = (
        [choice.get("delta") for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []
    )
    return any(isinstance(delta, dict) and any(delta.get(k) for k in _CONTENT) for delta in deltas)


_CONTENT = ("content", "reasoning_content", "tool_calls", "refusal")
