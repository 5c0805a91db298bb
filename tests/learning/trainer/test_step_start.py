"""Going back to the start of a step is exact, for every kind of trainer and wherever the step failed."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from trainer_toys import Batch, make_experiences, make_model, plain_copy, record

from sharpen.config.run import LossConfig
from sharpen.config.trainer import CriticConfig, LoraConfig, TrainerConfig
from sharpen.errors import TrainingError
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.algorithm.supervised import resolve_supervised
from sharpen.learning.trainer import step_start
from sharpen.learning.trainer.critic import Critic
from sharpen.learning.trainer.lora import AdaptedModel
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.optimizer import Optimizer
from sharpen.learning.trainer.parity import Tolerance
from sharpen.learning.trainer.step_start import StepStart
from sharpen.learning.trainer.trainer import Trainer

EXPERIENCES = record(plain_copy(make_model("qwen3", torch.float32)), make_experiences(num_groups=4))
HALVES = EXPERIENCES[:6], EXPERIENCES[6:]
NOT_FINITE = replace(HALVES[1][0], weights_T=np.where(HALVES[1][0].loss_mask_T, np.inf, 0).astype(np.float32))


def make_trainer(kind: str, **config):
    config = TrainerConfig(**{"max_tokens_per_micro_batch": 80, "num_minibatches": 2, **config})
    module = make_model("qwen3", torch.float32)
    lora = LoraConfig(rank=3, alpha=6)
    policy = (
        AdaptedModel(module, lora=lora, compute_dtype=torch.float32)
        if kind == "lora"
        else TrainedModel(module, compute_dtype=torch.float32)
    )
    if kind == "sft":
        algorithm = resolve_supervised("sft", LossConfig())
        return Trainer(policy, algorithm=algorithm, config=config, learning_rate=0.01, planned_updates=10)
    loss = LossConfig(kl="k2", kl_in="reward", kl_target=0.1, kl_coef=0.2) if kind == "adapted kl" else None
    algorithm = resolve("ppo" if kind == "critic" else "multi_step_grpo", loss or LossConfig(kl="none"), 8)
    critic = reference = None
    if algorithm.needs_critic:
        model = TrainedModel(make_model("qwen3", torch.float32), compute_dtype=torch.float32)
        critic = Critic(model, config=CriticConfig(), trainer_config=config, planned_updates=10)
    if algorithm.needs_reference:
        reference = TrainedModel(make_model("qwen3", torch.float32, seed=1), compute_dtype=torch.float32)
        reference.freeze()
    return Trainer(
        policy,
        algorithm=algorithm,
        config=config,
        learning_rate=0.01,
        planned_updates=10,
        reference=reference,
        critic=critic,
        tolerance=Tolerance(mean=None, max=None),
    )


def batches(trainer, *halves):
    return [Batch(experiences=tuple(half)) for half in halves]


def step(trainer, *halves) -> None:
    trainer.train_step(batches(trainer, *(halves or HALVES)))


def saved(trainer, folder) -> dict[str, bytes]:
    """Return all files of its checkpoint."""
    trainer.save(folder, {})
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", ["full", "critic", "lora", "sft", "adapted kl"])
def test_a_step_that_fails_in_its_second_update_is_undone_bit_for_bit(tmp_path, kind):
    """The first time before the optimizer has any state, the second time with some. What trains afterwards is what
    would have trained without it. Red when `train_step` does not call `begin`, when the moments (`live_tensors`) or the
    critic's optimizer are left out of what is kept."""
    disturbed, quiet = make_trainer(kind), make_trainer(kind)
    for number in range(2):
        before = saved(disturbed, tmp_path / f"before {number}")
        with pytest.raises(TrainingError, match=f"update {2 * number + 1}"):
            step(disturbed, HALVES[0], [NOT_FINITE, *HALVES[1][1:]])
        assert disturbed.version == 2 * number + 1
        assert disturbed.back_to(2 * number)
        assert disturbed.version == 2 * number
        assert saved(disturbed, tmp_path / f"after {number}") == before
        for trainer in (disturbed, quiet):
            step(trainer)
        assert saved(disturbed, tmp_path / f"disturbed {number}") == saved(quiet, tmp_path / f"quiet {number}")


