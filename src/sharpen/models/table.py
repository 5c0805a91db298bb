"""The table of model families: one row each, which engine, trainer, `sharpen models`, the documentation and the tests
read.

In: a Hugging Face configuration. Out: its row; or a `ModelError` that names the family and what is missing. A family
without a row is served and trained if its configuration shows nothing that is missing, and engine and trainer compare
it with transformers when they start. Nothing here imports torch or transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sharpen.config.doors import find_part, names
from sharpen.config.functions import prepare_others
from sharpen.errors import ConfigError, ModelError
from sharpen.models.marks import both_ways
from sharpen.models.pieces import HAS, NAMES, Part, Piece, pieces_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of models. `types` are the model types of its checkpoints (`config.json`): with towers first, if any.

    `needs`: all that a checkpoint of it can need; what one does need is read from its configuration, except `always`,
    which no configuration shows. `limits` are sentences for people. `images`: whether its images are read; the towers
    of others are kept as they are. `without_adapters`: its linear layers, by the last part of their names, that can
    have none. `in_vllm`: whether vLLM has a class for it, or serves it by transformers' own; `images_in_vllm`: whether
    that is shown images; `not_on_cpu`: why its build for CPUs does not serve it, or "". `listed`: it is one of ours,
    tested here; engine and trainer compare every other one with transformers when they start.
    """

    name: str
    types: tuple[str, ...]
    needs: frozenset[Piece] = frozenset()
    always: frozenset[Piece] = frozenset()
    limits: tuple[str, ...] = ()
    images: bool = False
    without_adapters: frozenset[str] = frozenset()
    in_vllm: bool = True
    images_in_vllm: bool = False
    not_on_cpu: str = ""
    listed: bool = True


def _row(
    name: str,
    *types: str,
    needs: str = "",
    always: str = "",
    limits: tuple[str, ...] = (),
    images: bool = False,
    without_adapters: str = "",
    in_vllm: bool = True,
    images_in_vllm: bool = False,
    not_on_cpu: str = "",
) -> Family:
    always_needed = _named(always)
    return Family(
        name=name,
        types=types,
        needs=_named(needs) | always_needed,
        always=always_needed,
        limits=limits,
        images=images,
        without_adapters=frozenset(without_adapters.split()),
        in_vllm=in_vllm,
        images_in_vllm=images_in_vllm,
        not_on_cpu=not_on_cpu,
    )


def _named(names: str) -> frozenset[Piece]:
    return frozenset(Piece[name.upper()] for name in names.split())


_NO_OUT_PROJ = "LoRA has no adapters on `out_proj` of its recurrent layers, which peft refuses"
_NO_MLP = "LoRA has no adapters on `gate_proj`, `up_proj` and `down_proj`, which peft takes for those of the experts"
_FILES_ALONE = "its towers are never loaded, only kept as files"
_ALL_EXPERTS = "every token is computed by all experts, as transformers does it; those that were not chosen add nothing"
_WHOLE_PATHS = "shared prompts are computed for each sequence anew in its Mamba 1 layers"
_TRITON = "its recurrent layers need Triton"
_FAR = "logprobs of a tiny random checkpoint were far from transformers', for a reason that was not found"

FAMILIES: tuple[Family, ...] = (
    _row("Qwen2, Qwen2.5", "qwen2"),
    _row("Qwen3", "qwen3"),
    _row("Qwen3-VL", "qwen3_vl", needs="vision", images=True, images_in_vllm=True),
    _row("Qwen3.5", "qwen3_5", "qwen3_5_text", needs="recurrent vision", images=True),
    _row("Qwen3-Next", "qwen3_next", needs="recurrent experts", limits=(_NO_MLP,)),
    _row("Llama 2, Llama 3", "llama"),
    _row("Mistral", "mistral"),
    _row("Ministral", "ministral"),
    _row("Ministral 3", "ministral3"),
    _row("Mistral 3, Mistral Small 3", "mistral3", needs="vision", images=True, images_in_vllm=True),
    _row("Gemma", "gemma"),
    _row("Gemma 2", "gemma2", needs="soft_caps"),
    _row("Gemma 3", "gemma3", "gemma3_text", needs="vision", images=True),
    _row("Gemma 3n", "gemma3n", "gemma3n_text", needs="vision audio shared_keys", limits=(_FILES_ALONE,)),
    _row("Gemma 4", "gemma4", "gemma4_text", needs="vision audio head_sizes shared_keys experts", images=True),
    _row("SmolLM3", "smollm3"),
    _row("OLMo 2", "olmo2"),
    _row("OLMo 3", "olmo3"),
    _row("OLMo Hybrid", "olmo_hybrid", needs="recurrent", not_on_cpu=_TRITON),
    _row("Phi-3, Phi-4", "phi3"),
    _row("Granite 3", "granite"),
    _row("Granite 4", "granitemoehybrid", needs="recurrent experts"),
    _row("GLM-4", "glm4"),
    _row("Hunyuan", "hunyuan_v1_dense"),
    _row("ERNIE 4.5", "ernie4_5"),
    _row("LFM2", "lfm2", needs="convolution"),
    _row("LFM3", "lfm3", needs="convolution", in_vllm=False),
    _row(
        "Nemotron-H",
        "nemotron_h",
        needs="recurrent experts",
        limits=(_NO_OUT_PROJ,),
        without_adapters="out_proj",
    ),
    _row("Falcon-H1", "falcon_h1", needs="recurrent", limits=(_NO_OUT_PROJ,), without_adapters="out_proj"),
    _row("Bamba", "bamba", needs="recurrent", in_vllm=False),
    _row(
        "Jamba",
        "jamba",
        needs="recurrent experts",
        limits=(_WHOLE_PATHS, "LoRA has no adapters on `dt_proj`"),
        not_on_cpu="its build for CPUs has no selective scan, which Mamba 1 layers need",
    ),
    _row("Kimi Linear", "kimi_linear", needs="recurrent experts two_sizes", not_on_cpu=_TRITON),
    _row("Qwen2-MoE", "qwen2_moe", needs="experts"),
    _row("Qwen3-MoE", "qwen3_moe", needs="experts"),
    _row("Qwen3.5-MoE", "qwen3_5_moe", "qwen3_5_moe_text", needs="recurrent experts vision", images=True),
    _row(
        "gpt-oss",
        "gpt_oss",
        needs="experts",
        always="sinks",
        not_on_cpu=_FAR,
    ),
    _row("OLMoE", "olmoe", needs="experts"),
    _row("GLM-4-MoE", "glm4_moe", needs="experts", limits=(_NO_MLP,)),
    _row("DeepSeek-V3", "deepseek_v3", needs="experts two_sizes", limits=(_NO_MLP,), not_on_cpu=_FAR),
    _row("Mixtral", "mixtral", needs="experts"),
    _row("Granite MoE", "granitemoe", needs="experts"),
    _row("LFM2-MoE", "lfm2_moe", needs="experts convolution"),
    _row("EXAONE 4", "exaone4"),
    _row("Command R7B, Command A", "cohere2"),
    _row("Seed-OSS", "seed_oss"),
    _row("Apertus", "apertus"),
    _row("Llama 4", "llama4", "llama4_text", needs="vision experts chunked", limits=(_ALL_EXPERTS,)),
)
"""In the order of the documentation: by who publishes them."""

