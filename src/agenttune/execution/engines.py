"""Loads a model into an embedded engine.

In: a model's settings, its folder, the run's engine settings. Out: tokenizer and engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from agenttune.config.public import TunerModelConfig
from agenttune.config.run import RunConfig
from agenttune.types import Sampling

if TYPE_CHECKING:
    from agenttune.inference.embedded import EmbeddedEngine


def load_engine(model: TunerModelConfig, config: RunConfig, folder: Path) -> tuple[Any, EmbeddedEngine]:
    """(tokenizer, engine) of the model in `folder`. Raises `ModelError` if it cannot be served."""
    from transformers import AutoTokenizer

    from agenttune.inference.embedded import EmbeddedEngine

    tokenizer = AutoTokenizer.from_pretrained(folder)
    engine = EmbeddedEngine.from_pretrained(
        str(folder),
        max_model_len=model.max_model_len,
        device=config.engine.device,
        dtype=config.engine.dtype,
        max_slots=config.engine.max_slots,
        kv_cache_mb=config.engine.kv_cache_mb,
        deterministic=config.deterministic,
        stop_decoder=tokenizer.decode,
    )
    return tokenizer, engine


def sampling_of(model: TunerModelConfig) -> Sampling:
    """How calls sample that do not say."""
    return Sampling(temperature=model.temperature, top_p=model.top_p, max_tokens=model.max_tokens)
