"""The key of the server that is recorded goes below its base URL, and nowhere else."""

from __future__ import annotations

import httpx
import pytest
from raw_http import raw

from sharpen.gateway.requests import ApiError
from sharpen.serve.record.upstream import Upstream, base_url

UPSTREAM_KEY = "sk-the-owners-key"

ELSEWHERE = [
    "@evil.test/v1/models",
    "/v1/../../admin",
    "/v1/%2e%2e/%2e%2e/admin",
    "/v1/%252e%252e/admin",
    "/v1//evil.test/models",
    "//evil.test/v1/models",
    "/v1/models/..%2f..%2fadmin",
    "/v1/models%0d%0aX-Evil:%201",
    "/v1/models%3fa=1",
    "/v1\\@evil.test/models",
    "*",
]


@pytest.mark.parametrize("target", ELSEWHERE)
def test_a_path_that_could_lead_elsewhere_is_not_sent(start, target):
    """Red with the path joined to the URL as text: `..` left the base path, with the owner's key."""
    recorder = start(upstream_key=UPSTREAM_KEY)
    answer = raw(recorder.url, target, key="the-key", body={"messages": []})
    assert answer.split()[1] in (b"400", b"404")
    assert UPSTREAM_KEY.encode() not in answer
    assert recorder.fake.paths == []


def test_the_host_that_a_client_names_decides_nothing(start):
    """Red with the path taken from a URL that is made of the client's Host."""
    recorder = start(upstream_key=UPSTREAM_KEY)
    for host in ("localhost/v1/..", "localhost?x=", "localhost#", "127.0.0.1/v1/models?"):
        raw(recorder.url, "/v1/models", f"Host: {host}", key="the-key", body={"messages": []})
    assert set(recorder.fake.paths) <= {"POST /v1/models"}


def test_the_key_goes_below_the_base_url_alone(start):
    """A page of the server beside its API gets requests, but no key."""
    recorder = start(upstream_key=UPSTREAM_KEY)
    for path in ("/v1/models", "/tokenize", "/v1"):
        recorder.get(path)
    assert recorder.fake.paths == ["GET /v1/models", "GET /tokenize", "GET /v1"]
    keys = [headers.get("authorization") for headers in recorder.fake.headers]
    assert keys == [f"Bearer {UPSTREAM_KEY}", None, f"Bearer {UPSTREAM_KEY}"]


def test_a_password_in_the_url_is_told_to_nobody(start):
    recorder = start()
    recorder.proxy._upstream.url = "http://owner:hunter2hunter2@127.0.0.1:9/v1"
    told = [
        recorder.post("/v1/chat/completions", key="mine", messages=[{"role": "user", "content": "x"}]).text,
        recorder.get("/health").text,
        *recorder.said,
    ]
    assert "http://***@127.0.0.1:9/v1" in told[0]
    assert "hunter2" not in str(told)


def test_targets():
    upstream = Upstream("https://h/api/v3", "k")
    assert upstream.target("/v1/models/Qwen/Qwen3-0.6B", "a=%2F") == httpx.URL(
        "https://h/api/v3/models/Qwen/Qwen3-0.6B?a=%2F"
    )
    assert upstream.target("/v1x/models", "").path == "/api/v3/v1x/models"
    for path in ("", "v1/models", "/v1/.", "/v1/..", "/v1/ models", "/v1/\u0661"):
        with pytest.raises(ApiError):
            upstream.target(path, "")
    assert base_url("http://h:1") == "http://h:1/v1"