_BY_TYPE = {kind: family for family in FAMILIES for kind in family.types}
_BROUGHT: dict[str, Family] = {}
"""Families that others bring, by model type."""


def bring(*names: str) -> None:
    """Know families that others bring, by their names in `families`, here and in the processes that this one starts.

    To import one registers its classes with transformers. Raises `ConfigError` for what is no family, and for a model
    type of ours.
    """
    for name in names:
        family = find_part("families", name, {})
        if not isinstance(family, Family):
            raise ConfigError(
                f"families has {name!r}, which is {family!r}: it must be a Family (docs/use/extending.md)"
            )
        if taken := [kind for kind in family.types if kind in _BY_TYPE]:
            raise ConfigError(
                f"families has {name!r}, whose model type {taken[0]!r} is one of {_BY_TYPE[taken[0]].name}"
            )
        _BROUGHT.update(dict.fromkeys(family.types, replace(family, listed=False)))
        prepare_others(f"{__name__}:{bring.__name__}", name)


def bring_type(kind: str) -> None:
    """Know the family of a model type, if an installed package announces one by that name."""
    if kind not in _BY_TYPE and kind not in _BROUGHT and kind in names("families", {}):
        bring(kind)


def family_of(config: Any) -> Family:
    """Return the row of a configuration's family; one that is made of what the configuration shows, if it has none."""
    kind = config.model_type
    own = _BY_TYPE.get(kind) or _BROUGHT.get(kind)
    return own or Family(name=kind, types=(kind,), needs=pieces_of(config), listed=False)


def needs_of(config: Any) -> frozenset[Piece]:
    """Return what a model of this configuration needs beside plain attention."""
    return pieces_of(config) | family_of(config).always


def missing_of(config: Any, part: Part) -> str:
    """Return what this part lacks for a model of this configuration, as one phrase; "" if nothing."""
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model, and only decoder-only ones are supported"
    family, missing = family_of(config), sorted(needs_of(config) - HAS[part])
    if missing:
        return f"it has {', '.join(missing)}, which the {NAMES[part]} does not support yet"
    if part == "vllm" and not family.in_vllm:
        return "vLLM 0.32 does not serve this family; use engine.type embedded"
    return ""


def missing_images(config: Any) -> str:
    """Return why a model of this configuration is shown no images, as one phrase; "" if it is."""
    family = family_of(config)
    if Piece.VISION not in needs_of(config):
        return "it has no vision tower"
    return "" if family.images else f"those of {family.name} are not read here"


def missing_images_in_vllm(config: Any) -> str:
    """Return why vLLM is given no images for a model of this configuration, as one phrase; "" if it is."""
    if missing := missing_images(config):
        return missing
    family = family_of(config)
    if family.images_in_vllm:
        return ""
    if both_ways(config):
        return (
            f"the tokens of an image attend both ways in {family.name}, but in vLLM 0.32 on a CPU to earlier ones "
            "alone: set engine.type to embedded"
        )
    return f"those of {family.name} are not tested with vLLM 0.32: set engine.type to embedded"


def refuse_unsupported(config: Any, name: str, *parts: Part) -> None:
    """Raise `ModelError` if one of `parts` cannot compute a model of this configuration. `name` names it in errors."""
    for part in parts:
        if missing := missing_of(config, part):
            family = family_of(config)
            known = f"{family.name}, " if family.name != config.model_type else ""
            raise ModelError(
                f"{name} ({known}model type {config.model_type!r}): {missing}; `sharpen models` lists what is supported"
            )
