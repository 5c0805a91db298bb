"""What a protocol must keep, ours and somebody's own, and how a gateway answers in one that others bring."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from malformed import BODIES

from sharpen.config.functions import import_object
from sharpen.config.sections import GatewayConfig
from sharpen.errors import ConfigError
from sharpen.gateway.answers import Writer
from sharpen.gateway.protocols import chat
from sharpen.gateway.protocols.protocol import ClientProtocol, Context, Route
from sharpen.gateway.requests import ApiError, CallRequest
from sharpen.gateway.routes import ANTHROPIC, CHAT, OPENAI, Protocols
from sharpen.testing import check_protocol

EXAMPLE = f"{Path(__file__).parents[2] / 'examples' / 'extend' / 'protocol.py'}:OLLAMA"
LEAST: dict[str, Any] = {
    "/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/responses": {"input": "hi"},
    "/completions": {"prompt": "hi"},
    "/messages": {"max_tokens": 11, "messages": [{"role": "user", "content": "hi"}]},
}


@pytest.mark.parametrize("protocol", [OPENAI, ANTHROPIC], ids=lambda protocol: protocol.name)
def test_our_own_protocols_keep_the_contract(protocol: ClientProtocol) -> None:
    check_protocol(protocol, {route: [BODIES[f"/v1{route[1]}"], LEAST[route[1]]] for route in protocol.calls})


def wrapped(change: Callable[[CallRequest, Context], CallRequest] = lambda request, _: request, **writer: Any) -> Any:
    """Chat completions at another place, with another request or writer."""

    def parse(body: Any, context: Context) -> tuple[CallRequest, Writer]:
        request, made = chat.parse_request(body, context)
        return change(request, context), type("Changed", (chat.ChatWriter,), writer)(call_index=made.call_index)

    return {ROUTE: parse}


ROUTE: Route = ("POST", "/mine")
GOOD = ClientProtocol(name="mine", calls=wrapped())


def _own_temperature(request: CallRequest, context: Context) -> CallRequest:
    return replace(request, sampling=replace(request.sampling, temperature=0.5))


def _looks_inside(body: Any, context: Context) -> tuple[CallRequest, Writer]:
    body["messages"][0]["content"].strip()
    return chat.parse_request(body, context)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"calls": wrapped(_own_temperature)}, "is not greedy in an evaluation that is"),
        ({"calls": wrapped(lambda request, _: replace(request, rendered=()))}, "`rendered` is not `render_message`"),
        ({"calls": wrapped(whole=lambda self, head, choices, renderer: {"id": head.name})}, "does not hold 'Hé "),
        ({"calls": wrapped(delta=lambda self, head, delta: b"")}, r"as a stream, does not hold 'Hé "),
        ({"calls": wrapped(begin=lambda self, head: b"data: x\n\n")}, "has a line that is no JSON: 'data: x'"),
        ({"calls": wrapped(error=lambda self, error: b"")}, "ends without a word if it fails"),
        ({"calls": {ROUTE: _looks_inside}}, "raised TypeError: 'NoneType' object is not subscriptable"),
        ({"calls": {("POST", "/v1/mine"): chat.parse_request}}, "begins with '/' and not with '/v1'"),
        ({"calls": {CHAT: chat.parse_request}}, "is a route of ours"),
        ({"error": lambda error: {"error": error.status}}, "does not say "),
    ],
)
def test_a_protocol_that_breaks_the_contract_is_told_how(change: dict[str, Any], said: str) -> None:
    check_protocol(GOOD, {ROUTE: [LEAST["/chat/completions"]]})
    broken = replace(GOOD, **change)
    with pytest.raises(AssertionError, match=said):
        check_protocol(broken, {route: [LEAST["/chat/completions"]] for route in broken.calls})


@pytest.fixture
def asked(serve: Any) -> Iterator[Callable[..., httpx.Response]]:
    """Send a request in the example's protocol, by its path: `asked("/api/chat", {...})`."""
    served = serve(lambda request: next(answers), listen=GatewayConfig(protocols=(EXAMPLE,)))
    answers = iter(("hello", '<tool_call>\n{"name": "f", "arguments": {"a":1}}\n</tool_call>', "three", "never"))
    session = served.open()

    def ask(path: str, body: Any = None, *, key: str = session.model.api_key, method: str = "POST") -> httpx.Response:
        root = session.model.base_url.removesuffix("/v1")
        headers = {"authorization": f"Bearer {key}"}
        return httpx.request(method, f"{root}{path}", json=body, headers=headers)

    ask.session = session  # type: ignore[attr-defined]
    yield ask
    session.close()


