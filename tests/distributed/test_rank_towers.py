"""Checkpoints with towers on two ranks: trained as text, and written as they came."""

import pytest
import torch
from group_toys import Toy, assert_same_numbers, assert_same_weights, group_of, make_plan, one_process
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint, tensors_of
from trainer_toys import make_experiences, record
from transformers import AutoConfig, AutoModelForImageTextToText

from sharpen.models.modules import text_parameters
from sharpen.models.stand_ins import with_stand_ins

pytestmark = pytest.mark.distributed
TOWERS = ("vision", "visual", "audio", "projector")


def plain(folder):
    """The checkpoint in transformers, in fp32."""
    config = with_stand_ins(AutoConfig.from_pretrained(folder))
    return AutoModelForImageTextToText.from_pretrained(folder, config=config, dtype=torch.float32).eval()


def towered_toy(kind, folder):
    """Towers in bfloat16, and a tensor that transformers does not load."""
    make_checkpoint(kind, folder)
    tensors = load_file(folder / "model.safetensors")
    kept = [name for name in tensors if any(part in name for part in TOWERS)]
    tensors |= {name: tensors[name].bfloat16() for name in kept}
    tensors["mtp.layers.0.mlp.up_proj.weight"] = torch.randn(3, 4).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return Toy(folder=folder, experiences=record(plain(folder), make_experiences()))


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4}], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5", "gemma3n"])
def test_two_ranks_write_the_towers_byte_for_byte(tmp_path, kind, lora):
    """Towers that are held, those of a hybrid model, those that are kept as files alone. Red when `write_checkpoint`
    writes the towers from the module, gathered in fp32, or leaves out what no rank has loaded."""
    toy = towered_toy(kind, tmp_path / "model")
    plan = make_plan(toy, lora=lora, rate=1e-2)
    one, group = one_process(plan), group_of(plan)
    assert_same_numbers(one.train_step(toy.batches()), group.train_step(toy.batches()), relative=2e-5)
    assert_same_weights(one, group, absolute=2e-4)
    group.save(tmp_path / "saved", {"step": 1})
    before, after = tensors_of(toy.folder), tensors_of(tmp_path / "saved")
    assert after.keys() == before.keys()
    kept = {name for name, tensor in before.items() if tensor.dtype == torch.bfloat16}
    assert len(kept) > 2
    for name in kept:
        assert after[name].dtype == torch.bfloat16
        assert after[name].view(torch.uint8).equal(before[name].view(torch.uint8)), name
    assert sum(not after[name].equal(before[name]) for name in before.keys() - kept) > 5
    state = dict(group.state_tensors())
    for name, parameter in text_parameters(plain(tmp_path / "saved")):
        torch.testing.assert_close(parameter, state[name], atol=1e-6, rtol=0)
    resumed = one_process(plan)
    assert resumed.restore(tmp_path / "saved") == {"step": 1}
    assert_same_weights(resumed, group)
