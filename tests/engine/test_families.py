"""Which models are served, by which path, and how the others are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from toy_engines import FAMILIES, make_engine, make_model, prompt_of, request, run_all, scored
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from sharpen.engine.embedded.attention import SlotAttention
from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.engine.embedded.forward import GenericForward
from sharpen.engine.embedded.kv import KVLayout, KVPool
from sharpen.engine.embedded.matmul import choose_float32_matmul
from sharpen.engine.embedded.products import AttentionRule
from sharpen.engine.families import end_token_ids, inspect_model
from sharpen.errors import ModelError

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_which_families_take_the_fast_path(family: str) -> None:
    assert inspect_model(make_model(family), 256).fast == (family in {"qwen3", "qwen2", "llama"})


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_the_generic_path_serves_the_fast_families_too(family: str) -> None:
    reference, engine = make_model(family), make_engine(make_model(family))
    engine._stepper._forward = GenericForward(engine._model)
    prompts = [prompt_of(length, length) for length in (4, 40)]
    for prompt, generation in zip(prompts, run_all(engine, [request(p) for p in prompts]), strict=True):
        torch.testing.assert_close(
            torch.tensor(generation.logprobs), scored(reference, prompt, generation), atol=1e-4, rtol=0
        )


def test_recurrent_models_are_refused_by_name() -> None:
    model = MambaForCausalLM(MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(ModelError, match="MambaForCausalLM"):
        make_engine(model)


def test_rotary_angles_that_change_with_the_length_are_refused_beyond_it() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model = LlamaForCausalLM(LlamaConfig(**SMALL, max_position_embeddings=64, rope_parameters=rope)).eval()
    with pytest.raises(ModelError, match="64"):
        inspect_model(model, 128)
    assert inspect_model(model, 64).fast


def test_a_context_longer_than_the_models_is_refused() -> None:
    with pytest.raises(ModelError, match="512 positions"):
        make_engine(make_model("qwen3"), max_model_len=513)


def test_the_start_up_check_refuses_wrong_attention() -> None:
    """The start-up check: here the model's own scale is changed behind the configuration's back."""
    model = make_model("gemma")
    original = type(model.model.layers[0].self_attn).forward

    class Odd(type(model.model.layers[0].self_attn)):
        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            out, weights = original(self, hidden_states, *args, **kwargs)
            return out + hidden_states.mean(dim=1, keepdim=True), weights

    for layer in model.model.layers:
        layer.self_attn.__class__ = Odd
    with pytest.raises(ModelError, match="differ"):
        make_engine(model)


def test_end_tokens_of_the_generation_configuration_come_first() -> None:
    model = make_model("qwen3")
    model.generation_config.eos_token_id = [4, 5]
    assert end_token_ids(model) == {4, 5}
    model.generation_config.eos_token_id = None
    assert end_token_ids(model) == {1}
    model.config.eos_token_id = None
    assert end_token_ids(model) == frozenset()


def test_from_pretrained_loads_a_directory(tmp_path: Path) -> None:
    make_model("qwen3").save_pretrained(tmp_path)
    engine = EmbeddedEngine.from_pretrained(str(tmp_path), max_model_len=128, device="cpu")
    prompt = prompt_of(10, 0)
    (generation,) = run_all(engine, [request(prompt)])
    torch.testing.assert_close(
        torch.tensor(generation.logprobs), scored(make_model("qwen3"), prompt, generation), atol=1e-4, rtol=0
    )
    bf16 = EmbeddedEngine.from_pretrained(str(tmp_path), max_model_len=128, device="cpu", dtype="bfloat16")
    assert len(run_all(bf16, [request(prompt, max_tokens=2)])[0].ids) <= 2


def test_the_engines_model_still_saves(tmp_path: Path) -> None:
    """Its parameters are views of fused storage; a saved copy must hold each one whole."""
    model = make_model("qwen3")
    make_engine(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    for (name, ours), theirs in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_the_matmul_probe_chooses_by_accuracy_and_leaves_the_setting_alone() -> None:
    before = torch.get_float32_matmul_precision()
    assert choose_float32_matmul([(64, 32), (32, 64)]).precision == "highest"  # too small to gain
    choice = choose_float32_matmul([(512, 2048)] * 5)
    assert choice.precision == "highest" or choice.max_relative_error < 1e-5
    assert torch.get_float32_matmul_precision() == before


def test_padding_rows_and_masked_rows_give_no_nan() -> None:
    """A padding row sees only its own scratch position; no row of the mask may be all -inf."""
    pool = KVPool(
        layout=KVLayout.uniform(1, 1, 4),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_slots=4,
        max_length=64,
        budget_bytes=2**20,
    )
    slot = torch.tensor([0, pool.scratch, 2, pool.scratch])
    position = torch.tensor([3, 0, 0, 0])
    attention = SlotAttention(pool, slot_N=slot, position_N=position, num_decode=4, kv_length=64, segments=[])
    q, k, v = torch.randn(4, 2, 4), torch.randn(4, 1, 4), torch.randn(4, 1, 4)
    for window in (None, 1, 2):
        out = attention.attend(0, q, k, v, AttentionRule(scale=0.5, window=window))
        assert bool(torch.isfinite(out).all())
    torch.testing.assert_close(out[2], v[2].repeat(1, 2)[0])  # position 0 sees itself alone