def test_a_whole_step_can_be_undone_too_and_only_to_its_own_start():
    trainer = make_trainer("full")
    step(trainer)
    step(trainer)
    assert trainer.back_to(4)
    assert not trainer.back_to(0)
    assert trainer.version == 4
    assert trainer.back_to(2)
    assert trainer.version == 2


def test_a_whole_step_that_is_undone_takes_its_adapted_coefficient_back(tmp_path):
    """The coefficient is adapted at the end of a step. Red when `back_to` does not restore the loss's algorithm."""
    trainer = make_trainer("adapted kl")
    before = saved(trainer, tmp_path / "before")
    step(trainer)
    assert saved(trainer, tmp_path / "trained")["trainer_state/state.json"] != before["trainer_state/state.json"]
    assert trainer.back_to(0)
    assert saved(trainer, tmp_path / "after") == before


def test_a_step_of_one_update_keeps_nothing_and_changes_nothing_where_its_gradient_is_not_finite():
    trainer = make_trainer("full", num_minibatches=1)
    before = {name: tensor.clone() for name, tensor in trainer.state_tensors().items()}
    with pytest.raises(TrainingError):
        step(trainer, [NOT_FINITE])
    assert trainer.back_to(0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.state_tensors().items())
    step(trainer, HALVES[0])
    assert not trainer.back_to(0)
    assert not trainer._start._memory


def make_start(num_updates: int = 2, **kind) -> tuple[StepStart, torch.nn.Parameter]:
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = Optimizer([("w", parameter)], TrainerConfig(), peak_learning_rate=0.1, planned_updates=2)
    return StepStart([optimizer], num_updates=num_updates, **kind), parameter


def test_an_interrupted_update_is_not_whole_until_its_step_is_undone():
    """Red when `update` clears its mark after an error."""
    start, parameter = make_start()
    start.begin(7, 2, "further")
    with pytest.raises(ZeroDivisionError), start.update():
        parameter.data.add_(1.0).div_(1 // 0)
    assert not start.is_whole()
    assert start.go_back(6) == (False, None)
    assert not start.is_whole()
    assert start.go_back(7) == (True, "further")
    assert start.is_whole()
    assert parameter.tolist() == [1.0] * 4


@pytest.mark.gpu
def test_a_gpu_copies_its_start_out_while_it_computes():
    parameter = torch.nn.Parameter(torch.randn(2**22, device="cuda"))
    optimizer = Optimizer([("w", parameter)], TrainerConfig(), peak_learning_rate=0.1, planned_updates=4)
    start, before = StepStart([optimizer], num_updates=2), parameter.detach().clone()
    for _ in range(2):  # without and with moments
        start.begin(0, 2)
        parameter.grad = torch.ones_like(parameter)
        with start.update():
            optimizer.apply(0, optimizer.norm(0))
        assert not torch.equal(parameter, before)
        assert start.go_back(0) == (True, None)
        assert torch.equal(parameter, before)
        optimizer.apply(0, optimizer.norm(0))
        before = parameter.detach().clone()
    assert all(tensor.is_pinned() for tensor in start._memory.values() if tensor.numel() > 1)


def test_without_enough_memory_no_copy_is_kept_and_a_line_says_so():
    """No machine has enough memory for this many ranks."""
    start, _ = make_start(num_ranks=10**12)
    assert "GiB" in start.line
    assert "last checkpoint" in start.line
    start.begin(0, 2)
    assert start.go_back(0) == (False, None)
    assert make_start(num_updates=1, num_ranks=10**12)[0].line == ""
    assert step_start._check_memory([], {}, 1) == (True, "")
