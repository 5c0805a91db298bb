"""The forward pass of one step.

In: ids and positions, and a `StepAttention`. Out: the logits of selected rows. There are two implementations over the
weights of a Hugging Face model: `FastForward`, plain torch with fused projections for Qwen2, Qwen3 and Llama; and
`GenericForward`, the model's own modules with our function plugged into transformers' attention interface. The model's
parameters become views of the fused weights, so there is no second copy that a weight update could leave stale.

Shape suffixes: N rows of the step, R rows whose logits are returned, V vocabulary, H query heads, K key-value heads, D
head size.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from sharpen.engine.embedded.attention import LayoutProbe, StepAttention
from sharpen.engine.embedded.kv import KVLayout
from sharpen.engine.embedded.matmul import COLUMN_ROWS, are_columns_faster, has_exact_products
from sharpen.engine.embedded.products import AttentionRule
from sharpen.engine.embedded.projections import Projection, own, stack
from sharpen.engine.families import ModelShape
from sharpen.models.modules import decoder_of
from sharpen.models.windows import chunk_of, scaled_queries, take_over_scales

ATTENTION_NAME = "sharpen_slots"
"""The name under which our attention is registered with transformers."""


class Forward(Protocol):
    """One step's forward pass."""

    def logits(
        self, token_N: torch.Tensor, position_N: torch.Tensor, attention: StepAttention, rows_R: torch.Tensor
    ) -> torch.Tensor:
        """Logits [R, V], as the output layer computes them: in fp32 or the model's type, in any layout."""


class _FastLayer:
    """The weights of one decoder layer."""

    def __init__(self, layer: Any, head_counts: tuple[int, int]) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = Projection([attention.q_proj, attention.k_proj, attention.v_proj])
        self.gate_up = Projection([mlp.gate_proj, mlp.up_proj])
        self.out, self.down = Projection([attention.o_proj]), Projection([mlp.down_proj])
        self.input_norm, self.post_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.head_norm: torch.Tensor | None = None
        self.rule = AttentionRule(scale=float(attention.scaling))
        if hasattr(attention, "q_norm"):
            stacked = stack([attention.q_norm.weight, attention.k_norm.weight])
            self.head_norm = stacked.view(2, -1)
            self.head_norm_eps = float(attention.q_norm.variance_epsilon)
        self.alone = (self.out.weight_OC, self.down.weight_OC, self.input_norm.weight, self.post_norm.weight)
        """The weights that are not stacked with others."""
        heads, kv_heads = head_counts
        self._norm_of_head = torch.tensor([0] * heads + [1] * kv_heads, device=self.input_norm.weight.device)

    def head_norm_HD(self) -> torch.Tensor:
        """Return the query and key norm weights, one row per head."""
        assert self.head_norm is not None
        return self.head_norm.index_select(0, self._norm_of_head)


