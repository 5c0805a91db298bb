"""Mixtures of experts behind vLLM: the experts that it returns are those that transformers' routers choose for the same
ids, and a run trains on them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from expert_toys import put_experts
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from vllm_served import MODEL, Served, endless, generating, request, scored, start, weights

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, tune
from sharpen.contracts import GenerateRequest, Generation
from sharpen.evidence.certificate.certify import certify
from sharpen.learning.experience.reading import read_groups

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],  # so that the layers with experts are not all of them
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LONG = [(11 * i + 5) % 500 + 3 for i in range(250)]
"""Nearly two blocks of 128 tokens: a few tokens more, and a request needs its third."""


class Returned:
    """Reads experts as the engine's own reader, and keeps how many more rows than needed came for each request: those
    of tokens that were computed again."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.reader, self.surplus = engine, engine._routes, list[int]()

    def __enter__(self) -> Returned:
        self.engine._routes = self
        return self

    def __exit__(self, *_: object) -> None:
        self.engine._routes = self.reader

    def read(self, returned: Any, num_tokens: int) -> Any:
        self.surplus.append(len(returned) - num_tokens)
        return self.reader.read(returned, num_tokens)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint, and the model."""
    folder = tmp_path_factory.mktemp("experts")
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES)).eval().requires_grad_(False)
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.weight.normal_(std=0.5)
    model.save_pretrained(folder)
    for file in MODEL.glob("*token*"):
        shutil.copyfile(file, folder / file.name)
    return folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def mixing(mixture: tuple[Path, Any]) -> Iterator[Served]:
    """An engine with room for ten blocks of KV."""
    served = start(model_path=str(mixture[0]), kv_cache_mb=1)
    yield served
    served.run(served.engine.close())
    served.thread.close()


def chosen(model: Any, ids: list[int]) -> np.ndarray:
    """The experts of each token in each layer that has some, sorted."""
    with torch.no_grad():
        logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    return torch.stack([layer.topk(2, dim=-1).indices.sort(-1).values for layer in logits], dim=1).numpy()


def check(model: Any, asked: GenerateRequest, generation: Generation) -> None:
    """Logprobs and experts of a generation are the model's."""
    np.testing.assert_allclose(generation.logprobs, scored(model, asked, generation), atol=1e-4)
    ids = [*asked.prompt_ids.tolist(), *generation.ids.tolist()]
    assert generation.routes_NLK is not None
    assert generation.routes_NLK.dtype == np.uint8
    np.testing.assert_array_equal(np.sort(generation.routes_NLK, axis=-1), chosen(model, ids[:-1]))


def test_the_experts_of_every_token_in_a_batch_also_of_cached_ones_and_of_requests_that_gave_way(mixing, mixture):
    """Red when experts of other requests' tokens, of other layers, or of none for a cached prefix are returned."""
    model = mixture[1]
    short = [request([7, 8, 9], noise=3), request(LONG[:40], noise=4, max_tokens=8, temperature=0.7)]
    for _ in range(2):  # the second time with two blocks of its prompt cached
        asked = [*short, request([*LONG, *LONG[:30]], noise=5, max_tokens=4)]
        for one, generation in zip(asked, mixing.generate(*asked), strict=True):
            check(model, one, generation)
    with endless(mixing.engine), Returned(mixing.engine) as returned:
        crowd = [request([30 + i, *LONG[1:]], noise=i, max_tokens=20) for i in range(6)]
        for one, generation in zip(crowd, mixing.generate(*crowd), strict=True):
            check(model, one, generation)
    assert max(returned.surplus) > 0, "there was room for all"


def test_experts_under_new_weights_are_the_new_ones_also_of_tokens_before(mixing, mixture):
    """Every token of a call that saw an update has the experts that the new weights choose. Red when vLLM's own
    experts of the tokens before the update are kept, and when experts are sent as transformers holds them."""
    model = mixture[1]
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.05)

    async def update() -> Generation:
        asked = request(LONG[:60], noise=6, max_tokens=200)
        (call,) = await generating(mixing.engine, asked)
        await mixing.engine.load(1, weights(model))
        return await call

    with endless(mixing.engine):
        generation = mixing.run(update())
    assert set(generation.versions.tolist()) == {0, 1}
    ids = [*LONG[:60], *generation.ids.tolist()]
    np.testing.assert_array_equal(np.sort(generation.routes_NLK, axis=-1), chosen(model, ids[:-1]))
    asked = request(LONG[:60], noise=7)
    check(model, asked, mixing.generate(asked)[0])


def test_two_steps_of_a_run_are_certified(agent, tmp_path):
    """The trainer replays vLLM's experts: its logprobs are vLLM's, before and after an update."""
    folder, data = tmp_path / "model", str(MODEL.parent / "data")
    shutil.copytree(MODEL, folder)
    put_experts(folder)
    result = tune(
        workflow_func=agent.run_agent,
        judge_func=agent.judge,
        train_dataset=DatasetConfig(path=data, split="train", total_steps=2),
        model=TunerModelConfig(model_path=str(folder), max_model_len=512, max_tokens=16),
        algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=4, batch_size=2, learning_rate=1e-3),
        settings={
            "checkpoint_root_dir": str(tmp_path),
            "engine": {"type": "vllm", "kv_cache_mb": 64, "max_slots": 16},
            "loss.kl": "none",
            "rollout.failure_reward": 0.0,
            "evaluation.before_and_after": False,
            "evaluation.hold_out": 0,
        },
    )
    assert certify(result.run_dir).holds
    calls = [call for group in read_groups(result.run_dir / "run.db") for one in group.rollouts for call in one.calls]
    assert {int(call.versions_S[0]) for call in calls} == {0, 1}
    assert all(len(call.routes_NLK) == len(call.prompt_ids_P) + len(call.sampled_ids_S) - 1 for call in calls)
    lines = [json.loads(line) for line in Path(result.run_dir / "metrics.jsonl").read_text().splitlines()]
    gaps = [line["trainer/logprob_gap_max"] for line in lines if "trainer/logprob_gap_max" in line]
    assert len(gaps) == 2
    assert max(gaps) < 1e-4
