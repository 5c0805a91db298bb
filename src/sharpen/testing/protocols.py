"""Tries a client protocol: requests as its clients send them, the same ones spoiled, and answers of every kind.

In: a protocol, and bodies of requests for each of its routes. Out: nothing, or an `AssertionError`.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from sharpen.contracts import Generation
from sharpen.gateway.answers import Choice, Delta, Head, Writer
from sharpen.gateway.protocols.chat import check_message
from sharpen.gateway.protocols.protocol import ClientProtocol, Context, Route
from sharpen.gateway.render import Renderer
from sharpen.gateway.replies import EVENTS_TYPE
from sharpen.gateway.requests import ApiError, CallRequest, PromptTooLongError, render_message
from sharpen.gateway.routes import ANTHROPIC, OPENAI, OURS
from sharpen.types import FinishReason, Sampling

TEXT = ('Hé "said" <b>', " {x}\n🙂 end")
"""The pieces of an answer."""
MARK = "a ] b"
"""In the arguments of an answer's tool call."""
OWN = Sampling(temperature=0.375, top_p=0.75, max_tokens=11)
"""A run's own sampling."""
_SPOILED = 200
_NOTHING: tuple[Any, ...] = (None, 1, "x", [], {})
_VALUES: tuple[Any, ...] = (None, True, -1, 0.5, 10**30, "", "x", [], {}, [[]], [None], {"x": "y"})


def check_protocol(protocol: ClientProtocol, requests: Mapping[Route, Sequence[Any]]) -> None:
    """Raise `AssertionError` if `protocol` does not keep the contract of `ClientProtocol`.

    `requests` are bodies for each of its routes, as its clients send them: one that leaves the sampling to the run is
    among them, and one with tools if there are any. They are read twice, greedy, and spoiled in many ways, which must
    be refused by an `ApiError` or read as something else that is whole. To each, answers are written whole and as a
    stream: text, tool calls, an end by length; and errors.
    """
    assert isinstance(protocol, ClientProtocol), f"a protocol is a ClientProtocol, got {type(protocol).__name__}"
    for route in (*protocol.calls, *protocol.pages):
        _check_route(protocol, route)
    missing = [route for route in protocol.calls if not requests.get(route)]
    assert not missing, f"check_protocol needs requests of {missing[0]}"
    for error in (
        ApiError("There is 'nothing' here.", status=404, code="not_found"),
        PromptTooLongError(9000, 8192, "messages"),
        ApiError("The engine is lost.", status=500, kind="server_error"),
    ):
        _check_error(protocol, error)
    for page, make in protocol.pages.items():
        assert "a-model" in _text(make("a-model"), f"the page {page}"), f"the page {page} does not name the model"
    own = False
    for route in protocol.calls:
        for body in requests[route]:
            own |= _check_read(protocol, route, body)
            _check_answers(protocol, route, body)
        for wrong in _NOTHING:
            _check_refused(protocol, route, wrong)
        for seed in range(_SPOILED):
            dice = random.Random(seed)
            with contextlib.suppress(ApiError):
                _read(protocol, route, _spoiled(dice.choice(requests[route]), dice), _context())
    assert own, f"{protocol.name} reads no request with the run's own temperature, top_p and max_tokens"


def _context(*, greedy: bool = False) -> Context:
    return Context(model_name="a-model", defaults=OWN, greedy=greedy)


def _check_route(protocol: ClientProtocol, route: Route) -> None:
    method, path = route
    assert method.isupper(), f"{route}: a method is written in capitals"
    well = path.startswith("/") and not path.endswith("/") and path != "/v1" and not path.startswith("/v1/")
    assert well, f"{route}: a path begins with '/' and not with '/v1', which is taken away, and does not end with '/'"
    if protocol not in (OPENAI, ANTHROPIC):
        assert OURS.parser(route) is None, f"{route} is a route of ours"
        assert OURS.page(route) is None, f"{route} is a route of ours"


