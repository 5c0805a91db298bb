"""Adapters: an engine without the trainer's model names the same ones as the trainer has, in every kind of model."""

import pytest
import torch
from tiny import make_config, make_module

from sharpen.config.trainer import LoraConfig
from sharpen.errors import ModelError
from sharpen.learning.trainer.lora import AdaptedModel
from sharpen.models.adapters import adapter_shapes, check_adapters
from sharpen.models.modules import skeleton

KINDS = ("qwen3", "falcon_h1", "jamba", "gemma3", "gemma3n", "qwen3_moe")
"""Plain; a recurrent layer that peft refuses; one where adapters have no effect; towers; linear layers beside the
blocks, of which some have the names of other things; routers and experts. `every_family` has the others."""


def test_a_skeleton_says_in_which_type_the_files_are_and_leaves_the_configuration_as_it_is():
    """Break: in `skeleton` drop the copy, or the line after it is made."""
    config = make_config("qwen3")
    config.dtype = torch.bfloat16
    assert skeleton(config).config.dtype == config.dtype == torch.bfloat16


@pytest.mark.parametrize("targets", [None, ("q_proj", "o_proj")])
@pytest.mark.parametrize("kind", KINDS)
def test_names_and_shapes_are_those_of_the_trainers_adapters(kind, targets):
    """Break: let the pattern for towers match only what lies deeper than the decoder itself."""
    lora = LoraConfig(rank=2, alpha=4, target_modules=targets)
    policy = AdaptedModel(make_module(kind), lora=lora, compute_dtype=torch.float32)
    policy.alone = True
    tensors = policy.state_tensors()
    shapes = adapter_shapes(skeleton(make_config(kind)), lora)
    check_adapters(shapes, tensors)
    name = next(iter(tensors))
    with pytest.raises(ModelError, match=r"do not match this model and trainer\.lora"):
        check_adapters(shapes, {**tensors, name: tensors[name][:1]})
