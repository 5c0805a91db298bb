"""Replay: priorities by hand, what is drawn and kept, what is refused, the memory after a resume, the certificate."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experience_builders import audited, make_call, make_group, make_rollout
from hypothesis import given
from hypothesis import strategies as st

from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError
from sharpen.learning.algorithm.presets import PRESETS, Algorithm
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.experience.draw import draw_batches, split_minibatches
from sharpen.learning.experience.journal import Journal
from sharpen.learning.experience.reading import read_last_groups, read_trained
from sharpen.learning.experience.replay import (
    Replay,
    ReplayGroup,
    ReplaySettings,
    mixed,
    oldest_version,
    priority,
    replay_settings,
)
from sharpen.types import Check, Group

GRPO = PRESETS["grpo"]


def group(step: int, task: int, version: int, rewards: tuple[float, ...] = (1.0, 0.0)) -> Group:
    """A group of one-call rollouts, named as the loop names it."""
    id_ = f"step-{step - 1}/{task}"
    calls = [make_call(0, [1, 2], [3, 4 + i], versions_S=np.full(2, version, np.int32)) for i in range(len(rewards))]
    rollouts = [
        replace(make_rollout([calls[i]], reward, id_, i), task_id=f"task-{id_}") for i, reward in enumerate(rewards)
    ]
    return make_group(rollouts, id_, version=version)


def memory(**changes: Any) -> Replay:
    return Replay(ReplaySettings(**{"count": 2, "max_staleness": 3, "seed": 0} | changes))


def train(replay: Replay, groups: list[Group], algorithm: Algorithm = GRPO) -> None:
    replay.keep(groups, draw_batches(groups, algorithm, 1))


def ids(drawn: tuple[ReplayGroup, ...]) -> list[str]:
    return [kept.group.id for kept in drawn]


def config(**settings: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "train_dataset": {"path": "x"},
        "model": {"model_path": "m", "max_model_len": 64},
        "algorithm": {"algorithm_type": "grpo", "batch_size": 4},
        "sampling": {"replay_share": 1.0},
    }
    for key, value in settings.items():
        section, _, name = key.partition("__")
        tree.setdefault(section, {})[name] = value
    return RunConfig.model_validate(tree)


def settings_of(config: RunConfig, algorithm: Algorithm, ahead: int = 0) -> ReplaySettings | None:
    updates = config.trainer.updates
    return replay_settings(config.sampling, config.algorithm, algorithm, seed=0, updates=updates, ahead=ahead)


def configured(ahead: int = 0, **settings: Any) -> ReplaySettings | None:
    resolved = config(**settings)
    algorithm = resolve(resolved.algorithm.algorithm_type, resolved.loss, 8, max_tokens=8, sampling=resolved.sampling)
    return settings_of(resolved, algorithm, ahead)


def test_priorities_by_hand() -> None:
    """(1 - age / (bound + 1)) / 2^(uses - 1), with `signal` times signal^0.6."""
    assert priority("signal", signal=1.0, age=0, uses=1, max_staleness=3) == 1.0
    assert priority("recency", signal=0.1, age=2, uses=1, max_staleness=3) == 0.5
    assert priority("recency", signal=0.1, age=3, uses=3, max_staleness=3) == 0.0625
    assert priority("signal", signal=0.25, age=1, uses=2, max_staleness=3) == pytest.approx(0.435275 * 0.75 * 0.5)
    assert priority("signal", signal=1.0, age=4, uses=1, max_staleness=3) == 0.0
    assert priority("signal", signal=1.0, age=9, uses=1, max_staleness=3) == 0.0  # not below: the formula alone is -1.5
    assert priority("recency", signal=0.0, age=0, uses=1, max_staleness=3) == 0.0


kinds, signals = st.sampled_from(["signal", "recency"]), st.floats(1e-6, 1e3)


@given(kinds, signals, signals, st.integers(0, 8), st.integers(1, 6), st.integers(8, 20))
def test_older_used_and_weaker_groups_come_later(kind, low, high, age, uses, bound) -> None:  # type: ignore[no-untyped-def]
    low, high = sorted((low, high))
    here = priority(kind, signal=high, age=age, uses=uses, max_staleness=bound)
    assert here > 0.0
    assert here > priority(kind, signal=high, age=age, uses=uses + 1, max_staleness=bound)
    assert here > priority(kind, signal=high, age=age + 1, uses=uses, max_staleness=bound)
    assert here >= priority(kind, signal=low, age=age, uses=uses, max_staleness=bound)
    if kind == "signal":  # the unit of the rewards does not change the odds
        halved = priority(kind, signal=high / 2, age=age, uses=uses, max_staleness=bound)
        assert halved / here == pytest.approx(0.5**0.6)


def test_a_group_is_drawn_first_as_often_as_its_odds_say() -> None:
    """Ages 0 and 2 of a bound of 3 give odds of 1 to 1/2, a second use halves again: 4/7, 2/7, 1/7.

    Red when `draw` ranks by anything but `log(1 - u) / -weight`.
    """
    replay = memory(priority="recency", count=1)
    train(replay, [group(1, 0, 2), group(1, 1, 0), group(1, 2, 0)])
    train(replay, [group(1, 2, 0)])
    first = Counter(ids(replay.draw(step, 2))[0] for step in range(7000))
    assert first["step-0/0"] == pytest.approx(4000, abs=150)
    assert first["step-0/1"] == pytest.approx(2000, abs=150)
    assert first["step-0/2"] == pytest.approx(1000, abs=150)


def test_a_draw_is_without_replacement_seeded_and_bounded() -> None:
    replay, same, other = memory(count=3), memory(count=3), memory(count=3, seed=1)
    groups = [group(1, task, 0) for task in range(8)]
    for each in (replay, same, other):
        train(each, groups)
    draws = [ids(replay.draw(step, 1)) for step in range(20)]
    assert all(len(set(drawn)) == 3 for drawn in draws)
    assert draws == [ids(same.draw(step, 1)) for step in range(20)]
    assert draws != [ids(other.draw(step, 1)) for step in range(20)]
    assert len({tuple(drawn) for drawn in draws}) > 10
    assert len(memory(count=3).draw(1, 1)) == 0


def test_trap_13_a_group_leaves_when_its_oldest_token_is_beyond_the_bound() -> None:
    """Red when `oldest_version` takes the group's own version, or `draw` keeps what is too old."""
    replay = memory(max_staleness=2, count=9)
    young = group(3, 0, 5)
    call = make_call(0, [1, 2], [3, 4, 5], versions_S=np.array([5, 3, 5], np.int32))
    mixed_versions = group(3, 1, 5)
    first = replace(mixed_versions.rollouts[0], calls=(call,))
    mixed_versions = replace(mixed_versions, rollouts=(first, mixed_versions.rollouts[1]))
    assert (oldest_version(young), oldest_version(mixed_versions)) == (5, 3)
    train(replay, [young, mixed_versions])
    assert len(replay.draw(4, 5)) == len(replay.draw(4, 5)) == 2
    assert ids(replay.draw(4, 6)) == ["step-2/0"]
    assert len(replay) == 1
    assert ids(replay.draw(5, 7)) == ["step-2/0"]
    assert (ids(replay.draw(6, 8)), len(replay)) == ([], 0)


