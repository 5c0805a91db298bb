"""The bookkeeping of what vLLM's tower saw, for a vLLM that may not compute a prompt in parts.

In: requests that vLLM's scheduler begins. Out: whether there is room for an image, which is always. vLLM imports this
module in its core process, because `engine.vllm.pictures` names the class.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.encoder_cache_manager import EncoderCacheManager


class WholePrompts(EncoderCacheManager):  # type: ignore[misc]
    """Has room for each image of a prompt that is begun.

    vLLM's own has room for as many image tokens as one step computes tokens. That is too little where a step goes on
    within images whose beginnings are cached: vLLM then cuts the next prompt before its image.
    """

    def can_allocate(
        self, request: Any, input_id: int, encoder_compute_budget: int, num_embeds_to_schedule: int
    ) -> bool:
        """Make room for an image: by dropping what no request uses any more, then by more room. Returns True."""
        needed = request.get_num_encoder_embeds(input_id)
        missing = max(0, needed + num_embeds_to_schedule - self.num_freeable_slots)
        self.cache_size += missing
        self.num_free_slots += missing
        self.num_freeable_slots += missing
        return bool(super().can_allocate(request, input_id, needed, num_embeds_to_schedule))
