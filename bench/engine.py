"""The embedded engine against transformers' `generate` (the better of its dynamic and static cache), on two CPU
threads.

In: nothing (Qwen3 and Qwen3.5 models with random weights are made here). Out: a table and `bench/out/engine.json`.
Workloads:

- equal: 64 prompts of 64 tokens, 64 new tokens each;
- ragged: 64 conversations of three calls, measured once; what each call adds to the prompt, and its answer, are 8 to
  192 tokens, uniformly drawn. Transformers gets the whole, left-padded prompt again at each call and generates until
  the longest answer of the batch is done; our conversations go on independently;
- hybrid: ragged work of a third of the lengths by a model of which three layers in four are recurrent (gated delta
  nets in plain torch, so slow in transformers that the whole work would take ten minutes), measured once, with the
  dynamic cache;
- large: 100M parameters, short, reported only.

Sides alternate in one process, with the same weights, precision and matmul setting; medians are compared, in tokens
that were asked for per second. A cache that takes over half as long again as the fastest for the same work with a
quarter of the lengths is not measured. A chi-square test compares sampled tokens with the model's own distribution.

    python bench/engine.py [--repeats 3] [--no-large] [--only equal_fp32]
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import functools
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

from sharpen.contracts import GenerateRequest
from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.engine.embedded.matmul import float32_matmul
from sharpen.types import Sampling

TARGETS = {
    "equal_fp32": 1.15,
    "equal_bf16": 1.3,
    "ragged_fp32": 2.5,
    "ragged_bf16": 2.5,
    "hybrid_fp32": 2.5,
    "chi_square_p": 0.001,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MAX_LEN = 1600


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One call of a conversation: tokens that the user adds, tokens to sample."""

    added: tuple[int, ...]
    new: int


Conversation = tuple[Turn, ...]


def make_model(size: str, dtype: torch.dtype) -> Any:
    """`tiny` has 4.4M parameters, `large` about 100M. No end token: every answer has the length asked for."""
    tiny = size == "tiny"
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=2048 if tiny else 16384,
        hidden_size=256 if tiny else 768,
        intermediate_size=768 if tiny else 2304,
        num_hidden_layers=5 if tiny else 12,
        num_attention_heads=8 if tiny else 12,
        num_key_value_heads=4,
        head_dim=32 if tiny else 64,
        max_position_embeddings=MAX_LEN,
        initializer_range=0.1 if tiny else 0.02,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).to(dtype).eval()


def make_hybrid() -> Any:
    """About as many parameters as `tiny`: three layers with a recurrent state, one with attention."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=MAX_LEN,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return Qwen3_5ForCausalLM(config).eval()


def equal_work(count: int, prompt: int, new: int, seed: int) -> list[Conversation]:
    """`count` single calls of equal lengths."""
    generator = np.random.default_rng(seed)
    return [(Turn(added=_ids(generator, prompt), new=new),) for _ in range(count)]


def ragged_work(count: int, longest: int, seed: int) -> list[Conversation]:
    """Three calls each; what a call adds to the prompt, and its answer, are 8 to `longest` tokens, uniformly drawn."""
    generator = np.random.default_rng(seed)

    def drawn() -> int:
        return int(generator.integers(8, longest + 1))

    def turn() -> Turn:
        return Turn(added=_ids(generator, drawn()), new=drawn())

    return [(turn(), turn(), turn()) for _ in range(count)]


def quarter(turn: Turn) -> Turn:
    """A call of a quarter of the lengths."""
    return Turn(added=turn.added[: max(1, len(turn.added) // 4)], new=max(1, turn.new // 4))


def _ids(generator: np.random.Generator, count: int) -> tuple[int, ...]:
    return tuple(generator.integers(1, 2048, count).tolist())


def run_engine(engine: EmbeddedEngine, work: Sequence[Conversation], seed: int) -> float:
    """Seconds for all conversations at once."""

    async def converse(index: int, conversation: Conversation) -> None:
        ids: list[int] = []
        for call, turn in enumerate(conversation):
            ids += turn.added
            generation = await engine.generate(
                GenerateRequest(
                    prompt_ids=np.array(ids, np.int32),
                    sampling=Sampling(max_tokens=turn.new),
                    noise=(seed << 32) + (index << 8) + call,
                )
            )
            assert len(generation.ids) == turn.new
            ids += generation.ids.tolist()

    async def everyone() -> None:
        await asyncio.gather(*(converse(index, conversation) for index, conversation in enumerate(work)))

    start = time.perf_counter()
    asyncio.run(everyone())
    return time.perf_counter() - start


def run_transformers(model: Any, cache: str, work: Sequence[Conversation]) -> float:
    """Seconds for the same conversations, call by call as one left-padded batch."""
    histories: list[list[int]] = [[] for _ in work]
    start = time.perf_counter()
    for call in range(len(work[0])):
        for history, conversation in zip(histories, work, strict=True):
            history += conversation[call].added
        width = max(len(history) for history in histories)
        ids = torch.zeros(len(work), width, dtype=torch.long)
        mask = torch.zeros(len(work), width, dtype=torch.long)
        for row, history in enumerate(histories):
            ids[row, width - len(history) :] = torch.tensor(history)
            mask[row, width - len(history) :] = 1
        longest = max(conversation[call].new for conversation in work)
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=longest,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=1.0,
            cache_implementation=cache,
        )
        for row, (history, conversation) in enumerate(zip(histories, work, strict=True)):
            history += out[row, width : width + conversation[call].new].tolist()
    return time.perf_counter() - start


def compare(
    model: Any, work_of: Callable[[int], list[Conversation]], repeats: int, caches: Sequence[str]
) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds and tokens per second of each side, sides taking turns, new work in each repeat.

    Where the engine chose another setting for fp32 products than PyTorch's default, transformers has a turn with each.
    """
    engine = EmbeddedEngine(copy.deepcopy(model), max_model_len=MAX_LEN, max_slots=64)
    sides: dict[str, Callable[[list[Conversation], int], float]] = {
        "engine": lambda work, seed: run_engine(engine, work, seed)
    }
    for cache in caches:
        for precision in dict.fromkeys(("highest", engine.matmul.precision)):
            name = cache if precision == "highest" else f"{cache}, {precision}"
            sides[name] = functools.partial(run_transformers_with, precision, model, cache)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side(equal_work(4, 16, 8, 0), 0)  # warm-up
    trial = [tuple(quarter(turn) for turn in conversation) for conversation in work_of(0)]
    tried = {name: side(trial, 0) for name, side in sides.items() if name != "engine"}
    fastest = min(tried.values())
    sides = {name: side for name, side in sides.items() if tried.get(name, 0.0) <= 1.5 * fastest}
    for repeat in range(1, repeats + 1):
        work = work_of(repeat)
        tokens = sum(turn.new for conversation in work for turn in conversation)
        for name, side in sides.items():
            seconds[name].append(side(work, repeat) / tokens)
    medians = {name: statistics.median(values) for name, values in seconds.items() if values}
    return medians, {name: 1 / value for name, value in medians.items()}


