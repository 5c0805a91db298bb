"""A check at start-up that our forward pass and the model's own give the same logits for a few tokens.

In: the model before our forward pass is made, and the forward pass. Out: nothing, or a `ModelError`. For the cost of a
forward pass of a few tokens, an architecture that we would serve wrongly is an error instead of silently wrong samples.

Shape suffixes: P probe tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from sharpen.engine.embedded.attention import SlotAttention, SlotSegment
from sharpen.engine.embedded.forward import Forward
from sharpen.engine.embedded.kv import LENGTH_BUCKET, KVPool
from sharpen.engine.embedded.mixing import Mixing
from sharpen.errors import ModelError
from sharpen.models.pieces import text_config
from sharpen.models.routing import Routing, recording
from sharpen.models.windows import short_windows

_PROBE_TOKENS = 12
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.08, torch.float16: 0.02}


def _probe_ids(vocab_size: int, max_model_len: int, device: torch.device) -> torch.Tensor:
    count = min(_PROBE_TOKENS, max_model_len)
    return (torch.arange(count, device=device) * 7919 + 11) % vocab_size


@torch.inference_mode()
def reference_logits(model: Any, max_model_len: int) -> torch.Tensor:
    """Return the model's own logits of the probe, shape PV. To be called before its attention is replaced."""
    ids_P = _probe_ids(text_config(model.config).vocab_size, max_model_len, model.device)
    with short_windows(model):
        logits_PV: torch.Tensor = model(input_ids=ids_P.unsqueeze(0), use_cache=False).logits[0].float()
    return logits_PV


@torch.inference_mode()
def check_forward(
    model: Any,
    forward: Forward,
    pool: KVPool,
    reference_PV: torch.Tensor,
    routing: Routing | None = None,
    mixing: Mixing | None = None,
) -> None:
    """Compute the probe in slot 0, all but the last token as two segments, the last by decoding, and compare. Of a
    mixture of experts, the `routing` is recorded meanwhile.

    Raises `ModelError` if the logits differ by more than the tolerance, or if the routing cannot be recorded.
    """
    num_probe, vocab_size = reference_PV.shape
    ids_P = _probe_ids(vocab_size, num_probe, reference_PV.device)
    position_P = torch.arange(num_probe, device=ids_P.device)
    zero = torch.zeros_like(ids_P)
    ours = []
    for start, end in itertools.pairwise(sorted({0, num_probe // 2, num_probe - 1})):
        segment = SlotSegment(slot=0, first_row=0, start=start, end=end)
        rows = slice(start, end)
        attention = SlotAttention(
            pool, slot_N=zero[rows], position_N=position_P[rows], num_decode=0, kv_length=0, segments=[segment]
        )
        if mixing is not None:
            mixing.lay_out(np.zeros(0, np.int64), [segment])
        with short_windows(model):
            ours.append(forward.logits(ids_P[rows], position_P[rows], attention, position_P[: end - start]))
    attention = SlotAttention(
        pool, slot_N=zero[:1], position_N=position_P[-1:], num_decode=1, kv_length=LENGTH_BUCKET, segments=[]
    )
    if mixing is not None:
        mixing.lay_out(np.zeros(1, np.int64), [])
    with recording(routing), short_windows(model):
        ours.append(forward.logits(ids_P[-1:], position_P[-1:], attention, zero[:1]))
        if routing is not None:
            routing.check_all_chose()
    error = float((torch.cat(ours).float() - reference_PV).abs().max() / reference_PV.abs().max().clamp_min(1e-6))
    if not error <= _TOLERANCE[model.dtype]:
        raise ModelError(
            f"{type(model).__name__}: the embedded engine's logits differ from the model's own by {error:.2g} of their "
            "range: this architecture is not served"
        )
