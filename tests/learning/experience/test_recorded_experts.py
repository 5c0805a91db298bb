"""The experts of a mixture of experts on their way from a call to the trainer: journal, exchange, merged sequences,
certificate."""

import sqlite3
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from experience_builders import audited, make_group, make_rollout, two_turns

from sharpen.errors import CallError
from sharpen.evidence.certificate.constraints import wrong_experts
from sharpen.learning.algorithm.presets import PRESETS
from sharpen.learning.experience.draw import make_batch
from sharpen.learning.experience.journal import Journal
from sharpen.learning.experience.merge import merge
from sharpen.learning.experience.reading import read_groups
from sharpen.models.routing import RouteShape
from sharpen.placement.exchange.batch import pack, unpack


def routes(count, seed, dtype=np.uint8):
    return np.random.default_rng(seed).integers(0, 200, (count, 3, 2)).astype(dtype)


def rollout(index, *, reward=1.0, dtype=np.uint8, recomputed=False):
    """Two turns of 3 + 2 and 7 + 1 tokens. The prompt has the experts of all other rollouts; what the second call has
    of the first too, but for the last of them if it was `recomputed`."""
    plain = two_turns(reward, index=index)
    first = np.concatenate([routes(3, 1, dtype), routes(1, 10 + index, dtype)])
    second = np.concatenate([first, routes(3, 20 + index, dtype)])
    if recomputed:
        second[3] = 0
    calls = tuple(replace(call, routes_NLK=own) for call, own in zip(plain.calls, (first, second), strict=True))
    return replace(plain, calls=calls)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("recomputed", [False, True])
def test_they_come_back_from_journal_and_exchange(tmp_path, dtype, recomputed):
    group = make_group([rollout(0, dtype=dtype, recomputed=recomputed), rollout(1, dtype=dtype)])
    with Journal(tmp_path / "run.db") as journal:
        journal.add(group)
    for (read,) in (list(read_groups(tmp_path / "run.db")), unpack(pack([group], {}))[1]):
        for ours, theirs in zip(group.rollouts, read.rollouts, strict=True):
            for one, other in zip(ours.calls, theirs.calls, strict=True):
                assert other.routes_NLK.dtype == dtype
                np.testing.assert_array_equal(other.routes_NLK, one.routes_NLK)


def test_what_calls_and_rollouts_share_is_stored_once(tmp_path):
    """Break: store each call's experts whole."""
    with Journal(tmp_path / "run.db") as journal:
        journal.add(make_group([rollout(0), rollout(1)]))
    with closing(sqlite3.connect(tmp_path / "run.db")) as connection:
        prompts = connection.execute("SELECT length(experts) FROM routes ORDER BY id").fetchall()
        calls = connection.execute("SELECT call, kept, length(sampled) FROM call_routes ORDER BY call").fetchall()
    assert prompts == [(3 * 6,), (3 * 6,), (3 * 6,)]  # the common prompt; what each second call adds
    assert calls == [(0, 0, 6), (0, 0, 6), (1, 4, 0), (1, 4, 0)]


def test_a_journal_without_them_is_read_as_it_was(tmp_path):
    with Journal(tmp_path / "run.db") as journal:
        journal.add(make_group([two_turns()]))
    with closing(sqlite3.connect(tmp_path / "run.db")) as connection:
        connection.executescript("DROP TABLE call_routes; DROP TABLE routes;")
    ((read,),) = ((group.rollouts) for group in read_groups(tmp_path / "run.db"))
    assert [call.routes_NLK for call in read.calls] == [None, None]


def test_a_merged_sequence_has_for_each_token_what_the_first_call_recorded():
    """The second call computed the first's tokens again, perhaps with newer weights. Break: take the last call's."""
    one = rollout(0, recomputed=True)
    (merged,) = merge(one)
    assert len(merged.routes_NLK) == len(merged.ids_T) - 1
    np.testing.assert_array_equal(merged.routes_NLK[:4], one.calls[0].routes_NLK)
    np.testing.assert_array_equal(merged.routes_NLK[4:], one.calls[1].routes_NLK[4:])
    (dense,) = merge(two_turns())
    assert dense.routes_NLK is None


def test_a_call_with_experts_for_another_number_of_tokens_is_refused():
    one = rollout(0)
    short = replace(one.calls[0], routes_NLK=one.calls[0].routes_NLK[:-1])
    with pytest.raises(CallError, match="has 5 tokens, but experts for 3"):
        merge(make_rollout([short]))


def test_the_audit_finds_experts_that_are_not_the_recorded_ones():
    groups = [make_group([rollout(0), rollout(1, reward=0.0)])]
    algorithm = PRESETS["grpo"]
    batch = make_batch(groups, algorithm)
    assert audited(groups, [batch], algorithm)["records"].broken == 0
    first, *others = batch.experiences
    for changed in (None, (first.routes_NLK + 1)):
        wrong = replace(batch, experiences=(replace(first, routes_NLK=changed), *others))
        assert audited(groups, [wrong], algorithm)["records"].broken > 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda found: found, ""),
        (lambda found: None, "not recorded"),
        (lambda found: found[:, :2], "shape"),
        (lambda found: np.full_like(found, 250), "expert 250"),
    ],
)
def test_certify_names_calls_whose_experts_are_missing_or_impossible(change, says):
    (one,) = merge(rollout(0))
    problem = wrong_experts(
        [replace(one, routes_NLK=change(one.routes_NLK))], RouteShape(num_layers=3, top_k=2, num_experts=200)
    )
    assert says in problem
    assert bool(problem) == bool(says)
