"""Uses Liger's Triton kernels (RMSNorm, SwiGLU) in a model that trains on a GPU, if liger-kernel is installed.

In: a Hugging Face model. Out: the same model with these kernels, and a line for the user. Only this model changes:
Liger also replaces classes of transformers' modelling file, which would affect every model created later, so that is
undone. Its rotary embedding is available only that way and is therefore not used. Nor is its fused loss: it computes
no entropies.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

PACKAGE = "liger-kernel"
FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Supported model types; Liger's norms may differ from those of others."""


def use_liger(module: Any, device: torch.device) -> str:
    """Install Liger's kernels in `module` if possible. Return a line for the user, or "" if Liger is not installed."""
    if device.type != "cuda" or find_spec("liger_kernel") is None:
        return ""
    kind = module.config.model_type
    if kind not in FAMILIES:
        return f"Liger kernels: not used for model type {kind!r}"
    liger = import_module("liger_kernel.transformers")
    apply = getattr(liger, f"apply_liger_kernel_to_{kind}", None)
    if apply is None:
        return f"Liger kernels: this version has none for model type {kind!r}"
    put_in(module, apply)
    return f"Liger kernels {_version()}: RMSNorm, SwiGLU"


def put_in(module: Any, apply: Callable[..., None]) -> None:
    """Apply a Liger function to `module`, and restore what it replaced in the modelling file."""
    file = sys.modules[type(module).__module__]
    before = dict(vars(file))
    apply(rope=False, cross_entropy=False, fused_linear_cross_entropy=False, rms_norm=True, swiglu=True, model=module)
    for name, value in before.items():
        if getattr(file, name) is not value:
            setattr(file, name, value)


def take_out(module: Any) -> None:
    """Restore the model's own forward functions."""
    for part in module.modules():
        for name in ("forward", "extra_repr", "_get_name"):
            part.__dict__.pop(name, None)


def _version() -> str:
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return "(version unknown)"
