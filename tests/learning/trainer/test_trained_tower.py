"""A vision tower that is trained: its gradients, its way to the engine and into checkpoints, and refusals."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from picture_toys import IMAGES, draw, make_seeing_checkpoint, own_logprobs
from tiny import tensors_of
from toy_engines import run_all
from trainer_toys import make_experience
from transformers import AutoConfig, AutoModelForImageTextToText

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.config.trainer import LoraConfig, TrainerConfig
from sharpen.contracts import GenerateRequest
from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.errors import ConfigError, ModelError
from sharpen.evidence.certificate.certify import certify
from sharpen.learning.experience.reading import read_steps
from sharpen.learning.trainer.lora import load_trained
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.packing import pack
from sharpen.learning.trainer.settings import check_lora
from sharpen.models.images import eyes_of
from sharpen.models.modules import own_parameters, tower_modules
from sharpen.types import Sampling

CPU = torch.device("cpu")


def tower_parameters(module):
    return tuple(own_parameters(tower_modules(module)))


@pytest.fixture(scope="module", params=["qwen3_vl", "gemma3", "gemma4", "mistral3"])
def seeing(request, tmp_path_factory, toy_model_dir):
    folder = make_seeing_checkpoint(request.param, tmp_path_factory.mktemp("seeing"), toy_model_dir)
    return request.param, folder, eyes_of(folder, AutoConfig.from_pretrained(folder))


def test_the_gradients_are_those_of_transformers_through_the_pixels(seeing):
    """Two members share their image, whose tower runs once for both."""
    kind, folder, eyes = seeing
    found = []
    for group in range(2):
        ids, spans = eyes.expand(f"how many? {IMAGES[kind]} answer:", [draw(group, 40, 16)])
        for member in range(2):
            answer = np.random.default_rng(member).integers(3, 200, 5).tolist()
            one = make_experience(f"g{group}/{member}", [*ids, *answer], [(len(ids), len(ids) + 5)], advantage=1.0)
            found.append(replace(one, pictures=spans))
    (packed,) = pack(found, 10_000, min_shared_tokens=1)
    policy = TrainedModel.load(folder, dtype="float32", device=CPU, train_towers=True)
    (policy.score(packed).logprobs_E.sum() / 10).backward()
    own = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    logprobs = [own_logprobs(own, eyes, e.ids_T, e.pictures, np.flatnonzero(e.loss_mask_T)) for e in found]
    (torch.cat(logprobs).sum() / 10).backward()
    mine = dict(policy.parameters())
    towers = {id(parameter) for parameter in tower_parameters(own)}
    compared = 0
    for name, parameter in own.named_parameters():
        if parameter.grad is not None:
            scale = float(parameter.grad.abs().max())
            torch.testing.assert_close(mine[name].grad, parameter.grad, atol=2e-3 * scale + 1e-5, rtol=0, msg=name)
            compared += id(parameter) in towers and scale > 0
    assert compared > 3


def test_a_pass_without_images_gives_the_tower_zeros(seeing):
    """All ranks of a sharded model must have the same gradients to add up."""
    _, folder, _ = seeing
    policy = TrainedModel.load(folder, dtype="float32", device=CPU, train_towers=True)
    (packed,) = pack([make_experience("g/0", [5, 6, 7, 8], [(2, 4)], advantage=1.0)], 100)
    policy.score(packed).logprobs_E.sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in tower_parameters(policy.module))


def test_the_engine_looks_anew_with_the_tower_that_came(seeing):
    """Red when `load` keeps what the former tower made of the picture, or leaves the tower out."""
    kind, folder, eyes = seeing
    engine = EmbeddedEngine.from_pretrained(str(folder), max_model_len=256)
    ids, spans = eyes.expand(f"what is {IMAGES[kind]}?", [draw(1, 24, 16)])
    request = GenerateRequest(prompt_ids=ids, sampling=Sampling(temperature=1.0, max_tokens=1), noise=0, pictures=spans)
    policy = TrainedModel.load(folder, dtype="float32", device=CPU, train_towers=True)
    own = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    (before,) = run_all(engine, [request])
    with torch.no_grad():
        for module in (policy.module, own):
            for number, parameter in enumerate(tower_parameters(module)):
                parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    asyncio.run(engine.load(1, policy.state_tensors()))
    (after,) = run_all(engine, [request])
    whole = np.concatenate([ids, after.ids])
    expected = own_logprobs(own, eyes, whole, spans, [len(ids)]).detach()
    torch.testing.assert_close(torch.tensor(after.logprobs), expected, atol=2e-4, rtol=0)
    assert before.ids[0] != after.ids[0] or abs(before.logprobs[0] - after.logprobs[0]) > 1e-3


VOWELS = "aeiou"


async def looks(task, model):
    part = {"type": "image_url", "image_url": {"url": draw(len(task["question"]) % 2, 16, 24).data_url}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=8)
    return WorkflowOutput(reward=sum(letter in VOWELS for letter in reply.choices[0].message.content or "") / 8)


def test_a_run_trains_the_tower_and_engine_and_trainer_agree_after_it(tmp_path, toy_model_dir, toy_dataset):
    folder = make_seeing_checkpoint("qwen3_vl", tmp_path / "model", toy_model_dir)
    result = tune(
        workflow_func=looks,
        train_dataset=DatasetConfig(path=str(toy_dataset), split="train", total_steps=2),
        model=TunerModelConfig(model_path=str(folder), max_model_len=128, max_tokens=8),
        algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=4, batch_size=2, learning_rate=1e-2),
        settings={
            "checkpoint_root_dir": str(tmp_path / "runs"),
            "trainer.train_towers": True,
            "check.enabled": False,
            "evaluation.before_and_after": False,
            "evaluation.hold_out": 0,
        },
    )
    steps = read_steps(result.run_dir / "run.db")
    assert [step.metrics["trainer/logprob_gap_max"] < 1e-3 for step in steps] == [True] * 2
    assert certify(result.run_dir).holds
    before, after = tensors_of(folder), tensors_of(result.run_dir / "latest")
    assert before.keys() == after.keys()
    assert [name for name in before if ".visual." in name and not before[name].equal(after[name])]


def test_what_has_no_tower_to_train_is_told_so(tmp_path, toy_model_dir):
    with pytest.raises(ModelError, match=r"train_towers is true, but .*toy.* no vision tower"):
        load_trained(toy_model_dir, TrainerConfig(train_towers=True), CPU)
    with pytest.raises(ConfigError, match=r"trainer.train_towers .* trainer.lora"):
        check_lora(TrainerConfig(train_towers=True, lora=LoraConfig()))
