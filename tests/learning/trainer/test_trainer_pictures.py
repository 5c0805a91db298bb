"""Sequences with images train as each would by itself, with transformers' own forward pass over the pixels."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from picture_toys import draw, make_seeing_checkpoint, own_logprobs, written
from trainer_toys import make_experience
from transformers import AutoConfig, AutoModelForImageTextToText

from sharpen.config.trainer import LoraConfig, TrainerConfig
from sharpen.errors import ModelError
from sharpen.learning.trainer.lora import load_trained
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.packing import pack
from sharpen.models.images import eyes_of
from sharpen.models.modules import text_parameters
from sharpen.types import PictureSpan

CPU = torch.device("cpu")
IMAGE = "IMAGE"  # becomes what the family writes for one
KINDS = ("qwen3_vl", "qwen3_5", "gemma3", "gemma4")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory, toy_model_dir):
    """Return the folder of a type's checkpoint, and its eyes."""
    made = {}

    def get(kind):
        if kind not in made:
            folder = make_seeing_checkpoint(kind, tmp_path_factory.mktemp(kind), toy_model_dir)
            made[kind] = folder, eyes_of(folder, AutoConfig.from_pretrained(folder))
        return made[kind]

    return get


def turn(eyes, text, pictures, before=()):
    """The ids and spans of a text, which follows the ids of `before`."""
    ids, spans = eyes.expand(text.replace(IMAGE, written(eyes)), pictures)
    start = len(before)
    moved = [PictureSpan(picture=one.picture, start=start + one.start, length=one.length) for one in spans]
    return [*before, *ids.tolist()], moved


def make_sequences(eyes):
    """Two groups of three, a system prompt common to all; each group's question is another image with the same ids.
    Their second turns show images too, of which those of the first two members are the same."""
    rng = np.random.default_rng(0)
    found = []
    for group in range(2):
        prompt, first = turn(eyes, f"count the shapes: {IMAGE} how many?", [draw(group, 40, 16)])
        for member in range(3):
            answer = [*prompt, *rng.integers(3, 200, 4 + member // 2).tolist()]
            if member < 2:
                answer = [*prompt, 7, 8, 9, 10]
            whole, second = turn(eyes, f" and here {IMAGE}?", [draw(10 + max(member, 1), 16, 48)], answer)
            ids = [*whole, *rng.integers(3, 200, 5).tolist()]
            spans = [(len(prompt), len(answer)), (len(whole), len(ids))]
            one = make_experience(f"g{group}/{member}", ids, spans, advantage=float(rng.normal()))
            found.append(replace(one, pictures=(*first, *second)))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_tree_with_images_has_the_loss_and_gradients_of_separate_sequences(seeing, kind, checkpointed):
    folder, eyes = seeing(kind)
    experiences = make_sequences(eyes)
    (packed,) = pack(experiences, 10_000, min_shared_tokens=1)
    assert packed.num_computed_tokens < 0.8 * packed.num_sequence_tokens
    policy = TrainedModel.load(folder, dtype="float32", device=CPU, gradient_checkpointing=checkpointed)
    logprobs = policy.score(packed).logprobs_E
    logprobs.sum().backward()
    own = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    expected = torch.cat(
        [own_logprobs(own, eyes, e.ids_T, e.pictures, np.flatnonzero(e.loss_mask_T)) for e in experiences]
    )
    expected.sum().backward()
    torch.testing.assert_close(logprobs, expected, atol=2e-4, rtol=0)
    gradients = {name: parameter.grad for name, parameter in text_parameters(own) if parameter.grad is not None}
    for name, parameter in policy.parameters():
        if name in gradients:
            scale = float(gradients[name].abs().max())
            torch.testing.assert_close(parameter.grad, gradients[name], atol=2e-3 * scale + 1e-5, rtol=0)
    assert len(gradients) > 5
    assert all(parameter.grad is None for name, parameter in policy.module.named_parameters() if "vis" in name)


def test_beginnings_are_common_only_where_the_images_are(seeing):
    _, eyes = seeing("qwen3_vl")
    experiences = make_sequences(eyes)
    assert experiences[0].ids_T.tolist()[:20] == experiences[3].ids_T.tolist()[:20]
    (packed,) = pack(experiences, 10_000, min_shared_tokens=1)
    shown = [one.picture for one in packed.shown]
    assert shown.count(draw(0, 40, 16)) == shown.count(draw(1, 40, 16)) == 1
    assert len(shown) == 6  # of each group: its question's, that of two members, that of the third
    same = [replace(one, pictures=(replace(one.pictures[0], picture=draw(0, 40, 16)),)) for one in experiences]
    (fewer,) = pack(same, 10_000, min_shared_tokens=1)
    assert fewer.num_computed_tokens < packed.num_computed_tokens


def test_packs_of_any_size_have_the_same_logprobs(seeing):
    folder, eyes = seeing("qwen3_5")
    policy = TrainedModel.load(folder, dtype="float32", device=CPU)
    experiences = make_sequences(eyes)
    with torch.no_grad():
        whole, single = (
            torch.cat([policy.score(one).logprobs_E for one in pack(experiences, size)]) for size in (10_000, 1)
        )
    torch.testing.assert_close(whole.sort().values, single.sort().values, atol=1e-4, rtol=0)


def test_an_image_passes_through_the_tower_once(seeing):
    folder, eyes = seeing("qwen3_vl")
    policy = TrainedModel.load(folder, dtype="float32", device=CPU)
    shown = []
    policy.module.model.visual.register_forward_hook(lambda *_: shown.append(1))
    for _ in range(2):
        for one in pack(make_sequences(eyes), 1):
            policy.score(one)
    assert len(shown) == 4


def test_a_model_without_a_tower_cannot_score_images(seeing, toy_model_dir):
    _, eyes = seeing("qwen3_vl")
    (packed,) = pack(make_sequences(eyes), 10_000)
    blind = TrainedModel.load(toy_model_dir, dtype="float32", device=CPU)
    with pytest.raises(ModelError, match="sees no images"):
        blind.score(packed)


@pytest.mark.parametrize("pixels", [256, 16384])
def test_a_model_that_reads_images_at_another_size_cannot_score_them(seeing, tmp_path, pixels):
    """A teacher with the original processor's settings, say: it has fewer tokens for an image, or more."""
    folder, eyes = seeing("qwen3_vl")
    (packed,) = pack(make_sequences(eyes), 10_000)
    other = shutil.copytree(folder, tmp_path / "other")
    settings = json.loads((other / "preprocessor_config.json").read_text())
    settings["size"] = {"shortest_edge": pixels if pixels > 4096 else 64, "longest_edge": pixels}
    (other / "preprocessor_config.json").write_text(json.dumps(settings))
    teacher = TrainedModel.load(other, dtype="float32", device=CPU)
    with pytest.raises(ModelError, match="must read images as the policy does"):
        teacher.score(packed)


def test_adapters_train_on_images_while_tower_and_weights_stay(seeing):
    folder, eyes = seeing("qwen3_vl")
    config = TrainerConfig(lora=LoraConfig(rank=4), dtype="float32")
    policy = load_trained(folder, config, CPU)
    (packed,) = pack(make_sequences(eyes), 10_000, min_shared_tokens=1)
    plain = TrainedModel.load(folder, dtype="float32", device=CPU)
    logprobs = policy.score(packed).logprobs_E
    torch.testing.assert_close(logprobs, plain.score(packed).logprobs_E, atol=1e-4, rtol=0)
    logprobs.sum().backward()
    trained = dict(policy.parameters())
    assert all("lora" in name and "vis" not in name for name in trained)
    assert any(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in trained.values())
