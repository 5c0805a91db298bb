"""When weights move: schedules worked out by hand, and what holds for any durations."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError
from sharpen.learning.schedule import Action, Counters, Schedule
from sharpen.run.rollouts import staleness_settings


def schedule(style: str = "fixed", interval: int = 1, offset: int = 0, *, updates: int = 1, **given):
    config = RunConfig.model_validate(
        {
            "train_dataset": {"path": "d"},
            "model": {"model_path": "m", "max_model_len": 64},
            "trainer": {"num_minibatches": updates},
            "sync": {"style": style, "interval": interval, "offset": offset, **given},
        }
    )
    return schedule_of(config)


def schedule_of(config: RunConfig) -> Schedule:
    return Schedule.of(config.sync, mode=config.mode, updates=config.trainer.updates)


@dataclass
class Run:
    """A run with a simulated clock: how long each batch and each step takes. `log` is what the coordinator did: `b3`
    begins batch 3, `t2` trains step 2, `s2` syncs the weights of step 2, `w` waits for what is in flight though the
    oldest batch could train."""

    schedule: Schedule
    rollouts: list[float]
    steps: list[float]
    started: int = 0
    now: float = 0.0
    log: list[str] = field(default_factory=list)
    began: dict[int, int] = field(default_factory=dict)
    behind: list[int] = field(default_factory=list)
    evaluations: set[int] = field(default_factory=set)
    in_flight_at_sync: int = 0

    def go(self) -> "Run":
        ends: dict[int, float] = {}
        begun = trained = synced = self.started
        total = len(self.rollouts)
        while trained < total:
            ready, idle = begun > trained and ends[trained + 1] <= self.now, max(ends.values(), default=0) <= self.now
            now = Counters(total=total, begun=begun, trained=trained, synced=synced, ready=ready, idle=idle)
            action = self.schedule.next(now)
            if action is Action.BEGIN:
                begun += 1
                ends[begun], self.began[begun] = self.now + self.rollouts[begun - 1], synced
                self.log.append(f"b{begun}")
            elif action is Action.SYNC:
                synced = trained
                self.in_flight_at_sync += not idle
                self.log.append(f"s{synced}")
            elif action is Action.TRAIN:
                trained += 1
                self.behind.append(trained - 1 - self.began[trained])
                self.now += self.steps[trained - 1]
                self.log.append(f"t{trained}")
                if trained in self.evaluations:
                    self.now, synced = max(self.now, *ends.values()), trained
            else:
                self.now = max(ends.values()) if ready else ends[trained + 1]
                self.log += ["w"] * ready
        return self


def log(found: Schedule, total: int = 4, rollout: float = 1.0, step: float = 1.0) -> str:
    return " ".join(Run(found, [rollout] * total, [step] * total).go().log)


@pytest.mark.parametrize(
    ("interval", "offset", "expected"),
    [
        # synchronous
        (1, 0, "b1 t1 s1 b2 t2 s2 b3 t3 s3 b4 t4 s4 b5 t5 s5 b6 t6"),
        # one step off: step k trains while batch k + 1 is rolled out with the weights of step k - 1
        (1, 1, "b1 b2 t1 s1 b3 t2 s2 b4 t3 s3 b5 t4 s4 b6 t5 t6"),
        (1, 2, "b1 b2 b3 t1 s1 b4 t2 s2 b5 t3 s3 b6 t4 t5 t6"),
        # two batches with the same weights; the trainer's second step trains on tokens one step behind
        (2, 0, "b1 b2 t1 t2 s2 b3 b4 t3 t4 s4 b5 b6 t5 t6"),
        (2, 1, "b1 b2 b3 t1 t2 s2 b4 b5 t3 t4 s4 b6 t5 t6"),
        (2, 2, "b1 b2 b3 b4 t1 t2 s2 b5 b6 t3 t4 t5 t6"),
        (3, 0, "b1 b2 b3 t1 t2 t3 s3 b4 b5 b6 t4 t5 t6"),
        (3, 1, "b1 b2 b3 b4 t1 t2 t3 s3 b5 b6 t4 t5 t6"),
        (3, 2, "b1 b2 b3 b4 b5 t1 t2 t3 s3 b6 t4 t5 t6"),
    ],
)
def test_fixed_by_hand(interval, offset, expected):
    """Batches of a window take a second together, as does a step. Points are after `offset + k * interval` batches."""
    assert log(schedule(interval=interval, offset=offset), 6) == expected


def test_fixed_waits_for_the_slower_side():
    """Slow rollouts: the trainer has done its step and waits for the batch in flight, then weights move."""
    found = Run(schedule(offset=2), [1.0, 1.0, 5.0, 5.0, 1.0], [1.0] * 5).go()
    assert " ".join(found.log) == "b1 b2 b3 t1 w s1 b4 t2 w s2 b5 t3 t4 t5"


def test_dynamic_by_explorer_by_hand():
    """Whatever has trained when its batches have ended is what the next ones begin with."""
    style = "dynamic_by_explorer"
    # Batch 1 ends with nothing trained, so batch 2 begins without new weights. It ends while step 1 trains; and so on.
    assert log(schedule(style)) == "b1 b2 t1 s1 b3 t2 s2 b4 t3 t4"
    # Batches 3 and 4 will be 2 and 3 steps behind, as is allowed; 5 and 6 wait until step 2 has trained.
    assert log(schedule(style, 2), 6) == "b1 b2 b3 b4 t1 t2 s2 b5 b6 t3 t4 t5 t6"
    assert log(schedule(style, 1, 1), 5) == "b1 b2 b3 t1 s1 b4 t2 s2 b5 t3 t4 t5"
    # Slow rollouts: batch 3 ends after two steps, and both of them serve.
    assert log(schedule(style, 1, 1), 5, rollout=5.0) == "b1 b2 b3 t1 t2 s2 b4 t3 s3 b5 t4 t5"


def test_dynamic_by_trainer_by_hand():
    """The trainer waits for its sync after each interval; the explorer goes on until it is asked."""
    style = "dynamic_by_trainer"
    assert log(schedule(style)) == "b1 b2 t1 s1 b3 t2 s2 b4 t3 t4"
    assert log(schedule(style, 2), 6) == "b1 b2 b3 b4 t1 t2 s2 b5 b6 t3 t4 t5 t6"
    # Slow rollouts: batch 2 could train, but step 1 waits for its sync, and that for batch 3.
    assert log(schedule(style, 1, 1), 5, rollout=5.0) == "b1 b2 b3 t1 w s1 b4 t2 w s2 b5 t3 t4 t5"


def test_fully_async_by_hand():
    """Nobody waits: a batch begins as soon as it is sure to be young enough, weights move after each interval."""
    assert log(schedule("fully_async"), rollout=5.0) == "b1 b2 t1 s1 b3 t2 s2 b4 t3 t4"
    assert log(schedule("fully_async", max_staleness=2), rollout=5.0) == "b1 b2 b3 t1 s1 b4 t2 t3 t4"
    assert log(schedule("fully_async", 2), 7) == "b1 b2 b3 b4 t1 t2 s2 b5 b6 t3 t4 s4 b7 t5 t6 t7"


@given(st.data())
def test_trap_13_no_token_is_older_than_the_bound_and_nobody_waits_for_ever(data):
    """Whatever the durations, where a resumed run begins, and when evaluations make the engine serve newer weights.
    Red when `_new_enough` is always true."""
    style = data.draw(st.sampled_from(["fixed", "dynamic_by_explorer", "dynamic_by_trainer", "fully_async"]))
    interval = data.draw(st.integers(1, 4))
    offset = 0 if style == "fully_async" else data.draw(st.integers(0, 3))
    updates = data.draw(st.integers(1, 3))
    bound = (offset + interval - 1) * updates + (0 if style == "fixed" else data.draw(st.integers(0, 6)))
    total = data.draw(st.integers(1, 12))
    given_bound = {"max_staleness": bound} if bound and data.draw(st.booleans()) else {}
    found = schedule(style, interval, offset, updates=updates, **given_bound)
    durations = st.lists(st.sampled_from([0.1, 1.0, 2.5, 9.0]), min_size=total, max_size=total)
    run = Run(found, data.draw(durations), data.draw(durations), started=data.draw(st.integers(0, total)))
    run.evaluations = data.draw(st.sets(st.integers(1, total)))
    run.go()
    expected = range(run.started + 1, total + 1)
    assert [int(word[1:]) for word in run.log if word[0] == "t"] == list(expected)
    assert [int(word[1:]) for word in run.log if word[0] == "b"] == list(expected)
    assert all(0 <= behind <= found.max_behind for behind in run.behind)
    if given_bound:
        assert all(behind * updates <= bound for behind in run.behind)
    if found.drains:
        assert run.in_flight_at_sync == 0
    if style == "fixed":
        assert found.max_staleness == (offset + interval - 1) * updates


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"max_staleness": 2}, "no token is more than 0 versions behind"),
        ({"offset": 2, "max_staleness": 1}, "offset 2 tokens are up to 2 versions behind: set at least 2"),
        ({"offset": 1, "updates": 3, "max_staleness": 2}, "and 3 updates a step tokens are up to 3 versions behind"),
        ({"style": "fully_async", "interval": 4, "max_staleness": 2}, "set at least 3"),
        ({"style": "fully_async", "offset": 1}, "no effect with sync.style .fully_async.: leave it out"),
    ],
)
def test_impossible_or_ineffective_settings_are_refused(given, part):
    with pytest.raises(ConfigError, match=part):
        schedule(**given)


def test_the_bound_is_in_whole_steps():
    """Five updates are one step of four: a batch two steps behind could be 8 versions behind."""
    found = schedule("fully_async", updates=4, max_staleness=5)
    assert (found.max_behind, found.max_staleness) == (1, 4)
    assert not schedule().overlaps
    assert schedule(offset=1).overlaps


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "algorithm.learning_rate (0.01)"),
        ({"trainer": {"epochs": 2}}, "trainer.epochs (2) or algorithm.learning_rate (0.01)"),
        ({"sync": {"offset": 1}}, "sync.offset (1) or algorithm.learning_rate (0.01)"),
        (
            {"sync": {"style": "fully_async", "max_staleness": 4, "interval": 2}, "trainer": {"num_minibatches": 2}},
            "sync.max_staleness (4) or sync.interval (2) or trainer.num_minibatches (2) or "
            "algorithm.learning_rate (0.01)",
        ),
        ({"sampling": {"replay_share": 0.5}}, "sampling.replay_share (0.5) or algorithm.learning_rate (0.01)"),
    ],
)
def test_trap_12_the_alarm_names_the_settings_that_are_in_force(settings, said):
    content = {
        "train_dataset": {"path": "d"},
        "model": {"model_path": "m", "max_model_len": 64},
        "algorithm": {"algorithm_type": "grpo", "batch_size": 1, "group_size": 2, "learning_rate": 0.01},
        **settings,
    }
    config = RunConfig.model_validate(content)
    assert staleness_settings(config, schedule_of(config)) == said
