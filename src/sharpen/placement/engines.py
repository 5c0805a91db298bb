"""Loads a model into an engine, and makes the gateway of an engine.

In: a model's settings, its folder, the run's engine settings. Out: tokenizer and engine; `Gateway`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharpen.agent.rollout.user_loop import owner
from sharpen.config.public import TunerModelConfig
from sharpen.config.run import EngineConfig
from sharpen.config.sections import GatewayConfig
from sharpen.config.trainer import LoraConfig
from sharpen.contracts import EngineSettings
from sharpen.engine.routing import Replicas
from sharpen.gateway.gateway import Gateway
from sharpen.gateway.images import album_of
from sharpen.learning.recipe import EngineType
from sharpen.placement.engine_choice import start_of
from sharpen.types import Sampling

if TYPE_CHECKING:
    from sharpen.contracts import Engine
    from sharpen.engine.embedded.engine import EmbeddedEngine
    from sharpen.placement.serving import ServingThread


def load_policy(
    model: TunerModelConfig,
    config: EngineConfig,
    folder: Path,
    thread: ServingThread,
    *,
    type: EngineType,
    deterministic: bool,
    alone: bool,
    adapters: LoraConfig | None = None,
) -> tuple[Any, Engine]:
    """Load the trained model from `folder`; return (tokenizer, engine). `type` has been chosen by `config`. `alone`:
    the engine never computes at the same time as a trainer; `adapters` are served beside the model's own weights.
    Raises `ModelError` if the engine cannot serve the model."""
    if type == "embedded":
        return load_engine(model, config, folder, deterministic=deterministic, alone=alone, adapters=adapters)
    if type != "vllm":
        return _load_own(type, model, config, folder, thread, alone=alone)
    from sharpen.models.configuration import load_tokenizer

    tokenizer = load_tokenizer(folder)
    return tokenizer, thread.call(_start_replicas(model, config, folder, tokenizer.decode, adapters))


def _load_own(
    type: EngineType,
    model: TunerModelConfig,
    config: EngineConfig,
    folder: Path,
    thread: ServingThread,
    *,
    alone: bool,
) -> tuple[Any, Engine]:
    """Start somebody's own engine; return (tokenizer, engine). Raises what starting it raises."""
    from sharpen.models.configuration import load_tokenizer

    tokenizer = load_tokenizer(folder)
    settings = EngineSettings(
        folder=folder,
        tokenizer=tokenizer,
        max_model_len=model.max_model_len,
        device=config.device,
        dtype=config.dtype,
        max_slots=config.max_slots,
        kv_cache_mb=config.kv_cache_mb,
        tensor_parallel_size=model.tensor_parallel_size,
        alone=alone,
    )
    start = start_of(type)

    async def started() -> Engine:
        return await start(settings)

    return tokenizer, thread.call(started())


async def _start_replicas(
    model: TunerModelConfig,
    config: EngineConfig,
    folder: Path,
    stop_decoder: Callable[[list[int]], str],
    lora: LoraConfig | None,
) -> Engine:
    """Start the vLLM engine, or several as one `Replicas`, each with its own GPUs or cores."""
    from sharpen.engine.vllm.engine import VLLMEngine

    engines: list[Engine] = []
    try:
        for number in range(count := model.inference_engine_num):
            engines.append(
                await VLLMEngine.start(
                    str(folder),
                    max_model_len=model.max_model_len,
                    stop_decoder=stop_decoder,
                    dtype=config.dtype,
                    max_slots=config.max_slots,
                    kv_cache_mb=config.kv_cache_mb,
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


def load_engine(
    model: TunerModelConfig,
    config: EngineConfig,
    folder: Path,
    *,
    deterministic: bool,
    alone: bool,
    adapters: LoraConfig | None = None,
) -> tuple[Any, EmbeddedEngine]:
    """Load the model in `folder`; return (tokenizer, embedded engine). `alone` as in `load_policy`; with `adapters` the
    engine serves them beside the model's own weights. Raises `ModelError` if the engine cannot serve the model."""
    from sharpen.engine.embedded.engine import EmbeddedEngine
    from sharpen.models.configuration import load_tokenizer

    tokenizer = load_tokenizer(folder)
    engine = EmbeddedEngine.from_pretrained(
        str(folder),
        max_model_len=model.max_model_len,
        device=config.device,
        dtype=config.dtype,
        max_slots=config.max_slots,
        kv_cache_mb=config.kv_cache_mb,
        deterministic=deterministic,
        alone=alone,
        stop_decoder=tokenizer.decode,
        tokenizer=tokenizer,
        adapters=adapters,
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
    adapters: Sequence[str] = (),
    policies: Mapping[str, str] | None = None,
) -> Gateway:
    """Return a gateway for a model's engine; its server will `listen` there. `adapters` are names of those that the
    engine serves beside the model, `policies` those that answer agents, by their names. Raises `ConfigError` for an
    unknown parser."""
    return Gateway(
        engine,
        tokenizer,
        model_name=model.model_path,
        loop=loop,
        sampling=Sampling(
            temperature=model.temperature,
            top_p=model.top_p,
            top_k=model.top_k,
            min_p=model.min_p,
            max_tokens=model.max_tokens,
        ),
        enable_thinking=model.enable_thinking,
        tool_call_parser=model.tool_call_parser,
        reasoning_parser=model.reasoning_parser,
        max_calls=max_calls,
        who_calls=owner.get,
        listen=listen,
        adapters=adapters,
        policies=policies,
        album=album_of(Path(tokenizer.name_or_path)),
    )
