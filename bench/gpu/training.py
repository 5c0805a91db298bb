"""The parts of `bench/gpu/run.py` that train: tokens per second and MFU, attention by itself, weights into the engine.

In: a `Setting`. Out: `Row`s.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from formulas import causal_pairs, training_flops, tree_pairs
from measures import Row, Setting, flops_per_s, generate, make_model, seconds_of, shape_of
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.functional import scaled_dot_product_attention
from trainer import Batch, make_experience

from sharpen.config.run import LossConfig
from sharpen.config.trainer import TrainerConfig
from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.trainer.attention import TreeLayout, _per_segment
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.packing import Pack, pack
from sharpen.learning.trainer.parity import LogprobGap, Tolerance
from sharpen.learning.trainer.trainer import Trainer
from sharpen.learning.trainer.varlen import TorchVarlen, varlen_attention
from sharpen.types import Experience

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
CONTEXT = 32
"""Tokens at a sequence's start that carry no loss."""


def make_trainer(setting: Setting, *, tokens: int, checkpointing: bool) -> Trainer:
    """GRPO without a reference, fp32 weights, products in bfloat16."""
    trained = TrainedModel(
        make_model(setting, torch.float32),
        compute_dtype=torch.bfloat16 if setting.device.type == "cuda" else torch.float32,
        gradient_checkpointing=checkpointing,
    )
    return Trainer(
        trained,
        algorithm=resolve("grpo", LossConfig(kl="none", kl_coef=None), 8),
        config=TrainerConfig(max_tokens_per_micro_batch=tokens),
        learning_rate=1e-6,
        planned_updates=1000,
        tolerance=Tolerance(mean=None, max=None),
    )


