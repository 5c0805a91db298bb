"""What vLLM samples: exact logprobs of the distribution sampled from, ids as given, and what is refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from vllm_served import MAX_MODEL_LEN, MODEL, begun, frozen, request, scored

from sharpen.errors import ContextOverflowError, SamplingError

END = 507
PROMPT = [506, 70, 80, 90, 100, 101]


@pytest.mark.parametrize("batch", [True, False])
def test_logprobs_are_those_of_the_distribution_sampled_from(served, model, batch):
    """Together (greedy and truncated rows in one batch) and one by one."""
    asked = [
        request(PROMPT, noise=1),
        request(PROMPT, noise=2, temperature=0.7),
        request(PROMPT, noise=3, temperature=1.3),
        request(PROMPT, noise=4, temperature=0.0),
        request(PROMPT, noise=5, top_p=0.8),
        request(PROMPT, noise=6, top_k=5, temperature=0.9),
        request(PROMPT, noise=7, top_k=20, top_p=0.7, temperature=1.2),
        request(PROMPT, noise=8, min_p=0.2, temperature=1.5),
    ]
    generations = served.generate(*asked) if batch else [served.generate(one)[0] for one in asked]
    for one, generation in zip(asked, generations, strict=True):
        assert len(generation.ids) == len(generation.logprobs) == len(generation.versions) >= 1
        assert set(generation.versions.tolist()) == {served.engine.version}
        np.testing.assert_allclose(generation.logprobs, scored(model, one, generation), atol=1e-4)
        assert END not in generation.ids[:-1]
        assert generation.finish_reason == ("stop" if generation.ids[-1] == END else "length")
        assert generation.text is None


def test_more_prompts_than_one_forward_pass_takes(served, model):
    """Red with chunked prefill (drop it from `_cpu_settings`): vLLM dies of a seeded request whose prompt it splits."""
    asked = [request([(7 * i + j) % 500 for j in range(300)], noise=i, max_tokens=4) for i in range(32)]
    for one, generation in zip(asked, served.generate(*asked), strict=True):
        np.testing.assert_allclose(generation.logprobs, scored(model, one, generation), atol=1e-4)


def test_greedy_takes_the_likeliest(served, model):
    asked = request(PROMPT, temperature=0.0, top_logprobs=3)
    (generation,) = served.generate(asked)
    assert [pairs[0][0] for pairs in generation.top_logprobs] == generation.ids.tolist()


def test_a_prompt_is_scored_whole_though_it_is_cached(served, model):
    ids = [(5 * place) % 500 for place in range(80)]
    plain, asked = request(ids, max_tokens=2), replace(request(ids, max_tokens=2), prompt_logprobs=2)
    served.generate(plain)
    found = served.generate(asked)[0].prompt_logprobs
    with torch.no_grad():
        log = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)[:-1]
    own = log.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
    np.testing.assert_allclose(found.logprobs, own, atol=1e-4)
    likeliest = [[value for _, value in top] for top in found.top_logprobs]
    np.testing.assert_allclose(likeliest, log.topk(2).values, atol=1e-4)


def test_noise_decides_the_tokens(served):
    one, again, other = served.generate(*(request(PROMPT, noise=noise) for noise in (2**64 - 1, 2**64 - 1, 5)))
    assert one.ids.tolist() == again.ids.tolist() != other.ids.tolist()


def test_alternatives_are_sorted_and_hold_the_sampled_distribution(served):
    asked = request(PROMPT, top_logprobs=4, top_k=3, temperature=0.8)
    (generation,) = served.generate(asked)
    for token, logprob, pairs in zip(generation.ids, generation.logprobs, generation.top_logprobs, strict=True):
        values = [value for _, value in pairs]
        assert len(pairs) <= 3, "the fourth has probability zero"
        assert values == sorted(values, reverse=True)
        assert abs(sum(np.exp(values)) - 1) < 1e-4
        assert dict(pairs)[int(token)] == pytest.approx(float(logprob), abs=1e-6)


def test_stop_strings(served):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    (whole,) = served.generate(request(PROMPT, temperature=0.0, max_tokens=40))
    text = tokenizer.decode(whole.ids.tolist())
    stop = text[3:5]
    (cut,) = served.generate(request(PROMPT, temperature=0.0, max_tokens=40, stop=(stop, "never sampled")))
    assert cut.finish_reason == "stop"
    assert cut.text == text[: text.index(stop)]
    assert cut.ids.tolist() == whole.ids.tolist()[: len(cut.ids)]
    assert stop in tokenizer.decode(cut.ids.tolist())
    assert stop not in tokenizer.decode(cut.ids.tolist()[:-1])


def test_the_context_bounds_prompt_and_answer(served):
    with pytest.raises(ContextOverflowError, match="no room"):
        served.generate(request([9] * MAX_MODEL_LEN))
    (one,) = served.generate(request([9] * (MAX_MODEL_LEN - 1), max_tokens=50))
    assert len(one.ids) == 1
    assert one.finish_reason == ("stop" if one.ids[0] == END else "length")


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"prompt": []}, "1 or more ids"),
        ({"prompt": [512]}, "0 .. 511"),
        ({"temperature": 0.001}, "temperature 0.001 is below 0.01"),
        ({"top_logprobs": 21}, "at most 20"),
        ({"top_p": 0.0}, "top_p"),
    ],
)
def test_what_is_refused(served, bad, words):
    with pytest.raises(SamplingError, match=words):
        served.generate(request(**{"prompt": PROMPT, **bad}))


def test_a_cancelled_call_is_aborted_and_the_others_go_on(served):
    """Red when `generate` shields its task from cancellation (`await asyncio.shield(call)`)."""

    async def scenario():
        async with frozen(served.engine):
            calls = await begun(served.engine, *(request([9 + i], max_tokens=400) for i in range(4)))
            calls[0].cancel()
            with pytest.raises(asyncio.CancelledError):
                await calls[0]
            assert served.engine._llm.get_num_unfinished_requests() == 3
        return await asyncio.gather(*calls[1:])

    assert all(len(other.ids) for other in served.run(scenario()))
