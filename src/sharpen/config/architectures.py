"""Models that neither engine nor trainer takes, told by their configuration before any weight is read.

In: a Hugging Face configuration. Out: nothing, or `ModelError`.
"""

from __future__ import annotations

from typing import Any

from sharpen.errors import ModelError

_SENSES = ("vision_config", "vision_tower", "mm_vision_tower", "audio_config")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def refuse_architecture(config: Any, name: str) -> None:
    """Raise `ModelError`, which calls the model `name`, if it sees or hears, or routes tokens to experts.

    Engine and trainer could route a token to other experts, so that its logprob would be another model's; the routing
    would have to be recorded and replayed.
    """
    for field in _SENSES:
        if getattr(config, field, None) is not None:
            raise ModelError(
                f"{name}: vision-language models are not supported yet, nor others that take more than text (its "
                f"configuration has {field}); take a text model"
            )
    for field in _EXPERTS:
        if count := getattr(config, field, None):
            raise ModelError(
                f"{name} routes tokens to experts ({field}={count}): routing could differ between engine and trainer, "
                "so mixture-of-experts models are not supported; take a dense model"
            )
