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
from transformers import AutoConfig

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.evidence.certificate.certify import certify
from sharpen.models.modules import class_for, text_parameters
from sharpen.models.stand_ins import with_stand_ins
from sharpen.models.table import FAMILIES, family_of, missing_of
from sharpen.testing import check_family

TYPES = [kind for family in FAMILIES for kind in family.types if kind in SETTINGS]
SERVED = [kind for kind in TYPES if not missing_of(make_config(kind), "engine")]
TRAINED = [kind for kind in SERVED if not missing_of(make_config(kind), "trainer")]
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
def test_engine_trainer_and_adapters_compute_what_transformers_does(folder_of, kind):
    check_family(family_of(make_config(kind)), folder_of(kind))


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