def body(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "toy", "messages": list(messages), "stream": False, **fields}


def test_an_agent_speaks_a_protocol_that_others_bring(asked: Any) -> None:
    """Whole and as lines; the ids of a conversation go on, although its tool calls have no ids in this protocol."""
    user = {"role": "user", "content": "hi"}
    first = asked("/api/chat", body(user, stream=True))
    assert first.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in first.text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == "hello"
    assert [line["done"] for line in lines] == [*[False] * (len(lines) - 1), True]
    answer = {"role": "assistant", "content": "hello"}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    second = asked("/api/chat", body(user, answer, user, tools=tools)).json()
    assert second["message"]["tool_calls"] == [{"function": {"name": "f", "arguments": {"a": 1}}}]
    result = {"role": "tool", "tool_name": "f", "content": "3"}
    third = asked("/api/chat", body(user, answer, user, second["message"], result, tools=tools)).json()
    assert (third["message"]["content"], third["done_reason"]) == ("three", "stop")
    calls = asked.session.snapshot()
    assert [call.parent for call in calls] == [None, None, 1], "tools change the prompt; then it goes on"
    assert third["prompt_eval_count"] == len(calls[2].prompt_ids_P)


def test_errors_have_the_form_of_the_protocol_that_was_spoken(asked: Any) -> None:
    refused = asked("/api/chat", body({"role": "user", "content": 3}))
    assert (refused.status_code, refused.json()) == (
        400,
        {"error": "'messages[0].content' is 3; it must be a string."},
    )
    assert (
        asked("/api/chat", body({"role": "user", "content": "x"}), key="at-none")
        .json()["error"]
        .startswith("This key belongs to no rollout")
    )
    assert asked("/api/chat", method="GET").json()["error"].startswith("There is no GET /api/chat here: use POST")
    assert asked("/v1/messages", {}).json()["type"] == "error"
    assert asked("/v1/chat/completions", {}).json()["error"]["param"] == "messages"
    assert asked("/api/tags", method="GET").json() == {"models": [{"name": "toy", "model": "toy"}]}


def test_a_path_may_have_places_for_names() -> None:
    """As Gemini's, whose path holds the model's name."""
    route: Route = ("POST", "/v1beta/models/{model}:generate")
    mine = replace(GOOD, calls={route: chat.parse_request})
    protocols = Protocols([mine])
    assert protocols.parser(("POST", "/v1beta/models/a-b.c:generate")) is chat.parse_request
    for method, path in (("GET", "/v1beta/models/a:generate"), ("POST", "/v1beta/models/a/b:generate")):
        assert protocols.parser((method, path)) is None


def test_what_is_no_protocol_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="must be a ClientProtocol"):
        Protocols([EXAMPLE.replace("OLLAMA", "tags")])
    with pytest.raises(ConfigError, match="mine has the route POST /chat/completions of openai"):
        Protocols([replace(GOOD, calls={CHAT: chat.parse_request})])
    with pytest.raises(ConfigError, match="ollama has the route POST /api/chat of another"):
        Protocols([replace(import_object(EXAMPLE), name="another"), EXAMPLE])
    with pytest.raises(ValueError, match=r"must be module:name .*, got 'ollama'"):
        GatewayConfig(protocols=("ollama",))
    assert Protocols().not_found("POST", "/api/chat").body()["error"]["message"].endswith("(docs/use/extending.md).")
    assert isinstance(Protocols().not_found("POST", "/x"), ApiError)
