"""An explored batch and an announcement as bytes, and back."""

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from experience_builders import make_group, two_turns

from sharpen.agent.rollout.refill import StepRollouts
from sharpen.config.run import RunConfig
from sharpen.config.trainer import TrainerConfig
from sharpen.errors import ConfigError, JournalError
from sharpen.placement.exchange.announcement import Announcement
from sharpen.placement.exchange.batch import ExploredBatch
from sharpen.types import Experience

CONFIG = RunConfig.model_validate({"train_dataset": {"path": "d"}, "model": {"model_path": "m", "max_model_len": 64}})


def batch() -> ExploredBatch:
    groups = tuple(
        make_group([two_turns(reward, name, index) for index, reward in enumerate((0.25, 1.0))], name)
        for name in ("step-0/a", "step-0/b")
    )
    rollouts = StepRollouts(groups=groups, batch_size=2, usable=2, refill_rounds=0, seconds=1.5, refill_s=0.0)
    return ExploredBatch(rollouts=rollouts, session="ab12", version=7, order={"position": 2}, generate_s=0.75)


def test_a_batch_arrives_as_it_was_sent():
    sent = batch()
    found = ExploredBatch.from_bytes(sent.to_bytes())
    assert (found.session, found.version, found.order, found.generate_s) == ("ab12", 7, {"position": 2}, 0.75)
    assert replace(found.rollouts, groups=()) == replace(sent.rollouts, groups=())
    for there, here in zip(found.rollouts.groups, sent.rollouts.groups, strict=True):
        assert (there.id, there.version, there.task) == (here.id, here.version, here.task)
        for a, b in zip(there.rollouts, here.rollouts, strict=True):
            assert (a.id, a.reward, a.outcome) == (b.id, b.reward, b.outcome)
            for one, other in zip(a.calls, b.calls, strict=True):
                assert np.array_equal(one.sampled_ids_S, other.sampled_ids_S)
                assert np.array_equal(one.logprobs_S, other.logprobs_S)
                assert np.array_equal(one.versions_S, other.versions_S)


@pytest.mark.parametrize("content", [b"", b"no database", Path(__file__).read_bytes()])
def test_what_is_no_batch_is_an_error_of_ours(content):
    with pytest.raises(JournalError, match="exchange"):
        ExploredBatch.from_bytes(content)


def test_a_batch_of_damaged_records_is_an_error_of_ours():
    """Red before: the `ValueError` of a missing call went through a trainer that names what it cannot read."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.deserialize(batch().to_bytes())
        connection.execute("UPDATE calls SET idx = 7 WHERE idx = 1")
        connection.commit()
        content = connection.serialize()
    with pytest.raises(JournalError, match=r"exchange is not a batch of rollouts: ValueError: call 1 .* is missing"):
        ExploredBatch.from_bytes(content)


def test_an_announcement_keeps_the_probe_bit_by_bit():
    probe = Experience(
        rollout_id="probe",
        group_id="probe",
        task_id="probe",
        ids_T=np.array([1, 2, 3], np.int32),
        loss_mask_T=np.array([False, True, True]),
        logprobs_T=np.array([0.0, -0.1, -1e-7], np.float32),
        versions_T=np.array([-1, 0, 0], np.int32),
        calls_T=np.array([-1, 0, 0], np.int32),
        temperatures_T=np.array([1.0, 0.7, 0.7], np.float32),
        advantages_T=np.zeros(3, np.float32),
        weights_T=np.zeros(3, np.float32),
    )
    sent = Announcement.of(CONFIG, total_steps=9, model={"digest": "x"}, probe=[probe])
    found = Announcement.from_bytes(sent.to_bytes())
    assert (found.total_steps, found.model, found.settings) == (9, {"digest": "x"}, sent.settings)
    (there,) = found.probe
    for name in ("ids_T", "loss_mask_T", "logprobs_T", "temperatures_T"):
        assert getattr(there, name).dtype == getattr(probe, name).dtype
        assert np.array_equal(getattr(there, name), getattr(probe, name))
    found.check(CONFIG, {"digest": "x"})


def test_towers_are_trained_on_both_sides_or_on_none():
    """Red before: an explorer with vLLM, whose rollouts show no images, fed a trainer of towers."""
    announcement = Announcement.of(CONFIG, total_steps=1, model={"digest": "x"}, probe=())
    trains = CONFIG.model_copy(update={"trainer": TrainerConfig(train_towers=True)})
    with pytest.raises(ConfigError, match=r"trainer.train_towers: False there, True here"):
        announcement.check(trains, {"digest": "x"})
    settings = {name: value for name, value in announcement.settings.items() if name != "trainer.train_towers"}
    replace(announcement, settings=settings).check(trains, {"digest": "x"})  # of an earlier version


def test_another_model_is_another_run():
    announcement = Announcement.of(CONFIG, total_steps=1, model={"digest": "x"}, probe=())
    with pytest.raises(ConfigError, match="model") as found:
        announcement.check(CONFIG, {"digest": "y"})
    assert "the explorer and this trainer do not" in str(found.value)
    assert "'x'" in str(found.value)
    assert "'y'" in str(found.value)
