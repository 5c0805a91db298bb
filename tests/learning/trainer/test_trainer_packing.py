"""Packing: shared prefixes computed once, budgets kept, and every sequence still whole."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_toys import make_experience, make_experiences

from sharpen.errors import CallError
from sharpen.learning.trainer.packing import Pack, pack
from sharpen.types import Picture, PictureSpan


def path_of(packed: Pack, index: int) -> list[int]:
    """Indices in N of the tokens that a token attends to, itself included."""
    number = next(n for n, segment in enumerate(packed.segments) if segment.start <= index < segment.stop)
    path = list(range(packed.segments[number].start, index + 1))
    while (parent := packed.segments[number].parent) is not None:
        number = parent
        path = list(range(packed.segments[number].start, packed.segments[number].stop)) + path
    return path


def test_a_common_prompt_is_one_segment():
    """Prompt of 5 tokens, 3 and 2 sampled: the last sampled token predicts nothing, so 5 + 2 + 1 are computed."""
    prompt = [7, 8, 9, 10, 11]
    members = [
        make_experience("g/0", [*prompt, 20, 21, 22], [(5, 8)], advantage=1.0),
        make_experience("g/1", [*prompt, 30, 31], [(5, 7)], advantage=-1.0),
    ]
    (packed,) = pack(members, 100, min_shared_tokens=1)
    assert packed.ids_N.tolist() == [7, 8, 9, 10, 11, 20, 21, 30]
    assert packed.positions_N.tolist() == [0, 1, 2, 3, 4, 5, 6, 5]
    assert [(s.start, s.stop, s.subtree_stop, s.parent) for s in packed.segments] == [
        (0, 5, 8, None),
        (5, 7, 7, 0),
        (7, 8, 8, 0),
    ]
    assert packed.predict_E.tolist() == [4, 5, 6, 4, 7]  # both rollouts' first tokens come from one hidden state
    assert packed.targets_E.tolist() == [20, 21, 22, 30, 31]
    assert packed.rollouts_E.tolist() == [0, 0, 0, 1, 1]
    assert packed.tokens_E.tolist() == [5, 6, 7, 5, 6]
    assert (packed.num_computed_tokens, packed.num_trained_tokens, packed.num_sequence_tokens) == (8, 5, 15)


def test_a_prompt_shared_by_groups_is_computed_once():
    experiences = make_experiences(num_groups=3, group_size=2)
    (packed,) = pack(experiences, 10_000, min_shared_tokens=4)
    roots = [segment for segment in packed.segments if segment.parent is None]
    assert len(roots) == 1  # the system prompt
    assert roots[0].stop == 10


def test_short_shared_runs_are_not_split():
    members = [
        make_experience("g/0", [7, 8, 9, 20, 21], [(3, 5)], advantage=1.0),
        make_experience("g/1", [7, 8, 9, 30, 31], [(3, 5)], advantage=1.0),
    ]
    (split,) = pack(members, 100, min_shared_tokens=3)
    (whole,) = pack(members, 100, min_shared_tokens=4)
    assert (split.num_computed_tokens, whole.num_computed_tokens) == (5, 8)
    assert len(whole.segments) == 2


def test_a_sequence_that_ends_inside_another_leaves_it_its_own_ids():
    """The last id of the shorter one is not computed, and is not what the longer one has there."""
    longer = make_experience("g/0", [5, 6, 7, 8, 9, 2], [(3, 6)], advantage=1.0)
    shorter = make_experience("g/1", [5, 6, 7, 8, 2], [(3, 5)], advantage=-1.0)
    for experiences in ([longer, shorter], [shorter, longer]):
        (packed,) = pack(experiences, 100, min_shared_tokens=1)
        assert packed.ids_N.tolist() == [5, 6, 7, 8, 9]


def test_what_a_sequence_holds_behind_its_last_target_is_not_taken_for_that_of_another():
    """The shorter one's second turn is not trained: neither its image nor its experts are the longer one's."""
    longer = make_experience("g/0", [5, 6, 7, 8, 9, 10, 2], [(3, 7)], advantage=1.0)
    shorter = make_experience("g/1", [5, 6, 7, 8, 99, 99, 2], [(3, 4)], advantage=-1.0)
    span = PictureSpan(picture=Picture.of(b"second turn"), start=4, length=2)
    routes_NLK = np.arange(6, dtype=np.uint8).reshape(6, 1, 1)
    members = [replace(longer, routes_NLK=routes_NLK), replace(shorter, routes_NLK=routes_NLK[::-1], pictures=(span,))]
    for order in (members, members[::-1]):
        (packed,) = pack(order, 100, min_shared_tokens=1)
        assert packed.ids_N.tolist() == [5, 6, 7, 8, 9, 10]
        assert packed.shown == ()
        assert packed.num_rerouted_tokens == 3
        assert packed.routes_NLK[3:].ravel().tolist() == [3, 4, 5]


def test_a_sequence_that_ends_inside_another_costs_nothing():
    long = make_experience("g/0", [7, 8, 9, 10, 11, 12], [(1, 6)], advantage=1.0)
    short = make_experience("g/1", [7, 8, 9, 10], [(1, 4)], advantage=1.0)
    for members in ([long, short], [short, long]):
        (packed,) = pack(members, 100, min_shared_tokens=1)
        assert packed.num_computed_tokens == 5
        assert packed.num_trained_tokens == 8


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), min_size=2, max_size=12)), min_size=1, max_size=12
    ),
    st.integers(1, 40),
    st.integers(1, 6),
)
@settings(deadline=None, max_examples=150)
def test_every_loss_token_sees_exactly_its_own_history(rollouts, max_tokens, min_shared):
    """The ids on an entry's path are those of its sequence before the target; each loss token is there once."""
    members = [
        make_experience(f"g{group}/{number}", ids, [(1, len(ids))], advantage=float(number))
        for number, (group, ids) in enumerate(rollouts)
    ]
    packs = pack(members, max_tokens, min_shared_tokens=min_shared)
    ids = {member.rollout_id: member.ids_T.tolist() for member in members}
    seen = []
    for packed in packs:
        longest = max(len(ids[packed.rollout_ids[number]]) - 1 for number in packed.rollouts_E)
        limit = max_tokens if longest <= max_tokens else longest + longest // 4
        assert packed.num_computed_tokens <= limit
        for entry, index in enumerate(packed.predict_E.tolist()):
            rollout_id, token = packed.rollout_ids[packed.rollouts_E[entry]], int(packed.tokens_E[entry])
            path = path_of(packed, index)
            assert packed.ids_N[path].tolist() == ids[rollout_id][:token]
            assert packed.positions_N[path].tolist() == list(range(token))
            assert packed.targets_E[entry] == ids[rollout_id][token]
            seen.append((rollout_id, token))
    assert sorted(seen) == sorted((m.rollout_id, token) for m in members for token in range(1, len(m.ids_T)))


