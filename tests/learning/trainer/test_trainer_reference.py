"""The model before training: it stays what it was, and a large copy is in memory only while a step is scored."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from trainer_toys import Batch, make_experiences
from transformers import AutoModelForCausalLM

from sharpen.config.run import LossConfig
from sharpen.config.trainer import TrainerConfig
from sharpen.errors import ModelError
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.trainer.lora import load_trained
from sharpen.learning.trainer.packing import pack
from sharpen.learning.trainer.parity import Tolerance
from sharpen.learning.trainer.reference import FrozenCopy, load_reference
from sharpen.learning.trainer.trainer import Trainer

CPU = torch.device("cpu")


@pytest.fixture(params=["float32", "bfloat16"])
def folder(request: pytest.FixtureRequest, toy_model_dir: Path, tmp_path: Path) -> Path:
    """The toy model, with files of this type."""
    copied = shutil.copytree(toy_model_dir, tmp_path / "model")
    dtype = getattr(torch, request.param)
    AutoModelForCausalLM.from_pretrained(copied, dtype=dtype).save_pretrained(copied)
    return copied


def held(reference: FrozenCopy) -> int:
    return sum(one.numel() for one in reference.model.module.parameters())


def test_without_lora_there_are_two_models_and_all_weights_train(toy_model_dir: Path) -> None:
    config = TrainerConfig()
    policy = load_trained(toy_model_dir, config, CPU)
    reference = load_reference(policy, toy_model_dir, config, CPU)
    assert isinstance(reference, FrozenCopy)
    assert reference.model.module is not policy.module
    assert list(reference.model.parameters()) == []
    assert policy.adapters is None
    count = held(reference)
    reference.rest()
    assert held(reference) == count > 0  # a small one stays


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_copy_is_read_again_as_it_was(folder: Path, dtype: torch.dtype) -> None:
    (packed,) = pack(make_experiences(num_groups=1), 10_000)
    reference = FrozenCopy(folder, dtype, CPU, large_copy=1)
    before = reference.score(packed).logprobs_E
    kinds = {name: (one.dtype, one.shape) for name, one in reference.model.module.named_parameters()}
    for _ in range(2):
        reference.rest()
        assert held(reference) == 0
        assert torch.equal(reference.score(packed).logprobs_E, before)
    assert {name: (one.dtype, one.shape) for name, one in reference.model.module.named_parameters()} == kinds


def test_its_weights_have_left_when_gradients_come(toy_model_dir: Path) -> None:
    """Break: do not call `_all_scored` in `RolloutLoss.begin`."""
    policy = load_trained(toy_model_dir, TrainerConfig(), CPU)
    reference = FrozenCopy(toy_model_dir, torch.float32, CPU, large_copy=1)
    trainer = Trainer(
        policy,
        algorithm=resolve("grpo", LossConfig(kl="k2", kl_coef=0.1), 4),
        config=TrainerConfig(),
        learning_rate=1e-2,
        planned_updates=2,
        reference=reference,
        tolerance=Tolerance(mean=None, max=None),
    )
    seen: list[int] = []
    for _, one in policy.parameters():
        one.register_post_accumulate_grad_hook(lambda _: seen.append(held(reference)))
    steps = [trainer.train_step([Batch(experiences=tuple(make_experiences(seed=step)))]) for step in (1, 2)]
    assert set(seen) == {0}
    assert abs(steps[0].values["kl_reference"]) < 1e-6 < steps[1].values["kl_reference"]


def test_files_that_have_changed_since_are_refused(folder: Path) -> None:
    (packed,) = pack(make_experiences(num_groups=1), 10_000)
    reference = FrozenCopy(folder, torch.float32, CPU, large_copy=1)
    reference.rest()
    os.utime(folder / "model.safetensors", (1, 1))
    with pytest.raises(ModelError, match=r"have changed since the run began: .* Put the files back"):
        reference.score(packed)
