"""The rules by which gradients become updates: what they do, what they keep, and what a checkpoint holds of it."""

import sys

import pytest
import torch

from sharpen.config.trainer import TrainerConfig
from sharpen.errors import ConfigError
from sharpen.learning.trainer.optimizer import Optimizer
from sharpen.learning.trainer.settings import check_optimizer
from sharpen.learning.trainer.step_start import StepStart

KINDS = ("adamw", "adamw_8bit", "paged_adamw_8bit", "muon")


class Toy:
    """A matrix of a block, an embedding table and a norm that are to become `target`s."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        shapes = {"block": (96, 64), "table": (128, 64), "norm": (64,)}  # the matrices are large enough for 8 bits
        self.targets = {name: torch.randn(shape) for name, shape in shapes.items()}
        self.parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
        config = TrainerConfig(optimizer=kind, weight_decay=0.0, max_grad_norm=1e9)
        tables = [self.parameters["table"]]
        self.optimizer = Optimizer(
            self.parameters.items(), config, peak_learning_rate=0.05, planned_updates=99, tables=tables
        )

    def loss(self) -> torch.Tensor:
        return sum((self.parameters[name] - target).square().mean() for name, target in self.targets.items())

    def update(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.apply(number, self.optimizer.norm(number))

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_every_rule_lowers_the_loss(kind):
    toy = Toy(kind)
    before = toy.loss().item()
    for number in range(60):
        toy.update(number)
    assert toy.loss().item() < 0.2 * before


def test_the_rules_keep_as_much_as_is_said():
    kept = {}
    for kind in KINDS:
        toy = Toy(kind)
        toy.update(0)
        bytes_of = dict.fromkeys(toy.parameters, 0)
        for name, tensor in toy.optimizer.state_tensors().items():
            bytes_of[name.partition("/")[0]] += tensor.nbytes if tensor.ndim else 0
        kept[kind] = {name: bytes_of[name] / toy.parameters[name].numel() for name in bytes_of}
    assert kept["adamw"] == {"block": 8.0, "table": 8.0, "norm": 8.0}
    for kind in ("adamw_8bit", "paged_adamw_8bit"):  # two bytes, and two scales for each 256 weights
        assert kept[kind] == {"block": 2 + 8 / 256, "table": 2 + 8 / 256, "norm": 8.0}
    assert kept["muon"] == {"block": 4.0, "table": 8.0, "norm": 8.0}


def test_muon_turns_the_blocks_matrices_alone():
    """Its update of a matrix has singular values near 1, here times 0.2 sqrt(96), and AdamW's first one is the sign."""
    toy = Toy("muon")
    toy.update(0)
    after = toy.weights()
    singular = torch.linalg.svdvals(after["block"]) / (0.05 * 0.2 * 96**0.5)
    assert 0.6 < singular.min().item() < singular.max().item() < 1.3
    for name in ("table", "norm"):
        torch.testing.assert_close(after[name], 0.05 * toy.targets[name].sign(), rtol=0.1, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_state_goes_on_to_the_last_bit(kind):
    first = Toy(kind)
    for number in range(3):
        first.update(number)
    second = Toy(kind)
    for name, tensor in first.weights().items():
        second.parameters[name].data.copy_(tensor)
    saved = {name: tensor.clone() for name, tensor in first.optimizer.state_tensors().items()}
    second.optimizer.load_state_tensors(saved)
    for toy in (first, second):
        toy.update(3)
        toy.update(4)
    assert all(torch.equal(first.weights()[name], second.weights()[name]) for name in first.parameters)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", [0, 2])
def test_a_step_is_undone_to_the_last_bit(kind, before):
    """Undone after its second update, and made again, it gives what it gives when made once."""
    toy = Toy(kind)
    for number in range(before):
        toy.update(number)
    start = StepStart([toy.optimizer], num_updates=2)
    start.begin(before, 2)
    weights = toy.weights()
    once = []
    for _ in range(2):
        for number in (before, before + 1):
            with start.update():
                toy.update(number)
        once.append(toy.weights())
        assert start.go_back(before) == (True, None)
        assert all(torch.equal(weights[name], toy.parameters[name]) for name in weights)
    assert all(torch.equal(once[0][name], once[1][name]) for name in weights)


@pytest.mark.parametrize("settings", [{"num_processes": 2}, {"cpu_offload": True}])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_sharded_weights_need_adamw(kind, settings):
    check_optimizer(TrainerConfig(**settings))
    with pytest.raises(ConfigError, match=rf"trainer.optimizer is {kind}.*use adamw"):
        check_optimizer(TrainerConfig(optimizer=kind, **settings))
    check_optimizer(TrainerConfig(optimizer=kind))


def test_a_missing_bitsandbytes_is_a_clear_error(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(
        ConfigError, match=r"bitsandbytes, which is not installed: pip install .*quant.*use adamw or muon"
    ):
        check_optimizer(TrainerConfig(optimizer="adamw_8bit"))
    check_optimizer(TrainerConfig(optimizer="muon"))
