"""Engine and trainer at real sizes on two CPU threads, in bfloat16, against what the machine allows.

In: nothing (models of Qwen3's shape with random weights are made here). Out: a table and `bench/out/real.json`. A model
of 100M parameters (vocabulary 16,384) and one of 0.6B (Qwen3-0.6B's shape, vocabulary 151,936) do four works:

- decode: 32 requests whose prompt of 200 tokens, the same for all, is cached sample 12 tokens each;
- decode long: the same behind 640 tokens, as in the later turns of an agent;
- prefill: 2 prompts of 256 tokens, one token sampled each;
- training: one update of adapters (rank 16) by 8 answers of 112 tokens to a prompt of 128, with gradient checkpointing.

The limit is measured in the same run: the products of a step with all weights, by the fastest of three ways (rows
first, weight first, and, where the processor has products of bfloat16, weight packed beforehand by oneDNN), and the
keys and values that decoding reads (those of the prompt once), at the bandwidth of a sum over memory. Beside the engine
as it is, it runs with settings of before: all products rows first, and (of adapters beside shared weights) the model's
own modules. These take turns; medians are compared, and shares of the limit are reported, with what the seconds of
decoding are spent on.
vLLM's build for CPUs does the same works if `.venv-vllm` is there (`make .venv-vllm/installed`), in its own process,
afterwards. Training's limit is the products of two forward passes and one backward pass to the inputs (the output
layer: one and one). TRL trains the same answers if `.venv-trl` is there (`make .venv-trl/installed`), by its
`SFTTrainer`, padded, without ratios and advantages (`trl/micro_step.py`).

    python bench/real.py [--repeats 3] [--only 100M]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import finish, table
from torch.nn.functional import linear
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).parents[1]
SHAPES = {
    "tiny": {"vocab_size": 16384, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    "100M": {"vocab_size": 16384, "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12},
    "0.6B": {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    "1.7B": {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28},
    "4B": {"vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36},
}
"""Of Qwen3, from 0.6B on."""
HEADS = {"tiny": (4, 2, 32), "100M": (12, 4, 64), "0.6B": (16, 8, 128), "1.7B": (16, 8, 128), "4B": (32, 8, 128)}
ROWS, CACHED, LONG, NEW, PROMPTS, PROMPT = 32, 200, 640, 12, 2, 256
ANSWERS, ANSWER, QUESTION = 8, 112, 128
OPERATORS = {
    "products with weights": {"mm", "addmm", "linear", "mkldnn_linear"},
    "attention": {"bmm", "baddbmm", "_softmax", "_scaled_dot_product_flash_attention_for_cpu"},
    "copies": {"copy_", "cat", "index", "index_select", "_index_put_impl_", "gather"},
}
"""What a decode step computes, by PyTorch's operators."""
Speeds = tuple[float, float, float]
"""Tokens a second: decode, decode long, prefill."""


