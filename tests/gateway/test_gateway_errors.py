"""What the gateway refuses, and how a failure is told apart: by the agent, by the session."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from scripted import ScriptedEngine, toy_tokenizer

from sharpen.errors import ConfigError, EngineError, EngineLostError, ModelError
from sharpen.gateway.gateway import Gateway
from sharpen.types import CallStatus, Outcome

USER = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "add"}}


def ask(session: Any, **options: Any) -> Any:
    return session.model.sync_client.chat.completions.create(**{"model": "toy", "messages": USER, **options})


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"response_format": {"type": "grammar"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    ({"response_format": "json"}, "response_format"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"stop": ""}, "stop"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"extra_body": {"min_p": 1.1}}, "min_p"),
    ({"extra_body": {"top_k": "many"}}, "top_k"),
    ({"extra_body": {"chat_template_kwargs": {"tokenize": True}}}, "chat_template_kwargs"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "owner", "content": "x"}]}, "messages[0].role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].image_url.url",
    ),
    ({"messages": [{"role": "user", "content": "x", "audio": {"id": "a"}}]}, "messages[0].audio"),
    ({"messages": [{"role": "assistant", "function_call": {"name": "add"}}]}, "messages[0].function_call"),
    ({"messages": [{"role": "assistant", "content": "x", "prefix": True}]}, "messages[0].prefix"),
]


@pytest.mark.parametrize(("options", "param"), REFUSED, ids=[param for _, param in REFUSED])
def test_bad_requests_are_refused_by_name(serve: Any, options: dict[str, Any], param: str) -> None:
    served = serve("hi")
    session = served.open()
    with pytest.raises(openai.BadRequestError) as caught:
        ask(session, **options)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert session.failure is None  # the agent's doing: it shows as the workflow's own error
    assert served.engine.requests == []
    assert session.close() == ()


@pytest.mark.parametrize(
    "body", ['{"model": "toy", "messages": [{"role": "user", "content": "\\ud800"}]}', "[1]", "{", '{"model": "toy"}']
)
def test_invalid_bodies_are_refused(serve: Any, body: str) -> None:
    session = serve("hi").open()
    headers = {"Authorization": f"Bearer {session.model.api_key}"}
    reply = httpx.post(f"{session.model.base_url}/chat/completions", headers=headers, content=body)
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")


def test_harmless_parameters_are_accepted(serve: Any) -> None:
    session = serve("hi").open()
    ask(session, user="u", store=False, metadata={"a": "b"}, frequency_penalty=0, response_format={"type": "text"})
    assert len(session.close()) == 1


def test_prompt_longer_than_the_context(serve: Any) -> None:
    session = serve("hi", max_model_len=20).open()
    with pytest.raises(openai.BadRequestError) as caught:
        ask(session, messages=[{"role": "user", "content": "word " * 50}])
    assert caught.value.code == "context_length_exceeded"
    assert session.failure == Outcome.CONTEXT_OVERFLOW
    assert session.close() == ()


def test_call_limit_counts_choices(serve: Any) -> None:
    session = serve("hi").open(max_calls=3)
    ask(session, n=2)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(session, n=2)
    assert caught.value.code == "call_limit_exceeded"
    assert session.failure == Outcome.CALL_LIMIT
    ask(session)
    assert len(session.close()) == 3


def test_engine_failure_is_infrastructure(serve: Any) -> None:
    def script(request: Any) -> str:
        raise EngineError("out of memory")

    session = serve(script).open()
    with pytest.raises(openai.InternalServerError, match="out of memory"):
        ask(session)
    assert session.failure == Outcome.INFRASTRUCTURE
    assert session.failure_reason == "EngineError: out of memory"
    (call,) = session.close()
    assert call.status == CallStatus.ABANDONED
    assert len(call.sampled_ids_S) == 0


def test_no_session_opens_once_the_engine_is_lost(serve: Any, caplog: Any) -> None:
    """The call ends as every failure of the engine does, without a line of its own: the run ends with one. Red when
    `open` (gateway/gateway.py) does not look."""

    def script(request: Any) -> str:
        raise EngineLostError("its processes died")

    served = serve(script)
    session = served.open()
    with pytest.raises(openai.InternalServerError, match="its processes died"):
        ask(session)
    assert session.failure == Outcome.INFRASTRUCTURE
    with pytest.raises(EngineLostError, match="its processes died"):
        served.open()
    assert not caplog.records


def test_one_failed_choice_fails_the_request(serve: Any) -> None:
    def script(request: Any) -> str:
        if len(served.engine.requests) == 2:
            raise EngineError("broken")
        return "hi"

    served = serve(script)
    session = served.open()
    with pytest.raises(openai.InternalServerError):
        ask(session, n=2)
    assert not any(call.trainable for call in session.close())


def test_revoked_key(serve: Any) -> None:
    session = serve("hi").open()
    session.close()
    with pytest.raises(openai.AuthenticationError, match="g/0 has ended"):
        ask(session)
    assert session.close() == ()


UNKNOWN = {"Authorization": "Bearer sk-of-another-server"}
NO_KEY: list[tuple[dict[str, str], str, str]] = [
    ({}, "missing_api_key", "send model.api_key as"),
    ({"Authorization": "Bearer"}, "missing_api_key", "send model.api_key as"),
    (UNKNOWN, "invalid_api_key", "belongs to no rollout"),
]


@pytest.mark.parametrize(("headers", "code", "said"), NO_KEY)
def test_a_401_distinguishes_missing_and_unknown_keys(
    serve: Any, headers: dict[str, str], code: str, said: str
) -> None:
    """The third is that of `test_revoked_key`."""
    reply = httpx.get(f"{serve('hi').open().model.base_url}/models", headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (401, code)
    assert said in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "header", ["Authorization: bearer ", "authorization: BEARER   ", "X-Api-Key: ", "api-key: ", "x-goog-api-key: "]
)
def test_a_key_is_found_in_each_header(serve: Any, header: str) -> None:
    """Red when `key_of` (gateway/caller.py) looks for "Bearer " alone."""
    session = serve("hi").open()
    name, _, scheme = header.partition(": ")
    headers = {name: f"{scheme}{session.model.api_key}"}
    assert httpx.get(f"{session.model.base_url}/models", headers=headers).status_code == 200


NOT_FOUND: list[tuple[str, str, str]] = [
    ("POST", "/v1/v1/chat/completions", "model.base_url.removesuffix"),
    ("POST", "/v1/openai/deployments/toy/chat/completions", "with nothing added"),
    ("GET", "/v1/chat/completions", "use POST"),
    ("PUT", "/v1/models", "use GET"),
    ("GET", "/v1/completions", "use POST"),
    ("POST", "/v1/embeddings", "ask another server"),
    ("GET", "/v1", "ends in /v1"),
]


@pytest.mark.parametrize(("method", "path", "said"), NOT_FOUND)
def test_a_404_names_the_remedy(serve: Any, method: str, path: str, said: str) -> None:
    session = serve("hi").open()
    url = session.model.base_url.removesuffix("/v1") + path
    reply = httpx.request(method, url, headers={"api-key": session.model.api_key}, json={})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")
    assert said in reply.json()["error"]["message"]


def test_a_base_url_without_v1_is_fine(serve: Any) -> None:
    session = serve("hi").open()
    with openai.OpenAI(
        base_url=session.model.base_url.removesuffix("/v1"), api_key=session.model.api_key, max_retries=0
    ) as client:
        assert client.chat.completions.create(model="toy", messages=USER).choices[0].message.content == "hi"


def test_template_errors_are_the_request(serve: Any) -> None:
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(openai.BadRequestError, match="roles must alternate"):
        ask(serve("hi", tokenizer=tokenizer).open())


def test_a_gateway_that_cannot_work_is_refused(serving: Any) -> None:
    tokenizer = toy_tokenizer()
    engine = ScriptedEngine(tokenizer, lambda request: "hi")
    with pytest.raises(ConfigError, match="'hermes'"):
        Gateway(engine, tokenizer, model_name="toy", loop=serving.loop, tool_call_parser="json")
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match="chat template"):
        Gateway(engine, tokenizer, model_name="toy", loop=serving.loop)
