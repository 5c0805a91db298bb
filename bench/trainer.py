"""A training step on packed sequences against one on padded sequences, on two CPU threads.

In: nothing (Qwen3 models with random weights and token sequences are made here). Out: a table and
`bench/out/trainer.json`:

- packed_fp32 (ratio `packed`, target 2.0): 16 sequences of 128 to 896 tokens, 8192 in all, 5M parameters. Ours is the
whole `Trainer.train_step`; the other side pads them to one batch and takes the same update with transformers and
PyTorch. Every token but the first 32 of a sequence carries loss, so that neither side gains by computing fewer logits.
- packed_bf16: the same in bf16 autocast, reported.
- common_prompt: 16 groups x 8 rollouts of the quickstart's size, whose prompts (150 tokens, of which 110 are common to
all) are computed once, against packing without sharing. Reported.
- hybrid (target 2.0): the same rollouts, our training step against the padded batch, on a model with three gated delta
nets and one attention layer (Qwen3.5): the tree of shared prompts through recurrent states.

Sides alternate in one process with the same matmul setting; medians are compared.

    python bench/trainer.py [--repeats 5] [--matmul highest]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from report import finish
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM

from sharpen.config.run import LossConfig
from sharpen.config.trainer import TrainerConfig
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.optimizer import Optimizer
from sharpen.learning.trainer.packing import Pack, pack
from sharpen.learning.trainer.parity import Tolerance
from sharpen.learning.trainer.trainer import Trainer
from sharpen.types import Experience

TARGETS = {"packed": 2.0, "hybrid": 2.0}
VOCABULARY = 512
RATE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """An update's sequences."""

    experiences: tuple[Experience, ...]
    experts: tuple[Experience, ...] = ()


def make_model(hidden: int, layers: int, heads: int) -> Any:
    """A random Qwen3 model in evaluation mode, fp32."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


def make_hybrid(hidden: int, heads: int) -> Any:
    """A random Qwen3.5 model of four layers in evaluation mode, fp32."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=32,
        linear_num_key_heads=heads // 2,
        linear_num_value_heads=heads,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    return Qwen3_5ForCausalLM(config).eval()


def make_experience(
    group: int, number: int, ids: Sequence[int], first: int, weight: float, advantage: float
) -> Experience:
    """A sequence whose tokens from `first` on carry loss."""
    mask_T = np.arange(len(ids)) >= first
    return Experience(
        rollout_id=f"{group}/{number}",
        group_id=str(group),
        task_id=str(group),
        ids_T=np.array(ids, np.int32),
        loss_mask_T=mask_T,
        logprobs_T=np.where(mask_T, np.float32(-6), np.float32(0)),
        versions_T=np.where(mask_T, 0, -1).astype(np.int32),
        calls_T=np.where(mask_T, 0, -1).astype(np.int32),
        temperatures_T=np.ones(len(ids), np.float32),
        advantages_T=np.where(mask_T, np.float32(advantage), np.float32(0)),
        weights_T=np.where(mask_T, np.float32(weight), np.float32(0)),
    )


def ragged_experiences(count: int) -> list[Experience]:
    """So many sequences of 128 to 896 tokens, evenly spread: 16 have 8192 tokens."""
    rng = np.random.default_rng(0)
    lengths = rng.permutation(np.linspace(128, 896, count).round().astype(int))
    num_loss = int(lengths.sum()) - count * 32
    return [
        make_experience(n, 0, rng.integers(5, VOCABULARY, length).tolist(), 32, 1 / num_loss, float(rng.normal()))
        for n, length in enumerate(lengths.tolist())
    ]


def grouped_experiences(num_groups: int) -> list[Experience]:
    """Groups of 8 rollouts: 110 tokens common to all, 40 to the group, 55 of their own."""
    rng = np.random.default_rng(0)
    system = rng.integers(5, VOCABULARY, 110).tolist()
    experiences, weight = [], 1 / (8 * num_groups * 35)
    for group in range(num_groups):
        prompt = system + rng.integers(5, VOCABULARY, 40).tolist()
        for number in range(8):
            ids = prompt + rng.integers(5, VOCABULARY, 55).tolist()
            experiences.append(make_experience(group, number, ids, 170, weight, float(rng.normal())))
    return experiences


def packed_side(module: Any, experiences: Sequence[Experience], dtype: torch.dtype) -> Callable[[], object]:
    """Our training step."""
    trainer = Trainer(
        TrainedModel(module, compute_dtype=dtype),
        algorithm=resolve("grpo", LossConfig(kl="none", kl_coef=None), 8),
        config=TrainerConfig(max_tokens_per_micro_batch=8192),
        learning_rate=RATE,
        planned_updates=1,
        tolerance=Tolerance(mean=None, max=None),
    )
    batch = Batch(experiences=tuple(experiences))
    return lambda: trainer.train_step([batch])


