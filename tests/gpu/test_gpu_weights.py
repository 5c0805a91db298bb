"""Weights from a trainer into an engine on the same GPU; two ranks against one process."""

import asyncio

import pytest
import torch
from group_toys import assert_same_numbers, assert_same_weights, make_plan, make_toy
from trainer_toys import Batch, make_experiences, make_model, plain_copy, record

from sharpen.config.run import LossConfig
from sharpen.config.trainer import TrainerConfig
from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.parity import Tolerance
from sharpen.learning.trainer.trainer import Trainer
from sharpen.placement.ranks.group import TrainerGroup
from sharpen.placement.ranks.processes import RankProcesses


def make_trainer(module, compute_dtype, **config):
    return Trainer(
        TrainedModel(module, compute_dtype=compute_dtype),
        algorithm=resolve("multi_step_grpo", LossConfig(kl="none"), 8),
        config=TrainerConfig(**{"max_tokens_per_micro_batch": 80, **config}),
        learning_rate=1e-3,
        planned_updates=10,
        tolerance=Tolerance(mean=None, max=None),
    )


def rollouts():
    return record(plain_copy(make_model("qwen3", torch.float32)), make_experiences())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_trainers_own_tensors_are_copied_into_the_engines(dtype):
    """The engine has the trainer's values, in memory of its own: what trains on does not change what serves."""
    trainer = make_trainer(make_model("qwen3", torch.float32).cuda(), torch.bfloat16)
    engine = EmbeddedEngine(make_model("qwen3", dtype).cuda(), max_model_len=128, max_slots=4)
    batch = Batch(experiences=tuple(rollouts()))
    trainer.train_step([batch])
    asyncio.run(engine.load(1, trainer.state_tensors()))
    served = {name: tensor.clone() for name, tensor in engine._model.named_parameters()}
    for name, tensor in trainer.state_tensors().items():
        torch.testing.assert_close(served[name], tensor.to(dtype), atol=0, rtol=0)
    trainer.train_step([batch])
    for name, tensor in engine._model.named_parameters():
        assert torch.equal(tensor, served[name])


def test_a_gpu_trains_as_the_cpu_does():
    """Three updates in fp32: the same numbers, the same weights."""
    batch = Batch(experiences=tuple(rollouts()))
    cpu = make_trainer(make_model("qwen3", torch.float32), torch.float32)
    gpu = make_trainer(make_model("qwen3", torch.float32).cuda(), torch.float32)
    for _ in range(3):
        first, second = cpu.train_step([batch]), gpu.train_step([batch])
        for name in ("loss", "grad_norm", "kl_old", "entropy"):
            assert second.values[name] == pytest.approx(first.values[name], rel=1e-3, abs=1e-5), name
    for name, tensor in cpu.state_tensors().items():
        torch.testing.assert_close(gpu.state_tensors()[name].cpu(), tensor, atol=2e-4, rtol=0, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_micro_batches_and_sharing_change_nothing_but_rounding(dtype):
    """Gradients of one pack and of many; with the flash kernel in bfloat16."""
    experiences = rollouts()
    norms = []
    for max_tokens in (10_000, 80, 30):
        trainer = make_trainer(make_model("qwen3", torch.float32).cuda(), dtype, max_tokens_per_micro_batch=max_tokens)
        norms.append(trainer.train_step([Batch(experiences=tuple(experiences))]).values["grad_norm"])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert norms[1:] == pytest.approx([norms[0]] * 2, rel=tolerance)


@pytest.mark.two_gpus
def test_two_gpus_train_as_one_process_does(tmp_path):
    """FSDP2 over nccl, fp32."""
    toy = make_toy(tmp_path / "model")
    plan = make_plan(toy, dtype="float32")
    one = Trainer.load(plan, "cuda")
    ranks = RankProcesses(plan, 2, on_gpus=True)
    try:
        group = TrainerGroup(ranks)
        for _ in range(3):
            first, second = one.train_step(toy.batches()), group.train_step(toy.batches())
            assert_same_numbers(first, second, relative=1e-3)
        assert_same_weights(Moved(one), group, absolute=2e-4)
    finally:
        ranks.close()


class Moved:
    """A trainer's weights on the CPU."""

    def __init__(self, trainer):
        self._trainer = trainer

    def state_tensors(self):
        return {name: tensor.cpu() for name, tensor in self._trainer.state_tensors().items()}
