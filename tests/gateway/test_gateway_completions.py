"""Prompts without a chat template: `POST /v1/completions`, recorded as token-exactly as chat completions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from scripted import END, generation, toy_tokenizer

from sharpen.contracts import PromptLogprobs
from sharpen.types import PROMPT_ROLE, CallStatus

Serve = Callable[..., Any]


def complete(session: Any, prompt: Any = "name the", **options: Any) -> Any:
    return session.model.sync_client.completions.create(model="toy", prompt=prompt, **options)


def test_the_prompt_is_the_text_and_nothing_else(serve: Serve, tokenizer: Any) -> None:
    """Also that the answer is not parsed, though the gateway has parsers for thinking and tools."""
    session = serve("<think>\nhm\n</think>\n\nyes").open()
    completion = complete(session)
    assert completion.object == "text_completion"
    assert completion.choices[0].text == "<think>\nhm\n</think>\n\nyes"
    assert completion.choices[0].finish_reason == "stop"
    (call,) = session.model.calls()
    assert call.prompt_ids_P.tolist() == tokenizer.encode("name the", add_special_tokens=False)
    assert call.sampled_ids_S.tolist() == [
        *tokenizer.encode("<think>\nhm\n</think>\n\nyes", add_special_tokens=False),
        tokenizer.eos_token_id,
    ]
    assert call.messages == ({"role": PROMPT_ROLE, "content": "name the"},)
    assert (call.status, call.parent, call.trainable) == (CallStatus.USED, None, True)
    assert completion.usage.prompt_tokens == len(call.prompt_ids_P)
    assert completion.usage.completion_tokens == len(call.sampled_ids_S)


def test_http_and_in_process_record_the_same(serve: Serve) -> None:
    served = serve("yes")
    session = served.open()
    complete(session, temperature=0.5, n=2)
    with openai.OpenAI(base_url=session.model.base_url, api_key=session.model.api_key, max_retries=0) as client:
        over_http = client.completions.create(model="toy", prompt="name the", temperature=0.5, n=2)
    assert [choice.text for choice in over_http.choices] == ["yes", "yes"]
    assert [choice.call_index for choice in over_http.choices] == [2, 3]
    calls = session.model.calls()
    assert [call.request for call in calls] == [0, 0, 2, 2]
    assert len({call.prompt_ids_P.tobytes() for call in calls}) == 1
    assert {call.sampling.temperature for call in calls} == {0.5}


def test_a_text_gets_what_the_tokenizer_puts_before_any(serve: Serve) -> None:
    """A begin token, as Llama's tokenizer adds it. Red with `add_special_tokens=False` in `Renderer.encode_raw`."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = toy_tokenizer()
    begin = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", begin)]
    )
    served = serve("yes", tokenizer=tokenizer)
    session = served.open()
    complete(session)
    plain = tokenizer.encode("name the", add_special_tokens=False)
    complete(session, prompt=plain)
    assert [call.prompt_ids_P.tolist() for call in session.model.calls()] == [[begin, *plain], plain]


def test_a_text_that_goes_on_keeps_the_ids_that_were_sampled(serve: Serve, tokenizer: Any) -> None:
    """Sampled letter by letter, "name" is never tokenized as one token again."""
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "name"]
    served = serve(lambda request: generation(letters, limit=request.sampling.max_tokens, finish_reason="length"))
    session = served.open()
    first = "user: "
    said = complete(session, prompt=first).choices[0].text
    complete(session, prompt=f"{first}{said} and")
    complete(session, prompt="user")
    one, two, three = session.model.calls()
    assert (two.parent, three.parent) == (0, None)
    assert two.prompt_ids_P.tolist() == [
        *one.prompt_ids_P.tolist(),
        *letters,
        *tokenizer.encode(" and", add_special_tokens=False),
    ]


def test_the_longest_earlier_call_is_continued(serve: Serve, tokenizer: Any) -> None:
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "ab"]
    session = serve(lambda request: generation(letters, finish_reason="length")).open()
    complete(session, prompt="x")
    complete(session, prompt="xaby")
    complete(session, prompt="x")
    complete(session, prompt="xabyabz")
    assert [call.parent for call in session.model.calls()] == [None, 0, None, 1]


def test_ids_are_used_as_they_are(serve: Serve, tokenizer: Any) -> None:
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in "name"]
    session = serve("yes").open()
    first = complete(session, prompt=letters, extra_body={"return_token_ids": True}).choices[0]
    assert (first.prompt_token_ids, session.model.prompt_text(0)) == (letters, "name")
    complete(session, prompt=[*letters, *first.token_ids, letters[0]])
    complete(session, prompt=letters)
    calls = session.model.calls()
    assert [call.parent for call in calls] == [None, 0, None]
    assert np.array_equal(calls[1].prompt_ids_P, [*letters, *first.token_ids, letters[0]])
    assert calls[1].messages[0]["content"] == f"nameyes{END}n"


