"""Loads a model into an engine, and makes the gateway of an engine.

In: a model's settings, its folder, the run's engine settings. Out: tokenizer and engine; `Gateway`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharpen.config.gateway import GatewayConfig
from sharpen.config.public import TunerModelConfig
from sharpen.config.run import RunConfig
from sharpen.config.trainer import LoraConfig
from sharpen.gateway.gateway import Gateway
from sharpen.inference.routing import Replicas
from sharpen.recipe import EngineType
from sharpen.rollout.user_loop import owner
from sharpen.types import Sampling

if TYPE_CHECKING:
    from sharpen.execution.serving import ServingThread
    from sharpen.inference.embedded.engine import EmbeddedEngine
    from sharpen.inference.engine import Engine


def load_policy(
    config: RunConfig, folder: Path, thread: ServingThread, *, type: EngineType, alone: bool
) -> tuple[Any, Engine]:
    """Load the trained model from `folder`; return (tokenizer, engine). `alone`: the engine never computes at the same
    time as the trainer. Raises `ModelError` if the engine cannot serve the model."""
    if type == "embedded":
        return load_engine(config.model, config, folder, alone=alone)
    return load_vllm(config.model, config, folder, thread, lora=unmerged_adapters(config))


def load_vllm(
    model: TunerModelConfig, config: RunConfig, folder: Path, thread: ServingThread, *, lora: LoraConfig | None = None
) -> tuple[Any, Engine]:
    """Load the model in `folder` into vLLM; return (tokenizer, engine). With `lora` the engine loads unmerged adapters.
    Raises `ModelError` if vLLM cannot serve the model."""
    from sharpen.families.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder)
    return tokenizer, thread.call(_start_replicas(model, config, folder, tokenizer.decode, lora))


async def _start_replicas(
    model: TunerModelConfig,
    config: RunConfig,
    folder: Path,
    stop_decoder: Callable[[list[int]], str],
    lora: LoraConfig | None,
) -> Engine:
    """Start the vLLM engine, or several as one `Replicas`, each with its own GPUs or cores."""
    from sharpen.inference.vllm.engine import VLLMEngine

    engines: list[Engine] = []
    try:
        for number in range(count := model.inference_engine_num):
            engines.append(
                await VLLMEngine.start(
                    str(folder),
                    max_model_len=model.max_model_len,
                    stop_decoder=stop_decoder,
                    dtype=config.engine.dtype,
                    max_slots=config.engine.max_slots,
                    kv_cache_mb=config.engine.kv_cache_mb,
                    tensor_parallel_size=model.tensor_parallel_size,
                    replica=(number, count),
                    lora=lora,
                )
            )
    except BaseException:
        for engine in engines:
            await engine.close()
        raise
    return engines[0] if count == 1 else Replicas(engines)


def unmerged_adapters(config: RunConfig) -> LoraConfig | None:
    """Return the LoRA settings if vLLM loads the adapters unmerged: it supports their rank and the trainer is in this
    process."""
    from sharpen.inference.vllm.adapters import RANKS

    lora = config.trainer.lora
    if lora is None or lora.rank > max(RANKS) or config.trainer.has_ranks or config.uses_ray or config.mode != "both":
        return None
    return lora


def load_engine(model: TunerModelConfig, config: RunConfig, folder: Path, *, alone: bool) -> tuple[Any, EmbeddedEngine]:
    """Load the model in `folder`; return (tokenizer, embedded engine). `alone` as in `load_policy`. Raises `ModelError`
    if the engine cannot serve the model."""
    from sharpen.families.tokenizer import load_tokenizer
    from sharpen.inference.embedded.engine import EmbeddedEngine

    tokenizer = load_tokenizer(folder)
    engine = EmbeddedEngine.from_pretrained(
        str(folder),
        max_model_len=model.max_model_len,
        device=config.engine.device,
        dtype=config.engine.dtype,
        max_slots=config.engine.max_slots,
        kv_cache_mb=config.engine.kv_cache_mb,
        deterministic=config.deterministic,
        alone=alone,
        stop_decoder=tokenizer.decode,
        tokenizer=tokenizer,
    )
    return tokenizer, engine


def make_gateway(
    model: TunerModelConfig,
    engine: Engine,
    tokenizer: Any,
    loop: asyncio.AbstractEventLoop,
    *,
    listen: GatewayConfig,
    max_calls: int | None = None,
) -> Gateway:
    """Return a gateway for a model's engine; its server will `listen` there. Raises `ConfigError` for an unknown
    parser."""
    return Gateway(
        engine,
        tokenizer,
        model_name=model.model_path,
        loop=loop,
        sampling=Sampling(
            temperature=model.temperature, top_p=model.top_p, top_k=model.top_k, max_tokens=model.max_tokens
        ),
        enable_thinking=model.enable_thinking,
        tool_call_parser=model.tool_call_parser,
        reasoning_parser=model.reasoning_parser,
        max_calls=max_calls,
        who_calls=owner.get,
        listen=listen,
    )
