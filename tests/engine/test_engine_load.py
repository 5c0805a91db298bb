"""New weights: what they change, what must not survive them, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from toy_engines import FAMILIES, VOCAB, full_logits, make_engine, make_model, prompt_of, request, run_all, scored

from sharpen.contracts import Generation
from sharpen.errors import ModelError


def weights_of(family: str, seed: int) -> Mapping[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in make_model(family, seed).named_parameters()}


def without_end(family: str, seed: int = 0) -> object:
    model = make_model(family, seed)
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_trap_14_loaded_weights_serve_like_a_fresh_engine(family: str) -> None:
    """Red when `load` leaves the prefix cache in place (drop `forget_all` from `Scheduler.suspend_all`)."""
    prompts = [prompt_of(50, 1), prompt_of(20, 2), prompt_of(50, 1) + prompt_of(9, 3)]
    requests = [request(prompt, noise=index, max_tokens=12) for index, prompt in enumerate(prompts)]
    engine, fresh = make_engine(make_model(family, 0)), make_engine(make_model(family, 1))
    before = run_all(engine, requests)
    asyncio.run(engine.load(5, weights_of(family, 1)))
    after, expected = run_all(engine, requests), run_all(fresh, requests)
    assert [g.ids.tolist() for g in after] == [g.ids.tolist() for g in expected]
    assert [g.ids.tolist() for g in after] != [g.ids.tolist() for g in before]
    for one, other in zip(after, expected, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
        assert set(one.versions.tolist()) == {5}


@pytest.mark.parametrize("deterministic", [False, True])
def test_trap_14_no_token_after_a_load_uses_old_kv(deterministic: bool) -> None:
    """Red when running requests find their own older KV again (drop `forget_all` from `Scheduler.suspend_all`)."""
    engine = make_engine(without_end("qwen3"), deterministic=deterministic)
    prompts = [prompt_of(length, length) for length in (5, 40, 70)]

    async def scenario() -> list[Generation]:
        tasks = [asyncio.create_task(engine.generate(request(p, max_tokens=30, noise=9))) for p in prompts]
        while engine.stats.sampled_tokens < 30:
            await asyncio.sleep(0)
        await engine.load(1, weights_of("qwen3", 1))
        return list(await asyncio.gather(*tasks))

    models = [make_model("qwen3", 0), make_model("qwen3", 1)]
    for prompt, generation in zip(prompts, asyncio.run(scenario()), strict=True):
        versions = generation.versions.tolist()
        assert versions == sorted(versions)
        assert set(versions) == {0, 1}
        by_version = torch.stack([scored(model, prompt, generation) for model in models])
        expected = by_version.gather(0, torch.tensor(versions).unsqueeze(0))[0]
        torch.testing.assert_close(torch.tensor(generation.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["qwen3", "gemma"])
def test_trap_29_the_tied_output_layer_follows_the_embedding(family: str) -> None:
    """Red when the forward keeps a copy of the output weight (`.clone()` it in `FastForward`)."""
    engine = make_engine(make_model(family, 0))
    run_all(engine, [request([4, 5])])
    weights = dict(weights_of(family, 0))
    embedding = weights["model.embed_tokens.weight"]
    embedding.copy_(torch.randn(embedding.shape, generator=torch.Generator().manual_seed(3)) * 0.3)
    asyncio.run(engine.load(1, weights))
    reference = make_model(family, 0)
    reference.load_state_dict(weights, strict=False)
    prompt = prompt_of(20, 4)
    (generation,) = run_all(engine, [request(prompt)])
    torch.testing.assert_close(
        torch.tensor(generation.logprobs), scored(reference, prompt, generation), atol=1e-4, rtol=0
    )


def test_tied_weights_may_come_under_both_names_if_equal() -> None:
    engine = make_engine(make_model("qwen3", 0))
    weights = dict(weights_of("qwen3", 1))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    asyncio.run(engine.load(1, weights))
    assert engine.version == 1
    weights["lm_head.weight"] = weights["lm_head.weight"] + 1
    with pytest.raises(ModelError, match="tied"):
        asyncio.run(engine.load(2, weights))


@pytest.mark.parametrize("damage", ["missing", "unknown", "shape"])
def test_a_load_with_wrong_names_or_shapes_changes_nothing(damage: str) -> None:
    engine = make_engine(make_model("qwen2", 0))
    expected = run_all(engine, [request(prompt_of(9, 1))])[0]
    weights = dict(weights_of("qwen2", 1))
    name = "model.layers.1.mlp.down_proj.weight"
    if damage == "missing":
        del weights[name]
    elif damage == "unknown":
        weights["model.layers.7.mlp.down_proj.weight"] = weights[name]
    else:
        weights[name] = weights[name].t().contiguous()
    with pytest.raises(ModelError, match="down_proj"):
        asyncio.run(engine.load(1, weights))
    again = run_all(engine, [request(prompt_of(9, 1))])[0]
    np.testing.assert_array_equal(again.ids, expected.ids)
    assert set(again.versions.tolist()) == {0}


def test_loading_converts_the_dtype() -> None:
    engine = make_engine(make_model("llama", 0).to(torch.bfloat16))
    asyncio.run(engine.load(1, weights_of("llama", 1)))
    reference = make_model("llama", 1).to(torch.bfloat16)
    prompt = prompt_of(9, 1)
    (generation,) = run_all(engine, [request(prompt, temperature=0.0, max_tokens=1)])
    assert int(generation.ids[0]) == int(full_logits(reference, prompt)[-1].argmax())
    assert int(generation.ids[0]) < VOCAB