def one_sequence(tokens: int, vocabulary: int) -> list[Experience]:
    """A sequence of this many computed tokens, all but the first of which carry loss."""
    rng = np.random.default_rng(0)
    ids = rng.integers(5, vocabulary, tokens + 1).tolist()
    return [make_experience(0, 0, ids, min(CONTEXT, tokens // 2), 1 / tokens, 1.0)]


def tree_sequences(setting: Setting, vocabulary: int) -> list[Experience]:
    """Groups of rollouts with a prompt of their group, as GRPO trains them."""
    groups, rollouts, prompt, own = setting.tree
    rng = np.random.default_rng(0)
    made = []
    for group in range(groups):
        start = rng.integers(5, vocabulary, prompt).tolist()
        for number in range(rollouts):
            ids = start + rng.integers(5, vocabulary, own).tolist()
            made.append(make_experience(group, number, ids, prompt, 1 / (groups * rollouts * own), rng.normal()))
    return made


def sequence_part(index: int) -> Callable[[Setting], list[Row]]:
    """Training on one sequence of the setting's length with this index."""

    def part(setting: Setting) -> list[Row]:
        tokens = setting.training[index]
        return _training(
            setting, lambda vocabulary: one_sequence(tokens, vocabulary), f"one sequence of {tokens}", tokens
        )

    return part


def tree_part(setting: Setting) -> list[Row]:
    """Training on groups of rollouts, in one micro-batch."""
    groups, rollouts, prompt, own = setting.tree
    name = f"{groups} x {rollouts} rollouts of {prompt} + {own}"
    return _training(setting, lambda vocabulary: tree_sequences(setting, vocabulary), name, 1 << 30)


def flash_part(setting: Setting) -> list[Row]:
    """The second length again by each flash implementation that PyTorch can be given, where its package is."""
    tokens, rows = setting.training[1], []
    for impl in list_flash_attention_impls():
        name = f"one sequence of {tokens}, {impl}"
        try:
            with _flash(impl):
                rows += _training(setting, lambda vocabulary: one_sequence(tokens, vocabulary), name, tokens)
        except Exception as error:  # a package that is not there, or not for this device
            rows.append(Row(measure=f"training, {name}", value=None, note=_first_line(error)))
    return rows


def _training(setting: Setting, make: Callable[[int], list[Experience]], name: str, tokens: int) -> list[Row]:
    """One update in one micro-batch; with gradient checkpointing if it does not fit without."""
    try:
        return _train(setting, make, name, tokens, checkpointing=False)
    except torch.OutOfMemoryError:
        print(f"{name}: out of memory, again with gradient checkpointing", flush=True)
    gc.collect()
    torch.cuda.empty_cache()
    return _train(setting, make, name, tokens, checkpointing=True)


def _train(
    setting: Setting, make: Callable[[int], list[Experience]], name: str, tokens: int, *, checkpointing: bool
) -> list[Row]:
    trainer = make_trainer(setting, tokens=tokens, checkpointing=checkpointing)
    shape = shape_of(trainer.policy.module)
    sequences = make(trainer.policy.module.config.vocab_size)
    packs = pack(sequences, tokens)
    computed = sum(packed.num_computed_tokens for packed in packs)
    pairs = sum(tree_pairs(_segments(packed)) for packed in packs)
    full = sum(len(sequence.ids_T) ** 2 for sequence in sequences)
    on_gpu = setting.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    batch = Batch(experiences=tuple(sequences))
    seconds = seconds_of(setting, lambda: trainer.train_step([batch]), warm=2)
    peak, source = flops_per_s(setting)
    mfu = training_flops(shape, computed, pairs) / seconds / peak
    memory = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    kernels = "; ".join(trainer.policy.kernels) or "the CPU's way"
    note = f"{'with' if checkpointing else 'no'} gradient checkpointing; {kernels}"
    return [
        Row(measure=f"training, {name}", value=computed / seconds, unit="tokens/s", note=note),
        Row(measure=f"MFU, {name}", value=mfu, note=f"causal pairs only; peak: {source}"),
        Row(
            measure=f"MFU with all pairs, {name}",
            value=training_flops(shape, computed, full) / seconds / peak,
            note="as tables that count T² for each sequence",
        ),
        Row(measure=f"peak memory, {name}", value=memory, unit="GiB", note="" if on_gpu else "a GPU's"),
        Row(measure=f"unshared tokens, {name}", value=sum(len(s.ids_T) for s in sequences) / seconds, unit="tokens/s"),
    ]


def _segments(packed: Pack) -> list[tuple[int, int]]:
    """(Tokens before it on its path, its own tokens) of each segment."""
    own = [segment.stop - segment.start for segment in packed.segments]
    paths = TreeLayout(packed.segments, torch.from_numpy(packed.positions_N)).paths
    return [(sum(own[part] for part in path[:-1]), own[path[-1]]) for path in paths]


def attention_part(setting: Setting) -> list[Row]:
    """Forward and backward pass of one layer's attention by each way that there is: over one long sequence, and over
    the tree of rollouts."""
    length = setting.training[1]
    config = make_model(setting, torch.float32).config
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    scale = head_dim**-0.5
    on_gpu = setting.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    (packed,) = pack(one_sequence(length, 500), length)
    long = TreeLayout(packed.segments, torch.from_numpy(packed.positions_N).to(setting.device))
    (packed,) = pack(tree_sequences(setting, 500), 1 << 30)
    tree = TreeLayout(packed.segments, torch.from_numpy(packed.positions_N).to(setting.device))
    tokens = {"one sequence": length, "tree": packed.num_computed_tokens}
    pairs = {"one sequence": causal_pairs([length]), "tree": tree_pairs(_segments(packed))}

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)

    ways: list[tuple[str, str, Any, Any]] = [
        ("tree", "segment by segment", nullcontext, lambda q, k, v: _per_segment(q, k, v, tree, scale, None))
    ]
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        ways.append(("one sequence", f"SDPA {backend.name}", lambda backend=backend: sdpa_kernel(backend), plain))
    if on_gpu:
        kernel = TorchVarlen()
        for where, layout in (("one sequence", long), ("tree", tree)):

            def varlen(q: Any, k: Any, v: Any, layout: TreeLayout = layout) -> torch.Tensor:
                return varlen_attention(kernel, q, k, v, layout.kernel_paths, scale, None)

            ways.append((where, "varlen", nullcontext, varlen))
            for impl in list_flash_attention_impls():
                ways.append((where, f"varlen by {impl}", lambda impl=impl: _flash(impl), varlen))
    rows = []
    for where, name, context, run in ways:
        shapes = [(1, count, tokens[where], head_dim) for count in (heads, kv_heads, kv_heads, heads)]
        tensors = [torch.randn(shape, device=setting.device, dtype=dtype) for shape in shapes]
        measure = f"attention, {where}: {name}"
        try:
            with context():
                seconds = seconds_of(setting, lambda: _both_ways(run, tensors), warm=2)  # noqa: B023
        except Exception as error:  # each way is tried: which are built for this device is what is asked
            rows.append(Row(measure=measure, value=None, note=_first_line(error)))
            continue
        flops = 12.0 * heads * head_dim * pairs[where]
        rows.append(Row(measure=measure, value=flops / seconds / 1e12, unit="TFLOP/s", note=f"{seconds * 1e3:.2f} ms"))
    return rows


class _flash:
    """One of PyTorch's registered flash implementations, for a while."""

    def __init__(self, impl: str) -> None:
        self._impl = impl

    def __enter__(self) -> None:
        activate_flash_attention_impl(self._impl)

    def __exit__(self, *_: object) -> None:
        restore_flash_attention_impl()


def _both_ways(run: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    leaves = [tensor.requires_grad_() for tensor in tensors[:3]]
    torch.autograd.grad(run(*leaves), leaves, tensors[3])


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:160]


def sync_part(setting: Setting) -> list[Row]:
    """Seconds until the engine serves new weights: from the trainer's own tensors on the same device, and from the
    host's memory."""
    trainer = make_trainer(setting, tokens=1024, checkpointing=False)
    engine = EmbeddedEngine(make_model(setting, setting.dtype), max_model_len=256, max_slots=8)
    versions = iter(range(1, 1000))

    def load(tensors: dict[str, torch.Tensor]) -> Callable[[], None]:
        return lambda: asyncio.run(engine.load(next(versions), tensors))

    shared = trainer.state_tensors()
    host = {name: tensor.cpu() for name, tensor in shared.items()}
    num_bytes = sum(tensor.nbytes for tensor in shared.values())
    return [
        Row(
            measure="weights into the engine, from the trainer's tensors",
            value=seconds_of(setting, load(shared), warm=2) * 1e3,
            unit="ms",
        ),
        Row(measure="weights into the engine, from the host", value=seconds_of(setting, load(host)) * 1e3, unit="ms"),
        Row(measure="weights moved", value=num_bytes / 1e9, unit="GB", note="fp32"),
    ]


def parity_part(setting: Setting) -> list[Row]:
    """How far the trainer's logprobs are from the engine's recorded ones, at the types that a run has here. The last
    norm is scaled up, so that logits spread as those of a trained model."""
    count, prompt, new = (2, 8, 16) if setting.smoke else (16, 256, 512)
    model = make_model(setting, torch.float32)
    with torch.no_grad():
        model.model.norm.weight.mul_(4)
    trained = TrainedModel(
        copy.deepcopy(model),
        compute_dtype=torch.bfloat16 if setting.device.type == "cuda" else torch.float32,
    )
    engine = EmbeddedEngine(model.to(setting.dtype), max_model_len=prompt + new, max_slots=count)
    done = generate(engine, trained.module.config.vocab_size, (count, prompt, new), 1)
    experiences = []
    for number, (ids, generation) in enumerate(done):
        whole = make_experience(0, number, [*ids.tolist(), *generation.ids.tolist()], prompt, 1.0, 1.0)
        logprobs_T = whole.logprobs_T.copy()
        logprobs_T[prompt:] = generation.logprobs
        versions_T = np.where(whole.loss_mask_T, 0, -1).astype(np.int32)
        experiences.append(replace(whole, logprobs_T=logprobs_T, versions_T=versions_T))
    gap = LogprobGap(0)
    with torch.no_grad():
        for packed in pack(experiences, 8192):
            gap.add(packed, trained.score(packed).logprobs_E)
    return [
        Row(measure="engine against trainer, mean |logprob gap|", value=gap.mean, note=f"{gap.num_tokens} tokens"),
        Row(measure="engine against trainer, largest gap", value=gap.max),
    ]


def quickstart_part(setting: Setting) -> list[Row]:
    """The quickstart's agent, trained on this device: held-out accuracy before and after, seconds."""
    sys.path.insert(0, str(QUICKSTART))
    from agent import judge, run_agent

    from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, tune

    small: dict[str, Any] = {"evaluation.max_tasks": 16} if setting.smoke else {}
    with tempfile.TemporaryDirectory() as folder:
        result = tune(
            workflow_func=run_agent,
            judge_func=judge,
            train_dataset=DatasetConfig(
                path=str(QUICKSTART / "data"), split="train", total_steps=1 if setting.smoke else 40
            ),
            eval_dataset=DatasetConfig(path=str(QUICKSTART / "data"), split="test"),
            model=TunerModelConfig(model_path=str(QUICKSTART / "model"), max_model_len=512),
            algorithm=AlgorithmConfig(
                algorithm_type="grpo", group_size=8, batch_size=2 if setting.smoke else 16, learning_rate=3e-4
            ),
            settings={
                "checkpoint_root_dir": folder,
                "engine.type": "embedded",
                "engine.device": setting.device.type,
                "loss.kl": "none",
                "trainer.beta2": 0.95,
                "trainer.weight_decay": 0.0,
                **small,
            },
        )
        if (out := os.environ.get("SHARPEN_BENCH_OUT")) is not None:
            for name in ("reward_curve.png", "metrics.jsonl", "summary.json"):
                if (result.run_dir / name).exists():
                    shutil.copy(result.run_dir / name, Path(out) / f"quickstart_{name}")
        summary = json.loads((result.run_dir / "summary.json").read_text())
    rows = []
    for mode in ("greedy", "sampled"):
        for when in ("before", "after"):
            rows.append(Row(measure=f"quickstart, {mode} accuracy {when}", value=summary[when][mode]["accuracy"]))
    return [*rows, Row(measure="quickstart, whole process", value=summary["seconds"], unit="s")]
