"""Experiences and the model wrapper: what they show, what may be set, what `chat` takes."""

from __future__ import annotations

import asyncio
import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from trinity_serving import MakePlace, talking_server

from sharpen.compat.trinity import EID, Experience, ModelWrapper
from sharpen.compat.trinity.results import result_of
from sharpen.errors import ConfigError
from sharpen.placement.auxiliary.endpoint import Endpoint

ASK = [{"role": "user", "content": "?"}]


@pytest.fixture
def make_model(make_place: MakePlace) -> Callable[..., ModelWrapper]:
    def make(script: Any, **options: Any) -> ModelWrapper:
        return ModelWrapper(make_place(script, **options).open("g/0", 1).model, enable_history=True)

    return make


def test_what_an_experience_shows(make_model: Any):
    (exp,) = make_model("yes").chat(ASK)
    (call,) = exp.calls
    assert exp.tokens.dtype == torch.int32
    assert exp.tokens.tolist() == [*call.prompt_ids_P.tolist(), *call.sampled_ids_S.tolist()]
    assert exp.prompt_length == len(call.prompt_ids_P)
    assert exp.logprobs.tolist() == [-1.0, -2.0]  # "yes" is one token, and there is the end token
    assert exp.action_mask.tolist() == [True, True]
    assert (exp.response_text, exp.truncate_status) == ("yes", None)
    assert exp.prompt_text == "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"
    assert exp.messages == [*ASK, {"role": "assistant", "content": "yes"}]
    assert (exp.reward, exp.metrics, exp.info, exp.tools) == (None, {}, {}, [])
    assert (exp.advantages, exp.token_level_reward) == (None, None)
    assert isinstance(exp.eid, EID)
    exp.eid.run, exp.eid.step = 2, 5
    assert (exp.eid.rid, exp.eid.uid) == ("//2", f"//2/5/{exp.eid.suffix}")


@pytest.mark.parametrize("reward", [1, 0.5, True, np.float32(0.5), np.array(2.0), torch.tensor(0.25)])
def test_rewards_are_numbers(make_model: Any, reward: Any):
    (exp,) = make_model("yes").chat(ASK)
    exp.reward = reward
    assert type(exp.reward) is float
    assert exp.reward == float(reward)


@pytest.mark.parametrize("reward", ["1", {"accuracy": 1.0}, [1.0], np.array([1.0, 2.0]), torch.ones(2)])
def test_other_things_are_not(make_model: Any, reward: Any):
    (exp,) = make_model("yes").chat(ASK)
    with pytest.raises(ConfigError, match=r"exp.reward must be a number"):
        exp.reward = reward


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((name, f"exp.{name} was recorded") for name in ("tokens", "logprobs", "prompt_length", "response_text")),
        ("advantages", "exp.advantages cannot be set: advantages are computed when a batch is drawn"),
        ("truncate_status", "it is taken from how the call ended"),
        ("colour", "an Experience has no field 'colour': keep what is yours in exp.info"),
    ],
)
def test_the_record_cannot_be_set(make_model: Any, name: str, words: str):
    (exp,) = make_model("yes").chat(ASK)
    with pytest.raises(ConfigError, match=words):
        setattr(exp, name, 1)


def test_a_record_changed_in_place_is_found(make_model: Any):
    model = make_model("yes")
    (exp,) = model.chat(ASK)
    exp.reward = 1.0
    assert result_of("W", [exp], model).call_rewards == {0: 1.0}
    exp.logprobs[0] = 0.0
    with pytest.raises(ConfigError, match=r"exp.logprobs was changed in place"):
        result_of("W", [exp], model)


def test_a_mask_is_all_or_nothing(make_model: Any):
    model = make_model("yes")
    (exp,) = model.chat(ASK)
    exp.reward = 1.0
    exp.action_mask = torch.zeros_like(exp.action_mask)
    assert exp.action_mask.tolist() == [False, False]
    assert result_of("W", [exp], model).call_rewards == {}
    exp.action_mask = [True, True]
    assert result_of("W", [exp], model).call_rewards == {0: 1.0}
    with pytest.raises(ConfigError, match="cannot be set to a part"):
        exp.action_mask = [True, False]


