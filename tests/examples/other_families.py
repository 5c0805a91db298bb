"""The quickstart's shipped model as a hybrid and as a mixture of experts, in minutes instead of the hour that teaching
one from nothing takes.

In: a family, `hybrid` or `moe`, and a folder. Out: a checkpoint there. The dense model's weights are taken over (a copy
of its MLP in every expert; recurrent layers put between its own), then all weights are taught the quickstart's traces
for some steps, so that experts come to differ and recurrent layers to matter.
"""

import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
sys.path.insert(0, str(QUICKSTART))
import build_model  # noqa: E402
from problems import splits, stream  # noqa: E402

BATCH, LEARNING_RATE = 16, 5e-4


def make(family: str, out: Path, steps: int = 60) -> None:
    """Write the model of a family, taught, and the quickstart's tokenizer."""
    torch.manual_seed(0)
    dense = AutoModelForCausalLM.from_pretrained(QUICKSTART / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "model")
    model = {"hybrid": hybrid_of, "moe": moe_of}[family](dense)
    model.generation_config = dense.generation_config
    teach(model, tokenizer, steps)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def common(dense: PreTrainedModel) -> dict[str, Any]:
    """What the configurations share."""
    names = (
        "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim rms_norm_eps "
        "max_position_embeddings tie_word_embeddings eos_token_id pad_token_id bos_token_id"
    )
    return {name: getattr(dense.config, name) for name in names.split()} | {"dtype": "float32"}


def moe_of(dense: PreTrainedModel) -> PreTrainedModel:
    """Eight experts, each of them the dense MLP with some noise, of which a token has two."""
    config = Qwen3MoeConfig(
        **common(dense),
        num_hidden_layers=dense.config.num_hidden_layers,
        rope_parameters=dense.config.rope_parameters,
        moe_intermediate_size=dense.config.intermediate_size,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    )
    model = Qwen3MoeForCausalLM(config)
    model.load_state_dict(dense.state_dict(), strict=False)
    with torch.no_grad():
        for layer, taken in zip(model.model.layers, dense.model.layers, strict=True):
            both = torch.cat([taken.mlp.gate_proj.weight, taken.mlp.up_proj.weight])
            for expert in range(8):
                layer.mlp.experts.gate_up_proj[expert].copy_(both + 0.01 * torch.randn_like(both))
                layer.mlp.experts.down_proj[expert].copy_(taken.mlp.down_proj.weight)
            layer.mlp.gate.weight.normal_(std=0.1)
    return model


def hybrid_of(dense: PreTrainedModel) -> PreTrainedModel:
    """A gated delta net before each of the dense model's first layers.

    Qwen3.5's attention has a gate for each value, which begins open by half, and its norms multiply by 1 + weight.
    """
    num_layers = dense.config.num_hidden_layers
    kinds = [*["linear_attention", "full_attention"] * 2, *["full_attention"] * (num_layers - 2)]
    config = Qwen3_5TextConfig(
        **common(dense),
        num_hidden_layers=len(kinds),
        layer_types=kinds,
        rope_parameters={**dense.config.rope_parameters, "partial_rotary_factor": 1.0, "mrope_section": [6, 5, 5]},
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    )
    model = Qwen3_5ForCausalLM(config)
    full = [layer for layer, kind in zip(model.model.layers, kinds, strict=True) if kind == "full_attention"]
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(dense.model.embed_tokens.weight)
        model.model.norm.weight.copy_(dense.model.norm.weight - 1)
        for layer, taken in zip(full, dense.model.layers, strict=True):
            state = {name: tensor - 1 if "norm" in name else tensor for name, tensor in taken.state_dict().items()}
            heads_HDC = state["self_attn.q_proj.weight"].unflatten(0, (dense.config.num_attention_heads, -1))
            state["self_attn.q_proj.weight"] = torch.cat([heads_HDC, torch.zeros_like(heads_HDC)], dim=1).flatten(0, 1)
            state["self_attn.o_proj.weight"] = 2 * state["self_attn.o_proj.weight"]
            layer.load_state_dict(state)
    return model


def teach(model: PreTrainedModel, tokenizer: Any, steps: int) -> None:
    """SFT on the quickstart's traces: what its own model was taught last."""
    rng = random.Random(0)
    source = stream("0/sft", without={problem.question for problem in splits()["test"]})
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(steps):
        conversations = [build_model.conversation(rng, next(source), build_model.HABIT) for _ in range(BATCH)]
        traces = [build_model.encode(tokenizer, messages) for messages in conversations]
        ids_BT, targets_BT = build_model.collate(traces, tokenizer.pad_token_id)
        loss = F.cross_entropy(model(input_ids=ids_BT).logits.flatten(0, 1), targets_BT.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1 - step / steps)
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}/{steps}  loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
