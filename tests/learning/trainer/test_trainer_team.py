"""How work is divided among ranks; what is seen without starting any (`tests/distributed` starts them)."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainer_toys import make_experiences, make_model

from sharpen.errors import CheckpointError
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.packing import pack
from sharpen.learning.trainer.team import IDLE, Ranks, Team, backward_idle, deal


@given(sizes=st.lists(st.integers(1, 1000), max_size=30), num_ranks=st.integers(1, 5))
def test_every_item_is_dealt_once_in_equally_many_rounds_of_neighbours_by_size(sizes, num_ranks):
    """What a round takes is its longest item; no division of whole items into these rounds has a smaller sum.

    Break: deal in the order of the items (`order = range(len(sizes))`)."""
    hands = [deal(sizes, rank, num_ranks) for rank in range(num_ranks)]
    assert {len(hand) for hand in hands} == {-(-len(sizes) // num_ranks)}
    dealt = [number for hand in hands for number in hand if number is not None]
    assert sorted(dealt) == list(range(len(sizes)))
    rounds = [[number for number in turn if number is not None] for turn in zip(*hands, strict=True)]
    waited = sum(max(sizes[number] for number in turn) for turn in rounds)
    assert waited == sum(sorted(sizes, reverse=True)[::num_ranks])


class Apart(Ranks):
    """Several ranks of which none has met the others: enough to pack for them."""

    def __init__(self, size: int) -> None:
        self.size = size


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("max_tokens", [60, 80, 150, 10_000])
def test_packs_are_about_equal_and_none_is_too_long(size, max_tokens):
    """With one pack for all ranks nobody would wait less; the tokens waited for never grow by dividing, and are near
    the share of each where there is enough to divide.

    Break: return `widest` from `Ranks.packs`."""
    experiences = make_experiences(num_groups=6, group_size=4)
    ranks = Apart(size)
    packs = ranks.packs(experiences, max_tokens)
    assert sum(part.num_sequences for part in packs) == len(experiences)
    assert all(part.num_computed_tokens <= max_tokens for part in packs)
    widest = pack(experiences, max_tokens)
    assert ranks._cost(packs) <= ranks._cost(widest)
    if max_tokens == 10_000:
        assert len(packs) >= size
        assert ranks._cost(packs) < 0.75 * ranks._cost(widest)


def test_packs_of_nothing():
    assert Apart(2).packs([], 80) == []


def test_the_pass_of_a_rank_without_work_changes_no_gradient():
    """Break: `torch.ones_like` in `backward_idle`."""
    model = TrainedModel(make_model("qwen3"), compute_dtype=torch.float64)
    (part,) = pack(make_experiences(num_groups=1), 10_000)
    model.score(part).logprobs_E.sum().backward()
    before = {name: parameter.grad.clone() for name, parameter in model.parameters()}
    backward_idle(model)
    assert all(torch.equal(parameter.grad, before[name]) for name, parameter in model.parameters())
    assert IDLE.num_sequences == 0
    assert not np.any(IDLE.weights_E)


def test_one_process_is_a_team_of_one():
    team = Team()
    assert (team.rank, team.size) == (0, 1)
    assert team.map([IDLE, IDLE], lambda item: item.num_computed_tokens, pytest.fail) == [1, 1]
    weight = torch.nn.Parameter(torch.ones(2))
    gathered = team.gather([("a", weight), ("b", weight)])
    assert gathered["a"].data_ptr() == gathered["b"].data_ptr() == weight.data_ptr()
    assert not gathered["a"].requires_grad
    team.agree(None)
    with pytest.raises(CheckpointError, match="full"):
        team.agree(CheckpointError("full"))
