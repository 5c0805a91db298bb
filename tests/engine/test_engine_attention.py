"""Models whose layers differ in their attention, served with chunked prompts and single steps, against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy_engines import _COMMON, make_engine, prompt_of, request, run_all, scored
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    GraniteSWAConfig,
    Llama4TextConfig,
)

from sharpen.engine.embedded.forward import kv_layout
from sharpen.engine.embedded.kv import KVShape
from sharpen.engine.families import inspect_model

PLAIN = {name: value for name, value in _COMMON.items() if name != "head_dim"}
TWO = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
FOUR = {
    **_COMMON,
    "num_hidden_layers": 4,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 4,
}
MODELS: dict[str, Any] = {
    "soft caps": lambda: Gemma2Config(**_COMMON, **TWO, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "sinks": lambda: GraniteSWAConfig(**PLAIN, **TWO),
    "sizes by layer, shared keys": lambda: Gemma4TextConfig(
        **FOUR, global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True
    ),
    "shared keys": lambda: Gemma3nTextConfig(**FOUR, laurel_rank=4, activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0]),
    "chunks": lambda: Llama4TextConfig(
        **_COMMON,
        num_local_experts=1,
        moe_layers=[],
        intermediate_size_mlp=48,
        no_rope_layers=[1, 0],
        attention_chunk_size=24,
        floor_scale=9,
        attn_scale=0.5,
    ),
    "two sizes": lambda: DeepseekV3Config(
        **{**PLAIN, "num_key_value_heads": 4},
        n_routed_experts=0,
        first_k_dense_replace=2,
        q_lora_rank=16,
        kv_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
    ),
}


def make(kind: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[kind](), attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_chunked_prompts_and_single_steps_give_the_logprobs_of_transformers(kind: str, deterministic: bool) -> None:
    """Prompts longer than windows and steps, then their continuations. Break: let a layer that shares keys write its
    own (`KVPool.write`), cut values to the keys' size, drop `rule.sinks_H`, swap the two window bounds, take chunks for
    sliding windows, or leave out `scaled_queries`."""
    reference, engine = make(kind), make_engine(make(kind), deterministic=deterministic)
    engine._stepper.prompt_tokens_per_step = 50
    prompts = [prompt_of(length, length) for length in (1, 30, 130)]
    for call in range(2):
        generations = run_all(engine, [request(prompt, noise=call, max_tokens=12) for prompt in prompts])
        for prompt, generation in zip(prompts, generations, strict=True):
            expected = scored(reference, prompt, generation)
            torch.testing.assert_close(torch.tensor(generation.logprobs), expected, atol=1e-4, rtol=0)
        prompts = [
            [*prompt, *generation.ids.tolist(), *prompt_of(4, call)]
            for prompt, generation in zip(prompts, generations, strict=True)
        ]
    assert engine.stats.reused_tokens > 130


def test_the_cache_has_each_layers_own_shape_and_shared_keys_once() -> None:
    """Break: take the shape of the first layer for all, or note no owners in `LayoutProbe`."""
    model = make("sizes by layer, shared keys")
    layout = kv_layout(model, inspect_model(model, 256))
    assert layout.shapes == {
        0: KVShape(num_heads=2, key_size=16, value_size=16),
        1: KVShape(num_heads=1, key_size=32, value_size=32),
    }
    assert layout.owners == {2: 0, 3: 1}
    assert layout.elements_per_position == 2 * 2 * 16 + 2 * 32
    assert model.config._attn_implementation == "eager"  # as it was
    two = make("two sizes")
    assert kv_layout(two, inspect_model(two, 256)).shapes[0] == KVShape(num_heads=4, key_size=12, value_size=6)