def test_kept_groups_have_their_signal_and_uses() -> None:
    """GRPO's advantages of rewards 1, 0 are ±1 / sqrt(2), of 1, 0, 0, 0 they are 3/2, -1/2, -1/2, -1/2.

    Flat, small and filtered groups have no advantage. Red when `keep` takes a group with signal 0.
    """
    groups = [
        group(1, 0, 0),
        group(1, 1, 0, (1.0, 0.0, 0.0, 0.0)),
        group(1, 2, 0, (1.0, 1.0)),
        group(1, 3, 0, (1.0,)),
    ]
    replay = memory(count=9)
    train(replay, groups)
    kept = {one.group.id: one for one in replay.draw(2, 1)}
    assert set(kept) == {"step-0/0", "step-0/1"}
    assert kept["step-0/0"].signal == pytest.approx(0.5**0.5, rel=1e-5)
    assert kept["step-0/1"].signal == pytest.approx(0.75, rel=1e-5)
    train(replay, [groups[0]])
    assert {one.group.id: one.uses for one in replay.draw(3, 2)} == {"step-0/0": 2, "step-0/1": 1}
    filtered = replace(GRPO, shaping=replace(GRPO.shaping, reward_high=0.4))
    replay = memory(count=9)
    train(replay, groups, filtered)
    assert ids(replay.draw(2, 1)) == ["step-0/1"]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 5))
