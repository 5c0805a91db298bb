"""A tiny checkpoint of each family, with random weights: the sizes that show every kind of layer of the family.

`SETTINGS` has one entry for each model type of the table `sharpen.models.table.FAMILIES`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from expert_toys import EXPERTS
from hybrid_toys import HYBRIDS
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING

from sharpen.models.modules import class_for
from sharpen.models.stand_ins import with_stand_ins

VOCABULARY = 320
"""Enough for the tokenizer of `toy_model.make_toy_model`, whose special ids are those below."""
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
_WINDOWED = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}
_EYES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 16,
}
_QWEN_EYES = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
_THREE_POSITIONS = {
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
}
"""Time, height and width of an image's tokens turn different parts of a head."""
_GEMMA3 = {**_WINDOWED, "query_pre_attn_scalar": 8}
_GEMMA4 = {
    **_WINDOWED,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "global_head_dim": 16,
}

_BOTH_MATTER = {
    "num_hidden_layers": 3,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
}
"""What an image's tokens see in the last layer reaches no other token."""
_GEMMA3N = {
    **_WINDOWED,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "intermediate_size": [48] * 4,
    "activation_sparsity_pattern": [0.0] * 4,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "laurel_rank": 4,
    "altup_num_inputs": 2,
}
_LLAMA4_EYES = {
    **_EYES,
    "image_size": 8,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
    "vision_output_dim": 16,
}
_PLAIN = (
    *("qwen2", "qwen3", "llama", "gemma", "smollm3", "olmo2", "phi3", "granite", "glm4"),
    *("hunyuan_v1_dense", "ernie4_5", "seed_oss", "apertus", "ministral3"),
)

SETTINGS: dict[str, dict[str, Any]] = {
    **HYBRIDS,
    **EXPERTS,
    "nemotron_h": {**HYBRIDS["nemotron_h"], "initializer_range": 0.05},  # else strong decay rounds by up to 1e-4
    "kimi_linear": {**HYBRIDS["kimi_linear"], "head_dim": 4, "v_head_dim": 6},
    "deepseek_v3": {**EXPERTS["deepseek_v3"], "head_dim": 4, "v_head_dim": 6},
    **{kind: {} for kind in _PLAIN},
    **{kind: {"sliding_window": 12} for kind in ("mistral", "ministral")},
    **dict.fromkeys(("olmo3", "exaone4", "cohere2"), _WINDOWED),
    "gemma2": {**_WINDOWED, "query_pre_attn_scalar": 8},
    "gemma3_text": _GEMMA3,
    "gemma3": {"text": {**_GEMMA3, **_BOTH_MATTER}, "vision": _EYES},
    "gemma4_text": _GEMMA4,
    "qwen3_vl": {
        "text": _THREE_POSITIONS,
        "vision": _QWEN_EYES,
    },
    "gemma3n_text": _GEMMA3N,
    "gemma3n": {
        "text": {**_GEMMA3N, "vocab_size_per_layer_input": VOCABULARY - 10},
        "vision": {"hidden_size": 16, "vocab_size": 5, "vocab_offset": VOCABULARY - 10},
        "audio": {"hidden_size": 16, "vocab_size": 5, "vocab_offset": VOCABULARY - 5},
    },
    "llama4": {"text": EXPERTS["llama4_text"], "vision": _LLAMA4_EYES},
    "gemma4": {
        "text": {**_GEMMA4, **_BOTH_MATTER, "use_bidirectional_attention": "vision"},
        "vision": {**_EYES, "head_dim": 8, "num_key_value_heads": 2},
    },
    "qwen3_5": {"text": {**HYBRIDS["qwen3_5_text"], **_THREE_POSITIONS}, "vision": _QWEN_EYES},
    "qwen3_5_moe": {"text": {**EXPERTS["qwen3_5_moe_text"], **_THREE_POSITIONS}, "vision": _QWEN_EYES},
    "mistral3": {"text": {"model_type": "mistral"}, "vision": {**_EYES, "model_type": "pixtral"}},
}

_WIDE_TEXT = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
WIDE: dict[str, dict[str, Any]] = {
    "qwen3_vl": {
        "text": {**_WIDE_TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [8, 4, 4]}},
        "vision": {"out_hidden_size": 64},
    },
    "gemma3": {"text": {**_WIDE_TEXT, "query_pre_attn_scalar": 32}},
    "mistral3": {"text": _WIDE_TEXT},
}
"""Heads of the smallest size of vLLM's attention on a CPU, by type."""


def make_config(kind: str, wide: bool = False, **fields: Any) -> Any:
    """The configuration of a tiny model of this type, with more `fields` if it has towers. `wide`: with the heads of
    `WIDE`."""
    settings = SETTINGS[kind]
    if wide:
        settings = {name: {**value, **WIDE[kind].get(name, {})} for name, value in settings.items()}
    if "text" not in settings:
        return CONFIG_MAPPING[kind](**{**_SIZES, **settings})
    towers = {f"{name}_config": value for name, value in settings.items() if name != "text"}
    return CONFIG_MAPPING[kind](text_config={**_SIZES, **settings["text"]}, **towers, **fields)


def make_module(kind: str, seed: int = 0, wide: bool = False, **fields: Any) -> Any:
    """A model of this type with random weights, norms and biases too, so that a forgotten one shows."""
    torch.manual_seed(seed)
    config = make_config(kind, wide, **fields)
    module = class_for(config).from_config(with_stand_ins(config))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return module.eval()


def make_checkpoint(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint of this type, as transformers writes it."""
    module = make_module(kind)
    (module if dtype == torch.float32 else module.to(dtype)).save_pretrained(folder)  # Llama 4's angles are complex
    if with_stand_ins(module.config) is not module.config:
        _put_towers(module, folder)
    return folder


def _put_towers(module: Any, folder: Path) -> None:
    """Add what a checkpoint has whose towers are kept as files: their tensors, and the configuration with them."""
    eye, ear = torch.randn(3, 4).bfloat16(), torch.randn(2, 5)
    towers = {"model.vision_tower.timm_model.conv_stem.weight": eye, "model.audio_tower.conformer.0.weight": ear}
    save_file(tensors_of(folder) | towers, folder / "model.safetensors", metadata={"format": "pt"})
    make_config(module.config.model_type).save_pretrained(folder)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint's files by name."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    return found
