"""Updates by optimizers in 8 bits, made once more: right ones are found right, faults in what they do are found.

After an update the checkpoint holds the moments in 8 bits, and weights that moved by the moments before they were
rounded; gradients that differ are found by the weights, states that are kept wrongly by the moments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_blockwise, quantize_blockwise
from faulty_update import STEP, FaultyUpdate, make_run

from sharpen.evidence.certificate.plain.implied import gradients, implied
from sharpen.evidence.certificate.plain.optimizers import Rates, State, adamw
from sharpen.evidence.certificate.plain.quantized import EightBits, dynamic_values, rounded_moment
from sharpen.evidence.certificate.plain.retrain import retrain

Kind = tuple[str, dict[str, Any]]
Fault = Callable[[FaultyUpdate], None]

SINGLE: Kind = ("grpo", {"trainer.optimizer": "adamw_8bit"})
PAGED: Kind = ("grpo", {"trainer.optimizer": "paged_adamw_8bit", "trainer.dtype": "bfloat16"})
SEVERAL: Kind = ("grpo", {"trainer.optimizer": "adamw_8bit", "trainer.num_minibatches": 2, "trainer.epochs": 2})
CRITIC: Kind = ("ppo", {"trainer.optimizer": "adamw_8bit"})
_LAYER = "model.layers.1.mlp.up_proj.weight"


def groups(**changes: Any) -> Fault:
    """Change the optimizer's own settings."""

    def plant(update: FaultyUpdate) -> None:
        for group in update.groups():
            group.update(changes)

    return plant


def gradients_of(change: Callable[[torch.Tensor], torch.Tensor], part: str = "") -> Fault:
    return lambda update: update.gradients(change, part)


def a_tenth_of_the_rate(update: FaultyUpdate) -> None:
    update.optimizer._peak /= 10


def no_moments(update: FaultyUpdate) -> None:
    update.optimizer.load_state_tensors({})


def no_clip(update: FaultyUpdate) -> None:
    update.optimizer._config = update.optimizer._config.model_copy(update={"max_grad_norm": 1e9})


def step_twice(update: FaultyUpdate) -> None:
    update.after_apply(lambda: [rule.step() for rule in update.optimizer._rules])


def critic_slow(update: FaultyUpdate) -> None:
    update.trainer._optimizers[1]._peak /= 10


def states(change: Callable[[dict[str, Any]], None]) -> Fault:
    """Change the state of a layer's weight after each update."""

    def plant(update: FaultyUpdate) -> None:
        parameter = update.parameters[_LAYER]
        rule = update.optimizer._rule_of[parameter]
        update.after_apply(lambda: change(rule.state[parameter]))

    return plant


def scale_of_a_block(state: dict[str, Any]) -> None:
    state["absmax1"][3] *= 1.1


def second_moment_as_signed(state: dict[str, Any]) -> None:
    """It is rounded to the values with a sign, of which half are never used."""
    exact = dequantize_blockwise(state["state2"], absmax=state["absmax2"], code=state["qmap2"], blocksize=256)
    codes, rounding = quantize_blockwise(exact, code=state["qmap1"], blocksize=256)
    state["state2"].copy_(codes)
    state["absmax2"].copy_(rounding.absmax)


def first_moment_of_zeros(state: dict[str, Any]) -> None:
    state["state1"].fill_(int(dynamic_values(signed=True).abs().argmin()))


