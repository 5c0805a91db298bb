"""Updates of a mixture of experts, made once more with the experts that the engine chose."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from expert_toys import put_experts
from faulty_update import FaultyUpdate, make_run

from sharpen.errors import ModelError
from sharpen.evidence.certificate.plain.balance import Routers
from sharpen.evidence.certificate.plain.model import Chosen
from sharpen.evidence.certificate.plain.retrain import retrain


@pytest.fixture(scope="module")
def finished(tmp_path_factory, write_toy_model, toy_dataset):
    """Two updates a step, at a rate at which the second one would choose other experts by itself."""
    model = put_experts(write_toy_model(tmp_path_factory.mktemp("model")))
    folder = tmp_path_factory.mktemp("run")
    return make_run(folder, model, toy_dataset, rate=3e-2, **{"trainer.num_minibatches": 2, "loss.kl_coef": 0.01})


@pytest.fixture(scope="module", params=["qwen3_moe", "glm4_moe"])
def balanced(request, tmp_path_factory, write_toy_model, toy_dataset):
    """With a balance loss: of routers that score by a softmax, and by sigmoids."""
    model = put_experts(write_toy_model(tmp_path_factory.mktemp("model")), request.param)
    return make_run(tmp_path_factory.mktemp("run"), model, toy_dataset, **{"trainer.balance_coef": 0.5})


def chosen_anew(update: FaultyUpdate) -> None:
    update.trainer.policy.replays = False


def one_expert_stays(update: FaultyUpdate) -> None:
    kept = torch.ones(8, 1, 1)
    kept[3] = 0.0
    update.gradients(lambda gradient: gradient * kept, "layers.0.mlp.experts.down_proj")


def a_router_stays(update: FaultyUpdate) -> None:
    update.gradients(lambda gradient: 0 * gradient, "layers.1.mlp.gate")


def test_honest_steps_are_found_right(finished):
    found = retrain(finished)
    assert [(one.first, one.last) for one in found.repeated] == [(1, 1), (2, 2)]
    assert not found.problems
    assert not found.not_repeated


FAULTS = {
    "experts are chosen anew by the trainer": chosen_anew,
    "an expert does not learn": one_expert_stays,
    "a router does not learn": a_router_stays,
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_found(fault, finished, tmp_path):
    update = FaultyUpdate(finished, tmp_path / "run")
    fault(update)
    update.train()
    assert update.found().problems


def twice_as_balanced(update: FaultyUpdate) -> None:
    update.trainer._loss._balance._coef *= 2


def not_balanced(update: FaultyUpdate) -> None:
    update.trainer._loss._balance = None


def balanced_by_others(update: FaultyUpdate) -> None:
    """Each expert has the share of the one before it."""
    of = update.trainer._loss._balance.of
    update.trainer._loss._balance.of = lambda parts: [
        replace(one, shares_LE=one.shares_LE.roll(1, 1)) for one in of(parts)
    ]


BALANCES = {
    "the balance loss counts twice": twice_as_balanced,
    "no balance loss": not_balanced,
    "experts are balanced by the choices of others": balanced_by_others,
}


def test_honest_steps_with_a_balance_loss_are_found_right(balanced):
    found = retrain(balanced)
    assert [(one.first, one.last) for one in found.repeated] == [(1, 1), (2, 2)]
    assert not found.problems


@pytest.mark.parametrize("fault", BALANCES.values(), ids=BALANCES)
def test_a_fault_in_the_balance_loss_is_found(fault, balanced, tmp_path):
    update = FaultyUpdate(balanced, tmp_path / "run")
    fault(update)
    update.train()
    assert update.found().problems


def test_the_balance_loss_by_hand():
    """A router of two experts, one of which a token chooses: logits 0 and ln 3, so probabilities 1/4 and 3/4, or by
    sigmoids 1/2 and 3/4, of which the shares are 2/5 and 3/5."""
    hidden_TC, weight_EC = torch.ones(1, 1), torch.tensor([[0.0], [math.log(3.0)]])
    for score, shares in ((torch.softmax, [0.25, 0.75]), (torch.sigmoid, [0.4, 0.6])):
        with Routers(2) as routers:
            logits_TE = torch.nn.functional.linear(hidden_TC, weight_EC)
            (score(logits_TE) if score is torch.sigmoid else score(logits_TE, -1)).topk(1)
        assert routers.probabilities[0][0].tolist() == pytest.approx(shares)
        assert routers.chosen[0].tolist() == [[1]]
    with pytest.raises(ModelError, match="does not compute its scores by a linear layer"), Routers(2):
        torch.topk(torch.ones(1, 2), 1)


def test_the_recorded_experts_are_given_with_their_own_scores():
    """Two layers of three tokens, which choose 2 of 4 experts; a choice among groups stays what it is."""
    routes_TLK = torch.tensor([[[0, 1], [2, 3]], [[1, 2], [3, 0]], [[3, 0], [1, 2]]])
    scores_TE = torch.tensor([[0.1, 0.2, 0.3, 0.4]] * 3)
    with Chosen(routes_TLK, 4):
        assert torch.topk(scores_TE[:, :2], 1).indices.tolist() == [[1], [1], [1]]
        first = torch.topk(scores_TE, 2, dim=-1)
        second = scores_TE.topk(2)
    assert torch.equal(first.indices, routes_TLK[:, 0])
    assert torch.equal(second.indices, routes_TLK[:, 1])
    assert first.values[1].tolist() == pytest.approx([0.2, 0.3])
    with pytest.raises(ModelError, match="2 layers, and 1 routers"), Chosen(routes_TLK, 4):
        torch.topk(scores_TE, 2)
