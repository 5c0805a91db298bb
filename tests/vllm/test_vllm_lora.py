"""Adapters that vLLM loads without merging them: what they change, requests in flight, and what is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from vllm_served import (
    MODEL,
    begun,
    endless,
    frozen,
    generating,
    read_model,
    request,
    scored,
    start,
    vllm_left,
    vllm_processes,
)

from sharpen.config.trainer import LoraConfig
from sharpen.errors import ModelError
from sharpen.learning.trainer.lora import AdaptedModel
from sharpen.learning.trainer.model import read_module

LORA = LoraConfig(rank=6, alpha=12)
LONG = [(7 * i + 3) % 500 for i in range(300)]  # more than two blocks of the prefix cache


@pytest.fixture(scope="module")
def adapted():
    known = {process.pid for process in vllm_processes()}
    served = start(lora=LORA, max_slots=16)
    yield served
    served.run(served.engine.close())
    served.thread.close()
    assert not vllm_left(known)


def trained(seed: int) -> AdaptedModel:
    """A policy whose adapters are far from nothing."""
    policy = AdaptedModel(read_module(MODEL, torch.device("cpu")), lora=LORA, compute_dtype=torch.float32)
    policy.alone = True
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in policy.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.07)
    return policy


def acting(policy: AdaptedModel) -> Any:
    """The model that the policy acts with, as transformers computes it."""
    policy.alone = False
    module = read_model()
    wrong = module.load_state_dict(policy.state_tensors(), strict=False)
    assert set(wrong.missing_keys) <= {"lm_head.weight"}
    policy.alone = True
    return module


def check(served: Any, policy: AdaptedModel, *asked: Any) -> None:
    module = acting(policy)
    for one, generation in zip(asked, served.generate(*asked), strict=True):
        assert set(generation.versions.tolist()) == {served.engine.version}
        np.testing.assert_allclose(generation.logprobs, scored(module, one, generation), atol=1e-4)


def test_trap_14_adapters_of_each_version_act_and_no_cache_survives_them(adapted, model):
    """Before the first load they change nothing. Red when all versions' requests have one name and one folder (`write`,
    engine/vllm/adapters.py): prompts come from the prefix cache of other adapters."""
    asked = [request(LONG, max_tokens=8), request([506, 61], noise=3, temperature=0.7)]
    for one, generation in zip(asked, adapted.generate(*asked), strict=True):
        np.testing.assert_allclose(generation.logprobs, scored(model, one, generation), atol=1e-4)
    for seed in (1, 2, 1):
        policy = trained(seed)
        adapted.run(adapted.engine.load(adapted.engine.version + 1, policy.state_tensors()))
        for _ in range(2):
            check(adapted, policy, *asked)


def test_requests_in_flight_keep_their_adapters_and_their_version(adapted):
    """One batch has requests of two versions, each with the logprobs of its own; the adapters that nobody uses any more
    are dropped at the next load. Red when `_sample` (engine/vllm/engine.py) takes vLLM's versions."""
    old, new = trained(3), trained(4)
    asked = [request([506, *range(40, 40 + length)], noise=9, max_tokens=200, temperature=1.5) for length in (3, 30)]
    adapted.run(adapted.engine.load(10, old.state_tensors()))

    async def scenario():
        with endless(adapted.engine):
            calls = await generating(adapted.engine, *asked)
            async with frozen(adapted.engine):
                assert not any(call.done() for call in calls)
                await adapted.engine.load(11, new.state_tensors())
                late = await begun(adapted.engine, *asked)
        return await asyncio.gather(*calls, *late)

    generations = adapted.run(scenario())
    for one, generation, version in zip([*asked, *asked], generations, (10, 10, 11, 11), strict=True):
        assert set(generation.versions.tolist()) == {version}
        module = acting(old if version == 10 else new)
        np.testing.assert_allclose(generation.logprobs, scored(module, one, generation), atol=1e-4)
    folder = adapted.engine._folder
    assert len(list(folder.glob("adapter-*"))) == 2
    adapted.run(adapted.engine.load(12, old.state_tensors()))
    assert len(list(folder.glob("adapter-*"))) == 1
    assert list(adapted.run(adapted.engine._llm.list_loras())) == [adapted.engine._adapter.request.lora_int_id]


def test_adapters_of_another_model_are_refused_and_nothing_changes(adapted):
    policy = trained(5)
    adapted.run(adapted.engine.load(20, policy.state_tensors()))
    wrong = policy.state_tensors()
    wrong.pop(next(iter(wrong)))
    with pytest.raises(ModelError, match=r"this model and trainer\.lora: base_model"):
        adapted.run(adapted.engine.load(21, wrong))
    assert adapted.engine.version == 20
    check(adapted, policy, request([506, 61]))
