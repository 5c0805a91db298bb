"""The image column of the table (`make test-models`): a tiny checkpoint of every family whose images are read.

What the engine samples and the trainer trains is what transformers computes from the pixels, and the checkpoint of a
certified step comes back with its tower byte for byte.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from picture_toys import IMAGES, SEEING, draw, make_seeing_checkpoint, own_logprobs
from tiny import tensors_of
from toy_engines import run_all
from trainer_toys import make_experience
from transformers import AutoConfig, AutoModelForImageTextToText

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.contracts import GenerateRequest
from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.evidence.certificate.certify import certify
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.packing import pack
from sharpen.models.images import Eyes, eyes_of
from sharpen.models.modules import text_parameters
from sharpen.models.table import FAMILIES
from sharpen.types import Experience, Sampling

pytestmark = pytest.mark.models
Seeing = Callable[[str], tuple[Path, Eyes, Any]]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory, toy_model_dir: Path) -> Seeing:
    """The folder of a type's checkpoint, its eyes, and transformers' own model."""
    made: dict[str, tuple[Path, Eyes, Any]] = {}

    def get(kind: str) -> tuple[Path, Eyes, Any]:
        if kind not in made:
            folder = make_seeing_checkpoint(kind, tmp_path_factory.mktemp(kind), toy_model_dir)
            own = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
            eyes = eyes_of(folder, AutoConfig.from_pretrained(folder))
            assert eyes is not None
            made[kind] = folder, eyes, own
        return made[kind]

    return get


def test_every_family_whose_images_are_read_is_tested() -> None:
    assert {kind for family in FAMILIES if family.images for kind in family.types[:1]} == set(SEEING)


@pytest.mark.parametrize("kind", SEEING)
def test_the_engine_samples_what_transformers_computes_from_the_pixels(seeing: Seeing, kind: str) -> None:
    folder, eyes, own = seeing(kind)
    engine = EmbeddedEngine.from_pretrained(str(folder), max_model_len=256)
    ids, spans = eyes.expand(f"what is {IMAGES[kind]}, and {IMAGES[kind]}?", [draw(1, 48, 16), draw(2, 16, 24)])
    request = GenerateRequest(prompt_ids=ids, sampling=Sampling(temperature=1.0, max_tokens=8), noise=0, pictures=spans)
    (generation,) = run_all(engine, [request])
    images = np.flatnonzero(generation.ids == eyes.image_token_id)  # transformers would count one as an image's
    count = int(images[0]) if len(images) else len(generation.ids)
    whole = np.concatenate([ids, generation.ids[:count]])
    expected = own_logprobs(own, eyes, whole, spans, range(len(ids), len(whole))).detach()
    torch.testing.assert_close(torch.tensor(generation.logprobs[:count]), expected, atol=2e-4, rtol=0)


def _sequences(eyes: Eyes, kind: str) -> list[Experience]:
    """Two groups, whose questions have the same ids and different images."""
    found = []
    for group in range(2):
        ids, spans = eyes.expand(f"how many shapes? {IMAGES[kind]} answer:", [draw(group, 40, 16)])
        for member in range(2):
            answer = np.random.default_rng(member).integers(3, 200, 5).tolist()
            one = make_experience(f"g{group}/{member}", [*ids, *answer], [(len(ids), len(ids) + 5)], advantage=1.0)
            found.append(replace(one, pictures=spans))
    return found


ALONE = [kind for kind in SEEING if kind != "qwen3_5_moe"]
"""Those whose logprobs depend on no recorded routing."""


@pytest.mark.parametrize("kind", ALONE)
def test_a_packed_tree_has_the_loss_and_gradients_of_separate_sequences(seeing: Seeing, kind: str) -> None:
    folder, eyes, own = seeing(kind)
    own.zero_grad()
    experiences = _sequences(eyes, kind)
    (packed,) = pack(experiences, 10_000, min_shared_tokens=1)
    policy = TrainedModel.load(folder, dtype="float32", device=torch.device("cpu"))
    logprobs = policy.score(packed).logprobs_E
    (logprobs.sum() / 10).backward()
    expected = torch.cat(
        [own_logprobs(own, eyes, e.ids_T, e.pictures, np.flatnonzero(e.loss_mask_T)) for e in experiences]
    )
    (expected.sum() / 10).backward()
    torch.testing.assert_close(logprobs, expected, atol=2e-4, rtol=0)
    gradients = {name: parameter.grad for name, parameter in text_parameters(own) if parameter.grad is not None}
    for name, parameter in policy.parameters():
        if name in gradients:
            scale = float(gradients[name].abs().max())
            torch.testing.assert_close(parameter.grad, gradients[name], atol=2e-3 * scale + 1e-5, rtol=0)
    assert len(gradients) > 5


async def looks(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """Shows one of two images, then another; the reward is the share of vowels."""
    content = [{"type": "text", "text": task["question"]}, shown(len(task["question"]))]
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    text = ""
    for turn in range(2):
        reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=8)
        answer = reply.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": [shown(turn)]}]
        text += answer
    return WorkflowOutput(reward=sum(letter in "aeiou" for letter in text) / 16)


def shown(seed: int) -> dict[str, Any]:
    data = base64.b64encode(draw(seed % 2, 16, 24).data).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_a_run_in_bfloat16_with_images_is_certified(
    seeing: Seeing, toy_dataset: Path, tmp_path: Path, kind: str
) -> None:
    folder, _, _ = seeing(kind)
    result = tune(
        workflow_func=looks,
        train_dataset=DatasetConfig(path=str(toy_dataset), split="train", total_steps=2),
        model=TunerModelConfig(model_path=str(folder), max_model_len=400, max_tokens=8),
        algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=4, batch_size=2, learning_rate=1e-3),
        settings={
            "checkpoint_root_dir": str(tmp_path),
            "engine.dtype": "bfloat16",
            "trainer.dtype": "bfloat16",
            "rollout.failure_reward": 0.0,
            "evaluation.before_and_after": False,
            "evaluation.hold_out": 0,
        },
    )
    assert certify(result.run_dir).holds


ANSWERS = {
    "sft": lambda seed: {"response": "yes" if seed % 2 else "no"},
    "dpo": lambda seed: {"chosen": "yes", "rejected": "no"},
}


@pytest.mark.parametrize(("algorithm", "kind"), [("sft", "qwen3_vl"), ("dpo", "qwen3_vl"), ("sft", "gemma3")])
def test_rows_with_images_train_and_what_is_on_them_counts(
    seeing: Seeing, tmp_path: Path, algorithm: str, kind: str
) -> None:
    """A second run on other images has other losses: red when the trainer computes rows without them."""
    folder, _, _ = seeing(kind)
    losses = []
    for other in (0, 100):
        rows = tmp_path / f"{other}.jsonl"
        lines = [
            {"prompt": "<image>?", "images": [draw(seed + other).data_url], **ANSWERS[algorithm](seed)}
            for seed in range(8)
        ]
        rows.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        result = tune(
            train_dataset=DatasetConfig(path=str(rows), total_steps=2),
            model=TunerModelConfig(model_path=str(folder), max_model_len=400),
            algorithm=AlgorithmConfig(algorithm_type=algorithm, batch_size=4, learning_rate=1e-3),
            settings={
                "checkpoint_root_dir": str(tmp_path),
                "evaluation.hold_out": False,
                "sampling.order": "sequential",
            },
        )
        certificate = certify(result.run_dir)
        assert certificate.holds
        assert not certificate.not_recomputed
        metrics = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
        losses.append([step["trainer/loss"] for step in metrics if "trainer/loss" in step])
    assert len(losses[0]) == 2
    assert losses[0][1] != losses[1][1]


@pytest.mark.parametrize("kind", SEEING)
def test_a_certified_step_with_images_keeps_the_tower(
    seeing: Seeing, toy_dataset: Path, tmp_path: Path, kind: str
) -> None:
    """Engine and trainer agree at the same weights, or the run would stop."""
    folder, _, own = seeing(kind)
    result = tune(
        workflow_func=looks,
        train_dataset=DatasetConfig(path=str(toy_dataset), split="train", total_steps=1),
        model=TunerModelConfig(model_path=str(folder), max_model_len=400, max_tokens=8),
        algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=4, batch_size=2, learning_rate=1e-3),
        settings={
            "checkpoint_root_dir": str(tmp_path),
            "rollout.failure_reward": 0.0,
            "evaluation.before_and_after": False,
            "evaluation.hold_out": 0,
        },
    )
    assert certify(result.run_dir).holds
    assert len(list((result.run_dir / "images").iterdir())) == 2
    written = result.run_dir / "latest"
    assert tensors_of(folder).keys() == tensors_of(written).keys()
    after = AutoModelForImageTextToText.from_pretrained(written, dtype=torch.float32)
    text, state = {name for name, _ in text_parameters(after)}, dict(own.named_parameters())
    changed = {name for name, parameter in after.named_parameters() if not parameter.equal(state[name])}
    assert changed
    assert changed <= text
    assert eyes_of(written, AutoConfig.from_pretrained(written)) is not None