def test_the_memory_is_bounded_by_the_staleness(batch_size: int, steps: int, updates: int, seed: int) -> None:
    """`batch_size` groups for each step whose updates fit into the bound."""
    replay = memory(count=batch_size, max_staleness=steps * updates, seed=seed)
    for step in range(1, 9):
        version = (step - 1) * updates
        drawn = replay.draw(step, version)
        assert len(replay) == batch_size * min(step - 1, steps)
        assert len(drawn) == min(batch_size, len(replay))
        assert all(1 <= kept.uses <= steps and updates <= kept.age(version) <= steps * updates for kept in drawn)
        fresh = [group(step, task, version) for task in range(batch_size)]
        train(replay, [*fresh, *(kept.group for kept in drawn)])


def test_replayed_groups_are_spread_over_the_minibatches() -> None:
    fresh = [group(2, task, 1) for task in range(4)]
    flat = group(2, 9, 1, (0.0, 0.0))
    old = [group(1, task, 0) for task in range(2)]
    dapo = PRESETS["dapo"]
    names = [one.id for one in mixed([flat, *fresh], old, dapo)]
    assert names == ["step-1/0", "step-1/1", "step-0/0", "step-1/2", "step-1/3", "step-0/1", "step-1/9"]
    assert [one.id for one in mixed([flat, fresh[0]], [], dapo)] == ["step-1/9", "step-1/0"]
    assert [one.id for one in mixed([flat], old, dapo)] == ["step-0/0", "step-0/1", "step-1/9"]


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4))
def test_every_minibatch_has_its_share_and_a_fresh_group_is_first(num_fresh: int, num_old: int, parts: int) -> None:
    fresh, old = [group(2, i, 1) for i in range(num_fresh)], [group(1, i, 0) for i in range(num_old)]
    order = mixed(fresh, old, GRPO)
    assert sorted(one.id for one in order) == sorted(one.id for one in (*fresh, *old))
    assert order[0] is fresh[0]
    for part in split_minibatches(order, parts, GRPO):
        share = sum(one.version == 0 for one in part) / len(part)
        assert abs(share - num_old / len(order)) * len(part) <= 1.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"sampling__replay_share": 0.0, "sampling__max_staleness": 8},
            r"max_staleness is 8, .*set sampling.replay_share",
        ),
        ({"sampling__replay_share": 0.0, "sampling__replay_priority": "recency"}, "replay_priority is 'recency'"),
        ({"sampling__replay_share": 0.2}, "less than one group for a step of 4 tasks: set at least 0.25"),
        ({"sampling__max_staleness": 5, "trainer__num_minibatches": 3, "trainer__epochs": 2}, "makes 6 updates"),
        ({"algorithm__algorithm_type": "ppo"}, "critic of 'ppo'"),
        ({"algorithm__algorithm_type": "reinforce"}, "'reinforce' of 'reinforce' has no probability ratio"),
        ({"algorithm__algorithm_type": "remax"}, "'reinforce' of 'remax'"),
        ({"loss__policy_loss": "sft"}, "'sft' of 'grpo'"),
    ],
)
def test_unsuitable_algorithms_and_unused_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configured(**settings)


