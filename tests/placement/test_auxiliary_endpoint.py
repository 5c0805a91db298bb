"""Auxiliary models at an endpoint: genuine clients, counted on the right rollout, refused when closed or used up."""

from __future__ import annotations

import asyncio
import gzip
import logging
import threading
from typing import Any

import httpx
import openai
import pytest
from fake_endpoint import FakeEndpoint, completion, failure, stream
from starlette.responses import Response

from sharpen.compat.trinity.model import ModelWrapper
from sharpen.errors import ConfigError, TokenCapError

USER = [{"role": "user", "content": "hello"}]


def ask(model: Any, content: str = "hello", **options: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    return model.sync_client.chat.completions.create(model=model.name, messages=messages, **options)


async def ask_async(model: Any, content: str = "hello", **options: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    return await model.client.chat.completions.create(model=model.name, messages=messages, **options)


def test_genuine_clients_with_the_key_of_the_environment(
    endpoint: FakeEndpoint, make_config: Any, open_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-123")
    models = open_models(make_config(judge={"base_url": endpoint.url, "api_key_env": "JUDGE_KEY"}))
    session = models.open("g/0", 1)
    judge = session.auxiliary_models["judge"]
    assert judge.name == "m"
    assert isinstance(judge.client, openai.AsyncOpenAI)
    assert isinstance(judge.sync_client, openai.OpenAI)
    assert judge.client.max_retries == openai.DEFAULT_MAX_RETRIES
    assert judge.client.timeout == judge.sync_client.timeout == openai.DEFAULT_TIMEOUT
    assert str(judge.client.base_url).rstrip("/") == endpoint.url
    assert ask(judge).choices[0].message.content == "good"
    assert asyncio.run(ask_async(judge)).choices[0].message.content == "good"
    assert endpoint.keys == ["sk-123"] * 2
    assert session.counts == {"auxiliary/judge/calls": 2.0, "auxiliary/judge/tokens": 26.0}
    assert models.auxiliary.total_tokens == {"judge": 26}
    session.end()


def test_what_other_clients_use_over_base_url_is_counted_too(
    endpoint: FakeEndpoint, make_config: Any, open_models: Any
) -> None:
    session = open_models(make_config(judge={"base_url": endpoint.url})).open("g/0", 1)
    judge = session.auxiliary_models["judge"]
    other = openai.OpenAI(base_url=judge.base_url, api_key=judge.api_key, max_retries=0)
    assert other.chat.completions.create(model=judge.name, messages=USER).usage.total_tokens == 13
    endpoint.answer = lambda body: stream(["a", "b"], usage=9)
    assert len(list(other.chat.completions.create(model=judge.name, messages=USER, stream=True))) == 4
    assert endpoint.keys == ["none"] * 2
    assert session.counts == {"auxiliary/judge/calls": 2.0, "auxiliary/judge/tokens": 22.0}
    session.end()
    with pytest.raises(openai.AuthenticationError):
        other.chat.completions.create(model=judge.name, messages=USER)


@pytest.mark.parametrize("usage", [25, None])
def test_streams_are_counted_by_their_usage_else_by_their_chunks(
    endpoint: FakeEndpoint, make_config: Any, open_models: Any, usage: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Chunks are streamed: the first is there before the last was sent. Without usage it is said, once."""
    release = threading.Event()

    def answer(body: dict[str, Any]) -> Response:
        response: Any = stream(["a", "b", "c"], usage=usage)
        inner = response.body_iterator

        async def slow() -> Any:
            number = 0
            async for event in inner:
                if number == 1:
                    await asyncio.to_thread(release.wait, 10)
                number += 1
                yield event

        response.body_iterator = slow()
        return response

    endpoint.answer = answer
    session = open_models(make_config(judge={"base_url": endpoint.url})).open("g/0", 1)
    judge = session.auxiliary_models["judge"]

    async def read() -> list[str]:
        texts = []
        async for chunk in await ask_async(judge, stream=True):
            release.set()
            texts += [choice.delta.content for choice in chunk.choices]
        return texts

    with caplog.at_level(logging.WARNING, "sharpen.auxiliary"):
        assert asyncio.run(read()) == ["a", "b", "c", None]
        for _ in range(2):
            assert [c.choices[0].delta.content for c in ask(judge, stream=True) if c.choices] == ["a", "b", "c", None]
    assert session.counts == {"auxiliary/judge/calls": 3.0, "auxiliary/judge/tokens": 3.0 * (usage or 3)}
    assert len(caplog.records) == (0 if usage else 1)
    assert all("has no usage, so the prompt's tokens are not counted" in r.getMessage() for r in caplog.records)
    session.end()


def test_compressed_answers_and_answers_without_usage(
    endpoint: FakeEndpoint, make_config: Any, open_models: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def compressed(body: dict[str, Any]) -> Response:
        packed = gzip.compress(bytes(completion().body))
        return Response(packed, headers={"content-encoding": "gzip", "content-type": "application/json"})

    session = open_models(make_config(judge={"base_url": endpoint.url})).open("g/0", 1)
    judge = session.auxiliary_models["judge"]
    endpoint.answer = compressed
    assert ask(judge).choices[0].message.content == "good"
    assert session.counts == {"auxiliary/judge/calls": 1.0, "auxiliary/judge/tokens": 13.0}
    endpoint.answer = lambda body: completion(usage=False)
    with caplog.at_level(logging.WARNING, "sharpen.auxiliary"):
        ask(judge)
        ask(judge)
    assert session.counts == {"auxiliary/judge/calls": 3.0, "auxiliary/judge/tokens": 13.0}
    assert len(caplog.records) == 1
    session.end()


def test_interleaved_rollouts_are_counted_each_on_its_own(
    endpoint: FakeEndpoint, make_config: Any, open_models: Any
) -> None:
    """Trap 26 for tokens: 40 attempts at a time, each asks for its own number of tokens, in its own number of calls."""
    endpoint.answer = lambda body: completion(prompt=0, sampled=int(body["messages"][0]["content"]))
    models = open_models(make_config(judge={"base_url": endpoint.url}, critic={"base_url": endpoint.url}))
    sessions = [models.open(f"g/{n}", n) for n in range(40)]

    async def use(n: int) -> None:
        for _ in range(n % 3 + 1):
            await ask_async(sessions[n].auxiliary_models["judge"], str(n))
        if n % 2:
            await ask_async(sessions[n].auxiliary_models["critic"], str(1000 + n))

    async def all_of_them() -> None:
        await asyncio.gather(*(use(n) for n in range(40)))

    asyncio.run(all_of_them())
    for n, session in enumerate(sessions):
        calls = n % 3 + 1
        assert session.counts == {
            "auxiliary/judge/calls": float(calls),
            "auxiliary/judge/tokens": float(calls * n),
            "auxiliary/critic/calls": float(n % 2),
            "auxiliary/critic/tokens": float(n % 2 * (1000 + n)),
        }
        session.end()
    assert models.auxiliary.total_tokens["judge"] == sum((n % 3 + 1) * n for n in range(40))


def test_retries_are_the_sdks_own_and_a_repeated_success_is_no_failure(
    endpoint: FakeEndpoint, make_config: Any, open_models: Any
) -> None:
    answers = iter([failure(503), completion()])
    endpoint.answer = lambda body: next(answers)
    session = open_models(make_config(judge={"base_url": endpoint.url})).open("g/0", 1)
    assert ask(session.auxiliary_models["judge"]).choices[0].message.content == "good"
    assert len(endpoint.bodies) == 2
    assert session.auxiliary_failure is None
    assert session.counts == {"auxiliary/judge/calls": 1.0, "auxiliary/judge/tokens": 13.0}
    session.end()


@pytest.mark.parametrize(
    ("status", "kind", "fails"),
    [
        (500, openai.InternalServerError, True),
        (429, openai.RateLimitError, True),
        (401, openai.AuthenticationError, True),
        (404, openai.NotFoundError, True),
        (400, openai.BadRequestError, False),
    ],
)
def test_an_endpoint_that_fails_is_remembered_a_bad_request_is_not(
    endpoint: FakeEndpoint, make_config: Any, open_models: Any, status: int, kind: Any, fails: bool
) -> None:
    endpoint.answer = lambda body: failure(status)
    session = open_models(make_config(judge={"base_url": endpoint.url})).open("g/0", 1)
    with pytest.raises(kind):
        session.auxiliary_models["judge"].sync_client.with_options(max_retries=0).chat.completions.create(
            model="m", messages=USER
        )
    if fails:
        assert (
            session.auxiliary_failure
            == f"a call of the auxiliary model 'judge' failed: {endpoint.url} answered {status}"
        )
    else:
        assert session.auxiliary_failure is None
    assert session.counts == {"auxiliary/judge/calls": 0.0, "auxiliary/judge/tokens": 0.0}
    session.end()


def test_an_endpoint_that_is_not_there(make_config: Any, open_models: Any) -> None:
    session = open_models(make_config(judge={"base_url": "http://127.0.0.1:9/v1"})).open("g/0", 1)
    client = session.auxiliary_models["judge"].sync_client.with_options(max_retries=0)
    with pytest.raises(openai.APIConnectionError):
        client.chat.completions.create(model="m", messages=USER)
    assert "ConnectError" in str(session.auxiliary_failure)
    other = httpx.post(
        f"{session.auxiliary_models['judge'].base_url}/chat/completions",
        headers={"authorization": f"Bearer {session.auxiliary_models['judge'].api_key}"},
        json={"model": "m", "messages": USER},
    )
    assert other.status_code == 502
    session.end()


def test_a_time_limit_of_the_client_holds(endpoint: FakeEndpoint, make_config: Any, open_models: Any) -> None:
    release = threading.Event()

    def slow(body: dict[str, Any]) -> Response:
        release.wait(120)
        return completion()

    endpoint.answer = slow
    session = open_models(make_config(judge={"base_url": endpoint.url})).open("g/0", 1)
    client = session.auxiliary_models["judge"].sync_client.with_options(max_retries=0, timeout=0.4)
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(model="m", messages=USER)
    assert "ReadTimeout" in str(session.auxiliary_failure)
    release.set()
    session.end()


def test_an_equal_request_made_at_the_same_time_is_no_repetition(
    endpoint: FakeEndpoint, make_config: Any, open_models: Any
) -> None:
    """Of two equal requests in flight one fails, then the other is answered: the first one failed. Red when a success
    clears a failure that came after its own beginning."""
    failed, both = threading.Event(), threading.Barrier(2)
    first = threading.Lock()

    def one_of_two(body: dict[str, Any]) -> Response:
        both.wait(60)
        if first.acquire(blocking=False):
            return failure(503)
        failed.wait(60)
        return completion()

    endpoint.answer = one_of_two
    session = open_models(make_config(judge={"base_url": endpoint.url})).open("g/0", 1)
    client = session.auxiliary_models["judge"].client.with_options(max_retries=0)

    async def ask_once() -> None:
        try:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])
        except openai.InternalServerError:
            failed.set()

    async def main() -> None:
        await asyncio.gather(ask_once(), ask_once())

    asyncio.run(main())
    assert session.auxiliary_failure is not None
    assert "503" in session.auxiliary_failure


def test_what_runs_at_the_end_is_cancelled_and_later_calls_are_refused(
    endpoint: FakeEndpoint, make_config: Any, open_models: Any
) -> None:
    came, release = threading.Event(), threading.Event()

    def slow(body: dict[str, Any]) -> Response:
        came.set()
        release.wait(120)
        return completion()

    endpoint.answer = slow
    session = open_models(make_config(judge={"base_url": endpoint.url})).open("g/0", 1)
    judge = session.auxiliary_models["judge"]

    async def left_behind() -> None:
        call = asyncio.create_task(ask_async(judge))
        await asyncio.to_thread(came.wait, 120)
        session.end()
        with pytest.raises(openai.AuthenticationError, match="has ended"):
            await call  # the client tried again after the abort, and was refused

    asyncio.run(left_behind())
    release.set()
    with pytest.raises(openai.AuthenticationError):
        ask(judge)
    assert len(endpoint.bodies) == 1
    assert session.auxiliary_failure is None


def test_the_cap_refuses_the_next_call_and_names_model_cap_and_use(
    endpoint: FakeEndpoint, make_config: Any, open_models: Any
) -> None:
    models = open_models(make_config(judge={"base_url": endpoint.url, "max_total_tokens": 20}))
    first, second = models.open("g/0", 1), models.open("g/1", 2)
    ask(first.auxiliary_models["judge"])
    ask(first.auxiliary_models["judge"])
    assert first.exhausted is None
    with pytest.raises(openai.PermissionDeniedError) as caught:
        ask(second.auxiliary_models["judge"])
    assert caught.value.code == "token_cap_reached"
    assert len(endpoint.bodies) == 2
    assert isinstance(second.exhausted, TokenCapError)
    for words in ("'judge' (m)", "has used 26 tokens", "auxiliary_models.judge.max_total_tokens is 20"):
        assert words in str(second.exhausted)
    assert (first.exhausted, second.auxiliary_failure) == (None, None)
    for session in (first, second):
        session.end()


def test_sampling_settings_apply_to_calls_that_set_none(
    endpoint: FakeEndpoint, make_config: Any, open_models: Any
) -> None:
    settings = {"base_url": endpoint.url, "temperature": 0.0, "max_tokens": 50, "enable_thinking": False}
    session = open_models(make_config(judge=settings, plain={"base_url": endpoint.url})).open("g/0", 1)
    ask(session.auxiliary_models["judge"])
    ask(session.auxiliary_models["judge"], temperature=0.5, max_completion_tokens=9)
    ask(session.auxiliary_models["plain"])
    thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    rest = {"model": "m", "messages": USER}
    assert endpoint.bodies == [
        {**rest, **thinking, "temperature": 0.0, "max_tokens": 50},
        {**rest, **thinking, "temperature": 0.5, "max_completion_tokens": 9},
        rest,
    ]
    session.end()


def test_a_key_that_is_not_there(make_config: Any, open_models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ConfigError, match="environment variable JUDGE_KEY, which is not set"):
        open_models(make_config(judge={"base_url": "http://127.0.0.1:9/v1", "api_key_env": "JUDGE_KEY"}))


def test_trinitys_wrapper_around_one_is_counted_too(endpoint: FakeEndpoint, make_config: Any, open_models: Any) -> None:
    session = open_models(make_config(judge={"base_url": endpoint.url})).open("g/0", 1)
    wrapper = ModelWrapper(session.auxiliary_models["judge"], enable_history=False)
    client = wrapper.get_openai_client()
    assert client.chat.completions.create(model=wrapper.model_path, messages=USER).usage.total_tokens == 13
    assert session.counts == {"auxiliary/judge/calls": 1.0, "auxiliary/judge/tokens": 13.0}
    session.end()
    with pytest.raises(openai.AuthenticationError):
        client.chat.completions.create(model=wrapper.model_path, messages=USER)
