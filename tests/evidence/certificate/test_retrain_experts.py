"""Updates of a mixture of experts, made once more with the experts that the engine chose."""

from __future__ import annotations

import pytest
import torch
from expert_toys import put_experts
from faulty_update import FaultyUpdate, make_run

from sharpen.errors import ModelError
from sharpen.evidence.certificate.plain_experts import Chosen
from sharpen.evidence.certificate.retrain import retrain


@pytest.fixture(scope="module")
def finished(tmp_path_factory, write_toy_model, toy_dataset):
    """Two updates a step, at a rate at which the second one would choose other experts by itself."""
    model = put_experts(write_toy_model(tmp_path_factory.mktemp("model")))
    folder = tmp_path_factory.mktemp("run")
    return make_run(folder, model, toy_dataset, rate=3e-2, **{"trainer.num_minibatches": 2, "loss.kl_coef": 0.01})


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