def _check_error(protocol: ClientProtocol, error: ApiError) -> None:
    text = _text(protocol.error(error), "an error")
    if not isinstance(error, PromptTooLongError):  # whose words are the vendor's
        assert json.dumps(str(error))[1:-1] in text, f"{protocol.name} does not say {str(error)!r} in its error: {text}"


def _read(protocol: ClientProtocol, route: Route, body: Any, context: Context) -> tuple[CallRequest, Writer]:
    """Return a request as it is read. Raises `ApiError`."""
    given = copy.deepcopy(body)
    try:
        request, writer = protocol.calls[route](given, context)
    except ApiError as error:
        if not 400 <= error.status < 500:
            raise AssertionError(f"{_request(route, body)} is refused with {error.status}: it must be 4xx") from error
        _check_error(protocol, error)
        raise
    except Exception as error:  # the code of the part under test
        raise AssertionError(f"{_request(route, body)} raised {type(error).__name__}: {error}") from error
    assert given == body, f"{_request(route, body)} was changed to {given}: others read it too"
    assert isinstance(request, CallRequest), f"{_request(route, body)} gives {request!r}, not a CallRequest"
    if request.prompt is None:
        assert request.messages, f"{_request(route, body)} gives neither messages nor a prompt"
    for place, message in enumerate(request.messages):
        try:
            check_message(message, place)
        except ApiError as error:
            raise AssertionError(f"{_request(route, body)} gives no message of chat completions: {error}") from error
    rendered = tuple(map(render_message, request.messages))
    assert request.rendered == rendered, f"{_request(route, body)}: `rendered` is not `render_message` of its messages"
    return request, writer


def _check_read(protocol: ClientProtocol, route: Route, body: Any) -> bool:
    """Whether a request that must be read has the run's own sampling."""
    try:
        first, _ = _read(protocol, route, body, _context())
        again, _ = _read(protocol, route, body, _context())
        greedy, _ = _read(protocol, route, body, _context(greedy=True))
    except ApiError as error:
        raise AssertionError(f"{_request(route, body)} is refused: {error}") from error
    assert first == again, f"{_request(route, body)} is read in two ways: {first}, {again}"
    assert greedy.sampling.temperature == 0.0, (
        f"{_request(route, body)} is not greedy in an evaluation that is: take `sampling_of`, or the context's `greedy`"
    )
    return first.sampling == OWN


def _check_refused(protocol: ClientProtocol, route: Route, body: Any) -> None:
    try:
        _read(protocol, route, body, _context())
    except ApiError:
        return
    raise AssertionError(f"{_request(route, body)} asks for nothing, and is read")


def _spoiled(body: Any, dice: random.Random) -> Any:
    """Return a body with another value somewhere, or with a field less or more."""
    whole = {"body": copy.deepcopy(body)}
    places = list(_places(whole))
    for _ in range(dice.randrange(1, 3)):
        holder, key = dice.choice(places)
        if isinstance(holder, dict) and holder is not whole and dice.random() < 0.3:
            holder.pop(key, None)
        elif isinstance(holder, dict) and holder is not whole and dice.random() < 0.2:
            holder["nobody_knows"] = dice.choice(_VALUES)
        elif isinstance(holder, dict) or key < len(holder):
            holder[key] = copy.deepcopy(dice.choice(_VALUES))
    return whole["body"]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)


class _Letters:
    """In place of the renderer, of which a writer asks the texts of tokens, and counts some."""

    def token_bytes(self, token_id: int) -> tuple[str, list[int]]:
        return chr(97 + token_id), [97 + token_id]

    def encode(self, text: str) -> list[int]:
        return [*text.encode()]


def _check_answers(protocol: ClientProtocol, route: Route, body: Any) -> None:
    request, _ = _read(protocol, route, body, _context())
    plain = request.prompt is not None or request.plain_text
    _check_answer(protocol, route, body, {"content": "".join(TEXT)}, "stop")
    _check_answer(protocol, route, body, {"content": "".join(TEXT)}, "length")
    if not plain:
        _check_answer(protocol, route, body, {"content": "".join(TEXT), "reasoning_content": "so so"}, "stop")
    if request.tools and not plain:
        function = {"name": request.tools[0]["function"]["name"], "arguments": json.dumps({"input": MARK})}
        calls = [{"id": "call_1", "type": "function", "function": function}]
        _check_answer(protocol, route, body, {"content": None, "tool_calls": calls}, "tool_calls")


