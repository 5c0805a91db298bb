"""Tiny random mixtures of experts of each family, whose routers spread the tokens over all experts."""

from dataclasses import dataclass, field
from typing import Any

import torch
from trainer_toys import SIZES
from transformers import CONFIG_MAPPING, AutoModelForCausalLM


@dataclass(frozen=True, kw_only=True)
class Toy:
    """The settings of a family beside `SIZES`. `plain_attention`: nothing but full attention besides its experts."""

    settings: dict[str, Any] = field(default_factory=dict)
    plain_attention: bool = True


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
EXPERTS: dict[str, Toy] = {
    "qwen3_moe": Toy(settings={**_EIGHT, "head_dim": 8, "norm_topk_prob": True}),
    "qwen2_moe": Toy(settings=_SHARED),
    "olmoe": Toy(settings=_EIGHT),
    "mixtral": Toy(settings=_LOCAL),
    "granitemoe": Toy(settings=_LOCAL),
    "glm4_moe": Toy(settings={**_GROUPED, "head_dim": 8}),
    "ernie4_5_moe": Toy(settings={"moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 0} | _EIGHT),
    "lfm2_moe": Toy(settings={**_EIGHT, "num_dense_layers": 1, "layer_types": ["full_attention"] * 2}),
    "gpt_oss": Toy(settings={**_LOCAL, "head_dim": 8, "rope_parameters": None}, plain_attention=False),
    "deepseek_v3": Toy(
        settings={
            **_GROUPED,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
        },
        plain_attention=False,
    ),
    "llama4_text": Toy(
        settings={
            **_LOCAL,
            "num_experts_per_tok": 1,
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "moe_layers": [1],
            "attention_chunk_size": 64,
        },
        plain_attention=False,
    ),
    "qwen3_next": Toy(settings={**_SHARED, **_DELTA, "head_dim": 8}, plain_attention=False),
    "qwen3_5_moe_text": Toy(settings={**_SHARED, **_DELTA, "head_dim": 8}, plain_attention=False),
}


def make_experts(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A random Hugging Face model of the family."""
    torch.manual_seed(seed)
    settings = {**SIZES, **EXPERTS[family].settings}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**settings)).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate.weight" in name or "router" in name:
                parameter.normal_()
    return model
