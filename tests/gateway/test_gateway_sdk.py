"""The gateway as an agent sees it: through the SDK's clients, through HTTP, whole and streamed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import httpx
import openai
import pytest

from sharpen.types import CallStatus

USER = [{"role": "user", "content": "hello"}]
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALLS = (
    'thinking\n<tool_call>\n{"name": "add", "arguments": {"a":  1}}\n</tool_call>\n'
    '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
)


def ask(session: Any, **options: Any) -> Any:
    return session.model.sync_client.chat.completions.create(**{"model": "toy", "messages": USER, **options})


def test_async_client(serve: Any) -> None:
    session = serve("hi there").open()

    async def workflow() -> Any:
        return await session.model.client.chat.completions.create(model=session.model.name, messages=USER)

    reply = asyncio.run(workflow())
    assert type(session.model.client) is openai.AsyncOpenAI
    assert reply.choices[0].message.content == "hi there"
    assert reply.choices[0].finish_reason == "stop"
    (call,) = session.close()
    assert reply.usage.prompt_tokens == len(call.prompt_ids_P)
    assert reply.usage.completion_tokens == len(call.sampled_ids_S)
    assert call.status == CallStatus.USED
    assert call.trainable
    assert call.messages == tuple(USER)
    assert call.response == {"role": "assistant", "content": "hi there"}


def test_sync_client_on_its_own_thread(serve: Any) -> None:
    session = serve("hi").open()
    assert type(session.model.sync_client) is openai.OpenAI
    assert ask(session).choices[0].message.content == "hi"
    assert [call.status for call in session.close()] == [CallStatus.USED]


def test_sync_client_inside_async_workflows_does_not_deadlock(serve: Any) -> None:
    served = serve("hi")

    async def workflow(session: Any) -> None:
        ask(session)
        await session.model.client.chat.completions.create(model="toy", messages=USER)
        ask(session)

    async def main() -> list[Any]:
        sessions = [served.open(f"g/{i}") for i in range(8)]
        await asyncio.wait_for(asyncio.gather(*(workflow(session) for session in sessions)), 120)
        return [session.close() for session in sessions]

    assert [len(calls) for calls in asyncio.run(main())] == [3] * 8


def test_http_with_plain_httpx(serve: Any) -> None:
    session = serve("hi").open()
    url, headers = session.model.base_url, {"Authorization": f"Bearer {session.model.api_key}"}
    assert url.startswith("http://127.0.0.1:")
    reply = httpx.post(f"{url}/chat/completions", headers=headers, json={"model": "toy", "messages": USER})
    assert reply.status_code == 200
    assert reply.json()["choices"][0]["message"] == {"role": "assistant", "content": "hi"}
    assert httpx.get(f"{url}/models", headers=headers).json()["data"][0]["id"] == "toy"
    assert httpx.get(f"{url}/nothing", headers=headers).status_code == 404
    assert httpx.get(f"{url}/models").status_code == 401
    assert [call.status for call in session.close()] == [CallStatus.USED]
    assert httpx.get(f"{url}/models", headers=headers).json()["error"]["code"] == "invalid_api_key"


def test_a_key_in_the_path_counts_before_one_in_the_headers(serve: Any) -> None:
    served = serve("hi")
    session, other = served.open("g/0"), served.open("g/1")
    url = session.model.keyed_url
    assert url == session.model.base_url.replace("/v1", f"/{session.model.api_key}/v1")
    with openai.OpenAI(base_url=url, api_key="none") as client:  # the package insists on a key
        assert client.models.list().data[0].id == "toy"
        assert client.chat.completions.create(model="toy", messages=USER).choices[0].message.content == "hi"
    with openai.OpenAI(base_url=url, api_key=other.model.api_key) as client:
        client.chat.completions.create(model="toy", messages=USER)
    assert [len(session.close()), len(other.close())] == [2, 0]
    assert "g/0 has ended" in httpx.get(f"{url}/models").json()["error"]["message"]


def test_environment_of_a_rollout(serve: Any) -> None:
    """The real clients read it: one finds model and key without a word of configuration."""
    session = serve("hi").open()
    model, found = session.model, session.model.environment()
    assert found["OPENAI_BASE_URL"] == found["OPENAI_API_BASE"] == model.base_url
    assert found["ANTHROPIC_BASE_URL"] + "/v1" == model.base_url
    assert {found[name] for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")} == {model.api_key}
    assert {value for name, value in found.items() if "_MODEL" in name} == {"toy"}
    assert found["NO_PROXY"] == found["no_proxy"] == "127.0.0.1"
    code = (
        "import os, openai; chat = openai.OpenAI().chat.completions\n"
        "messages = [{'role': 'user', 'content': 'hello'}]\n"
        "print(chat.create(model=os.environ['OPENAI_MODEL'], messages=messages).choices[0].message.content)"
    )
    shown = subprocess.run([sys.executable, "-c", code], env=found, capture_output=True, text=True, check=True)
    assert shown.stdout == "hi\n"
    assert len(session.close()) == 1


def test_http_with_the_sdk(serve: Any) -> None:
    session = serve("hi").open()
    with openai.OpenAI(base_url=session.model.base_url, api_key=session.model.api_key) as client:
        assert client.models.list().data[0].id == "toy"
        assert client.chat.completions.create(model="toy", messages=USER).choices[0].message.content == "hi"
    assert len(session.close()) == 1


@pytest.mark.parametrize("transport", ["in-process", "http"])
def test_stream(serve: Any, transport: str) -> None:
    session = serve(CALLS).open()
    client = session.model.sync_client
    if transport == "http":
        client = openai.OpenAI(base_url=session.model.base_url, api_key=session.model.api_key, max_retries=0)
    with client.chat.completions.stream(
        model="toy", messages=USER, tools=[TOOL], stream_options={"include_usage": True}
    ) as stream:
        final = stream.get_final_completion()
    choice = final.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "thinking"
    assert [call.function.arguments for call in choice.message.tool_calls] == ['{"a":  1}', "{}"]
    assert final.usage.completion_tokens == len(session.close()[0].sampled_ids_S)
    client.close()


def test_raw_stream_of_several_choices(serve: Any) -> None:
    session = serve("hi").open()
    chunks = list(ask(session, stream=True, n=2))
    texts = {0: "", 1: ""}
    ends = []
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        ends.append(chunk.choices[0].finish_reason)
    assert texts == {0: "hi", 1: "hi"}
    assert ends.count("stop") == 2
    assert all(chunk.usage is None for chunk in chunks)


def test_async_stream(serve: Any) -> None:
    session = serve("hi").open()

    async def workflow() -> str:
        stream = await session.model.client.chat.completions.create(model="toy", messages=USER, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(workflow()) == "hi"


def test_n_choices_are_calls_with_their_own_noise(serve: Any) -> None:
    served = serve("hi")
    session = served.open()
    assert len(ask(session, n=3).choices) == 3
    calls = session.close()
    assert [call.index for call in calls] == [0, 1, 2]
    assert len({request.noise for request in served.engine.requests}) == 3


def test_tools(serve: Any, tokenizer: Any) -> None:
    served = serve(CALLS)
    session = served.open()
    message = ask(session, tools=[TOOL]).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["add", "add"]
    assert message.tool_calls[0].function.arguments == '{"a":  1}'
    assert len({call.id for call in message.tool_calls}) == 2
    assert json.dumps(TOOL) in tokenizer.decode(served.engine.requests[0].prompt_ids)
    hidden = ask(session, tools=[TOOL], tool_choice="none").choices[0]
    assert hidden.message.tool_calls is None
    assert hidden.message.content == CALLS
    assert '"add"' not in tokenizer.decode(served.engine.requests[1].prompt_ids)
    named = ask(session, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "add"}})
    assert named.choices[0].finish_reason == "tool_calls"


def test_malformed_tool_call_stays_text_and_is_counted(serve: Any) -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"a": }}\n</tool_call>'
    session = serve(text).open()
    choice = ask(session, tools=[TOOL]).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
    assert session.metrics["tool_parse_errors"] == 1
    assert session.failure is None


def test_sampling_parameters_reach_the_engine_and_the_record(serve: Any) -> None:
    served = serve("hi")
    session = served.open()
    ask(session, temperature=0.5, top_p=0.9, max_completion_tokens=5, stop="x", extra_body={"top_k": 3, "min_p": 0.1})
    sampling = served.engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 3, 0.1)
    assert (sampling.max_tokens, sampling.stop) == (5, ("x",))
    assert session.close()[0].sampling == sampling


def test_a_greedy_session_ignores_the_requested_temperature(serve: Any) -> None:
    from sharpen.types import Sampling

    session = serve("hi").open(sampling=Sampling(temperature=0.0, max_tokens=9))
    ask(session, temperature=1.0)
    (call,) = session.close()
    assert call.sampling == Sampling(temperature=0.0, max_tokens=9)
    assert not call.trainable


def test_seed_repeats_within_a_rollout_and_differs_between(serve: Any) -> None:
    served = serve("hi")
    first, second = served.open("g/0", noise_seed=1), served.open("g/1", noise_seed=2)
    for session in (first, first, second):
        ask(session, seed=42)
    for session in (first, first):
        ask(session)
    noises = [request.noise for request in served.engine.requests]
    assert noises[0] == noises[1] != noises[2]
    assert len(set(noises)) == 4


def test_stop_string_text_is_cut_and_the_next_call_forks(serve: Any, tokenizer: Any) -> None:
    from scripted import generation

    ids = tokenizer.encode("one STOP", add_special_tokens=False)
    session = serve(lambda request: generation(ids, text="one ")).open()
    choice = ask(session, stop=["STOP"]).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("one ", "stop")
    ask(session, messages=[*USER, {"role": "assistant", "content": "one "}, *USER])
    first, second = session.close()
    assert first.sampled_ids_S.tolist() == ids
    assert second.parent is None


def test_logprobs_in_openai_format(serve: Any, tokenizer: Any) -> None:
    from scripted import generation

    ids = [*tokenizer.encode("é", add_special_tokens=False), tokenizer.eos_token_id]
    top = tuple(((token, -0.5), (0, -3.0)) for token in ids)
    session = serve(lambda request: generation(ids, top_logprobs=top)).open()
    content = ask(session, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [entry.logprob for entry in content] == [-0.5, -1.0, -1.5]
    assert content[-1].token == "<|im_end|>"
    assert [len(entry.top_logprobs) for entry in content] == [2, 2, 2]
    assert ask(session).choices[0].logprobs is None


def test_token_ids_when_asked_for(serve: Any) -> None:
    session = serve("hi").open()
    reply = ask(session, extra_body={"return_token_ids": True}).model_dump()
    (call,) = session.close()
    assert reply["prompt_token_ids"] == call.prompt_ids_P.tolist()
    assert reply["choices"][0]["token_ids"] == call.sampled_ids_S.tolist()


def test_reasoning_is_its_own_field(serve: Any) -> None:
    session = serve("<think>\nso\n</think>\n\nanswer").open()
    message = ask(session).choices[0].message
    assert message.content == "answer"
    assert message.reasoning_content == "so"


def test_thinking_opened_by_the_template(serve: Any, tokenizer: Any) -> None:
    served = serve("so\n</think>\n\nanswer")
    session = served.open()
    message = ask(session, extra_body={"chat_template_kwargs": {"enable_thinking": True}}).choices[0].message
    assert (message.content, message.reasoning_content) == ("answer", "so")
    assert tokenizer.decode(served.engine.requests[0].prompt_ids).endswith("<think>\n")


def test_message_forms(serve: Any, tokenizer: Any) -> None:
    served = serve("hi")
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "name": "bob", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": None},
        {"role": "user", "content": "c"},
    ]
    ask(served.open(), messages=messages)
    expected = "system\nbe brief<|im_end|>\n<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
    assert expected in tokenizer.decode(served.engine.requests[0].prompt_ids)


def test_a_client_closed_by_one_rollout_serves_the_others(serve: Any) -> None:
    import copy

    served = serve("hi")
    first, second = served.open("g/0"), served.open("g/1")
    ask(first)
    first.model.sync_client.close()
    assert ask(second).choices[0].message.content == "hi"
    assert copy.deepcopy({"model": second.model})["model"] is second.model


@pytest.mark.parametrize("record", [True, False])
def test_answers_are_counted_and_a_cut_one_is_known_recorded_or_not(serve: Any, record: bool) -> None:
    """An evaluation records nothing, and must tell an agent that failed on an answer from one that got none."""
    served = serve("hi there")
    session = served.open(record=record)
    assert (session.num_answers, session.cut) == (0, False)
    with pytest.raises(openai.BadRequestError):
        ask(session, temperature=-1)
    assert session.num_answers == 0
    ask(session, max_tokens=1)
    assert (session.num_answers, session.cut) == (1, True)
    ask(session)
    assert (session.num_answers, session.cut) == (2, False)
    assert len(session.close()) == (2 if record else 0)
