"""The output layer on a GPU with bfloat16 inputs and fp32 logits.

In: hidden states and output embeddings. Out: logits. Rounded to bfloat16, a logit of 20 is off by up to 0.06, in the
trainer and, differently, in the engine; the GPU accumulates it in fp32 anyway. Autocast and autograd do not offer this
product, so forward and backward are written here: inputs in bfloat16, as with autocast, and the gradient of the logits
rounded to bfloat16 for the two products of the backward pass.

`OutputLayer` also does what some families do to the logits: multiply them by a number, and cap them softly.

Shape suffixes: R rows, V vocabulary, C hidden size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sharpen.models.pieces import text_config

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Multiplies two bfloat16 matrices, with an fp32 result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLayer:
    """The output embeddings of a model, and how its logits come from them: multiplied by `factor`, then, with
    `softcap`, softcap * tanh(logit / softcap)."""

    embeddings: Any
    factor: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, module: Any) -> OutputLayer:
        """Return that of a Hugging Face causal model, from the fields that its family's configuration has."""
        config = text_config(module.config)
        multiplied = [float(getattr(config, field, None) or 1) for field in ("logit_scale", "lm_head_multiplier")]
        return cls(
            embeddings=module.get_output_embeddings(),
            factor=math.prod(multiplied) / float(getattr(config, "logits_scaling", None) or 1),
            softcap=getattr(config, "final_logit_softcapping", None),
        )

    @property
    def num_ids(self) -> int:
        """The size of the vocabulary."""
        return int(self.embeddings.weight.shape[0])

    @property
    def is_frozen(self) -> bool:
        """Whether it is a plain product with embeddings that get no gradient."""
        layer = self.embeddings
        trained = any(parameter.requires_grad for parameter in layer.parameters())
        return type(layer) is torch.nn.Linear and self.softcap is None and not trained

    def logits(self, hidden_RC: torch.Tensor) -> torch.Tensor:
        """Return the logits (R, V), in fp32 where that costs nothing extra."""
        logits_RV = output_logits(self.embeddings, hidden_RC)
        if self.factor != 1:
            logits_RV = logits_RV * self.factor
        if self.softcap is not None:
            logits_RV = torch.tanh(logits_RV / self.softcap) * self.softcap
        return logits_RV


def output_logits(head: Any, hidden_RC: torch.Tensor) -> torch.Tensor:
    """Return `head(hidden_RC)`, in fp32 where that costs nothing extra."""
    if (
        type(head) is torch.nn.Linear
        and head.bias is None
        and hidden_RC.is_cuda
        and torch.is_autocast_enabled("cuda")
        and has_exact_product(hidden_RC.device)
    ):
        return exact_logits(hidden_RC, head.weight, exact_product)
    logits_RV: torch.Tensor = head(hidden_RC)
    return logits_RV


def exact_logits(hidden_RC: torch.Tensor, weight_VC: torch.Tensor, product: Product) -> torch.Tensor:
    """Return logits in fp32, shape (R, V), computed from inputs rounded to bfloat16."""
    logits_RV: torch.Tensor = _ExactLogits.apply(hidden_RC, weight_VC, product)  # type: ignore[no-untyped-call]
    return logits_RV


def exact_product(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Multiply two bfloat16 matrices on a GPU, with an fp32 result."""
    return torch.mm(first, second, out_dtype=torch.float32)


@functools.cache
def has_exact_product(device: torch.device) -> bool:
    """Whether this version of PyTorch has `exact_product` on the device."""
    probe = torch.zeros(8, 8, device=device, dtype=torch.bfloat16)
    try:
        exact_product(probe, probe)
    except RuntimeError:
        return False
    return True


class _ExactLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_RC: torch.Tensor, weight_VC: torch.Tensor, product: Product) -> torch.Tensor:
        rounded_RC, rounded_VC = hidden_RC.to(torch.bfloat16), weight_VC.to(torch.bfloat16)
        ctx.save_for_backward(rounded_RC, rounded_VC)
        ctx.dtypes = hidden_RC.dtype, weight_VC.dtype
        ctx.product = product
        return product(rounded_RC, rounded_VC.t())

    @staticmethod
    def backward(ctx: Any, grad_RV: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        rounded_RC, rounded_VC = ctx.saved_tensors
        hidden_dtype, weight_dtype = ctx.dtypes
        rounded_RV = grad_RV.to(torch.bfloat16)
        hidden = weight = None
        if ctx.needs_input_grad[0]:
            hidden = ctx.product(rounded_RV, rounded_VC).to(hidden_dtype)
        if ctx.needs_input_grad[1]:
            weight = ctx.product(rounded_RV.t(), rounded_RC).to(weight_dtype)
        return hidden, weight, None
