"""The embedded engine records the experts of every token that it computes: also of reused, copied and recomputed
ones."""

import asyncio
import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from expert_toys import EXPERTS, make_experts
from toy_engines import make_engine, request, run_all
from trainer_toys import VOCABULARY

from sharpen.errors import ModelError
from sharpen.models.routing import Routing


def ids_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, length).tolist()


@torch.no_grad()
def own_routes(model: Any, ids: list[int]) -> np.ndarray:
    """The experts that the model itself chooses for these ids, without our engine."""
    routing = Routing(model)
    with routing.recording() as recorded:
        model(input_ids=torch.tensor([ids]), use_cache=False)
        return recorded.routes_NLK.numpy()


def check(model: Any, prompt: list[int], generation: Any) -> None:
    ids = [*prompt, *generation.ids.tolist()]
    assert generation.routes_NLK.dtype == np.uint8
    np.testing.assert_array_equal(generation.routes_NLK, own_routes(copy.deepcopy(model), ids[:-1]))


@pytest.mark.parametrize("family", EXPERTS)
def test_every_token_but_the_last_has_the_experts_that_the_model_chooses(family):
    model = make_experts(family)
    engine = make_engine(copy.deepcopy(model))
    prompts = [ids_of(length, seed) for seed, length in enumerate((5, 40, 40, 17))]
    for prompt, generation in zip(prompts, run_all(engine, [request(prompt) for prompt in prompts]), strict=True):
        assert len(generation.routes_NLK) == len(prompt) + len(generation.ids) - 1
        check(model, prompt, generation)


def test_routes_of_a_reused_prefix_are_copied_with_its_keys():
    """Break: leave `copy_routes` out."""
    model = make_experts("qwen3_moe")
    engine = make_engine(copy.deepcopy(model))
    common = ids_of(48, seed=1)
    run_all(engine, [request(common)])
    prompts = [[*common, *ids_of(4, seed)] for seed in range(2, 5)]
    generations = run_all(engine, [request(prompt, noise=number) for number, prompt in enumerate(prompts)])
    assert engine.stats.reused_tokens > 0
    for prompt, generation in zip(prompts, generations, strict=True):
        check(model, prompt, generation)


def test_routes_are_those_of_the_weights_that_recomputed_the_ids():
    """A load in the middle of a call: all ids are computed again, so their routes are the new weights'."""
    model, other = make_experts("qwen3_moe"), make_experts("qwen3_moe", seed=7)
    engine = make_engine(copy.deepcopy(model))
    prompt = ids_of(20, seed=3)

    async def play() -> Any:
        reached = asyncio.Event()
        waiting = asyncio.create_task(
            engine.generate(_told(request(prompt, max_tokens=30, noise=5), lambda _: reached.set()))
        )
        await reached.wait()
        await engine.load(1, dict(other.named_parameters()))
        return await waiting

    generation = asyncio.run(play())
    assert set(generation.versions.tolist()) == {0, 1}
    check(other, prompt, generation)


def _told(one: Any, on_tokens: Any) -> Any:
    return replace(one, on_tokens=on_tokens)


def test_a_deterministic_engine_gives_a_row_the_same_whoever_its_neighbours_are():
    """Break: leave `set_experts_implementation` out (on a machine whose grouped product depends on its rows)."""
    model = make_experts("qwen3_moe")
    prompt = ids_of(30, seed=1)
    alone = run_all(make_engine(copy.deepcopy(model), deterministic=True), [request(prompt, noise=9)])[0]
    others = [request(ids_of(20 + seed, seed), noise=seed) for seed in range(2, 8)]
    among = run_all(make_engine(copy.deepcopy(model), deterministic=True), [*others, request(prompt, noise=9)])[-1]
    np.testing.assert_array_equal(alone.ids, among.ids)
    np.testing.assert_array_equal(alone.logprobs, among.logprobs)
    np.testing.assert_array_equal(alone.routes_NLK, among.routes_NLK)


def test_a_router_that_does_not_choose_by_topk_is_refused_by_name():
    model = make_experts("qwen3_moe")
    model.model.layers[1].mlp.gate.forward = _argmax_router(model.model.layers[1].mlp.gate)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.gate .*topk"):
        make_engine(model)


def _argmax_router(gate: Any) -> Any:
    def forward(hidden: torch.Tensor) -> Any:
        logits = torch.nn.functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
        scores, chosen = logits.softmax(-1).sort(dim=-1, descending=True)
        return logits, scores[:, : gate.top_k], chosen[:, : gate.top_k]

    return forward
