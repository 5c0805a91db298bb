"""Tiny random mixtures of experts of each family, whose routers spread the tokens over all experts."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from trainer_toys import SIZES
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

_EIGHT = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
_GROUPED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_SHARED = {**_EIGHT, "shared_expert_intermediate_size": 16}
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_EIGHT, "head_dim": 8, "norm_topk_prob": True},
    "qwen2_moe": _SHARED,
    "olmoe": _EIGHT,
    "mixtral": _LOCAL,
    "granitemoe": _LOCAL,
    "glm4_moe": {**_GROUPED, "head_dim": 8},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 0} | _EIGHT,
    "lfm2_moe": {**_EIGHT, "num_dense_layers": 1, "layer_types": ["full_attention"] * 2},
    "gpt_oss": {**_LOCAL, "head_dim": 8, "rope_parameters": None},
    "deepseek_v3": {
        **_GROUPED,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
    "llama4_text": {
        **_LOCAL,
        "num_experts_per_tok": 1,
        "head_dim": 8,
        "intermediate_size_mlp": 48,
        "num_hidden_layers": 3,
        "moe_layers": [1, 2],
        "no_rope_layers": [1, 0, 1],
        "attention_chunk_size": 12,
        "floor_scale": 7,
        "attn_scale": 0.5,
    },
    "qwen3_next": {**_SHARED, **_DELTA, "head_dim": 8},
    "qwen3_5_moe_text": {**_SHARED, **_DELTA, "head_dim": 8},
}
"""The settings of each family beside `SIZES`."""

TRAINED = [family for family in EXPERTS if "linear_num_value_heads" not in EXPERTS[family]]
"""Those without recurrent layers."""


def copy_of(model: Any) -> Any:
    """Copy the weights into a model with transformers' own attention, whose routers are not wrapped."""
    twin = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), attn_implementation="eager").to(model.dtype)
    twin.load_state_dict(model.state_dict())
    return twin.eval()


def make_experts(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A random Hugging Face model of the family."""
    torch.manual_seed(seed)
    settings = {**SIZES, **EXPERTS[family]}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**settings)).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate.weight" in name or "router" in name:
                parameter.normal_()
    return model


def put_experts(folder: Path, family: str = "qwen3_moe") -> Path:
    """Replace the toy model in `folder` (`toy_model.make_toy_model`) by a mixture of 8 experts of its sizes."""
    dense = json.loads((folder / "config.json").read_text())
    kept = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    kept += ("max_position_embeddings", "tie_word_embeddings", "eos_token_id", "pad_token_id", "intermediate_size")
    torch.manual_seed(0)
    settings = {name: dense[name] for name in kept}
    settings |= {name: value for name, value in EXPERTS[family].items() if name not in settings}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**settings | {"moe_intermediate_size": 32}))
    for name, weight in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            torch.nn.init.normal_(weight)
    model.save_pretrained(folder)
    return folder
