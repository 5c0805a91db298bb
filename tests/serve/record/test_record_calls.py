"""What a recorder forwards, gives back and keeps, in front of a server that answers as vLLM's does."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from upstream_like_vllm import END, FORMER, ids_of, rendered

from sharpen.types import CallStatus, Span

ASK = [{"role": "user", "content": "quest?"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


def test_a_conversation_is_kept_as_the_server_computed_it_and_given_as_if_it_had_not_been(start):
    recorder = start(says=["yes", "no"])
    with recorder.client() as client:
        first = client.chat.completions.create(
            model="served", messages=ASK, tools=TOOLS, temperature=0.7, max_tokens=9, extra_body={"odd": 1}
        )
        answer = first.choices[0].message.model_dump(exclude_none=True)
        messages = [*ASK, answer, {"role": "user", "content": "sure?"}]
        traced = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
        client.chat.completions.create(model="served", messages=messages, extra_headers=traced)
    assert recorder.fake.received[0] == {
        "model": "served",
        "messages": ASK,
        "tools": TOOLS,
        "temperature": 0.7,
        "max_tokens": 9,
        "odd": 1,
        "return_token_ids": True,
        "logprobs": True,
    }
    extra = first.model_dump()
    assert extra["former"] == FORMER
    assert extra["usage"]["completion_tokens"] == 2
    assert extra["choices"][0]["logprobs"] is None
    assert not {"prompt_token_ids", "token_ids"} & {*extra, *extra["choices"][0]}
    (rollout,) = recorder.rollouts()
    one, two = rollout.calls
    assert one.prompt_ids_P.tolist() == rendered(ASK)
    assert one.sampled_ids_S.tolist() == [*ids_of("yes"), END]
    assert one.logprobs_S.tolist() == [-0.0, -0.5, -1.0, -1.5]
    assert (one.sampling.temperature, one.sampling.max_tokens, one.finish_reason) == (0.7, 9, "stop")
    assert (list(one.messages), list(one.tools), one.model) == (ASK, TOOLS, "served")
    assert one.response == {"role": "assistant", "content": "yes"}
    assert (one.trainable, one.parent, two.parent) == (True, None, 0)
    assert two.prompt_ids_P.tolist() == rendered(messages)
    assert (one.span, two.span) == (None, Span(trace_id="a" * 32, span_id="b" * 16))
    assert two.seconds > 0
    assert rollout.started <= one.started <= one.started + one.seconds <= two.started + two.seconds <= time.time()


def test_a_stream_arrives_as_it_comes_and_without_what_was_asked_for(start):
    recorder = start(says=["yes!"])
    gate = asyncio.Event()
    recorder.fake.gate = gate
    with recorder.client() as client:
        stream = client.chat.completions.create(model="served", messages=ASK, stream=True)
        arrived = [next(stream), next(stream)]  # the server waits with the rest until these are there
        assert arrived[1].choices[0].delta.content == "y"
        recorder.thread.loop.call_soon_threadsafe(gate.set)
        arrived += list(stream)
    for chunk in arrived:
        about = chunk.model_dump(exclude_unset=True)
        assert not {"prompt_token_ids", "token_ids"} & {*about, *about["choices"][0]}
        assert about["choices"][0].get("logprobs") is None
    (call,) = recorder.rollouts()[0].calls
    assert call.prompt_ids_P.tolist() == rendered(ASK)
    assert call.sampled_ids_S.tolist() == [*ids_of("yes!"), END]
    assert (call.response["content"], call.finish_reason, call.status) == ("yes!", "stop", CallStatus.USED)
    assert len(call.logprobs_S) == 5


def test_what_the_client_asked_for_itself_stays_in_its_answer(recorder):
    own = {"return_token_ids": True, "logprobs": True}
    reply = recorder.post("/v1/chat/completions", key="mine", messages=ASK, **own).json()
    assert reply["prompt_token_ids"] == rendered(ASK)
    assert reply["choices"][0]["token_ids"] == [*ids_of("yes"), END]
    assert reply["choices"][0]["logprobs"]["content"][1]["logprob"] == -0.5
    text = recorder.post("/v1/chat/completions", key="mine", messages=ASK, stream=True, **own).text
    assert text.count("token_ids") == 5  # of the prompt, and of each of four tokens
    assert ": a comment" in text
    assert all(call.trainable for call in recorder.rollouts()[0].calls)


@pytest.mark.parametrize("stream", [False, True])
def test_completions_are_kept_with_their_prompt(recorder, stream):
    with recorder.client() as client:
        reply = client.completions.create(model="served", prompt="once", stream=stream)
        assert "".join(one.choices[0].text for one in (reply if stream else [reply])) == "yes"
    assert recorder.fake.received[0]["logprobs"] == 0
    (call,) = recorder.rollouts()[0].calls
    assert list(call.messages) == [{"role": "prompt", "content": "once"}]
    assert call.prompt_ids_P.tolist() == ids_of("once")
    assert call.sampled_ids_S.tolist() == [*ids_of("yes"), END]
    assert len(call.logprobs_S) == 4


def test_several_choices_are_calls_of_one_request_and_the_used_one_is_found_at_the_end(start):
    recorder = start(says=["a", "b", "c"])
    session = recorder.post("/sessions").json()
    with recorder.client(session["api_key"]) as client:
        reply = client.chat.completions.create(model="served", messages=ASK, n=2)
        used = reply.choices[1].message.model_dump(exclude_none=True)
        client.chat.completions.create(model="served", messages=[*ASK, used, *ASK])
    recorder.post("/feedback", session=session["id"], reward=1)
    calls = recorder.rollouts()[0].calls
    assert [call.request for call in calls] == [0, 0, None]
    assert [call.status for call in calls] == [CallStatus.UNUSED, CallStatus.USED, CallStatus.USED]
    assert [call.parent for call in calls] == [None, None, 1]


def test_errors_come_through_as_the_server_gave_them_and_are_no_calls(start):
    body = {"error": {"message": "too long", "code": 400}}
    recorder = start(failures=[(404, body), (400, body), (400, body), (503, {"detail": "busy"})])
    for status, content in ((404, body), (400, body), (503, {"detail": "busy"})):
        reply = recorder.post("/v1/chat/completions", key="mine", messages=ASK)
        assert (reply.status_code, reply.json(), reply.headers["x-request-id"]) == (status, content, "r1")
    assert recorder.rollouts() == []
    reply = httpx.post(f"{recorder.url}/v1/chat/completions", content=b"{", headers={"authorization": "Bearer x"})
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, "not JSON")
    assert "sharpen_requests_total" in recorder.get("/metrics").text


def test_a_server_that_is_not_there_is_a_502_that_names_it(start):
    recorder = start()
    recorder.proxy._upstream.url = "http://127.0.0.1:9/v1"
    reply = recorder.post("/v1/chat/completions", key="mine", messages=ASK)
    assert reply.status_code == 502
    assert "http://127.0.0.1:9/v1" in reply.json()["error"]["message"]


@pytest.mark.parametrize("knows_ids", ["ignores", "refuses"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_server_without_token_ids_is_named_once_and_its_calls_are_kept_as_text(start, knows_ids, stream):
    recorder = start(knows_ids=knows_ids)
    for _ in range(2):
        with recorder.client() as client:
            reply = client.chat.completions.create(model="served", messages=ASK, stream=stream)
            assert "".join(one.choices[0].delta.content or "" for one in reply) == "yes" if stream else True
    (line,) = recorder.said
    assert recorder.upstream in line
    assert "token ids" in line
    for call in recorder.rollouts()[0].calls:
        assert (len(call.prompt_ids_P), len(call.sampled_ids_S), call.trainable) == (0, 0, False)
        assert (list(call.messages), call.response["content"], call.status) == (ASK, "yes", CallStatus.USED)
    assert "return_token_ids" not in recorder.fake.received[-1]
    assert recorder.metric("calls_without_ids_total") == 2


def test_other_requests_pass_as_they_are(recorder):
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/responses?a=b%20c"), ("GET", "/version"), ("PUT", "/x")):
        reply = httpx.request(method, f"{recorder.url}{path}", headers={"x-mine": "1", "authorization": "Bearer k"})
        assert (reply.status_code, reply.text, reply.headers["x-other"]) == (203, "other", "yes")
        assert (recorder.fake.paths[-1], recorder.fake.headers[-1]["x-mine"]) == (f"{method} {path}", "1")
        assert recorder.fake.headers[-1]["authorization"] == "Bearer k"
    assert httpx.head(f"{recorder.url}/v1/models").headers["content-length"] == "5"
    assert recorder.rollouts() == []
    assert [line for line in recorder.said if "/v1/responses" in line and "not recorded" in line]


def test_a_client_that_hangs_up_stops_the_server_and_its_call_is_abandoned(start):
    recorder = start(gate=asyncio.Event())
    with recorder.client() as client:
        stream = client.chat.completions.create(model="served", messages=ASK, stream=True)
        next(stream), next(stream)
        stream.close()
    while recorder.metric("requests_running"):
        pass
    while not recorder.fake.cancelled:
        pass
    (call,) = recorder.rollouts()[0].calls
    assert (call.status, call.finish_reason, call.trainable) == (CallStatus.ABANDONED, "abort", False)
    assert call.sampled_ids_S.tolist() == ids_of("y")


def test_a_server_that_breaks_off_breaks_off_here_too(start):
    gate = asyncio.Event()
    recorder = start(gate=gate, breaks_off=True)
    with recorder.client() as client:
        stream = client.chat.completions.create(model="served", messages=ASK, stream=True)
        next(stream), next(stream)
        recorder.thread.loop.call_soon_threadsafe(gate.set)
        with pytest.raises((httpx.RemoteProtocolError, openai.APIConnectionError)):
            list(stream)
    (call,) = recorder.rollouts()[0].calls
    assert call.status == CallStatus.ABANDONED
    assert any(recorder.upstream in line for line in recorder.said)


def test_several_prompts_are_no_alternatives(recorder):
    recorder.post("/v1/completions", key="mine", prompt="once", n=2)
    recorder.fake.prompts = ["one", "two"]
    recorder.post("/v1/completions", key="mine", prompt=["one", "two"], n=2)
    calls = recorder.rollouts()[0].calls
    assert [call.request for call in calls] == [0, 0, None, None]
    assert [call.prompt_ids_P.tolist() for call in calls[2:]] == [ids_of("one"), ids_of("two")]


def test_a_full_disk_stops_the_record_and_not_the_application(start):
    recorder = start(max_bytes=400_000)
    ask = [{"role": "user", "content": "x" * 100_000}]
    while recorder.sessions.failure is None:
        assert recorder.post("/v1/chat/completions", key="mine", messages=ask).status_code == 200
    assert recorder.post("/v1/chat/completions", key="mine", messages=ASK).status_code == 200
    assert recorder.metric("recording") == 0
    (line,) = recorder.said
    assert "run.db" in line
    session = recorder.post("/sessions").json()
    assert recorder.post("/feedback", session=session["id"], reward=1).status_code == 503


def test_calls_at_the_same_time_are_all_kept(start):
    recorder = start()
    with ThreadPoolExecutor(8) as pool:
        replies = [pool.submit(recorder.post, "/v1/chat/completions", "mine", messages=ASK) for _ in range(24)]
        assert {reply.result().status_code for reply in replies} == {200}
    calls = recorder.rollouts()[0].calls
    assert [call.index for call in calls] == list(range(24))
    assert recorder.metric("calls_recorded_total") == 24
