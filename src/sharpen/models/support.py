"""What each family of models can do here, for people: `sharpen models` and the documentation's page.

In: the table of families, or a configuration. Out: a mark or a sentence for each part. Nothing here imports torch or
transformers.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec
from typing import Any

from sharpen.models.pieces import HAS, Part, Piece
from sharpen.models.table import Family, family_of, missing_images, missing_images_in_vllm, missing_of, needs_of

COLUMNS = ("family", "model types", "engine", "trainer", "LoRA", "images", "vLLM", "beside plain attention, limits")
YES, NO = "yes", "no"
_TOWERS = frozenset({Piece.VISION, Piece.AUDIO})
_KERNELS = {
    Piece.RECURRENT: ("fla", "causal_conv1d", "mamba_ssm"),
    Piece.CONVOLUTION: ("causal_conv1d",),
}
"""The packages whose kernels transformers takes for such layers, each where the family has a use for it."""


def row_of(family: Family) -> tuple[str, ...]:
    """Return a family's row of the table, by `COLUMNS`. What a checkpoint need not have is not held against its
    family: it says `partly` then."""
    parts = {part: _mark(family, part) for part in HAS}
    no_images = ["no images in vLLM"] if family.images and not family.images_in_vllm and parts["vllm"] != NO else []
    limits = [*sorted(family.needs), *_limits(family), *no_images]
    return (
        family.name,
        ", ".join(family.types),
        parts["engine"],
        parts["trainer"],
        parts["trainer"],
        YES if family.images else NO,
        parts["vllm"],
        "; ".join(limits),
    )


def _mark(family: Family, part: Part) -> str:
    missing = family.needs - HAS[part]
    if missing & family.always or (part == "vllm" and not family.in_vllm):
        return NO
    if not missing:
        return "not on a CPU" if part == "vllm" and family.not_on_cpu else YES
    return f"not with {_listed(missing)}"


def support_of(config: Any) -> dict[str, Any]:
    """Return what a model of this configuration can do here, and why not, as JSON values."""
    family, needs = family_of(config), needs_of(config)
    missing = {part: missing_of(config, part) for part in HAS}
    return {
        "family": family.name,
        "model_type": config.model_type,
        "in_the_table": family.listed,
        "needs": sorted(needs),
        "missing": {**missing, "LoRA": missing["trainer"]},
        "images": _images(config) if needs & _TOWERS else "",
        "kernels_not_installed": missing_kernels(needs),
        "limits": _limits(family),
    }


def _limits(family: Family) -> list[str]:
    on_cpu = [f"vLLM does not serve it on a CPU: {family.not_on_cpu}"] if family.not_on_cpu else []
    return [*family.limits, *on_cpu]


def _images(config: Any) -> str:
    if missing := missing_images(config):
        return f"not read: {missing}; the towers are kept as they are"
    missing = missing_images_in_vllm(config)
    by_vllm = f"; vLLM is given none: {missing}" if missing else ""
    return f"read, by the checkpoint's own processor; the tower is frozen{by_vllm}"


def missing_kernels(needs: Collection[Piece]) -> list[str]:
    """Return the packages that are not installed, without which layers are computed by transformers' slower torch
    code."""
    wanted = {name for piece in needs for name in _KERNELS.get(piece, ())}
    return sorted(name for name in wanted if find_spec(name) is None)


def _listed(pieces: Collection[Piece]) -> str:
    return " or ".join(sorted(pieces))
