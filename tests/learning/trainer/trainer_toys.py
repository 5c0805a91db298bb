"""Toy models of five families, and experiences like those of rollouts: a prompt shared by the group, two calls each."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from sharpen.types import Experience, Reread

VOCABULARY = 60
CHUNKS = ((1, 1), (2, 1), (1, 3), (2, 2))
"""Tokens of the policy and of a teacher with others in the chunks of `reread`."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "initializer_range": 0.1,
}
FAMILIES: dict[str, Any] = {
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "llama": lambda: LlamaConfig(**SIZES),
    "gemma": lambda: GemmaConfig(**SIZES, head_dim=8),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=9),
}


def make_model(family: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """A random Hugging Face model of the family. Mistral's sliding window is shorter than the sequences below."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(FAMILIES[family]()).to(dtype)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The part of `experience.draw.Batch` that the trainer uses."""

    experiences: tuple[Experience, ...]


def make_experience(
    rollout_id: str,
    ids: list[int],
    sampled: list[tuple[int, int]],
    *,
    advantage: float,
    temperatures: tuple[float, ...] = (1.0, 1.0),
    weight: float = 0.01,
) -> Experience:
    """One sequence; each (start, stop) in `sampled` is a call. Logprobs are -1 until `record` puts the model's own."""
    num_tokens = len(ids)
    mask_T = np.zeros(num_tokens, np.bool_)
    calls_T = np.full(num_tokens, -1, np.int32)
    temperatures_T = np.ones(num_tokens, np.float32)
    for call, (start, stop) in enumerate(sampled):
        mask_T[start:stop] = True
        calls_T[start:stop] = call
        temperatures_T[start:stop] = temperatures[call]
    group_id = rollout_id.split("/")[0]
    return Experience(
        rollout_id=rollout_id,
        group_id=group_id,
        task_id=group_id,
        ids_T=np.array(ids, np.int32),
        loss_mask_T=mask_T,
        logprobs_T=np.where(mask_T, np.float32(-1), np.float32(0)),
        versions_T=np.where(mask_T, 0, -1).astype(np.int32),
        calls_T=calls_T,
        temperatures_T=temperatures_T,
        advantages_T=np.where(mask_T, np.float32(advantage), np.float32(0)),
        weights_T=np.where(mask_T, np.float32(weight), np.float32(0)),
    )


def make_experiences(
    num_groups: int = 3, group_size: int = 3, seed: int = 0, temperatures: tuple[float, float] = (1.0, 0.7)
) -> list[Experience]:
    """Two-call rollouts: a system prompt common to all, a question common to the group, calls of a few likely ids."""
    rng = np.random.default_rng(seed)
    system = rng.integers(3, VOCABULARY, 10).tolist()
    experiences = []
    for group in range(num_groups):
        prompt = system + rng.integers(3, VOCABULARY, 5 + group).tolist()
        for index in range(group_size):
            first = rng.integers(3, 6, 6 + index).tolist()
            tool = rng.integers(3, VOCABULARY, 4).tolist()
            second = rng.integers(3, 6, 3 + group).tolist()
            a, b = len(prompt), len(prompt) + len(first)
            c = b + len(tool)
            experiences.append(
                make_experience(
                    f"g{group}/{index}",
                    prompt + first + tool + second,
                    [(a, b), (c, c + len(second))],
                    advantage=float(rng.normal()),
                    temperatures=temperatures,
                    weight=float(rng.uniform(0.005, 0.02)),
                )
            )
    return experiences


def hf_logprobs(model: Any, experience: Experience) -> torch.Tensor:
    """Return the loss tokens' logprobs from the model's own forward pass over one sequence, at their temperatures."""
    logits_TV = model(input_ids=torch.from_numpy(experience.ids_T.astype(np.int64))[None], use_cache=False).logits[0]
    targets = np.flatnonzero(experience.loss_mask_T)
    temperatures = torch.from_numpy(experience.temperatures_T[targets]).to(logits_TV)
    logprobs = (logits_TV[targets - 1] / temperatures[:, None]).log_softmax(-1)
    return logprobs[torch.arange(len(targets)), torch.from_numpy(experience.ids_T[targets].astype(np.int64))]


def plain_copy(model: Any) -> Any:
    """Copy the weights into a model with transformers' own attention."""
    twin = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), attn_implementation="sdpa").to(model.dtype)
    twin.load_state_dict(model.state_dict())
    return twin.eval()


def record(model: Any, experiences: list[Experience]) -> list[Experience]:
    """Set the recorded logprobs to the model's own, as a correct engine would."""
    recorded = []
    with torch.no_grad():
        for experience in experiences:
            logprobs_T = np.zeros(len(experience.ids_T), np.float32)
            logprobs_T[experience.loss_mask_T] = hf_logprobs(model, experience).float().numpy()
            recorded.append(replace(experience, logprobs_T=logprobs_T))
    return recorded


def reread(experience: Experience, draw: np.random.Generator, vocabulary: int) -> Experience:
    """The sequence with readings of its calls, of any ids, in chunks of several tokens of either."""
    rereads = {}
    for call in dict.fromkeys(experience.calls_T[experience.loss_mask_T].tolist()):
        count = int((experience.calls_T == call).sum())
        chunks_S = np.repeat(np.arange(count), [CHUNKS[n % 4][0] for n in range(count)])[:count]
        chunks_R = np.repeat(np.arange(chunks_S[-1] + 1), [CHUNKS[n % 4][1] for n in range(int(chunks_S[-1]) + 1)])
        rereads[call] = Reread(
            prompt_ids_P=np.arange(3, 12 + call, dtype=np.int32),
            answer_ids_R=draw.integers(vocabulary, size=len(chunks_R)).astype(np.int32),
            chunks_S=chunks_S.astype(np.int32),
            chunks_R=chunks_R.astype(np.int32),
        )
    return replace(experience, rereads=rereads)


@contextmanager
def keeping_gradients(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Yield what will be the gradients of the last update inside this block, before clipping, by name: a trainer lets
    go of them when the update is made."""
    found: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        return lambda parameter: found.update({name: parameter.grad.clone()})

    hooks = [parameter.register_post_accumulate_grad_hook(keep(name)) for name, parameter in model.parameters()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