def run_transformers_with(precision: str, model: Any, cache: str, work: list[Conversation], _seed: int) -> float:
    """`run_transformers` with PyTorch's setting for fp32 products."""
    with float32_matmul(precision):
        return run_transformers(model, cache, work)


def chi_square_p(model: Any, count: int) -> float:
    """p-value of the engine's first sampled tokens against the model's own distribution (bins of 5 or more
    expected)."""
    prompt = np.arange(5, 25, dtype=np.int32)
    with torch.inference_mode():
        logits_V = model(torch.tensor(prompt, dtype=torch.long).unsqueeze(0)).logits[0, -1].double()
    expected = torch.softmax(logits_V, 0).numpy() * count
    engine = EmbeddedEngine(copy.deepcopy(model), max_model_len=MAX_LEN)

    async def draw() -> list[int]:
        sampling = Sampling(max_tokens=1)
        requests = [GenerateRequest(prompt_ids=prompt, sampling=sampling, noise=noise) for noise in range(count)]
        return [int(g.ids[0]) for g in await asyncio.gather(*(engine.generate(request) for request in requests))]

    counts = np.bincount(asyncio.run(draw()), minlength=len(expected))
    few = expected < 5
    counts = np.append(counts[~few], counts[few].sum())
    expected = np.append(expected[~few], expected[few].sum())
    statistic = float(((counts - expected) ** 2 / np.maximum(expected, 1e-9)).sum())
    halves = torch.tensor([(len(counts) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def main() -> int:
    """Measure, print, write `bench/out/engine.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-large", action="store_true")
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--longest", type=int, default=192, help="tokens of an answer, at most; 8 or more")
    parser.add_argument("--draws", type=int, default=20_000, help="tokens of the chi-square test")
    parser.add_argument("--only", default="", help="one workload, for profiling; writes nothing")
    arguments = parser.parse_args()
    if arguments.longest < 8:
        parser.error(f"--longest is {arguments.longest}: an answer has 8 tokens or more")
    torch.set_num_threads(2)
    workloads: dict[str, Callable[[int], list[Conversation]]] = {
        "equal": lambda seed: equal_work(arguments.conversations, 64, max(1, arguments.longest // 3), seed),
        "ragged": lambda seed: ragged_work(arguments.conversations, arguments.longest, seed),
    }
    rows: list[list[object]] = []
    ratios: dict[str, float] = {}

    def measure(
        name: str,
        model: Any,
        work_of: Callable[[int], list[Conversation]],
        repeats: int,
        caches: Sequence[str] = ("dynamic", "static"),
    ) -> None:
        seconds, speed = compare(model, work_of, repeats, caches)
        best = min((side for side in seconds if side != "engine"), key=seconds.__getitem__)
        ratios[name] = seconds[best] / seconds["engine"]
        rows.append([name, speed["engine"], speed[best], best, ratios[name]])
        print(name, f"{ratios[name]:.2f}", flush=True)

    for kind, work_of in workloads.items():
        for precision, dtype in DTYPES.items():
            if arguments.only in f"{kind}_{precision}":
                measure(
                    f"{kind}_{precision}",
                    make_model("tiny", dtype),
                    work_of,
                    arguments.repeats if kind == "equal" else 1,
                )
    if arguments.only in "hybrid_fp32":
        shorter = max(8, arguments.longest // 3)
        work = functools.partial(ragged_work, arguments.conversations, shorter)
        measure("hybrid_fp32", make_hybrid(), work, 1, caches=("dynamic",))
    if arguments.only:
        return 0
    if not arguments.no_large:
        for precision, dtype in DTYPES.items():
            large = make_model("large", dtype)
            measure(f"large_{precision}", large, lambda seed: equal_work(16, 32, 32, seed), 1)
    ratios["chi_square_p"] = chi_square_p(make_model("tiny", torch.float32), arguments.draws)
    return finish(
        "engine",
        header=["workload", "engine tok/s", "transformers tok/s", "its best cache", "ratio"],
        rows=rows,
        ratios=ratios,
        at_least=TARGETS,
    )


if __name__ == "__main__":
    sys.exit(main())
