"""The same engine on a CUDA GPU."""

from __future__ import annotations

import asyncio

import pytest
import torch
from toy_engines import FAMILIES, make_engine, make_model, prompt_of, request, run_all, scored

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", FAMILIES)
def test_gpu_logprobs_equal_a_cpu_forward(family: str) -> None:
    reference, engine = make_model(family), make_engine(make_model(family).to("cuda"))
    prompts = [prompt_of(length, length) for length in (1, 10, 61, 90)]
    generations = run_all(engine, [request(prompt, noise=index) for index, prompt in enumerate(prompts)])
    for prompt, generation in zip(prompts, generations, strict=True):
        torch.testing.assert_close(
            torch.tensor(generation.logprobs), scored(reference, prompt, generation), atol=1e-3, rtol=0
        )


def test_gpu_takes_new_weights_from_the_cpu() -> None:
    engine = make_engine(make_model("qwen3").to("cuda"))
    weights = {name: tensor.detach().clone() for name, tensor in make_model("qwen3", 1).named_parameters()}
    asyncio.run(engine.load(1, weights))
    prompt = prompt_of(20, 0)
    (generation,) = run_all(engine, [request(prompt)])
    torch.testing.assert_close(
        torch.tensor(generation.logprobs), scored(make_model("qwen3", 1), prompt, generation), atol=1e-3, rtol=0
    )


def test_gpu_is_deterministic() -> None:
    requests = [request(prompt_of(30, 0) + prompt_of(n, n), noise=n) for n in range(1, 12)]
    once = run_all(make_engine(make_model("qwen3").to("cuda"), deterministic=True), requests)
    again = run_all(make_engine(make_model("qwen3").to("cuda"), deterministic=True, max_slots=2), requests[::-1])[::-1]
    for one, other in zip(once, again, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.logprobs.tobytes() == other.logprobs.tobytes()
