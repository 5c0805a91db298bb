"""The parts of `bench/gpu/run.py`, each run in a process of its own: what is measured, and how.

In: a `Setting`. Out: `Row`s. A part that the machine cannot run raises, and the table says why.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from formulas import Shape, decode_bound, known_peak
from transformers import ContinuousBatchingConfig, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from sharpen.contracts import GenerateRequest, Generation
from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.types import Sampling

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table; `value` None with a reason in `note` where there is no figure."""

    measure: str
    value: float | None
    unit: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the smoke run makes small. `serving` holds (sequences, prompt tokens, new tokens), `training` the tokens of
    an update's one sequence, `tree` (groups, rollouts, prompt tokens, own tokens)."""

    smoke: bool
    device: torch.device
    dtype: torch.dtype
    repeats: int
    serving: tuple[tuple[int, int, int], ...]
    training: tuple[int, ...]
    tree: tuple[int, int, int, int]
    copy_bytes: int
    matrix: int


def make_setting(*, smoke: bool) -> Setting:
    """The real measurement on a GPU, or the same code in small on a CPU."""
    if smoke:
        return Setting(
            smoke=True,
            device=torch.device("cpu"),
            dtype=torch.float32,
            repeats=1,
            serving=((1, 8, 8), (4, 8, 8)),
            training=(64, 128, 256),
            tree=(1, 3, 16, 24),
            copy_bytes=1 << 22,
            matrix=256,
        )
    if not torch.cuda.is_available():
        raise SystemExit("no GPU is here: bench/gpu/run.py --smoke runs the same code on a CPU, in small")
    return Setting(
        smoke=False,
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        repeats=3,
        serving=((1, 128, 256), (64, 128, 512), (256, 128, 512)),
        training=(4096, 16384, 65536),
        tree=(4, 8, 512, 448),
        copy_bytes=1 << 30,
        matrix=8192,
    )