def _check_answer(
    protocol: ClientProtocol, route: Route, body: Any, message: Mapping[str, Any], reason: FinishReason | str
) -> None:
    """Write an answer to a request, whole, as a stream, and as a stream that fails."""
    renderer, generation = cast(Renderer, _Letters()), _generation("length" if reason == "length" else "stop")
    said = {"role": "assistant", **message}
    texts = [message["tool_calls"][0]["function"]["name"], MARK] if "tool_calls" in message else []
    whole = ["".join(TEXT), *texts] if message["content"] else texts
    what = f"{protocol.name}'s answer to {_request(route, body)}"

    def made() -> tuple[Writer, Head, list[Choice]]:
        request, writer = _read(protocol, route, body, _context())
        head = Head(
            name="r1",
            model="a-model",
            created=1_700_000_000,
            prompt_ids_P=np.arange(3, dtype=np.int32),
            num_choices=request.n,
        )
        choices = [
            Choice(call_index=number, message=said, finish_reason=reason, generation=generation)
            for number in range(request.n)
        ]
        return writer, head, choices

    writer, head, choices = made()
    found = [*_strings(json.loads(_text(writer.whole(head, choices, renderer), what)))]
    for text in whole:
        assert any(text in one for one in found), f"{what} does not hold {text!r}: {found}"
    writer, head, choices = made()
    stream = [writer.begin(head)]
    if message.get("reasoning_content"):
        stream.append(writer.delta(head, Delta(kind="reasoning", text=message["reasoning_content"])))
    for text in TEXT if message["content"] else ():
        stream.append(writer.delta(head, Delta(kind="content", text=text)))
    stream.append(writer.end(head, choices, renderer))
    _check_stream(writer, stream, [*(TEXT if message["content"] else ()), *texts], f"{what}, as a stream,")
    writer, head, choices = made()
    failed = [writer.begin(head), writer.error(ApiError("It ended.", status=500))]
    assert failed[-1], f"{what} ends without a word if it fails"
    _check_stream(writer, failed, ["It ended."], f"{what}, as a stream that fails,")


def _check_stream(writer: Writer, stream: Sequence[bytes], texts: Sequence[str], what: str) -> None:
    """Look for texts in the events of a stream, in their order."""
    assert all(isinstance(part, bytes) for part in stream), f"{what} is not bytes: {stream}"
    events = list(_events(b"".join(stream), writer.stream_type, what))
    at = 0
    for text in texts:
        found = next((place for place in range(at, len(events)) if text in events[place]), None)
        assert found is not None, f"{what} does not hold {text!r} after its event {at}: {events}"
        at = found


def _events(stream: bytes, stream_type: str, what: str) -> Iterator[str]:
    """Yield the texts of each event of a stream: server-sent events, or lines of JSON."""
    for line in stream.decode().split("\n"):
        data = line.removeprefix("data:").strip() if stream_type == EVENTS_TYPE else line
        if not data or data == "[DONE]" or (stream_type == EVENTS_TYPE and not line.startswith("data:")):
            continue
        try:
            yield "\n".join(_strings(json.loads(data)))
        except ValueError as error:
            raise AssertionError(f"{what} has a line that is no JSON: {line!r}") from error


def _generation(reason: FinishReason) -> Generation:
    return Generation(
        ids=np.arange(3, dtype=np.int32),
        logprobs=np.array([-0.5, -1.0, -np.inf], dtype=np.float32),
        versions=np.zeros(3, dtype=np.int32),
        finish_reason=reason,
    )


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def _text(value: Any, what: str) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise AssertionError(f"{what} is no JSON: {error}") from error


def _request(route: Route, body: Any) -> str:
    return f"{' '.join(route)} with {body!r}"
