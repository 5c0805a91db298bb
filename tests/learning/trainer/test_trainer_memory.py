"""What saves memory and changes no number: layers' inputs kept on the host, frozen models kept rounded, gradients of
tables added to in place, checkpoints written a part at a time."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_toys import FAMILIES, hf_logprobs, make_experiences, make_model, plain_copy
from transformers import AutoModelForCausalLM

from sharpen.config.trainer import LoraConfig
from sharpen.learning.trainer.lora import AdaptedModel
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


class TablesMade(TorchDispatchMode):
    """Names the operations that return a new tensor of this shape."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape = shape
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        known = {one.data_ptr() for one in args if isinstance(one, torch.Tensor)}
        if isinstance(found, torch.Tensor) and found.shape == self.shape and found.data_ptr() not in known:
            self.names.append(str(function))
        return found


@pytest.mark.parametrize("tied", [True, False])
def test_the_gradient_of_a_large_table_is_added_to_in_place_and_is_that_of_transformers(tied):
    """Red when the padding's row gets one (transformers gives it none), when what was there is lost, or when a
    matrix as large as the table is made beside the gradient."""
    config = FAMILIES["qwen3"]()
    config.vocab_size, config.hidden_size, config.tie_word_embeddings = 1 << 15, 1 << 9, tied
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config)
    experiences = make_experiences(num_groups=1)[:2]
    experiences[0].ids_T[1] = config.pad_token_id
    plain = plain_copy(module)
    sum(hf_logprobs(plain, one).sum() for one in experiences).backward()
    policy = TrainedModel(module, compute_dtype=torch.float32, max_logits=1 << 18)
    made = []
    for experience in experiences:
        (packed,) = pack([experience], 10_000)
        scores = policy.score(packed).logprobs_E
        with TablesMade(module.get_input_embeddings().weight.shape) as tables:
            scores.sum().backward()
        made.append(tables.names)
    assert made == [["aten.zeros_like.default"] * (1 if tied else 2), []]
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    found = {name: parameter.grad for name, parameter in policy.parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert (gradient - expected[name]).abs().max() <= 1e-5 * expected[name].abs().max(), name


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_checkpoint_written_in_parts_is_the_same_and_no_two_parts_are_there_at_once(family, tmp_path):
    """Adapters are merged a layer at a time; tied tables are written once. Red when a part is held until the next one
    has been merged, or an output layer is written beside the table that it is."""
    make_model(family, torch.float32).save_pretrained(tmp_path / "source")
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    policy = AdaptedModel(module, lora=LoraConfig(rank=2, alpha=4), compute_dtype=torch.float32)
    for name, parameter in policy.parameters():
        torch.nn.init.normal_(parameter) if "lora_B" in name else None
    policy.write(tmp_path / "whole", policy.checkpoint_parts())
    earlier: list[weakref.ref[torch.Tensor]] = []

    def watched() -> Any:
        for part in policy.checkpoint_parts(most=1):
            assert not [one for one in earlier if one() is not None]
            earlier[:] = [weakref.ref(one) for one in part.values() if not isinstance(one, torch.nn.Parameter)]
            yield part
            del part

    policy.write(tmp_path / "parts", watched())
    assert len(list((tmp_path / "parts").glob("model-*-of-*.safetensors"))) == (4 if family == "qwen3" else 5)
    whole, parts = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert not torch.equal(
        whole["model.layers.1.mlp.up_proj.weight"], module.state_dict()["model.layers.1.mlp.up_proj.base_layer.weight"]
    )
    assert sorted(one.name for one in (tmp_path / "parts").iterdir() if one.suffix == ".json") == [
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
    ]
