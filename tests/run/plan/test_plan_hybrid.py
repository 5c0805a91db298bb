"""What recurrent layers and experts take: states beside the KV cache, their snapshots, the experts of tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_toys import EXPERTS, make_experts
from hybrid_toys import HYBRIDS, make_hybrid
from plan_toys import case_of, gpu, run_config, write_config
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Gemma3nTextConfig, Gemma4TextConfig, Lfm2Config

from sharpen.config.trainer import LoraConfig
from sharpen.engine.embedded.states import StatePool
from sharpen.learning.trainer.lora import AdaptedModel
from sharpen.models.recurrent import example_state, mixers_of
from sharpen.run.plan.case import Case
from sharpen.run.plan.live import Pass, _peaks, pass_bytes
from sharpen.run.plan.memory import engine_items, engine_need, places, slot_length, tree_states
from sharpen.run.plan.sizes import sizes_of
from sharpen.run.plan.speed import write_copy


@pytest.mark.parametrize("family", HYBRIDS)
def test_states_are_those_of_the_engine(family: str) -> None:
    model = make_hybrid(family)
    sizes = sizes_of(model.config)
    pool = StatePool(example_state(mixers_of(model), model))
    assert sizes.state_bytes(4) == pool.bytes_per_slot > 0
    assert len(sizes.states) == len(mixers_of(model))


def case(folder: Path, model: Any, settings: Mapping[str, Any]) -> Case:
    return case_of(run_config(write_config(folder, model.config), settings), gpu(16))


def test_slots_and_snapshots_by_hand(tmp_path: Path) -> None:
    """One layer of Qwen3.5: 48 inputs of a convolution over 4, and 4 heads of 8 x 8: 192 and 256 values. 32 slots, and
    two snapshots for each of 8 sequences."""
    planned = case(tmp_path, make_hybrid("qwen3_5_text"), {"engine.dtype": "float32"})
    sizes = planned.models.policy
    assert sizes.states == ((64 * 4, 4 * 8 * 8),)
    assert len(sizes.kv_values) == 1  # of two layers
    state = 4 * (64 * 4 + 4 * 8 * 8)
    need = engine_need(planned, planned.config.model, sizes, vllm=False, trained=True)
    assert need.states == (32 + 2 * 8) * state
    assert need.kv_cache == 33 * slot_length(256, 256, blocks=False) * sizes.kv_bytes(4)
    assert {item.role: item.num_bytes for item in engine_items(planned)}["engine: recurrent states"] == need.states


def test_sequences_that_go_on_from_a_shared_prompt_have_its_states(tmp_path: Path) -> None:
    hybrid = case(tmp_path, make_hybrid("qwen3_5_text"), {"trainer.gradient_checkpointing": True})
    single = {"algorithm.algorithm_type": "reinforceplusplus", "algorithm.group_size": 1}
    alone = case(tmp_path, make_hybrid("qwen3_5_text"), single)
    assert tree_states(hybrid, 10**9) == 2 * 8 * 4 * (64 * 4 + 4 * 8 * 8)
    assert tree_states(alone, 10**9) == 0


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_experts_and_their_adapters_are_those_of_the_model(family: str) -> None:
    model = make_experts(family)
    sizes, lora = sizes_of(model.config), LoraConfig(rank=2, experts=True)
    fused = [parameter.numel() for name, parameter in model.named_parameters() if parameter.dim() == 3]
    assert sizes.in_experts == sum(fused) > 0
    assert sizes.routes == len(fused) // 2 * EXPERTS[family]["num_experts_per_tok"]
    adapted = AdaptedModel(model, lora=lora, compute_dtype=model.dtype)
    names = tuple(adapted.adapters["target_modules"])
    counted = sizes.lora_parameters(lora.model_copy(update={"target_modules": names}))
    assert counted == sum(parameter.numel() for _, parameter in adapted.parameters())


def test_frozen_experts_take_half_in_bfloat16(tmp_path: Path) -> None:
    model = make_experts("qwen3_moe")
    planned = case(tmp_path, model, {"trainer.lora": {"rank": 2}})
    sizes = planned.models.policy
    (device,) = places(planned, certain=True)
    weights = next(item.num_bytes for item in device.items if item.role == "policy: weights")
    frozen = 4 * sizes.parameters - 2 * (sizes.block_linear + sizes.in_experts)
    assert weights == frozen + 4 * planned.num_trained


def test_experts_in_4_bits_are_loaded_once(tmp_path: Path) -> None:
    """On a GPU the engine reads linear layers whole and then rounds them; experts stay as they are, and the trainer
    takes the engine's. Red when all that the model has is counted a second time while it loads."""
    planned = case(tmp_path, make_experts("qwen3_moe"), {"trainer.lora": {"rank": 2, "base": "nf4"}})
    linear = planned.num_in_base
    assert 0 < linear < planned.models.policy.held - planned.models.policy.in_experts
    (device,) = places(planned)
    (loading,) = (item for item in device.items if item.role == "a model, read whole")
    assert (loading.when, loading.num_bytes) == ("loading", 2 * linear - linear // 2 - linear // 64)


def test_depth_is_extrapolated_by_whole_patterns_of_layers() -> None:
    """Red when two and three layers stand for all: those have one layer with attention, and three convolutions."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500}
    kinds = ["conv", "conv", "conv", "full_attention"] * 3
    config = Lfm2Config(**sizes, intermediate_size=96, num_hidden_layers=12, layer_types=kinds)
    traced = Pass(num_tokens=256, num_loss_tokens=20, bfloat16=False)
    assert pass_bytes(config, traced) == max(_peaks(config, traced, 12))


def sharing_keys(family: Any) -> Any:
    """A model whose last four of ten layers have the keys of others."""
    return family(
        hidden_size=32, intermediate_size=48, num_hidden_layers=10, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=320, vocab_size_per_layer_input=320, hidden_size_per_layer_input=8, sliding_window=12,
        layer_types=["sliding_attention", "full_attention"] * 5, num_kv_shared_layers=4, pad_token_id=0,
        **({"activation_sparsity_pattern": [0.0] * 10} if family is Gemma3nTextConfig else {}),
    )  # fmt: skip


@pytest.mark.parametrize("family", [Gemma3nTextConfig, Gemma4TextConfig])
def test_layers_that_share_keys_are_traced_with_those_that_have_them(family: Any) -> None:
    """Red when the first layers stand for all: transformers makes no model of them, nothing there has keys to share."""
    config = sharing_keys(family)
    taken = [pass_bytes(config, Pass(num_tokens=length, num_loss_tokens=8, bfloat16=False)) for length in (40, 80)]
    assert 0 < taken[0] < taken[1]


@pytest.mark.parametrize("family", [Gemma3nTextConfig, Gemma4TextConfig])
@pytest.mark.parametrize(("depth", "sharing"), [(1, 0), (2, 0), (8, 2)])
def test_a_copy_of_the_first_layers_can_be_loaded(family: Any, depth: int, sharing: int, tmp_path: Path) -> None:
    """Red, as the end of a run before its first step, where a copy has what its config says of other layers; and where
    its buffers have what lay in the memory."""
    write_copy(sharing_keys(family), depth, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (model.config.num_hidden_layers, model.config.num_kv_shared_layers) == (depth, sharing)
    written = load_file(tmp_path / "model.safetensors")
    assert all(tensor.unique().tolist() == [pytest.approx(0.01)] for tensor in written.values())
    assert model(torch.ones(1, 4, dtype=torch.long)).logits.isfinite().all()