FAULTS: dict[str, tuple[Kind, Fault]] = {
    "in 8 bits, betas are swapped": (SINGLE, groups(betas=(0.999, 0.9))),
    "in 8 bits, a tenth of the learning rate": (SINGLE, a_tenth_of_the_rate),
    "in 8 bits, the moments are lost": (SINGLE, no_moments),
    "in 8 bits, each update is applied twice": (SINGLE, step_twice),
    "in 8 bits, no clip": (SINGLE, no_clip),
    "in 8 bits, no decay": (SINGLE, groups(weight_decay=0.0)),
    "in 8 bits, epsilon is large": (SINGLE, groups(eps=1e-4)),
    "in 8 bits, a block's gradient is negated": (SINGLE, gradients_of(lambda g: -g, "layers.0.mlp")),
    "in 8 bits, a tensor does not learn": (SINGLE, gradients_of(lambda g: 0 * g, "layers.1.mlp.up_proj")),
    "in 8 bits, gradients have noise of one in a thousand": (
        SINGLE,
        gradients_of(lambda g: g * (1 + 1e-3 * torch.randn_like(g))),
    ),
    "in 8 bits, one of 128 blocks of a moment is 10% larger": (SINGLE, states(scale_of_a_block)),
    "in 8 bits, the first moment is not kept": (SINGLE, states(first_moment_of_zeros)),
    "in 8 bits, the second moment has the values of the first": (SINGLE, states(second_moment_as_signed)),
    "in 8 and 16 bits, a block's gradient is negated": (PAGED, gradients_of(lambda g: -g, "layers.0.mlp")),
    "in 8 and 16 bits, the moments are lost": (PAGED, no_moments),
    "in 8 bits, betas are swapped in several updates": (SEVERAL, groups(betas=(0.999, 0.9))),
    "in 8 bits, the moments are lost before several updates": (SEVERAL, no_moments),
    "in 8 bits, the critic learns a tenth": (CRITIC, critic_slow),
}
KINDS = {repr(kind): kind for kind, _ in FAULTS.values()}


@pytest.fixture(scope="module")
def run_of(tmp_path_factory, write_toy_model, toy_dataset):
    """Make a run with these settings, once; of a model whose matrices have 4,096 numbers and more."""
    made = {}
    model = write_toy_model(tmp_path_factory.mktemp("model"), hidden=64)

    def make(kind):
        key = repr(kind)
        if key not in made:
            made[key] = make_run(tmp_path_factory.mktemp("run"), model, toy_dataset, kind[0], **kind[1])
        return made[key]

    return make


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_step_without_a_fault_is_found_right(kind, run_of, tmp_path):
    update = FaultyUpdate(run_of(kind), tmp_path / "run")
    update.train()
    found = update.found()
    assert not found.problems
    assert not found.not_repeated
    assert found.repeated[0].cosine > (0.9 if kind == PAGED else 1 - 1e-3)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name, run_of, tmp_path):
    kind, plant = FAULTS[name]
    update = FaultyUpdate(run_of(kind), tmp_path / "run")
    plant(update)
    update.train()
    found = update.found()
    assert found.problems, found.repeated


THREE = pytest.mark.parametrize("kind", [SINGLE, PAGED, SEVERAL], ids=["one update", "in 16 bits", "several"])


@THREE
def test_honest_steps_raise_no_alarm(kind, run_of):
    """Those of the runs that others start from: the first as well, before which there are no moments."""
    assert_no_alarm(run_of(kind), STEP)


@pytest.mark.slow
@THREE
def test_many_honest_steps_raise_no_alarm(kind, tmp_path, write_toy_model, toy_dataset):
    model = write_toy_model(tmp_path / "model", hidden=64)
    run = make_run(tmp_path, model, toy_dataset, kind[0], steps=20, rate=1e-3, **kind[1])
    assert_no_alarm(run, 20)


def assert_no_alarm(run, steps):
    found = retrain(run)
    assert not found.problems
    assert len(found.repeated) == steps
    print(f"{run}: the furthest tensor at {max(one.share for one in found.repeated):.0%} of its bound")