def test_a_copy_stands_for_the_same_call(make_model: Any):
    model = make_model("yes")
    (exp,) = model.chat(ASK)
    exp.reward, exp.info["note"] = 1.0, "x"
    twin = copy.deepcopy(exp)
    twin.reward, twin.info["note"] = 0.0, "y"
    assert (exp.reward, exp.info["note"]) == (1.0, "x")
    assert result_of("W", [twin], model).call_rewards == {0: 0.0}


def test_metrics_are_means_over_those_that_have_them(make_model: Any):
    model = make_model("yes")
    exps = model.chat(ASK, n=3)
    for number, exp in enumerate(exps):
        exp.reward = 1.0
        exp.metrics = {"all": number, **({"some": 4.0} if number else {})}
    exps[1].metrics["odd"] = "text"
    assert result_of("W", exps, model).metrics == {"all": 1.0, "some": 4.0, "odd": "text"}


def test_n_answers_are_n_experiences(make_model: Any):
    model = make_model("yes")
    exps = model.chat(ASK, n=3, temperature=0.5, top_k=-1, top_p=None, logprobs=0, stop=["!"], max_tokens=1)
    assert [exp.calls[0].index for exp in exps] == [0, 1, 2]
    assert exps == model.extract_experience_from_history()
    sampling = exps[0].calls[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 1.0, 0)
    assert (sampling.stop, sampling.max_tokens) == (("!",), 1)
    assert [exp.truncate_status for exp in exps] == ["response_truncated"] * 3


def test_chat_shows_what_was_sampled_and_a_client_the_parsed_message(make_model: Any):
    model = make_model("<think>\nhm\n</think>\n\nyes", reasoning_parser="deepseek_r1")
    assert model.chat(ASK)[0].response_text == "<think>\nhm\n</think>\n\nyes"
    client = model.get_openai_client()
    reply = client.chat.completions.create(model=client.model_path, messages=ASK)
    assert reply.choices[0].message.content == "yes"
    assert model.extract_experience_from_history()[-1].response_text == "yes"


def test_chat_refuses_what_it_does_not_know(make_model: Any):
    model = make_model("yes")
    with pytest.raises(ConfigError, match=r"model.chat\(\) takes no 'max_token'; did you mean 'max_tokens'"):
        model.chat(ASK, max_token=3)
    with pytest.raises(AttributeError, match=r"ModelWrapper.logprobs is not available here"):
        model.logprobs([1, 2])
    assert not hasattr(model, "logprobs_async")
    assert copy.deepcopy(model) is model


def test_a_prompt_without_the_template_is_asked_as_it_is(make_model: Any):
    """And is no part of a conversation, whatever it says."""
    model = make_model("yes")
    experiences = model.generate(["a?", "b?"], n=2, temperature=0.5, max_tokens=9, logprobs=0)
    assert [exp.prompt_text for exp in experiences] == ["a?", "a?", "b?", "b?"]
    assert [exp.response_text for exp in experiences] == ["yes"] * 4
    (call,) = experiences[3].calls
    assert (call.index, call.request, call.sampling.temperature, call.sampling.max_tokens) == (3, 2, 0.5, 9)
    assert experiences[3].tokens.tolist() == [*call.prompt_ids_P.tolist(), *call.sampled_ids_S.tolist()]
    assert asyncio.run(model.generate_async(["c?"]))[0].prompt_text == "c?"
    assert model.extract_experience_from_history()[:4] == experiences
    with pytest.raises(ConfigError, match="none of the rollout's 5 calls made this conversation"):
        model.convert_messages_to_experience([{"role": "assistant", "content": "yes"}])


@pytest.mark.parametrize(
    ("prompts", "sampling", "words"),
    [
        ("a?", {}, "takes a list of texts, got 'a?'"),
        ([ASK], {}, "takes a list of texts"),
        (["a?"], {"tools": []}, "takes no 'tools'"),
        (["a?"], {"max_token": 3}, "takes no 'max_token'"),
    ],
)
def test_what_cannot_be_asked_without_the_template(make_model: Any, prompts: Any, sampling: Any, words: str):
    with pytest.raises(ConfigError) as error:
        make_model("yes").generate(prompts, **sampling)
    assert words in str(error.value)


