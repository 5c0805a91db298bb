"""A group's greedy baseline: in the journal, in advantages, in the checks of the certificate."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from experience_builders import audited, make_call, make_group, make_rollout, two_turns

from sharpen.learning.algorithm.presets import PRESETS
from sharpen.learning.experience.draw import draw_batches, left_out
from sharpen.learning.experience.journal import Journal
from sharpen.learning.experience.reading import find_rollouts, read_groups
from sharpen.types import Group, Outcome, Rollout, Sampling

REMAX = PRESETS["remax"]
GREEDY = Sampling(temperature=0.0)


def baseline(reward: float | None = 0.25, sampling: Sampling = GREEDY) -> Rollout:
    return make_rollout([make_call(0, [1, 2, 3], [9, 9], sampling=sampling)], reward, index=2)


def group(greedy: Rollout | None) -> Group:
    return make_group([two_turns(1.0), two_turns(0.0, index=1)], baseline=greedy)


def broken(given: Group) -> list[str]:
    batches = draw_batches([given], REMAX, 1)
    return [check.first or "" for check in audited([given], batches, REMAX).values() if check.broken]


def test_rewards_are_compared_with_the_baseline_and_it_is_not_trained() -> None:
    (batch,) = draw_batches([group(baseline())], REMAX, 1)
    advantages = {e.rollout_id: set(e.advantages_T[e.loss_mask_T].tolist()) for e in batch.experiences}
    assert advantages == {"g/0": {0.75}, "g/1": {-0.25}}
    assert batch.reward_mean == 0.5
    assert broken(group(baseline())) == []


def test_a_group_whose_baseline_failed_is_left_out() -> None:
    failed = group(baseline(None))
    assert left_out(failed, REMAX) == "small"
    assert left_out(failed, PRESETS["grpo"]) is None
    (batch,) = draw_batches([failed], REMAX, 1)
    assert batch.experiences == ()
    assert broken(failed) == []


def test_a_missing_or_noisy_baseline_breaks_the_certificate() -> None:
    assert broken(group(None)) == ["group g: no baseline"]
    assert broken(group(baseline(sampling=Sampling()))) == ["baseline g/2, call 0: not greedy"]


def test_the_journal_keeps_it_apart_from_rollouts_and_attempts(tmp_path: Path) -> None:
    earlier = replace(baseline(None), outcome=Outcome.TIMEOUT)
    written = replace(group(replace(baseline(), attempt=1)), attempts=(earlier,))
    with Journal(tmp_path / "run.db") as journal:
        journal.add(written)
    (read,) = read_groups(tmp_path / "run.db")
    assert [rollout.id for rollout in read.rollouts] == ["g/0", "g/1"]
    assert read.baseline is not None
    assert (read.baseline.id, read.baseline.reward, read.baseline.attempt) == ("g/2", 0.25, 1)
    np.testing.assert_array_equal(read.baseline.calls[0].sampled_ids_S, [9, 9])
    assert [rollout.attempt for rollout in read.attempts] == [0]
    assert [rollout.id for rollout in read.with_baseline] == ["g/0", "g/1", "g/2"]
    assert [entry.id for entry in find_rollouts(tmp_path / "run.db")] == ["g/0", "g/1", "g/2"]
