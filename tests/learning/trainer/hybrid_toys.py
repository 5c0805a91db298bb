"""Tiny random models with a recurrent or convolution layer of each kind, beside attention where the family has it."""

from typing import Any

import torch
from trainer_toys import SIZES
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
_CONVOLUTION: dict[str, Any] = {"layer_types": ["conv", "full_attention"]}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA,
    "qwen3_next": {**_DELTA, "num_experts": 0, "mlp_only_layers": [0, 1]},
    "olmo_hybrid": {**_DELTA, "linear_num_key_heads": 4},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "dense"],
        "num_local_experts": 0,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    },
    "lfm2": _CONVOLUTION,
    "lfm3": _CONVOLUTION,
    "granitemoehybrid": {
        **_MAMBA,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 48,
        "position_embedding_type": "nope",
    },
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64, "head_dim": 8},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp"],
        "num_hidden_layers": 3,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "head_dim": 8,
        "chunk_size": 16,
    },
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "mamba_d_state": 8,
        "mamba_expand": 2,
        "use_mamba_kernels": False,
    },
}
"""The settings of each family beside `SIZES`."""


def make_hybrid(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A random Hugging Face model of the family, whose layers all matter."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**{**SIZES, **HYBRIDS[family]}))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model.to(dtype).eval()
