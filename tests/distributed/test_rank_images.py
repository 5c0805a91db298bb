"""Rollouts with images on two ranks: the towers are gathered with the embeddings, whichever rank has images."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from group_toys import Toy, assert_same_numbers, assert_same_weights, group_of, make_plan, one_process
from picture_toys import IMAGES, draw, make_seeing_checkpoint
from trainer_toys import make_experience
from transformers import AutoConfig, AutoModelForImageTextToText

from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.packing import pack
from sharpen.models.images import eyes_of

pytestmark = pytest.mark.distributed


def seeing_toy(kind, folder, toy_model_dir):
    """Two groups with an image each, of equal ids, and one of text alone."""
    made = make_seeing_checkpoint(kind, folder, toy_model_dir)
    eyes = eyes_of(made, AutoConfig.from_pretrained(made))
    model = TrainedModel.load(made, dtype="float32", device=torch.device("cpu"))
    found = []
    for group in range(3):
        shown = [draw(group, 40, 16)] * (group < 2)
        ids, spans = eyes.expand(f"how many shapes? {IMAGES[kind] * len(shown)} answer:", shown)
        for member in range(4):
            answer = np.random.default_rng(10 * group + member).integers(3, 200, 5).tolist()
            sampled = [(len(ids), len(ids) + 5)]
            one = make_experience(f"g{group}/{member}", [*ids, *answer], sampled, advantage=1.0 - 2 * (member % 2))
            one = replace(one, pictures=spans)
            with torch.no_grad():
                logprobs_T = one.logprobs_T.copy()
                logprobs_T[one.loss_mask_T] = model.score(pack([one], 1000)[0]).logprobs_E.numpy()
            found.append(replace(one, logprobs_T=logprobs_T))
    return Toy(folder=made, experiences=found)


def parameters_of(folder):
    """Of the checkpoint, as transformers loads it, in fp32."""
    module = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize(("kind", "config"), [("qwen3_vl", {}), ("gemma3", {}), ("qwen3_vl", {"train_towers": True})])
def test_same_losses_and_weights_as_one_process(tmp_path, toy_model_dir, kind, config):
    """A trained tower has a gradient on both ranks, whichever has images: else they would wait for each other.
    What is saved are the trained weights, and the others as they came; red when `write_checkpoint` takes no
    trained tower for trained."""
    toy = seeing_toy(kind, tmp_path / "model", toy_model_dir)
    plan = make_plan(toy, **config)
    one, group = one_process(plan), group_of(plan)
    first = one.train_step(toy.batches())
    assert first.values["logprob_gap_max"] < 1e-4
    assert_same_numbers(first, group.train_step(toy.batches()), relative=2e-6)
    assert_same_numbers(one.train_step(toy.batches()), group.train_step(toy.batches()), relative=2e-6)
    assert_same_weights(one, group, absolute=4e-6)
    group.save(tmp_path / "saved", {"step": 2})
    before, after = (parameters_of(folder) for folder in (toy.folder, tmp_path / "saved"))
    state = dict(group.state_tensors())
    for name, tensor in after.items():
        torch.testing.assert_close(tensor, state.get(name, before[name]), atol=0.0, rtol=0.0, msg=name)
    eyes = [name for name in before if "visual." in name or "vision" in name]
    assert any(not after[name].equal(before[name]) for name in eyes) == ("train_towers" in config)


def test_in_bfloat16_the_losses_are_near_those_of_one_process(tmp_path, toy_model_dir):
    toy = seeing_toy("qwen3_vl", tmp_path / "model", toy_model_dir)
    plan = make_plan(toy, dtype="bfloat16")
    one, group = one_process(plan).train_step(toy.batches()), group_of(plan).train_step(toy.batches())
    for name in ("loss", "grad_norm", "logprob_gap_mean"):
        assert group.values[name] == pytest.approx(one.values[name], rel=0.05, abs=0.01), name
    assert one.values["logprob_gap_mean"] < 0.1