def test_a_group_stays_together_if_it_fits():
    experiences = make_experiences(num_groups=4, group_size=3)
    for packed in pack(experiences, 90):
        groups = {packed.rollout_ids[number].split("/")[0] for number in packed.rollouts_E}
        for group in groups:
            members = {
                packed.rollout_ids[number]
                for number in packed.rollouts_E
                if packed.rollout_ids[number].startswith(group)
            }
            assert len(members) == 3


def test_a_prompt_longer_than_a_pack_is_not_computed_for_every_answer():
    """Eight answers of 30 tokens to a prompt of 1,600, and a budget of 800. Break: let `limit` be `max_tokens`."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, 60, 1600).tolist()
    answers = [rng.integers(3, 60, 30).tolist() for _ in range(20)]
    members = [
        make_experience(f"g/{n}", prompt + answer, [(1600, 1630)], advantage=1.0) for n, answer in enumerate(answers)
    ]
    (packed,) = pack(members[:8], 800)
    assert packed.num_computed_tokens == 1600 + 8 * 29
    assert [packed.num_sequences for packed in pack(members, 800)] == [15, 5]  # at most a quarter more


def test_sequences_without_loss_are_left_out_and_an_unpredicted_token_is_refused():
    member = make_experience("g/0", [7, 8, 9], [(1, 3)], advantage=1.0)
    silent = replace(member, loss_mask_T=np.zeros(3, np.bool_))
    assert pack([silent], 100) == []
    with pytest.raises(CallError, match="g/0: its first token"):
        pack([make_experience("g/0", [7, 8, 9], [(0, 3)], advantage=1.0)], 100)


def test_a_sequence_that_ends_within_another_changes_none_of_its_experts():
    """Its last id, which the other has not, was never computed in the pack; the experts recorded for it are not used.

    Break: in `_routes` take the whole path of a sequence.
    """
    long = make_experience("g0/0", list(range(10, 40)), [(12, 30)], advantage=1.0)
    short = make_experience("g0/1", [*range(10, 25), 50], [(12, 16)], advantage=-1.0)
    routes = np.arange(29, dtype=np.uint8).reshape(-1, 1, 1)
    long = replace(long, routes_NLK=routes)
    short = replace(short, routes_NLK=routes[:15])
    for order in ([long, short], [short, long]):
        (one,) = pack(order, 100)
        assert one.routes_NLK is not None
        assert one.routes_NLK.ravel().tolist() == list(range(29))
        assert one.num_rerouted_tokens == 0
