"""Toy models of each family, random weights, vocabulary 97; and small ways to drive an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from sharpen.contracts import GenerateRequest, Generation
from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.types import Sampling

torch.set_num_threads(1)  # toy products: a second thread only waits

VOCAB = 97
END = 1
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": END,
    "pad_token_id": 2,
    "initializer_range": 0.3,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, Callable[[], tuple[type, Any]]] = {
    "qwen3": lambda: (Qwen3ForCausalLM, Qwen3Config(**_COMMON, tie_word_embeddings=True)),
    "qwen2": lambda: (Qwen2ForCausalLM, Qwen2Config(**_COMMON, tie_word_embeddings=False)),
    "llama": lambda: (LlamaForCausalLM, LlamaConfig(**_COMMON, rope_parameters=_LLAMA3_ROPE)),
    "gemma": lambda: (GemmaForCausalLM, GemmaConfig(**_COMMON)),
    "gemma2": lambda: (Gemma2ForCausalLM, Gemma2Config(**_COMMON, sliding_window=24, query_pre_attn_scalar=16)),
    "gemma3": lambda: (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **_COMMON,
            sliding_window=24,
            query_pre_attn_scalar=16,
            layer_types=["sliding_attention", "full_attention"],
        ),
    ),
    "mistral": lambda: (MistralForCausalLM, MistralConfig(**_COMMON, sliding_window=24)),
}


def make_model(family: str, seed: int = 0) -> Any:
    """A model of the family with random weights (norms and biases too, so that a forgotten one shows)."""
    cls, config = FAMILIES[family]()
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = cls(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def make_engine(model: Any, **settings: Any) -> EmbeddedEngine:
    """An engine over `model` with small defaults."""
    return EmbeddedEngine(model, **{"max_model_len": 256, "max_slots": 16, **settings})


def request(prompt: Sequence[int], *, noise: int = 0, top_logprobs: int = 0, **sampling: Any) -> GenerateRequest:
    """A request; sampling defaults to temperature 1 and 8 tokens."""
    return GenerateRequest(
        prompt_ids=np.array(prompt, np.int32),
        sampling=Sampling(**{"max_tokens": 8, **sampling}),
        noise=noise,
        top_logprobs=top_logprobs,
    )


def run_all(engine: EmbeddedEngine, requests: Sequence[GenerateRequest]) -> list[Generation]:
    """All requests at once, results in their order."""

    async def gather() -> list[Generation]:
        return list(await asyncio.gather(*(engine.generate(item) for item in requests)))

    return asyncio.run(gather())


def prompt_of(length: int, seed: int) -> list[int]:
    """Random ids, no special ones."""
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


@torch.no_grad()
def full_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Plain Hugging Face forward over a whole sequence, [T, V]."""
    return model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False).logits[0].float()


def scored(model: Any, prompt: Sequence[int], generation: Generation, temperature: float = 1.0) -> torch.Tensor:
    """The sampled tokens' logprobs by the Hugging Face model, at `temperature`."""
    ids = [*prompt, *generation.ids.tolist()]
    logprobs_TV = torch.log_softmax(full_logits(model, ids)[len(prompt) - 1 : -1] / temperature, dim=-1)
    ids_S = torch.tensor(generation.ids, dtype=torch.long, device=logprobs_TV.device)
    return logprobs_TV.gather(1, ids_S.unsqueeze(1)).squeeze(1)