def padded_side(module: Any, experiences: Sequence[Experience], dtype: torch.dtype) -> Callable[[], object]:
    """The same update on one right-padded batch, with transformers' own attention."""
    module.set_attn_implementation("sdpa")
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, fused=True)
    batch_size, longest = len(experiences), max(len(experience.ids_T) for experience in experiences)
    ids_BT = torch.zeros(batch_size, longest, dtype=torch.int64)
    real_BT = torch.zeros(batch_size, longest, dtype=torch.int64)
    columns_BT = {name: torch.zeros(batch_size, longest) for name in ("logprobs_T", "advantages_T", "weights_T")}
    for row, experience in enumerate(experiences):
        length = len(experience.ids_T)
        ids_BT[row, :length] = torch.from_numpy(experience.ids_T.astype(np.int64))
        real_BT[row, :length] = 1
        for name, column_BT in columns_BT.items():
            column_BT[row, :length] = torch.from_numpy(getattr(experience, name))
    old_BT, advantages_BT, weights_BT = (column_BT[:, 1:] for column_BT in columns_BT.values())

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            logits_BTV = module(input_ids=ids_BT, attention_mask=real_BT, use_cache=False).logits[:, :-1]
        logprobs_BTV = logits_BTV.float().log_softmax(-1)
        logprobs_BT = logprobs_BTV.gather(-1, ids_BT[:, 1:, None])[..., 0]
        ratio_BT = (logprobs_BT - old_BT).clamp(-20, 20).exp()
        surrogate_BT = torch.minimum(ratio_BT * advantages_BT, ratio_BT.clamp(0.8, 1.2) * advantages_BT)
        (-(weights_BT * surrogate_BT).sum()).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()

    return step


def sharing_side(module: Any, packs: Sequence[Pack]) -> Callable[[], object]:
    """Score, backward and update over given packs."""
    trained = TrainedModel(module, compute_dtype=torch.float32)
    optimizer = Optimizer(trained.parameters(), TrainerConfig(), peak_learning_rate=RATE, planned_updates=1)

    def step() -> None:
        optimizer.zero_grad()
        for packed in packs:
            factor_E = torch.from_numpy(packed.weights_E * packed.advantages_E)
            (-(factor_E * trained.score(packed).logprobs_E).sum()).backward()  # type: ignore[no-untyped-call]
        optimizer.apply(0, optimizer.norm(0))

    return step


def compare(first: Callable[[], object], second: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median seconds of both, taking turns, after one turn to warm up."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 1):
        for side, times in zip((first, second), seconds, strict=True):
            began = time.perf_counter()
            side()
            if repeat:
                times.append(time.perf_counter() - began)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def main() -> int:
    """Measure, print, write `bench/out/trainer.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=16, help="of the packed work, and groups of the other")
    parser.add_argument("--matmul", choices=("highest", "medium"), default="highest")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    torch.set_float32_matmul_precision(arguments.matmul)
    measured: dict[str, tuple[float, float]] = {}
    ragged, model = ragged_experiences(arguments.sequences), make_model(256, 6, 8)
    for name, dtype in (("packed_fp32", torch.float32), ("packed_bf16", torch.bfloat16)):
        ours = packed_side(copy.deepcopy(model), ragged, dtype)
        measured[name] = compare(ours, padded_side(copy.deepcopy(model), ragged, dtype), arguments.repeats)
    grouped, small = grouped_experiences(arguments.sequences), make_model(192, 4, 6)
    shared, apart = pack(grouped, 8192), pack(grouped, 8192, min_shared_tokens=1 << 30)
    measured["common_prompt"] = compare(
        sharing_side(copy.deepcopy(small), shared), sharing_side(copy.deepcopy(small), apart), arguments.repeats
    )
    hybrid = make_hybrid(192, 6)
    measured["hybrid"] = compare(
        packed_side(copy.deepcopy(hybrid), grouped, torch.float32),
        padded_side(copy.deepcopy(hybrid), grouped, torch.float32),
        arguments.repeats,
    )
    num_ragged, num_grouped = (sum(len(e.ids_T) for e in work) for work in (ragged, grouped))
    tokens = {"packed_fp32": num_ragged, "packed_bf16": num_ragged, "common_prompt": num_grouped, "hybrid": num_grouped}
    rows = [(name, tokens[name] / b, tokens[name] / a, b / a) for name, (a, b) in measured.items()]
    ratios = {name: b / a for name, (a, b) in measured.items()}
    ratios["packed"] = ratios.pop("packed_fp32")
    return finish(
        "trainer",
        header=("training step", "other tokens/s", "ours tokens/s", "ratio"),
        rows=rows,
        ratios=ratios,
        at_least=TARGETS,
        extra={
            "repeats": arguments.repeats,
            "matmul": arguments.matmul,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "common_prompt_computed_tokens": sum(packed.num_computed_tokens for packed in shared),
            "common_prompt_sequence_tokens": sum(packed.num_sequence_tokens for packed in shared),
        },
    )


if __name__ == "__main__":
    sys.exit(main())