def test_chats_and_texts_do_not_mix(serve: Serve) -> None:
    """A chat whose rendered text starts with prompt and answer of a text keeps the template's own ids."""
    session = serve("yes").open()
    complete(session, prompt=f"<|im_start|>user\nhello{END}\n<|im_start|>assistant\n")
    said = [("user", "hello"), ("assistant", "yes"), ("user", "go on")]
    messages = [{"role": role, "content": content} for role, content in said]
    session.model.sync_client.chat.completions.create(model="toy", messages=messages)
    one, two = session.model.calls()
    assert session.model.prompt_text(1).startswith(session.model.prompt_text(0) + f"yes{END}")
    assert (one.parent, two.parent) == (None, None)


def test_a_stream_has_the_same_text(serve: Serve) -> None:
    session = serve("yes").open()
    events = list(complete(session, stream=True, logprobs=0, stream_options={"include_usage": True}))
    assert "".join(choice.text for event in events for choice in event.choices) == "yes"
    assert [choice.finish_reason for event in events for choice in event.choices if choice.finish_reason] == ["stop"]
    assert events[-1].usage.completion_tokens == len(session.model.calls()[0].sampled_ids_S)


def test_logprobs_in_this_apis_format(serve: Serve, tokenizer: Any) -> None:
    ids = [*tokenizer.encode("yes", add_special_tokens=False), tokenizer.eos_token_id]
    top = (((ids[0], -0.5), (5, float("-inf"))),) * len(ids)
    session = serve(lambda request: generation(ids, top_logprobs=top if request.top_logprobs else None)).open()
    logprobs = complete(session, logprobs=2).choices[0].logprobs
    assert "".join(logprobs.tokens) == f"yes{END}"
    assert logprobs.token_logprobs == session.model.calls()[0].logprobs_S.tolist()
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:place])) for place in range(len(ids))]
    assert sorted(logprobs.top_logprobs[0].values()) == [-9999.0, -0.5]


def test_an_echo_begins_with_the_prompt_and_its_logprobs(serve: Serve, tokenizer: Any) -> None:
    """As evaluations by likelihood read it: a place for every token of both, and nothing for the first. Of two tokens
    with one text, as halves of characters have it, the likelier counts."""
    ids, answer = [5, 6, 7], tokenizer.encode("yes", add_special_tokens=False)
    half, other = (tokenizer.convert_tokens_to_ids(letter) for letter in "\u0122\u0123")  # no text of their own
    asked: list[int | None] = []

    def say(request: Any) -> Any:
        asked.append(request.prompt_logprobs)
        top = (((half, -0.25), (other, -3.0)), ((7, -1.0), (5, float("-inf"))))
        scores = PromptLogprobs(logprobs=np.array([-0.5, -1.0], np.float32), top_logprobs=top)
        said = generation(answer, top_logprobs=((),) * len(answer), finish_reason="length")
        return replace(said, prompt_logprobs=None if request.prompt_logprobs is None else scores)

    session = serve(say).open()
    choice = complete(session, prompt=ids, echo=True, logprobs=2, max_tokens=len(answer)).choices[0]
    before = tokenizer.decode(ids)
    assert choice.text == f"{before}yes" == "".join(choice.logprobs.tokens)
    assert choice.logprobs.token_logprobs[:3] == [None, -0.5, -1.0]
    assert choice.logprobs.top_logprobs[0] is None
    assert [*choice.logprobs.top_logprobs[1].values()] == [-0.25]
    assert sorted(choice.logprobs.top_logprobs[2].values()) == [-9999.0, -1.0]
    assert len(choice.logprobs.text_offset) == len(choice.logprobs.token_logprobs) == 3 + len(answer)
    assert complete(session, prompt=ids, echo=True).choices[0].text == f"{before}yes"
    assert asked == [2, None]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [2**31]}, "prompt[0]"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "a", "messages": []}, "messages"),
        ({"prompt": "a", "tools": []}, "tools"),
        ({"prompt": "a", "echo": True, "stream": True}, "echo"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "echo"),  # this engine has none of a prompt
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "logprobs": 6}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "presence_penalty": 1}, "presence_penalty"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a" * 5000}, "prompt"),
    ],
)
def test_what_is_wrong_with_a_request_is_said(serve: Serve, body: dict[str, Any], param: str) -> None:
    """Each a 400 that names the parameter, and none an infrastructure failure."""
    session = serve("yes").open()
    url, headers = f"{session.model.base_url}/completions", {"Authorization": f"Bearer {session.model.api_key}"}
    reply = httpx.post(url, content=json.dumps(body).encode(), headers=headers)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert session.failure in (None, "context_overflow")
    if body.get("prompt") == "a" * 5000:
        assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_defaults_that_vendors_send_are_accepted(serve: Serve) -> None:
    session = serve("yes").open()
    options = {"best_of": 1, "echo": False, "frequency_penalty": 0, "logit_bias": {}, "suffix": "", "user": "me"}
    assert complete(session, prompt=["name the"], **options).choices[0].text == "yes"
    assert session.model.prompt_text(0) == "name the"


def test_an_id_without_a_text_is_left_to_the_engine(serve: Serve) -> None:
    """Which refuses it if its model has no such row (some have more rows than their tokenizers have ids)."""
    session = serve("yes").open()
    complete(session, prompt=[99999])
    (call,) = session.model.calls()
    assert (call.prompt_ids_P.tolist(), call.messages[0]["content"]) == ([99999], "")