class FastForward:
    """The fast forward pass of Qwen2, Qwen3 and Llama with full attention."""

    def __init__(self, model: Any, shape: ModelShape, max_model_len: int, *, exact: bool = False) -> None:
        """`exact`: how products are computed may not depend on what is faster here."""
        config = model.config
        self._heads, self._kv_heads, self._head_dim = config.num_attention_heads, shape.num_kv_heads, shape.head_dim
        self._embedding = model.get_input_embeddings()
        self._head = model.get_output_embeddings()
        self._norm = model.model.norm
        self._eps = float(config.rms_norm_eps)
        counts = (self._heads, self._kv_heads)
        self._layers = [_FastLayer(layer, counts) for layer in model.model.layers]
        weight = self._embedding.weight
        positions = torch.arange(max_model_len, device=weight.device).unsqueeze(0)
        cos, sin = model.model.rotary_emb(weight.new_zeros(1, 1, 1), positions)
        half = shape.head_dim // 2
        self._cos_TD = cos[0].contiguous()
        self._signed_sin_TD = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)
        if weight.device.type == "cpu":
            own([weight, self._head.weight, self._norm.weight, *(one for layer in self._layers for one in layer.alone)])
        self._columns_faster = not exact and are_columns_faster(self._layers[0].gate_up.weight_OC)

    def logits(
        self, token_N: torch.Tensor, position_N: torch.Tensor, attention: StepAttention, rows_R: torch.Tensor
    ) -> torch.Tensor:
        """Logits [R, V], as the output layer computes them."""
        x = F.embedding(token_N, self._embedding.weight)
        cos = self._cos_TD[position_N].unsqueeze(1)
        sin = self._signed_sin_TD[position_N].unsqueeze(1)
        in_columns = self._in_columns(len(x))
        for index, layer in enumerate(self._layers):
            normed = F.rms_norm(x, (x.shape[1],), layer.input_norm.weight, self._eps)
            qkv = layer.qkv.columns(normed.t()).t().contiguous() if in_columns else layer.qkv.rows(normed)
            mixed = self._attend(index, layer, qkv, cos, sin, attention)
            x += layer.out.columns(mixed.t()).t() if in_columns else layer.out.rows(mixed)
            normed = F.rms_norm(x, (x.shape[1],), layer.post_norm.weight, self._eps)
            x += _feed_forward_columns(layer, normed) if in_columns else _feed_forward(layer, normed)
        selected = F.rms_norm(x.index_select(0, rows_R), (x.shape[1],), self._norm.weight, self._eps)
        return self._output(selected)

    def projections(self) -> list[Projection]:
        """Return the linear layers of all blocks, as they are computed."""
        return [one for layer in self._layers for one in (layer.qkv, layer.out, layer.gate_up, layer.down)]

    def _in_columns(self, num_rows: int) -> bool:
        return self._columns_faster and num_rows in COLUMN_ROWS

    def _output(self, hidden_RC: torch.Tensor) -> torch.Tensor:
        """Return logits. On a GPU they are not rounded to bfloat16: the error at 20 would be 0.06."""
        weight = self._head.weight
        if self._head.bias is None and has_exact_products(weight.device, weight.dtype):
            return torch.mm(hidden_RC, weight.t(), out_dtype=torch.float32)
        if self._head.bias is None and self._in_columns(len(hidden_RC)):
            return torch.mm(weight, hidden_RC.t()).t()
        logits_RV: torch.Tensor = self._head(hidden_RC)
        return logits_RV

    def _attend(
        self,
        index: int,
        layer: _FastLayer,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: StepAttention,
    ) -> torch.Tensor:
        num_rows, rotated_heads = qkv.shape[0], self._heads + self._kv_heads
        qkv = qkv.view(num_rows, -1, self._head_dim)
        qk, v_NKD = qkv[:, :rotated_heads], qkv[:, rotated_heads:]
        if layer.head_norm is not None:
            qk = F.rms_norm(qk, (self._head_dim,), None, layer.head_norm_eps) * layer.head_norm_HD()
        qk = (qk * cos).addcmul_(qk.roll(self._head_dim // 2, -1), sin)
        return attention.attend(index, qk[:, : self._heads], qk[:, self._heads :], v_NKD, layer.rule)


def _feed_forward(layer: _FastLayer, normed_NC: torch.Tensor) -> torch.Tensor:
    gate, up = layer.gate_up.rows(normed_NC).chunk(2, dim=-1)
    return layer.down.rows(F.silu(gate).mul_(up))


def _feed_forward_columns(layer: _FastLayer, normed_NC: torch.Tensor) -> torch.Tensor:
    gate, up = layer.gate_up.columns(normed_NC.t()).chunk(2)
    return layer.down.columns(F.silu(gate).mul_(up)).t()


_current: ContextVar[tuple[StepAttention, torch.Tensor]] = ContextVar("sharpen_step_attention")
"""The attention of the step, and the positions of its rows."""


def _slot_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend in the current step, with the signature that transformers calls; query, key, value: [1, heads, N, D]."""
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    attention, position_N = _current.get()
    chunk = chunk_of(module)
    window = sliding_window if chunk is None else chunk
    rule = AttentionRule(scale=float(scale), window=window, chunks=chunk is not None, softcap=softcap, sinks_H=s_aux)
    query = scaled_queries(module, query, position_N)
    q_NHD, k_NKD, v_NKD = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    layer = int(getattr(module, "layer_idx"))  # noqa: B009 - not declared on nn.Module
    out = attention.attend(layer, q_NHD, k_NKD, v_NKD, rule)
    return out.view(1, out.shape[0], query.shape[1], -1), None


@torch.inference_mode()
def kv_layout(model: Any, shape: ModelShape) -> KVLayout:
    """Return which keys and values a model's layers have: known of those with our own forward pass; the others' are
    found by running one token, with the model's attention as it was afterwards."""
    if shape.fast:
        return KVLayout.uniform(shape.num_layers, shape.num_kv_heads, shape.head_dim)
    decoder, probe = decoder_of(model), LayoutProbe()
    before = decoder.config._attn_implementation
    zero = torch.zeros(1, dtype=torch.long, device=model.device)
    GenericForward(model).logits(zero, zero, probe, zero)
    decoder.set_attn_implementation(before)
    return probe.layout


class GenericForward:
    """The forward pass of any model that `models.inspect_model` accepts, through the model's own modules."""

    def __init__(self, model: Any) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION_NAME, _slot_attention)
        decoder_of(model).set_attn_implementation(ATTENTION_NAME)
        take_over_scales(model)
        self._model = model

    def logits(
        self, token_N: torch.Tensor, position_N: torch.Tensor, attention: StepAttention, rows_R: torch.Tensor
    ) -> torch.Tensor:
        """Logits [R, V], as the output layer computes them."""
        token = _current.set((attention, position_N))
        try:
            output = self._model(
                input_ids=token_N.unsqueeze(0),
                position_ids=position_N.unsqueeze(0),
                use_cache=False,
                logits_to_keep=rows_R,
            )
        finally:
            _current.reset(token)
        logits_RV: torch.Tensor = output.logits[0]
        return logits_RV
