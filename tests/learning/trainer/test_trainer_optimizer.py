"""The schedule by hand, AdamW against torch's own, clipping, and gradients that are not finite."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from sharpen.config.trainer import TrainerConfig
from sharpen.errors import CheckpointError, TrainingError
from sharpen.learning.trainer.optimizer import GradientBlock, Optimizer, learning_rate, length


def rates(config: TrainerConfig, planned: int, count: int) -> list[float]:
    return [learning_rate(update, 1.0, config, planned) for update in range(count)]


def test_schedules_by_hand():
    assert rates(TrainerConfig(), 4, 3) == [1.0, 1.0, 1.0]
    assert rates(TrainerConfig(warmup_steps=4), 8, 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    linear = TrainerConfig(schedule="linear", warmup_steps=1, min_lr_ratio=0.2)
    assert rates(linear, 5, 7) == pytest.approx([1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    cosine = TrainerConfig(schedule="cosine")
    assert rates(cosine, 4, 6) == pytest.approx(
        [1.0, 0.5 + 0.5 * math.sqrt(0.5), 0.5, 0.5 - 0.5 * math.sqrt(0.5), 0.0, 0.0]
    )


def make(config: TrainerConfig) -> tuple[Optimizer, dict[str, torch.nn.Parameter]]:
    parameters = {
        "weight": torch.nn.Parameter(torch.tensor([[1.0, 2.0]])),
        "norm": torch.nn.Parameter(torch.tensor([1.0])),
    }
    return Optimizer(parameters.items(), config, peak_learning_rate=0.1, planned_updates=10), parameters


def test_first_update_by_hand():
    """Adam's first step moves each weight by the rate against the gradient's sign; only the matrix is decayed."""
    optimizer, parameters = make(TrainerConfig(weight_decay=0.5))
    parameters["weight"].grad = torch.tensor([[0.3, -0.4]])
    parameters["norm"].grad = torch.tensor([0.0])
    norm = optimizer.norm(0)
    rate = optimizer.apply(0, norm)
    assert (float(norm), rate) == (pytest.approx(0.5), 0.1)
    torch.testing.assert_close(parameters["weight"].detach(), torch.tensor([[1.0 * 0.95 - 0.1, 2.0 * 0.95 + 0.1]]))
    assert parameters["norm"].item() == 1.0


def test_gradients_are_clipped_to_the_norm_and_the_norm_before_is_reported():
    optimizer, parameters = make(TrainerConfig(max_grad_norm=1.0))
    parameters["weight"].grad = torch.tensor([[30.0, 0.0]])
    parameters["norm"].grad = torch.tensor([40.0])
    norm = optimizer.norm(0)
    optimizer.apply(0, norm)
    assert float(norm) == pytest.approx(50.0)
    torch.testing.assert_close(parameters["weight"].grad, torch.tensor([[0.6, 0.0]]))
    torch.testing.assert_close(parameters["norm"].grad, torch.tensor([0.8]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_named_and_changes_nothing(bad):
    optimizer, parameters = make(TrainerConfig())
    parameters["weight"].grad = torch.tensor([[1.0, bad]])
    parameters["norm"].grad = torch.tensor([1.0])
    with pytest.raises(TrainingError, match=r"update 7: 1 of 2 gradient values of weight are NaN or infinite"):
        optimizer.norm(7)
    assert parameters["weight"].tolist() == [[1.0, 2.0]]
    assert optimizer.state_tensors() == {}


def test_state_loads_into_another_optimizer_and_unknown_parameters_are_refused():
    optimizer, parameters = make(TrainerConfig())
    other, others = make(TrainerConfig())
    for update in range(3):
        for name, parameter in parameters.items():
            parameter.grad = torch.full_like(parameter, 0.1 * (update + 1))
            if update == 2:
                others[name].data.copy_(parameter)
        if update == 2:
            other.load_state_tensors(optimizer.state_tensors())
            for name, parameter in others.items():
                parameter.grad = parameters[name].grad.clone()
            other.apply(update, other.norm(update))
        optimizer.apply(update, optimizer.norm(update))
    assert all(torch.equal(parameters[name], others[name]) for name in parameters)
    with pytest.raises(CheckpointError, match="stranger"):
        other.load_state_tensors({"stranger/exp_avg": torch.zeros(1)})


def test_the_length_of_a_large_gradient_is_exact():
    """Red with PyTorch's own norm of float32 on a processor, which is 6e-5 too small here and 1% of 10^8 numbers."""
    gradient = torch.randn(3001, 1000, generator=torch.Generator().manual_seed(0)) * 1e-3
    exact = float(gradient.double().norm())
    assert float(length(gradient)) == pytest.approx(exact, rel=2e-7)
    assert float(length(gradient[:1, :5])) == pytest.approx(float(gradient[:1, :5].double().norm()), rel=2e-7)
    assert float(length(torch.zeros(0))) == 0.0


@pytest.fixture
def mesh():
    """A mesh of this process alone, as a rank has it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_the_norm_of_gradients_in_shards_is_exact_too(mesh):
    """Red with PyTorch's own norm of the shards. A gradient of 3 million numbers, and a small one."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"large": (3001, 1000), "small": (3, 2)}
    parameters, exact = {}, 0.0
    for name, shape in sizes.items():
        gradient = torch.randn(shape, generator=generator) * 1e-3
        parameters[name] = torch.nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, [Shard(0)]))
        parameters[name].grad = distribute_tensor(gradient, mesh, [Shard(0)])
        exact += float(gradient.double().square().sum())
    optimizer = Optimizer(parameters.items(), TrainerConfig(), peak_learning_rate=1.0, planned_updates=1)
    norm = optimizer.norm(0)
    assert float(norm) == pytest.approx(math.sqrt(exact), rel=2e-7)
    assert not isinstance(norm, DTensor)


def test_what_got_no_gradient_has_none_in_a_block():
    """A zero would decay it. And outside of an update gradients stay where they come."""
    used, unused = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    block = GradientBlock([used, unused])
    used.sum().backward()
    own = used.grad.data_ptr()
    block.begin()
    (2 * used).sum().backward()
    assert used.grad.tolist() == [3.0, 3.0]
    assert used.grad.data_ptr() != own
    assert unused.grad is None
