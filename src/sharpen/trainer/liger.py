"""Liger's Triton kernels (RMSNorm, SwiGLU) in a model that trains on a GPU, where liger-kernel is installed.

In: a Hugging Face model. Out: its modules compute with them, and a line that says so. Only this model's own modules
change: Liger also replaces classes of the modelling file, for every model made later in the process, and that is taken
back. Its rotary embedding can be had in no other way, and is left out; so is its fused loss, which gives no entropies.
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
"""Model types for which it is asked; of others it is not known that their norms are the same."""


def use_liger(module: Any, device: torch.device) -> str:
    """Put Liger's kernels into `module`, where they are installed; what to tell the user, empty if they are not."""
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
    """Apply a Liger function to `module` alone: what it replaced in the modelling file is put back."""
    file = sys.modules[type(module).__module__]
    before = dict(vars(file))
    apply(rope=False, cross_entropy=False, fused_linear_cross_entropy=False, rms_norm=True, swiglu=True, model=module)
    for name, value in before.items():
        if getattr(file, name) is not value:
            setattr(file, name, value)


def take_out(module: Any) -> None:
    """The model's own forward functions again."""
    for part in module.modules():
        for name in ("forward", "extra_repr", "_get_name"):
            part.__dict__.pop(name, None)


def _version() -> str:
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return "(version unknown)"