@pytest.mark.parametrize("signed", [True, False])
def test_a_moment_in_8_bits_is_that_of_bitsandbytes(signed):
    """Numbers of more than a thousandth of a block's largest; below, its kernel for processors takes one of several of
    the 256 values. And of all that is rounded to what is stored, the nearest to the moment is the moment itself."""
    torch.manual_seed(0)
    moment = torch.randn(40, 130) * 10 ** (-4 * torch.rand(40, 130))
    moment = moment if signed else moment.abs()
    codes, rounding = quantize_blockwise(moment, code=dynamic_values(signed=signed), blocksize=256)
    stored = EightBits(codes=codes, largest=rounding.absmax, signed=signed)
    assert torch.equal(stored.values(), dequantize_blockwise(codes, rounding))
    mine, other = (rounded_moment(moment, signed=signed, other=other) for other in (False, True))
    large = moment.abs() > 4e-3
    either = torch.isclose(stored.values(), mine, rtol=1e-6) | torch.isclose(stored.values(), other, rtol=1e-6)
    assert bool(either[large].all())
    assert torch.isclose(mine, other)[large].float().mean().item() > 0.9
    torch.testing.assert_close(stored.nearest_to(moment), moment.double(), rtol=1e-6, atol=1e-9)
    assert (stored.nearest_to(2 * moment) - 2 * moment).norm() > 0.9 * moment.norm()


def test_a_gradient_is_read_from_the_way_of_its_weight():
    """Moments 0.1 and 0.01 before a second update: the weights' way says each gradient, and so it does where the found
    one is another."""
    rates = Rates(
        peak=0.1, warmup=0, schedule="constant", floor=0.0, planned=0, betas=(0.9, 0.99), eps=0, decay=0.5,
        max_norm=1e9, eight_bits=True,
    )  # fmt: skip
    shape = (64, 64)
    before = State(
        weights={"w": torch.ones(shape).double()},
        moments={"w/exp_avg": torch.full(shape, 0.1).double(), "w/exp_avg_sq": torch.full(shape, 0.01).double()},
        counts={"w": 1},
        version=1,
    )

    def updated(gradient):
        state = before.copy(torch.float64)
        adamw(state, {"w": torch.full(shape, gradient).double()}, rates)
        return state

    exact, other = updated(0.02), updated(0.03)
    right = gradients(before, exact, rates)
    torch.testing.assert_close(right["w"], torch.full(shape, 0.02).double())
    for state, gradient in ((exact, 0.02), (other, 0.03)):
        found = implied(before, state, right, exact.counts, rates)
        torch.testing.assert_close(found["w"], torch.full(shape, gradient).double(), rtol=1e-3, atol=0)
    other.weights["w"] = other.weights["w"] + 1.0  # no gradient moves a weight so far
    assert implied(before, other, right, exact.counts, rates)["w"].min().item() > 0.5


@pytest.mark.parametrize("first", [3e-8, 3e-9, -3e-8, 0.0])
def test_no_way_of_a_gradient_is_too_long_for_any(first):
    """The way is longest at one gradient. Where `eps` counts beside the moments that is another than without: with the
    formula of `eps` 0 no gradient was found for the longest, and an honest update was called wrong."""
    rates = Rates(
        peak=1.0, warmup=0, schedule="constant", floor=0.0, planned=0, betas=(0.9, 0.999), eps=1e-8, decay=0.0,
        max_norm=1e9, eight_bits=True,
    )  # fmt: skip
    size = (1, 4096)
    moments = {"w/exp_avg": torch.full(size, first), "w/exp_avg_sq": torch.full(size, 4.4e-15)}
    before = State(
        weights={"w": torch.zeros(size).double()},
        moments={name: moment.double() for name, moment in moments.items()},
        counts={"w": 1},
        version=1,
    )
    right, made = torch.full(size, 1e-6).double(), torch.logspace(-7, -3, 4096).double()[None]
    state = before.copy(torch.float64)
    adamw(state, {"w": made.clone()}, rates)
    found = implied(before, state, {"w": right}, state.counts, rates)["w"]
    assert bool(((found - right).abs() <= (made - right).abs() * (1 + 1e-6) + 1e-12).all())
