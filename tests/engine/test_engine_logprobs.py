"""The engine against plain transformers: same greedy tokens, same logprobs, for every family and any mixture of
requests.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from toy_engines import (
    END,
    FAMILIES,
    VOCAB,
    full_logits,
    make_engine,
    make_model,
    prompt_of,
    request,
    run_all,
    scored,
)

RAGGED = [prompt_of(length, length) for length in (1, 3, 10, 30, 61, 64, 65, 90)]
SHARED = [prompt_of(40, 99) + prompt_of(extra, extra) for extra in (1, 5, 25)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers_generate(family: str) -> None:
    reference, engine = make_model(family), make_engine(make_model(family))
    prompts = RAGGED + SHARED
    generations = run_all(engine, [request(prompt, temperature=0.0, max_tokens=24) for prompt in prompts])
    for prompt, generation in zip(prompts, generations, strict=True):
        expected = reference.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :]
        assert generation.ids.tolist() == expected.tolist()
        torch.testing.assert_close(
            torch.tensor(generation.logprobs), scored(reference, prompt, generation), atol=1e-4, rtol=0
        )


def test_conversations_over_several_blocks_of_the_cache() -> None:
    """In bfloat16, whose cache is in blocks, with prefixes that are copied and continued. Red where a block's positions
    are counted from the sequence's first (`KVPool.places`, `copy`). How far a single number is rounded away depends on
    the processor, so that the mean is compared."""
    reference, engine = make_model("qwen3").bfloat16(), make_engine(make_model("qwen3").bfloat16(), max_model_len=512)
    shared = prompt_of(300, 1)
    prompts = [prompt_of(250, 2), shared, shared + prompt_of(150, 3), shared + prompt_of(60, 4), prompt_of(20, 5)]
    differences = []
    for call in range(2):
        generations = run_all(engine, [request(prompt, noise=call, max_tokens=16) for prompt in prompts])
        for prompt, generation in zip(prompts, generations, strict=True):
            differences.append((torch.tensor(generation.logprobs) - scored(reference, prompt, generation)).abs())
        prompts = [[*prompt, *found.ids.tolist(), 7] for prompt, found in zip(prompts, generations, strict=True)]
    assert float(torch.cat(differences).mean()) < 0.04
    assert len(engine._scheduler.pool.layers[0].blocks) == 2


@pytest.mark.parametrize("deterministic", [False, True])
def test_alternatives_are_of_the_distribution_that_was_sampled_from(deterministic: bool) -> None:
    """A greedy token is the likeliest alternative, in prompts of several lengths at once. Red where a step of several
    batches, as the fixed layout has, writes all their distributions to the same memory."""
    engine = make_engine(make_model("qwen3"), deterministic=deterministic)
    prompts = [prompt_of(length, length) for length in (5, 70, 140)]
    for generation in run_all(engine, [request(prompt, temperature=0.0, top_logprobs=2) for prompt in prompts]):
        likeliest = [alternatives[0] for alternatives in generation.top_logprobs]
        assert [token for token, _ in likeliest] == generation.ids.tolist()
        torch.testing.assert_close(
            torch.tensor([logprob for _, logprob in likeliest]), torch.tensor(generation.logprobs)
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_a_full_forward_over_three_calls(family: str) -> None:
    """Ragged requests at once, then twice their continuations (prefix reuse), at different temperatures."""
    reference, engine = make_model(family), make_engine(make_model(family))
    prompts = RAGGED + SHARED
    for call in range(3):
        temperatures = [(0.7, 1.0, 1.6)[(index + call) % 3] for index in range(len(prompts))]
        generations = run_all(
            engine,
            [
                request(prompt, temperature=temperature, max_tokens=5 + index % 13, noise=1000 * call + index)
                for index, (prompt, temperature) in enumerate(zip(prompts, temperatures, strict=True))
            ],
        )
        for prompt, temperature, generation in zip(prompts, temperatures, generations, strict=True):
            expected = scored(reference, prompt, generation, temperature)
            torch.testing.assert_close(torch.tensor(generation.logprobs), expected, atol=1e-4, rtol=0)
        prompts = [
            [*prompt, *generation.ids.tolist(), *prompt_of(4, call)]
            for prompt, generation in zip(prompts, generations, strict=True)
        ]
    assert engine.stats.reused_tokens > engine.stats.computed_tokens / 2


@pytest.mark.parametrize(("top_p", "top_k", "min_p"), [(0.6, 0, 0.0), (1.0, 3, 0.0), (0.8, 5, 0.0), (0.9, 0, 0.2)])
def test_trap_11_logprob_is_of_the_truncated_distribution(top_p: float, top_k: int, min_p: float) -> None:
    """Red when `sample` gathers from the plain log-softmax instead of the truncated, renormalized one."""
    reference, engine = make_model("qwen3"), make_engine(make_model("qwen3"))
    prompts = RAGGED[:5]
    cut = {"top_p": top_p, "top_k": top_k, "min_p": min_p}
    generations = run_all(
        engine, [request(p, temperature=0.9, noise=i, max_tokens=6, **cut) for i, p in enumerate(prompts)]
    )
    for prompt, generation in zip(prompts, generations, strict=True):
        logits = full_logits(reference, [*prompt, *generation.ids.tolist()])[len(prompt) - 1 : -1] / 0.9
        for row, token, logprob in zip(logits, generation.ids, generation.logprobs, strict=True):
            kept = row.sort(descending=True).indices[: top_k or VOCAB]
            kept = kept[torch.softmax(row, 0)[kept] >= min_p * torch.softmax(row, 0).max()]
            mass = torch.softmax(row[kept], 0)
            kept = kept[mass.cumsum(0) - mass < top_p]
            assert int(token) in kept.tolist()
            expected = torch.log_softmax(row[kept], 0)[kept.tolist().index(int(token))]
            assert float(logprob) == pytest.approx(float(expected), abs=1e-4)


def test_bfloat16_logprobs_are_near_a_full_forward() -> None:
    model = make_model("qwen3").to(torch.bfloat16)
    reference = make_model("qwen3").to(torch.bfloat16)
    engine = make_engine(model)
    generations = run_all(engine, [request(prompt, noise=index) for index, prompt in enumerate(RAGGED)])
    differences = [
        (torch.tensor(generation.logprobs) - scored(reference, prompt, generation)).abs()
        for prompt, generation in zip(RAGGED, generations, strict=True)
    ]
    assert float(torch.cat(differences).mean()) < 0.05


def test_long_prompts_are_computed_in_chunks() -> None:
    reference, engine = make_model("mistral"), make_engine(make_model("mistral"), max_model_len=500)
    engine._stepper.prompt_tokens_per_step = 37
    prompts = [prompt_of(450, 1), prompt_of(200, 2), prompt_of(10, 3)]
    for prompt, generation in zip(prompts, run_all(engine, [request(p) for p in prompts]), strict=True):
        torch.testing.assert_close(
            torch.tensor(generation.logprobs), scored(reference, prompt, generation), atol=1e-4, rtol=0
        )


def test_the_end_token_is_among_the_ids() -> None:
    reference, engine = make_model("qwen3"), make_engine(make_model("qwen3"))
    generations = run_all(engine, [request([5, 6], noise=noise, max_tokens=200) for noise in range(8)])
    ended = [generation for generation in generations if generation.finish_reason == "stop"]
    assert ended
    for generation in ended:
        assert generation.ids[-1] == END
        assert END not in generation.ids[:-1]
        torch.testing.assert_close(
            torch.tensor(generation.logprobs), scored(reference, [5, 6], generation), atol=1e-4, rtol=0
        )


@pytest.mark.parametrize(("family", "deterministic"), [("qwen3", False), ("qwen3", True), ("gemma3", False)])
def test_a_prompt_is_scored_whole_whatever_is_cached_of_it(family: str, deterministic: bool) -> None:
    """In pieces, as a large vocabulary has them, beside requests that are not scored, with its beginning cached before.
    Red where a scored prompt reuses KV, and where a piece's last row is not scored."""
    reference, engine = make_model(family), make_engine(make_model(family), deterministic=deterministic)
    engine._stepper._scored_tokens_per_step = 7
    prompts = [prompt_of(length, 99) for length in (1, 2, 40, 70)]
    run_all(engine, [request(prompts[-1])])
    plain = [request(prompt_of(30, seed), max_tokens=3) for seed in (1, 2)]
    asked = [replace(request(prompt, max_tokens=2), prompt_logprobs=3) for prompt in prompts]
    *beside, first, second, third, fourth = run_all(engine, [*plain, *asked])
    assert [generation.prompt_logprobs for generation in beside] == [None, None]
    for prompt, generation in zip(prompts, (first, second, third, fourth), strict=True):
        scores, expected = generation.prompt_logprobs, full_logits(reference, prompt).log_softmax(-1)
        assert scores is not None
        assert len(scores.logprobs) == len(scores.top_logprobs) == len(prompt) - 1
        own = expected[:-1].gather(1, torch.tensor(prompt[1:], dtype=torch.int64).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(torch.tensor(scores.logprobs), own, atol=1e-4, rtol=0)
        likeliest = torch.tensor([[value for _, value in top] for top in scores.top_logprobs]).reshape(-1, 3)
        torch.testing.assert_close(likeliest, expected[:-1].topk(3).values, atol=1e-4, rtol=0)
        sampled = scored(reference, prompt, generation)
        torch.testing.assert_close(torch.tensor(generation.logprobs), sampled, atol=1e-4, rtol=0)