def test_rollouts_that_run_ahead_make_groups_older_before_they_can_train_again() -> None:
    found = configured(ahead=2, trainer__num_minibatches=2)
    assert found is not None
    assert found.max_staleness == 2 * 4 + 2
    with pytest.raises(ConfigError, match=r"rollouts run up to 2 versions ahead of it .* set at least 4"):
        configured(ahead=2, trainer__num_minibatches=2, sampling__max_staleness=3)


def test_distillation_is_refused_since_it_learns_from_what_the_policy_says_now() -> None:
    with pytest.raises(ConfigError, match="'jsd', where a teacher"):
        settings_of(config(algorithm__algorithm_type="jsd"), PRESETS["jsd"])


@pytest.mark.parametrize("name", ["opmd", "asymre", "topr", "rec", "raft", "sppo", "gspo", "dapo", "icepop", "rloo"])
def test_algorithms_that_correct_for_older_policies_are_allowed(name: str) -> None:
    replay = configured(algorithm__algorithm_type=name, trainer__epochs=2)
    assert replay is not None
    assert replay.max_staleness == 8
    assert configured(sampling__replay_share=0.0) is None


STEPS = [(1, 0), (2, 2), (3, 4), (4, 6)]
"""Steps and the policy versions that they start at: two updates each."""


def run_steps(replay: Replay, journal: Journal, steps: list[tuple[int, int]], salt: float = 0.0) -> list[list[str]]:
    """Train these steps as the loop does; what each of them replayed."""
    drawn = []
    for step, version in steps:
        kept = replay.draw(step, version)
        drawn.append(ids(kept))
        fresh = [group(step, task, version, (1.0, 0.0, salt + 0.1 * task * step)) for task in range(3)]
        for one in fresh:
            journal.add(one)
        groups = mixed(fresh, [one.group for one in kept], GRPO)
        batches = draw_batches(groups, GRPO, 2)
        replay.keep(groups, batches)
        journal.add_step(step, version + 2, {}, [one for batch in batches for one in batch.experiences])
    return drawn


def test_trap_13_a_resumed_memory_is_that_of_an_uninterrupted_run(tmp_path: Path) -> None:
    """Steps 5 and 6 of a killed session are in the journal; the run goes on after step 4, at version 8.

    Red when `read_trained_groups` reads what steps after the last one trained: they are of weights that are gone.
    """
    whole, killed = memory(max_staleness=5), memory(max_staleness=5)
    with Journal(tmp_path / "whole.db") as journal:
        expected = run_steps(whole, journal, [*STEPS, (5, 8), (6, 10)])
    assert any(expected[-2:])
    with Journal(tmp_path / "run.db") as journal:
        run_steps(killed, journal, STEPS)
        run_steps(killed, journal, [(5, 8), (6, 10)], salt=0.5)  # undone by the kill
        journal.flush()
        resumed = memory(max_staleness=5)
        resumed.restore(tmp_path / "run.db", GRPO, step=4, version=8)
        before = memory(max_staleness=5)
        with Journal(tmp_path / "other.db") as other:
            run_steps(before, other, STEPS)
        before.draw(5, 8)
        for ours, theirs in zip(kept_by(resumed), kept_by(before), strict=True):
            assert (ours.uses, ours.signal, ours.group.id) == (theirs.uses, theirs.signal, theirs.group.id)
            for a, b in zip(ours.group.rollouts, theirs.group.rollouts, strict=True):
                assert a.reward == b.reward
                for name in ("prompt_ids_P", "sampled_ids_S", "logprobs_S", "versions_S"):
                    assert getattr(a.calls[0], name).tobytes() == getattr(b.calls[0], name).tobytes()
        assert run_steps(resumed, journal, [(5, 8), (6, 10)]) == expected[-2:]
        journal.flush()
    again = memory(max_staleness=5)
    again.restore(tmp_path / "run.db", GRPO, step=6, version=12)
    whole.draw(7, 12)
    assert [(one.group.id, one.uses, one.signal) for one in kept_by(again)] == [
        (one.group.id, one.uses, one.signal) for one in kept_by(whole)
    ]