def make_model(setting: Setting, dtype: torch.dtype) -> Any:
    """Random weights in the shape of Qwen3-0.6B, without an end token; in the smoke run 2 small layers."""
    torch.manual_seed(0)
    small = setting.smoke
    config = Qwen3Config(
        vocab_size=512 if small else 151936,
        hidden_size=64 if small else 1024,
        intermediate_size=128 if small else 3072,
        num_hidden_layers=2 if small else 28,
        num_attention_heads=4 if small else 16,
        num_key_value_heads=2 if small else 8,
        head_dim=16 if small else 128,
        max_position_embeddings=512 if small else 131072,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device(setting.device):
        return Qwen3ForCausalLM(config).to(dtype).eval()


def shape_of(model: Any) -> Shape:
    """The numbers that the formulas need."""
    config = model.config
    return Shape(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
    )


def seconds_of(setting: Setting, run: Callable[[], object], *, warm: int = 1) -> float:
    """Median seconds of `run`, after `warm` runs; the device is waited for."""
    times = []
    for repeat in range(warm + setting.repeats):
        began = _now(setting)
        run()
        if repeat >= warm:
            times.append(_now(setting) - began)
    return statistics.median(times)


def _now(setting: Setting) -> float:
    if setting.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def bytes_per_s(setting: Setting) -> float:
    """Memory bandwidth, by a copy within the device: each byte is read and written."""
    source = torch.zeros(setting.copy_bytes, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    return 2 * setting.copy_bytes / seconds_of(setting, lambda: target.copy_(source), warm=3)


def flops_per_s(setting: Setting) -> tuple[float, str]:
    """The device's bfloat16 peak by its data sheet, else as a large product reaches it; and which of the two."""
    name = torch.cuda.get_device_name() if setting.device.type == "cuda" else ""
    known = known_peak(name)
    return (known, "data sheet") if known is not None else (product_flops_per_s(setting), "a large product")


def product_flops_per_s(setting: Setting) -> float:
    """What one large square product in bfloat16 reaches."""
    size = setting.matrix
    a, b = (torch.randn(size, size, device=setting.device).to(torch.bfloat16) for _ in range(2))
    return 2.0 * size**3 / seconds_of(setting, lambda: a @ b, warm=3)


def device_part(setting: Setting) -> list[Row]:
    """What the other parts are compared with."""
    peak, source = flops_per_s(setting)
    rows = [
        Row(measure="memory bandwidth by a copy", value=bytes_per_s(setting) / 1e9, unit="GB/s"),
        Row(measure="bfloat16 peak", value=peak / 1e12, unit="TFLOP/s", note=source),
        Row(measure="bfloat16, one large product", value=product_flops_per_s(setting) / 1e12, unit="TFLOP/s"),
    ]
    model = make_model(setting, setting.dtype)
    return [*rows, Row(measure="parameters of the model", value=shape_of(model).parameters / 1e6, unit="M")]


def _prompts(count: int, length: int, vocabulary: int, seed: int) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(5, vocabulary, length).astype(np.int32) for _ in range(count)]


def generate(
    engine: EmbeddedEngine, vocabulary: int, work: tuple[int, int, int], seed: int
) -> list[tuple[np.ndarray[Any, Any], Generation]]:
    """All sequences of `work` at once, at temperature 1: prompts, and what was sampled."""
    count, prompt, new = work
    prompts = _prompts(count, prompt, vocabulary, seed)

    async def everyone() -> list[Generation]:
        requests = [
            GenerateRequest(prompt_ids=ids, sampling=Sampling(max_tokens=new), noise=(seed << 32) + number)
            for number, ids in enumerate(prompts)
        ]
        return list(await asyncio.gather(*(engine.generate(request) for request in requests)))

    done = asyncio.run(everyone())
    assert all(len(generation.ids) == new for generation in done)
    return list(zip(prompts, done, strict=True))


def engine_part(setting: Setting) -> list[Row]:
    """Tokens per second of the embedded engine, with and without CUDA graphs, and the share of the bound."""
    bandwidth = bytes_per_s(setting)
    model = make_model(setting, setting.dtype)
    shape, vocabulary = shape_of(model), model.config.vocab_size
    longest = max(prompt + new for _, prompt, new in setting.serving)
    engine = EmbeddedEngine(model, max_model_len=longest, max_slots=256, kv_cache_mb=256 if setting.smoke else 24576)
    rows = []
    for work in setting.serving:
        count, prompt, new = work
        bound = decode_bound(
            shape, sequences=count, prompt=prompt, new=new, itemsize=setting.dtype.itemsize, bytes_per_s=bandwidth
        )
        seeds = iter(range(1000))
        speed = count * new / seconds_of(setting, lambda: generate(engine, vocabulary, work, next(seeds)), warm=2)  # noqa: B023
        rows += [
            Row(measure=f"embedded engine, {_work(work)}", value=speed, unit="tokens/s"),
            Row(measure=f"bound by memory, {_work(work)}", value=bound, unit="tokens/s"),
            Row(measure=f"share of the bound, {_work(work)}", value=speed / bound),
        ]
        if (graphs := engine._stepper.graphs) is not None:
            engine._stepper.graphs = None
            began = _now(setting)
            generate(engine, vocabulary, work, 5000)
            eager = count * new / (_now(setting) - began)
            engine._stepper.graphs = graphs
            note = graphs.off or f"{graphs.replays} steps replayed of {engine.stats.steps}"
            rows.append(
                Row(measure=f"the same without CUDA graphs, {_work(work)}", value=eager, unit="tokens/s", note=note)
            )
    return rows


def _work(work: tuple[int, int, int]) -> str:
    count, prompt, new = work
    return f"{count} x ({prompt} + {new})"


def transformers_part(setting: Setting) -> list[Row]:
    """Tokens per second of transformers' continuous batching on the same work; its manager (memory, CUDA graphs) is
    made before the clock runs, anew for each work."""
    model = make_model(setting, setting.dtype)
    rows = []
    for work in setting.serving:
        count, prompt, new = work
        config = GenerationConfig(max_new_tokens=new, do_sample=True, top_k=0, top_p=1.0, temperature=1.0)
        config.eos_token_id = -1  # none: every answer has the length asked for
        small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64) if setting.smoke else None
        seeds = iter(range(1000))

        def run() -> None:
            inputs = [ids.tolist() for ids in _prompts(count, prompt, model.config.vocab_size, next(seeds))]  # noqa: B023
            done = model.generate_batch(
                inputs,
                generation_config=config,  # noqa: B023
                continuous_batching_config=small,  # noqa: B023
                persistent_manager=True,
            )
            found = sum(len(output.generated_tokens) for output in done.values())
            if found != count * new:  # noqa: B023
                raise RuntimeError(f"transformers generated {found} tokens of {count * new}")  # noqa: B023

        speed = count * new / seconds_of(setting, run)
        model.destroy_cached_continuous_batching_manager()
        rows.append(Row(measure=f"transformers continuous batching, {_work(work)}", value=speed, unit="tokens/s"))
    return rows


def vllm_part(setting: Setting) -> list[Row]:
    """Tokens per second of vLLM's offline engine on the same work, where it is installed."""
    if find_spec("vllm") is None:
        return [Row(measure="vLLM", value=None, note="not installed")]
    from vllm import LLM, SamplingParams

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(setting, setting.dtype)
        vocabulary = model.config.vocab_size
        model.save_pretrained(folder)
        del model
        gc.collect()
        torch.cuda.empty_cache()
        longest = max(prompt + new for _, prompt, new in setting.serving)
        engine = LLM(
            model=folder,
            skip_tokenizer_init=True,
            dtype=str(setting.dtype).removeprefix("torch."),
            max_model_len=longest,
            max_num_seqs=256,
            enable_prefix_caching=False,
            **({"enforce_eager": True} if setting.smoke else {"gpu_memory_utilization": 0.6}),
        )
        for work in setting.serving:
            count, prompt, new = work
            seeds = iter(range(1000))
            sampling = SamplingParams(max_tokens=new, ignore_eos=True, detokenize=False, temperature=1.0, logprobs=0)

            def run(
                count: int = count, prompt: int = prompt, sampling: Any = sampling, seeds: Iterator[int] = seeds
            ) -> None:
                prompts = _prompts(count, prompt, vocabulary, next(seeds))
                engine.generate([{"prompt_token_ids": ids.tolist()} for ids in prompts], sampling, use_tqdm=False)

            speed = count * new / seconds_of(setting, run)
            rows.append(Row(measure=f"vLLM, {_work(work)}", value=speed, unit="tokens/s"))
    return rows