def test_nulls_in_a_conversation_are_as_none(make_model: Any):
    """As clients dump their messages. Red when they are refused as unknown fields."""
    model = make_model("yes")
    (exp,) = model.chat(ASK)
    said = [*ASK, {"role": "assistant", "content": exp.response_text, "function_call": None, "parsed": None}]
    assert model.convert_messages_to_experience(said).tokens.tolist() == exp.tokens.tolist()


def test_a_conversation_goes_on_in_the_same_sequence(make_model: Any):
    model = make_model("yes")
    memory = list(ASK)
    for _ in range(3):
        (exp,) = model.chat(memory)
        memory += [{"role": "assistant", "content": exp.response_text}, *ASK]
    assert [exp.calls[0].parent for exp in model.extract_experience_from_history()] == [None, 0, 1]


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with talking_server() as url:
        yield Endpoint(base_url=url, name="m", api_key="k")


def test_an_endpoint_has_a_history_without_tokens(endpoint: Endpoint):
    model = ModelWrapper(endpoint, enable_history=True)
    other = ModelWrapper(endpoint, enable_history=True)
    first = model.chat(ASK, n=2, temperature=0.5, top_k=-1)
    with model.get_openai_client() as client:
        stream = client.chat.completions.create(model="m", messages=ASK, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "yes"
    exps = model.extract_experience_from_history()
    assert exps[:2] == first
    assert [exp.response_text for exp in exps] == ["yes"] * 3
    assert (exps[0].tokens, exps[0].logprobs, exps[0].prompt_length, exps[0].prompt_text) == (None, None, 0, None)
    assert other.extract_experience_from_history() == []
    whole = model.convert_messages_to_experience(exps[0].messages)
    for exp in (*exps, whole):
        exp.reward = 0.5
    result = result_of("W", exps, model)
    assert (result.reward, result.call_rewards) == (0.5, None)
    assert result_of("W", [whole], model).reward == 0.5


def test_an_endpoint_is_asked_with_messages(endpoint: Endpoint):
    with pytest.raises(ConfigError, match=r"model.generate\(\) asks without the chat template"):
        ModelWrapper(endpoint, enable_history=True).generate(["a?"])


def test_an_endpoint_has_an_asynchronous_client_too(endpoint: Endpoint):
    exps = asyncio.run(ask_asynchronously(ModelWrapper(endpoint, enable_history=True)))
    assert [exp.response_text for exp in exps] == ["yes", "yes"]


async def ask_asynchronously(model: ModelWrapper) -> list[Experience]:
    async with model.get_openai_async_client() as client:
        await client.chat.completions.create(model="m", messages=ASK)
        stream = await client.chat.completions.create(model="m", messages=ASK, stream=True)
        async for _ in stream:
            pass
    return model.extract_experience_from_history()


def test_a_constructed_experience_shows_what_it_was_made_of():
    exp = Experience(tokens=torch.tensor([1, 2, 3]), prompt_length=2, reward=1.0, logprobs=[-0.5], response_text="yes")
    assert (exp.tokens.tolist(), exp.prompt_length, exp.response_text) == ([1, 2, 3], 2, "yes")
    assert (exp.reward, exp.info, exp.metrics, exp.messages, exp.calls) == (1.0, {}, {}, [], ())
    assert Experience(EID("b", 3, 1), tokens=[1]).eid.rid == "b/3/1"
    for wrong, words in [({"advantages": [1.0]}, "computed when a batch is drawn"), ({"rewad": 1}, "no field 'rewad'")]:
        with pytest.raises(ConfigError, match=words):
            Experience(tokens=[1, 2, 3], **wrong)


def test_a_prompt_s_tokens_are_counted(make_model: Any):
    model = make_model("yes")
    (exp,) = model.chat(ASK)
    assert asyncio.run(model.get_message_token_len(ASK)) == exp.prompt_length
    with pytest.raises(ConfigError, match="the messages have no prompt"):
        asyncio.run(model.get_message_token_len([{"role": "nobody", "content": "?"}]))


def test_the_layer_is_imported_without_torch():
    code = (
        "import sys, sharpen.compat.trinity as trinity\n"
        "assert 'openai' not in sys.modules and 'pydantic' not in sys.modules\n"
        "for name in trinity.__all__: getattr(trinity, name)\n"
        "heavy = {'torch', 'transformers', 'agentscope', 'math_verify', 'sympy', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
