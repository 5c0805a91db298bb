"""What saves memory and changes no number: layers' inputs kept on the host, frozen models kept rounded."""

from pathlib import Path

import pytest
import torch
from trainer_toys import make_experiences, make_model

from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.packing import pack
from sharpen.learning.trainer.teacher import Teacher, Teachers


def gradients(policy: TrainedModel) -> dict[str, torch.Tensor]:
    for packed in pack(make_experiences(num_groups=2), 10_000, min_shared_tokens=4):
        policy.score(packed).logprobs_E.sum().backward()
    return {name: parameter.grad for name, parameter in policy.parameters()}


def test_offloaded_activations_give_the_same_gradients():
    """Bit for bit: they are copied there and back."""
    settings = {"compute_dtype": torch.float32, "gradient_checkpointing": True}
    plain = gradients(TrainedModel(make_model("qwen3", torch.float32), **settings))
    found = gradients(TrainedModel(make_model("qwen3", torch.float32), offload_activations=True, **settings))
    assert plain.keys() == found.keys()
    assert all(torch.equal(plain[name], found[name]) for name in plain)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_frozen_model_in_bfloat16_keeps_its_linear_layers_rounded_and_scores_the_same(family):
    """Tied embeddings, embeddings and norms stay in fp32."""
    (packed,) = pack(make_experiences(num_groups=1), 10_000)
    model = TrainedModel(make_model(family, torch.float32), compute_dtype=torch.bfloat16)
    with torch.no_grad():
        before = model.score(packed)
        model.freeze()
        after = model.score(packed)
    assert torch.equal(before.logprobs_E, after.logprobs_E)
    assert torch.equal(before.entropy_E, after.entropy_E)
    kinds = {name: parameter.dtype for name, parameter in model.module.named_parameters()}
    assert kinds["model.layers.0.mlp.up_proj.weight"] == torch.bfloat16
    assert kinds["model.embed_tokens.weight"] == kinds["model.norm.weight"] == torch.float32
    in_fp32 = TrainedModel(make_model(family, torch.float32), compute_dtype=torch.float32)
    in_fp32.freeze()
    assert {parameter.dtype for parameter in in_fp32.module.parameters()} == {torch.float32}


def test_a_teachers_fingerprint_is_that_of_its_weights_as_they_came():
    """So that a run from before the rounding continues."""
    model = make_model("llama", torch.float32)
    rounded = Teacher(TrainedModel(make_model("llama", torch.float32), compute_dtype=torch.bfloat16))
    whole = Teacher(TrainedModel(model, compute_dtype=torch.float32))
    assert rounded.fingerprint() == whole.fingerprint()
    Teachers({"": whole}).check_same(rounded.fingerprint(), Path("checkpoint"))
