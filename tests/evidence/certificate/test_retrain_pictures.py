"""Updates on prompts with images, made once more from the recorded files."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from faulty_update import FaultyUpdate, make_run
from picture_toys import draw, make_seeing_checkpoint

from sharpen import WorkflowOutput
from sharpen.errors import ModelError
from sharpen.evidence.certificate.plain.model import Pictures, PlainModel, PlainSequence
from sharpen.evidence.certificate.plain.retrain import retrain
from sharpen.types import PictureSpan


async def looks(task, model):
    """One call about an image of 16 tokens; the reward is the share of vowels."""
    image = {"type": "image_url", "image_url": {"url": draw(len(task["question"]) % 2, 32, 32).data_url}}
    messages = [{"role": "user", "content": [{"type": "text", "text": task["question"]}, image]}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=4)
    return WorkflowOutput(reward=sum(letter in "aeiou" for letter in reply.choices[0].message.content or "") / 4)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory, toy_model_dir):
    return make_seeing_checkpoint("qwen3_vl", tmp_path_factory.mktemp("model"), toy_model_dir)


def test_honest_steps_are_found_right_and_a_fault_is_found(seeing, tmp_path, toy_dataset):
    run = make_run(tmp_path, seeing, toy_dataset, workflow=looks)
    found = retrain(run)
    assert [(one.first, one.last) for one in found.repeated] == [(1, 1), (2, 2)]
    assert not found.problems
    assert not found.not_repeated
    update = FaultyUpdate(run, tmp_path / "copy")
    update.gradients(lambda gradient: 0 * gradient, "layers.1.mlp.up_proj")
    update.train()
    assert update.found().problems


def test_the_pixels_count_and_a_sampled_token_of_an_image_is_named(seeing):
    """Red where the plain loop does not show the image."""
    model = PlainModel(seeing, rounded=False, dtype=torch.float64, adapter_scale=None)
    token = model.module.config.image_token_id
    ids_T = torch.tensor([5, *[token] * 16, 7, 8])
    one = PlainSequence(
        owner="a",
        ids_T=ids_T,
        places_S=torch.tensor([17, 18]),
        recorded_S=torch.zeros(2),
        weights_S=torch.ones(2),
        pictures=(PictureSpan(picture=draw(0, 32, 32), start=1, length=16),),
    )
    other = replace(one, pictures=(PictureSpan(picture=draw(1, 32, 32), start=1, length=16),))
    weights = dict(model.module.named_parameters())
    first, second = (model.logprobs([sequence], weights)[0][0] for sequence in (one, other))
    assert float((first - second).abs().max()) > 1e-6
    with pytest.raises(ModelError, match="was sampled, where there is none"):
        Pictures(seeing, model.module).arguments(torch.cat([ids_T, ids_T[1:2]]), one.pictures, torch.float64)