def make_model(size: str) -> Any:
    """Random weights in bfloat16. No end token: every answer has the length asked for."""
    heads, kv_heads, head_dim = HEADS[size]
    config = Qwen3Config(
        **SHAPES[size],
        head_dim=head_dim,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return Qwen3ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def median(measured: Callable[[], object], repeats: int) -> float:
    """Median seconds."""
    measured()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        measured()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@torch.inference_mode()
def products_seconds(model: Any, rows: int, output_rows: int, repeats: int, passes: tuple[int, int] = (1, 1)) -> float:
    """Seconds of the products of one step, by the fastest way of each. `passes`: how often layers and output layer are
    computed."""
    config = model.config
    width, inner = config.hidden_size, config.intermediate_size
    heads = config.num_attention_heads * config.head_dim
    qkv = heads + 2 * config.num_key_value_heads * config.head_dim
    layer = [(qkv, width), (width, heads), (2 * inner, width), (width, inner)]
    layers = int(config.num_hidden_layers)
    output = fastest((int(config.vocab_size), width), output_rows, repeats)
    return passes[0] * layers * sum(fastest(shape, rows, repeats) for shape in layer) + passes[1] * output


def fastest(shape: tuple[int, int], rows: int, repeats: int) -> float:
    """Seconds of a product with a weight of this shape, averaged over so many weights that no cache holds them."""
    count = max(1, min(8, 2**25 // (shape[0] * shape[1])))
    weights = [torch.randn(shape).bfloat16() for _ in range(count)]
    x = torch.randn(rows, shape[1]).bfloat16()
    columns = x.t().contiguous()
    ways: list[Callable[[], object]] = [
        lambda: [linear(x, weight) for weight in weights],
        lambda: [weight @ columns for weight in weights],
    ]
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        packed = [torch.ops.mkldnn._reorder_linear_weight(weight, rows) for weight in weights]
        ways.append(lambda: [torch.ops.mkldnn._linear_pointwise(x, one, None, "none", [], "") for one in packed])
    return min(median(way, repeats) for way in ways) / count


def bandwidth(repeats: int) -> float:
    """Bytes a second of a sum over memory."""
    values = torch.ones(2**26)
    num_bytes: int = values.numel() * values.itemsize
    return num_bytes / median(values.sum, repeats)


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Random ids."""
    generator = np.random.default_rng(seed)
    return [[int(token) for token in generator.integers(1, 500, length)] for _ in range(count)]


def run_engine(engine: Any, ids: list[list[int]], new: int, seed: int) -> float:
    """Seconds of requests with these prompts, all at once."""
    from sharpen.contracts import GenerateRequest
    from sharpen.types import Sampling

    async def everyone() -> None:
        requests = [
            GenerateRequest(
                prompt_ids=np.array(prompt, np.int32), sampling=Sampling(max_tokens=new), noise=seed * 1000 + index
            )
            for index, prompt in enumerate(ids)
        ]
        await asyncio.gather(*(engine.generate(request) for request in requests))

    start = time.perf_counter()
    asyncio.run(everyone())
    return time.perf_counter() - start


def speeds(run: Callable[[list[list[int]], int, int], float], turn: int) -> Speeds:
    """Tokens a second of each work, by a function of prompts, new tokens and seed. Each turn has prompts of its own."""
    decode = []
    for length in (CACHED, LONG):
        same = prompts(1, length, 0) * ROWS
        run(same[:1], 1, turn)
        run(same, 1, turn)  # each request has its own copy of the prompt then, where the engine makes one
        decode.append(ROWS * NEW / run(same, NEW, turn))
    return decode[0], decode[1], PROMPTS * PROMPT / run(prompts(PROMPTS, PROMPT, turn + 1), 1, turn)


def engine_speeds(model: Any, *, adapters: bool, repeats: int) -> dict[str, Speeds]:
    """Median speeds of the engine as it is, and with each setting of before, in turns."""
    from sharpen.config.trainer import LoraConfig
    from sharpen.engine.embedded.engine import EmbeddedEngine
    from sharpen.engine.embedded.forward import GenericForward

    lora = LoraConfig(rank=16, base="shared") if adapters else None
    engine = EmbeddedEngine(model, max_model_len=1024, max_slots=64, kv_cache_mb=4000, adapters=lora)
    fast: Any = engine._stepper._forward
    chosen = fast._columns_faster

    def by_rows() -> None:
        fast._columns_faster, engine._stepper._forward = False, fast

    def as_it_is() -> None:
        fast._columns_faster, engine._stepper._forward = chosen, fast

    def by_modules() -> None:
        engine._stepper._forward = GenericForward(engine._model)

    name = "adapters, " if adapters else ""
    sides = {f"{name}engine": as_it_is, f"{name}rows first": by_rows}
    if adapters:
        sides[f"{name}model's modules"] = by_modules
    measured: dict[str, list[Speeds]] = {side: [] for side in sides}
    for turn in range((repeats + 1) * len(sides)):  # the first of each is a warm-up
        side = list(sides)[turn % len(sides)]
        sides[side]()
        measured[side].append(speeds(lambda ids, new, seed: run_engine(engine, ids, new, seed), turn))
    as_it_is()
    for length in (CACHED, LONG):
        shares = ", ".join(f"{kind} {share:.0%}" for kind, share in where_time_goes(engine, length).items())
        print(f"{name}decoding behind {length} tokens: {shares}", flush=True)
    asyncio.run(engine.close())
    return {side: medians(values[1:]) for side, values in measured.items()}


def where_time_goes(engine: Any, length: int) -> dict[str, float]:
    """Return the shares of the seconds of decoding, by what is computed."""
    ids = prompts(1, length, 0) * ROWS
    run_engine(engine, ids[:1], 1, 0)
    run_engine(engine, ids, 1, 0)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        seconds = run_engine(engine, ids, NEW, 0)
    shares = dict.fromkeys((*OPERATORS, "other operators"), 0.0)
    for operator in profiled.key_averages():
        name = operator.key.removeprefix("aten::")
        kind = next((kind for kind, names in OPERATORS.items() if name in names), "other operators")
        shares[kind] += operator.self_cpu_time_total / 1e6 / seconds
    return {**shares, "no operator": 1 - sum(shares.values())}


def medians(values: list[Speeds]) -> Speeds:
    """Median of each work's speeds."""
    decode, long, prefill = zip(*values, strict=True)
    return statistics.median(decode), statistics.median(long), statistics.median(prefill)


def limits(model: Any, repeats: int) -> Speeds:
    """Tokens a second that products and memory allow."""
    config = model.config
    per_position = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2
    bytes_a_second, products = bandwidth(repeats), products_seconds(model, ROWS, ROWS, repeats)
    decode, long = (
        ROWS / (products + (length + ROWS * NEW / 2) * per_position / bytes_a_second) for length in (CACHED, LONG)
    )
    return decode, long, PROMPTS * PROMPT / products_seconds(model, PROMPTS * PROMPT, PROMPTS, max(1, repeats // 2))


def vllm_speeds(python: Path, model: Any, repeats: int) -> Speeds | None:
    """Speeds of vLLM's build for CPUs, in its own environment; None if that is not there."""
    if not python.exists():
        print(f"no vLLM here ({python}): its side is left out", flush=True)
        return None
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        command = [str(python), __file__, "--vllm-model", folder, "--repeats", str(repeats)]
        settings = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
        cores = sorted(os.sched_getaffinity(0))[:2]  # by itself it would leave one of two cores out
        settings["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(core) for core in cores)
        done = subprocess.run(command, env=os.environ | settings, stdout=subprocess.PIPE, text=True, check=True)
    decode, long, prefill = json.loads(done.stdout.splitlines()[-1])
    return decode, long, prefill


def measure_vllm(folder: str, repeats: int) -> None:
    """Print the speeds of vLLM, within whose environment this runs."""
    from vllm import LLM, SamplingParams

    model = LLM(folder, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=ROWS, seed=0)

    def run(ids: list[list[int]], new: int, seed: int) -> float:
        sampling = SamplingParams(max_tokens=new, ignore_eos=True, detokenize=False, logprobs=0)
        start = time.perf_counter()
        model.generate([{"prompt_token_ids": prompt} for prompt in ids], sampling, use_tqdm=False)
        return time.perf_counter() - start

    print(json.dumps(medians([speeds(run, repeat) for repeat in range(repeats + 1)][1:])))


def training_seconds(folder: str, repeats: int) -> float:
    """Median seconds of our update."""
    from trainer import Batch, make_experience

    from sharpen.config.run import LossConfig
    from sharpen.config.trainer import LoraConfig, TrainerConfig
    from sharpen.learning.algorithm.resolve import resolve
    from sharpen.learning.trainer.lora import load_trained
    from sharpen.learning.trainer.parity import Tolerance
    from sharpen.learning.trainer.trainer import Trainer

    config = TrainerConfig(
        dtype="bfloat16",
        max_tokens_per_micro_batch=1024,
        gradient_checkpointing=True,
        lora=LoraConfig(rank=16, base="shared"),
    )
    trainer = Trainer(
        load_trained(folder, config, torch.device("cpu")),
        algorithm=resolve("grpo", LossConfig(kl="none", kl_coef=None), ANSWERS),
        config=config,
        learning_rate=1e-4,
        planned_updates=repeats + 1,
        tolerance=Tolerance(mean=None, max=None),
    )
    weight = 1 / (ANSWERS * ANSWER)
    answers = [
        make_experience(0, number, ids, QUESTION, weight, (-1.0) ** number) for number, ids in enumerate(sequences())
    ]
    return median(lambda: trainer.train_step([Batch(experiences=tuple(answers))]), repeats)


def sequences() -> list[list[int]]:
    """The question with each of its answers."""
    (question,) = prompts(1, QUESTION, 0)
    return [question + answer for answer in prompts(ANSWERS, ANSWER, 1)]


def trl_seconds(python: Path, folder: str, repeats: int) -> float | None:
    """Median seconds of TRL's step, in its own environment; None if that is not there."""
    if not python.exists():
        print(f"no TRL here ({python}): its side is left out", flush=True)
        return None
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "sequences.json"
        path.write_text(json.dumps([[ids, QUESTION] for ids in sequences()]), encoding="utf-8")
        script = ROOT / "bench/trl/micro_step.py"
        command = [str(python), str(script), "--model", folder, "--sequences", str(path), "--repeats", str(repeats)]
        settings = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"}
        done = subprocess.run(command, env=os.environ | settings, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def compare_training(size: str, python: Path, repeats: int) -> tuple[list[list[object]], dict[str, float]]:
    """Rows of the table, and ratios, of one size: trained tokens a second."""
    model = make_model(size)
    trained = ANSWERS * ANSWER
    limit = products_seconds(model, QUESTION + trained, trained, repeats, (3, 2))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        del model
        seconds = {"trainer": training_seconds(folder, repeats)}
        if (other := trl_seconds(python, folder, repeats)) is not None:
            seconds["TRL"] = other
    rows: list[list[object]] = [[size, "limit", trained / limit, 1.0]]
    rows += [[size, side, trained / taken, limit / taken] for side, taken in seconds.items()]
    values = {"training_share": limit / seconds["trainer"]}
    if other is not None:
        values["training_vs_trl"] = other / seconds["trainer"]
    return rows, {f"{name}_{size}": value for name, value in values.items()}


def compare(size: str, python: Path, repeats: int) -> tuple[list[list[object]], dict[str, float]]:
    """Rows of the table, and ratios, of one size."""
    limit = limits(make_model(size), 2 * repeats + 1)
    print(size, "limit", *limit, flush=True)
    sides = engine_speeds(make_model(size), adapters=False, repeats=repeats)
    sides |= engine_speeds(make_model(size), adapters=True, repeats=repeats)
    if (other := vllm_speeds(python, make_model(size), repeats)) is not None:
        sides["vLLM"] = other
    rows: list[list[object]] = [[size, "limit", *limit, 1.0, 1.0, 1.0]]
    for side, found in sides.items():
        rows.append([size, side, *found, *(one / most for one, most in zip(found, limit, strict=True))])
        print(*rows[-1], flush=True)
    engine, adapted = sides["engine"], sides["adapters, engine"]
    values = {
        "decode_share": engine[0] / limit[0],
        "long_share": engine[1] / limit[1],
        "prefill_share": engine[2] / limit[2],
        "decode_vs_rows_first": engine[0] / sides["rows first"][0],
        "adapters_vs_modules": adapted[0] / sides["adapters, model's modules"][0],
        "adapters_vs_none": adapted[0] / engine[0],
    }
    if other is not None:
        names = ("decode_vs_vllm", "long_vs_vllm", "prefill_vs_vllm")
        values |= {name: ours / theirs for name, ours, theirs in zip(names, engine, other, strict=True)}
    return rows, {f"{name}_{size}": value for name, value in values.items()}


def main() -> int:
    """Measure, print, write `bench/out/real.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=SHAPES, help="one size; tiny is for tests")
    parser.add_argument("--vllm-python", type=Path, default=ROOT / ".venv-vllm/bin/python")
    parser.add_argument("--trl-python", type=Path, default=ROOT / ".venv-trl/bin/python")
    parser.add_argument("--vllm-model", default="", help="measure vLLM alone, from its environment: a model's folder")
    arguments = parser.parse_args()
    if arguments.vllm_model:
        measure_vllm(arguments.vllm_model, arguments.repeats)
        return 0
    torch.set_num_threads(2)
    rows: list[list[object]] = []
    training: list[list[object]] = []
    ratios: dict[str, float] = {}
    for size in [arguments.only] if arguments.only else ["100M", "0.6B"]:
        more, values = compare(size, arguments.vllm_python, arguments.repeats)
        rows, ratios = rows + more, ratios | values
        more, values = compare_training(size, arguments.trl_python, arguments.repeats)
        training, ratios = training + more, ratios | values
    print(f"\n{table(['size', 'side', 'trained tok/s', 'of the limit'], training)}")
    header = ["size", "side", "decode tok/s", "long", "prefill", "of the limit", "long", "prefill"]
    return finish("real", header=header, rows=rows, ratios=ratios)


if __name__ == "__main__":
    sys.exit(main())
