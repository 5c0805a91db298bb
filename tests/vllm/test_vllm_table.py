"""The table of families against vLLM's own list of classes."""

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from vllm import ModelRegistry

from sharpen.models.table import FAMILIES

BY_TRANSFORMERS = {"ministral"}
"""Dense models without a class of vLLM's own, which it runs by transformers' code."""


def test_the_table_says_which_families_vllm_has_not():
    """Red when a new vLLM drops a family, or takes one up."""
    served = set(ModelRegistry.get_supported_archs())
    classes = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    for family in FAMILIES:
        kind = family.types[-1]
        if kind not in BY_TRANSFORMERS:
            names = {classes.get(kind), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)} - {None}
            assert bool(names & served) == family.in_vllm, f"{family.name}: {names}"