def test_trap_13_a_group_is_as_old_as_its_tokens_whenever_it_began(tmp_path: Path) -> None:
    """Where rollouts run ahead, weights may have moved between a group's begin (version 1) and its first token (3).

    Red when `restore` asks for groups that began within the bound (leave out `self._ahead`).
    """
    fresh = [replace(group(4, task, 3), version=1) for task in range(2)]
    whole, resumed = (memory(max_staleness=3, ahead=2) for _ in range(2))
    with Journal(tmp_path / "run.db") as journal:
        for one in fresh:
            journal.add(one)
        batches = draw_batches(fresh, GRPO, 1)
        whole.keep(fresh, batches)
        journal.add_step(4, 4, {}, [one for batch in batches for one in batch.experiences])
        journal.flush()
    resumed.restore(tmp_path / "run.db", GRPO, step=4, version=5)
    assert ids(resumed.draw(5, 5)) == ids(whole.draw(5, 5)) != []
    assert [kept.age(5) for kept in kept_by(resumed)] == [2, 2]
    assert resumed.draw(6, 7) == ()


def kept_by(replay: Replay) -> list[ReplayGroup]:
    return list(replay._kept.values())


def test_the_journal_shows_what_was_replayed(tmp_path: Path) -> None:
    with Journal(tmp_path / "run.db") as journal:
        drawn = run_steps(memory(), journal, STEPS)
    assert [len(found) for found in read_last_groups(tmp_path / "run.db").values()] == [3, 3, 3, 3]
    for (step, _), expected in zip(STEPS, drawn, strict=True):
        trained = {call.group_id for call in read_trained(tmp_path / "run.db", step=step)}
        assert {id_ for id_ in trained if not id_.startswith(f"step-{step - 1}/")} == set(expected)


def checks(fresh: list[Group], old: list[Group], **options: Any) -> dict[str, Check]:
    batches = draw_batches([*fresh, old[0]], GRPO, 1)
    options = {"version": 2, "replay_staleness": 2} | options
    return audited(fresh, batches, GRPO, replayed=old, options=options, batch_size=len(fresh))


def test_the_certificate_tells_replayed_groups_from_fresh_ones() -> None:
    """Red when `_check_refill` counts replayed groups as trained ones of the batch."""
    fresh, old = [group(3, task, 2) for task in range(2)], [group(1, 0, 0)]
    found = checks(fresh, old)
    assert not [check for check in found.values() if check.broken]
    assert (found["accounted"].checked, found["replay"].checked, found["groups"].checked) == (4, 1, 3)
    assert not [check for check in checks([group(3, 0, 2, (1.0, 1.0))], old).values() if check.broken]


def test_trap_13_the_certificate_finds_replay_beyond_the_bound_from_the_future_or_twice() -> None:
    """Each is red when its line in `audit` is taken out."""
    fresh, old = [group(3, 0, 2)], group(1, 0, 0)
    stale = checks(fresh, [old], replay_staleness=1)["staleness"]
    assert (stale.broken, stale.first) == (2, "rollout step-0/0/0, call 0, token 2: version 0")
    assert checks([group(3, 0, 1)], [old])["staleness"].broken  # a fresh token may not be stale at all
    newer = checks(fresh, [group(4, 0, 3)])["replay"].first
    assert newer is not None
    assert re.match(r"group step-3/0: .*version 3.* 2 trains", newer)
    assert checks(fresh, [old, old])["replay"].first == "group step-0/0: 2 times"
    part = replace(old, rollouts=old.rollouts[1:])
    assert checks(fresh, [part])["replay"].first == "group step-0/0: rollouts [1]"
