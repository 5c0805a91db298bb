"""Hybrid models behind vLLM on a CPU: logprobs are transformers', before and after an update, and so are the experts of
those that have some."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import DeepseekScalingRotaryEmbedding
from vllm_served import MODEL, request, scored, start, weights

from sharpen.engine.vllm.worker import flatten_heads
from sharpen.models.routing import routing_of

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": 2,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_dense_layers": 1,
        "conv_dim": 64,  # as published checkpoints have it: vLLM reads it
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "position_embedding_type": "nope",
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 16,
    },
}


def make(kind: str, folder: Path) -> Any:
    """A random checkpoint, and its model."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SIZES, **SETTINGS[kind])).save_pretrained(folder)
    for file in MODEL.glob("*token*"):
        shutil.copyfile(file, folder / file.name)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)


def chosen(model: Any, ids: list[int]) -> np.ndarray | None:
    """The experts of each token, sorted; None for a model without some."""
    routing = routing_of(model)
    if routing is None:
        return None
    with routing.recording() as recorded:
        model(torch.tensor([ids]))
        return recorded.routes_NLK.sort(-1).values.numpy()


@pytest.mark.parametrize("kind", SETTINGS)
def test_logprobs_and_experts_are_transformers(tmp_path, kind):
    """Red for LFM2 when vLLM's rotary embedding gets its queries head by head (logprobs are off by up to 1)."""
    model = make(kind, tmp_path)
    prompts = ([7, 8, 9], [(7 * i + 3) % 500 for i in range(40)], [(11 * i + 5) % 500 for i in range(150)])
    asked = [request(prompt, noise=i, max_tokens=12) for i, prompt in enumerate(prompts)]
    served = start(model_path=str(tmp_path))
    try:
        for version in range(2):
            for one, generation in zip(asked, served.generate(*asked), strict=True):
                assert set(generation.versions.tolist()) == {version}
                np.testing.assert_allclose(generation.logprobs, scored(model, one, generation), atol=1e-4)
                experts = chosen(model, [*one.prompt_ids.tolist(), *generation.ids.tolist()][:-1])
                if experts is not None:
                    np.testing.assert_array_equal(np.sort(generation.routes_NLK, axis=-1), experts)
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
            served.run(served.engine.load(version + 1, weights(model)))
    finally:
        served.run(served.engine.close())
        served.thread.close()


def test_rotary_embeddings_of_other_kinds_get_their_queries_as_they_come():
    """DeepSeek's takes them only head by head. Red (`RuntimeError`) when it is given flat ones."""
    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(custom_ops=["all"]))):
        plain = RotaryEmbedding(16, 16, 64, 10_000, True, torch.float32)
        scaled = DeepseekScalingRotaryEmbedding(16, 16, 64, 10_000, True, 1.0, torch.float32)
    model = torch.nn.ModuleList([plain, scaled])
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(5, heads, 16, generator=generator) for heads in (4, 2))
    flatten_heads(model)
    for rotary in model:
        expected = rotary.forward_native(torch.arange(5), query.clone(), key.clone())
        torch.testing.assert_close(rotary(torch.arange(5), query.clone(), key.clone()), expected)
