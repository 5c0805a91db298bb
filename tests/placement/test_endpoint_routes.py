"""The owner's key goes to the owner's endpoint, by listed routes, and nowhere else."""

from __future__ import annotations

import http.client
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from fake_endpoint import FakeEndpoint

from sharpen.gateway.requests import ApiError
from sharpen.placement.auxiliary.remote_transport import address, route_of

USER = [{"role": "user", "content": "hello"}]

ELSEWHERE = [
    "/v1.evil.test/steal",
    "/v1@evil.test/steal",
    "/v1/../../admin",
    "/v1/%2e%2e/admin",
    "/v1/models/../../admin",
    "/v1/models/..",
    "/v1//evil.test/chat/completions",
    "/v1/files",
    "/v1/chat/completions/../../files",
    "/v1/chat/completions%3Fx=1",
    "/",
]


@pytest.mark.parametrize("path", ELSEWHERE)
@pytest.mark.parametrize("suffix", ["", "/v1"])
def test_a_path_of_the_agents_choice_goes_nowhere(
    endpoint: FakeEndpoint, make_config: Any, open_models: Any, monkeypatch: pytest.MonkeyPatch, path: str, suffix: str
) -> None:
    """Red with the path joined to the base URL as text: the first one asked `http://127.0.0.1:PORT.evil.test/steal`
    with the owner's key, `..` left the base path."""
    monkeypatch.setenv("JUDGE_KEY", "sk-123")
    base = endpoint.url.removesuffix("/v1") + suffix
    judge = (
        open_models(make_config(judge={"base_url": base, "api_key_env": "JUDGE_KEY"}))
        .open("g/0", 1)
        .auxiliary_models["judge"]
    )
    connection = http.client.HTTPConnection(urlsplit(judge.base_url).netloc)
    connection.request("POST", path, b"{}", {"Authorization": f"Bearer {judge.api_key}"})
    response = connection.getresponse()
    assert response.status == 404
    assert b"was not sent" in response.read()
    connection.close()
    assert not endpoint.others
    assert not endpoint.keys


@pytest.mark.parametrize("suffix", ["", "/v1", "/v1/"])
def test_listed_routes_arrive_beneath_the_base_url(
    endpoint: FakeEndpoint, make_config: Any, open_models: Any, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-123")
    base = endpoint.url.removesuffix("/v1") + suffix
    judge = (
        open_models(make_config(judge={"base_url": base, "api_key_env": "JUDGE_KEY"}))
        .open("g/0", 1)
        .auxiliary_models["judge"]
    )
    with openai.OpenAI(base_url=judge.base_url, api_key=judge.api_key, max_retries=0) as other:
        for client in (judge.sync_client, other):
            client.chat.completions.create(model=judge.name, messages=USER)
            client.models.list()
    assert endpoint.keys == ["sk-123"] * 2
    listed = f"{base.rstrip('/')}/models"
    assert endpoint.others == [(listed, "Bearer sk-123")] * 2


def test_no_client_of_ours_takes_the_key_to_another_host(
    endpoint: FakeEndpoint, make_config: Any, open_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither with a base URL of its own nor with a whole URL; and the client itself does not hold the key."""
    monkeypatch.setenv("JUDGE_KEY", "sk-123")
    config = make_config(judge={"base_url": "https://api.example.test/v1", "api_key_env": "JUDGE_KEY"})
    judge = open_models(config).open("g/0", 1).auxiliary_models["judge"]
    assert judge.sync_client.api_key != "sk-123"
    moved = judge.sync_client.with_options(base_url=endpoint.url, max_retries=0)
    with pytest.raises(
        openai.PermissionDeniedError, match=r"is for api\.example\.test: the request for '127\.0\.0\.1' was"
    ):
        moved.chat.completions.create(model="m", messages=USER)
    with pytest.raises(openai.PermissionDeniedError):
        judge.sync_client.post(f"{endpoint.url}/chat/completions", body={}, cast_to=httpx.Response)
    assert not endpoint.keys
    assert not endpoint.others


def test_urls_of_the_endpoint() -> None:
    base = httpx.URL("https://host/v1")
    assert address(base, "POST", "/chat/completions/") == httpx.URL("https://host/v1/chat/completions")
    assert address(httpx.URL("https://host"), "POST", "/responses") == httpx.URL("https://host/responses")
    assert address(base, "GET", "/models/Qwen/Qwen3-0.6B") == httpx.URL("https://host/v1/models/Qwen/Qwen3-0.6B")
    assert route_of(base, httpx.URL("https://host:443/v1/models")) == "/models"
    for url in ("http://host/v1/models", "https://host:8443/v1/models", "https://host.evil.test/v1/models"):
        with pytest.raises(ApiError) as refused:
            route_of(base, httpx.URL(url))
        assert refused.value.status == 403
    with pytest.raises(ApiError, match="its paths begin with /v1/"):
        route_of(base, httpx.URL("https://host/v2/models"))
