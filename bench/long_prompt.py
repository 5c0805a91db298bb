"""A long prompt, as a coding agent sends it (16,000 tokens), and eight answers of 300 tokens: served and trained, on
one thread, in seconds of CPU time.

In: nothing (models with random weights and token ids are made here). Out: a table and `bench/out/long_prompt.json`:

- `prefill_full`, `prefill_window`: seconds of transformers' own forward pass over the prompt (sdpa) over those of the
  embedded engine, for a model with full attention and for one with windows of 512 tokens;
- `train_full`, `train_window`: seconds of a forward and backward pass over the eight sequences by transformers (one is
  measured, and counted eight times) over those of the trainer.

    python bench/long_prompt.py [--tokens 16000]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from report import finish
from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from sharpen.contracts import GenerateRequest
from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.packing import pack
from sharpen.types import Experience, Sampling

TARGETS = {"prefill_full": 0.9, "prefill_window": 2.0, "train_full": 4.0}
ANSWERS, ANSWER, VOCABULARY = 8, 300, 512
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 40_000,
}


def make_model(windowed: bool) -> Any:
    """Make a model of four layers; `windowed`: each sees the last 512 tokens."""
    torch.manual_seed(0)
    if windowed:
        return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=512, attn_implementation="sdpa")).eval()
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, attn_implementation="sdpa")).eval()


def seconds(run: Callable[[], object]) -> float:
    """Return how long `run` takes."""
    start = time.process_time()
    run()
    return time.process_time() - start


def prefill(windowed: bool, ids: list[int]) -> tuple[float, float]:
    """Return the seconds of transformers and of the engine for the first token after the prompt."""
    model = make_model(windowed)

    @torch.no_grad()
    def plain() -> None:
        model(input_ids=torch.tensor([ids]), use_cache=False, logits_to_keep=1)

    before = seconds(plain)
    engine = EmbeddedEngine(model, max_model_len=len(ids) + 64, max_slots=2)
    request = GenerateRequest(prompt_ids=np.array(ids, np.int32), sampling=Sampling(max_tokens=1), noise=0)
    return before, seconds(lambda: asyncio.run(engine.generate(request)))


def answer(number: int, prompt: list[int], ids: list[int]) -> Experience:
    """One sequence of the group, whose answer is trained."""
    mask_T = np.arange(len(prompt) + len(ids)) >= len(prompt)
    return Experience(
        rollout_id=f"group/{number}",
        group_id="group",
        task_id="task",
        ids_T=np.array(prompt + ids, np.int32),
        loss_mask_T=mask_T,
        logprobs_T=-mask_T.astype(np.float32),
        versions_T=np.where(mask_T, 0, -1).astype(np.int32),
        calls_T=np.where(mask_T, 0, -1).astype(np.int32),
        temperatures_T=np.ones(len(mask_T), np.float32),
        advantages_T=mask_T.astype(np.float32),
        weights_T=mask_T.astype(np.float32),
    )


def train(windowed: bool, prompt: list[int], answers: list[list[int]]) -> tuple[float, float]:
    """Return the seconds of transformers and of the trainer for forward and backward of the group."""
    model = make_model(windowed)

    def plain() -> None:
        ids = torch.tensor([prompt + answers[0]])
        logits = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=ANSWER).logits[0]
        torch.nn.functional.cross_entropy(logits, ids[0, -ANSWER:]).backward()  # type: ignore[no-untyped-call]

    before = ANSWERS * seconds(plain)
    trained = TrainedModel(model, compute_dtype=torch.float32)
    packs = pack([answer(number, prompt, ids) for number, ids in enumerate(answers)], 8192)

    def ours() -> None:
        for one in packs:
            trained.score(one).logprobs_E.sum().backward()  # type: ignore[no-untyped-call]

    return before, seconds(ours)


def main() -> int:
    """Measure, print, and return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_000, help="tokens of the prompt")
    num_tokens = parser.parse_args().tokens
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    prompt = rng.integers(5, VOCABULARY, num_tokens).tolist()
    answers = [rng.integers(5, VOCABULARY, ANSWER).tolist() for _ in range(ANSWERS)]
    rows: list[list[object]] = []
    ratios = {}
    for name, windowed in (("full", False), ("window", True)):
        for work, measured in (("prefill", prefill(windowed, prompt)), ("train", train(windowed, prompt, answers))):
            rows.append([f"{work}, {name} attention", *measured])
            ratios[f"{work}_{name}"] = measured[0] / measured[1]
    return finish(
        "long_prompt", header=["work", "transformers s", "ours s"], rows=rows, ratios=ratios, at_least=TARGETS
    )


if __name__ == "__main__":
    sys.exit(main())
