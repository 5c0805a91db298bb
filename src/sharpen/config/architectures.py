"""Refuses models that engine and trainer do not support, by their configuration, before any weight is read.

In: a Hugging Face configuration. Out: `ModelError` for a model that is not supported.
"""

from __future__ import annotations

from typing import Any

from sharpen.errors import ModelError

_MULTIMODAL = ("vision_config", "vision_tower", "mm_vision_tower", "audio_config")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def refuse_architecture(config: Any, name: str) -> None:
    """Raise `ModelError` if the model takes images or audio, or routes tokens to experts. `name` names it in errors.

    Engine and trainer could route the same token to different experts and so disagree on its logprob; the routing would
    have to be recorded and replayed.
    """
    for field in _MULTIMODAL:
        if getattr(config, field, None) is not None:
            raise ModelError(
                f"{name}: vision-language models, and others that take more than text, are not supported yet (its "
                f"configuration has {field}); use a text model"
            )
    for field in _EXPERTS:
        if count := getattr(config, field, None):
            raise ModelError(
                f"{name} routes tokens to experts ({field}={count}): routing could differ between engine and trainer, "
                "so mixture-of-experts models are not supported; use a dense model"
            )
