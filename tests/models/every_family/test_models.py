"""Every family of the table with a tiny random checkpoint (`make test-models`): what the engine samples and the trainer
trains is what transformers computes, one step of a run holds its certificate, and the checkpoint comes back as it was.

The list of the tests is the table's: a type is here as soon as engine and trainer have all that its tiny model needs.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import SETTINGS, make_checkpoint, make_config, tensors_of
from toy_engines import prompt_of, request, run_all, scored
from trainer_toys import hf_logprobs, make_experiences
from transformers import AutoConfig

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.config.trainer import LoraConfig
from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.evidence.certificate.certify import certify
from sharpen.learning.trainer.lora import AdaptedModel
from sharpen.learning.trainer.model import TrainedModel, read_module
from sharpen.learning.trainer.packing import pack
from sharpen.models.adapters import adapter_shapes, check_adapters
from sharpen.models.modules import class_for, skeleton, text_parameters
from sharpen.models.pieces import Piece
from sharpen.models.stand_ins import with_stand_ins
from sharpen.models.table import FAMILIES, missing_of, needs_of

CPU = torch.device("cpu")
TYPES = [kind for family in FAMILIES for kind in family.types if kind in SETTINGS]
SERVED = [kind for kind in TYPES if not missing_of(make_config(kind), "engine")]
TRAINED = [kind for kind in SERVED if not missing_of(make_config(kind), "trainer")]
ALONE = [kind for kind in TRAINED if Piece.EXPERTS not in needs_of(make_config(kind))]
"""Those whose logprobs depend on nothing but ids: experts need the recorded routing, which only a run has."""
pytestmark = pytest.mark.models


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory, toy_model_dir: Path) -> Callable[[str], Path]:
    """The tiny checkpoint of a type, made once, with the toy model's tokenizer."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = make_checkpoint(kind, tmp_path_factory.mktemp(kind))
            for file in toy_model_dir.iterdir():
                if file.suffix != ".safetensors" and file.name != "config.json":
                    shutil.copyfile(file, made[kind] / file.name)
        return made[kind]

    return folder


def plain(folder: Path, kind: str) -> Any:
    config = with_stand_ins(AutoConfig.from_pretrained(folder))
    return class_for(config).from_pretrained(folder, config=config, dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", SERVED)
def test_the_engine_samples_what_transformers_computes(folder_of, kind):
    engine = EmbeddedEngine.from_pretrained(str(folder_of(kind)), max_model_len=128)
    prompts = [prompt_of(length, length) for length in (5, 30)]
    for prompt, generation in zip(prompts, run_all(engine, [request(p) for p in prompts]), strict=True):
        expected = scored(plain(folder_of(kind), kind), prompt, generation)
        torch.testing.assert_close(torch.tensor(generation.logprobs), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("kind", ALONE)
def test_a_packed_tree_has_the_loss_and_gradients_of_separate_sequences(folder_of, kind):
    experiences = make_experiences(num_groups=2)
    (packed,) = pack(experiences, 10_000, min_shared_tokens=1)
    policy = TrainedModel.load(folder_of(kind), dtype="float32", device=CPU)
    scores = policy.score(packed)
    (scores.logprobs_E.sum() / 100).backward()
    model = plain(folder_of(kind), kind)
    total = torch.stack([hf_logprobs(model, experience).sum() for experience in experiences]).sum()
    (total / 100).backward()
    torch.testing.assert_close(scores.logprobs_E.sum(), total, atol=1e-2, rtol=1e-5)
    expected = {name: parameter.grad for name, parameter in text_parameters(model) if parameter.grad is not None}
    for name, parameter in policy.parameters():
        if name in expected:
            scale = float(expected[name].abs().max())
            torch.testing.assert_close(parameter.grad, expected[name], atol=2e-3 * scale + 1e-5, rtol=0)
    assert len(expected) > 5


@pytest.mark.parametrize("kind", TRAINED)
def test_adapters_have_no_effect_at_first_and_are_those_that_an_engine_expects(folder_of, kind):
    """The table says of each that it has LoRA."""
    (packed,) = pack(make_experiences(num_groups=1), 10_000, min_shared_tokens=1)
    lora = LoraConfig(rank=2, alpha=4)
    with torch.no_grad():
        before = TrainedModel.load(folder_of(kind), dtype="float32", device=CPU).score(packed).logprobs_E
        policy = AdaptedModel(read_module(folder_of(kind), CPU), lora=lora, compute_dtype=torch.float32)
        torch.testing.assert_close(policy.score(packed).logprobs_E, before)
    policy.alone = True
    check_adapters(adapter_shapes(skeleton(make_config(kind)), lora), policy.state_tensors())


async def prefers_vowels(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """Two calls, the second with the first in its history; the reward is the share of vowels."""
    messages = [{"role": "user", "content": task["question"]}]
    text = ""
    for _ in range(2):
        reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=8)
        answer = reply.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "again"}]
        text += answer
    return WorkflowOutput(reward=sum(letter in "aeiou" for letter in text) / 16)


@pytest.mark.parametrize("kind", TRAINED)
def test_one_step_of_a_run_certified_saved_and_loaded_by_transformers(folder_of, toy_dataset, tmp_path, kind):
    """Engine and trainer agree at the same weights, or the run would stop."""
    result = tune(
        workflow_func=prefers_vowels,
        train_dataset=DatasetConfig(path=str(toy_dataset), split="train", total_steps=1),
        model=TunerModelConfig(model_path=str(folder_of(kind)), max_model_len=128, max_tokens=8),
        algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=4, batch_size=2, learning_rate=1e-3),
        settings={
            "checkpoint_root_dir": str(tmp_path),
            "rollout.failure_reward": 0.0,
            "evaluation.before_and_after": False,
            "evaluation.hold_out": 0,
        },
    )
    assert certify(result.run_dir).holds
    written = result.run_dir / "latest"
    before, after = tensors_of(folder_of(kind)), tensors_of(written)
    assert {name: tensor.shape for name, tensor in after.items()} == {n: t.shape for n, t in before.items()}
    assert any(not after[name].equal(tensor) for name, tensor in before.items())
    text = {name for name, _ in text_parameters(plain(written, kind))}
    state = dict(plain(folder_of(kind), kind).named_parameters())
    for name, parameter in plain(written, kind).named_parameters():
        assert name in text or parameter.equal(state[name]), f"{name} was trained"
