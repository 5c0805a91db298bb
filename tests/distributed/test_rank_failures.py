"""Ranks that are lost, hang, or fail; errors that all of them agree on; a coordinator that is killed."""

import os
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from group_toys import (
    RaisesOn,
    assert_same_weights,
    group_of,
    leftover_folders,
    leftover_ranks,
    make_plan,
    make_toy,
    one_process,
    processes,
)
from processes import ends, forked, line_of
from transformers import MambaConfig

from sharpen.errors import ModelError, ParityError, RankError, TrainingError
from sharpen.learning.trainer.work import Minibatch
from sharpen.placement.ranks.group import TrainerGroup
from sharpen.placement.ranks.processes import RankProcesses

pytestmark = pytest.mark.distributed


def test_trap_09_an_error_that_all_agree_on_is_raised_as_itself_and_changes_nothing(tmp_path):
    """A wrong logprob in one rollout, which only one rank scores: both stop before the update. A second update that
    is wrong leaves the first one. NaN in one rank's gradient stops both. Afterwards they train on.

    Red when the gaps of the other rank's packs are not looked at (`_update` adding those of this rank alone)."""
    toy = make_toy(tmp_path / "model")
    plan = make_plan(toy)
    one = one_process(plan)
    wrong = list(toy.experiences)
    logprobs_T = wrong[4].logprobs_T.copy()
    logprobs_T[np.flatnonzero(wrong[4].loss_mask_T)[1]] += 0.05
    wrong[4] = replace(wrong[4], logprobs_T=logprobs_T)
    group = group_of(plan)
    with pytest.raises(ParityError, match=r"g1/1, call 0, token"):
        group.train_step([Minibatch(experiences=wrong)])
    assert group.version == 0
    assert_same_weights(one, group, absolute=0.0)
    late = [replace(e, versions_T=np.where(e.loss_mask_T, 1, -1)) for e in wrong]
    with pytest.raises(ParityError, match="the trainer is at 0"):
        group.train_step([*toy.batches(), Minibatch(experiences=late)])
    assert group.version == 0
    huge = list(toy.experiences)
    huge[3] = replace(huge[3], weights_T=np.where(huge[3].loss_mask_T, np.inf, 0.0).astype(np.float32))
    with pytest.raises(TrainingError, match="NaN or infinite; the update was not made"):
        group.train_step([*toy.batches(), Minibatch(experiences=huge)])
    one.train_step(toy.batches())
    assert group.version == 1
    assert_same_weights(one, group)
    with pytest.raises(TrainingError, match="NaN or infinite; the update was not made"):
        group.train_step([Minibatch(experiences=huge)])
    assert group.version == 1
    one.train_step(toy.batches())
    group.train_step(toy.batches())
    assert_same_weights(one, group)


def in_the_midst(ranks: RankProcesses, act, after_s: float = 0.7) -> None:
    """Stop the second rank, so that the step cannot end, and do something to it while the first one waits."""
    victim = ranks.process_ids[1]
    os.kill(victim, signal.SIGSTOP)
    threading.Timer(after_s, act, (victim,)).start()


def test_a_rank_that_is_killed_in_the_midst_of_a_step(tmp_path):
    """One error that names it; nothing is left of the others (`nothing_left_behind`), and no further call works."""
    toy = make_toy(tmp_path / "model")
    with processes(make_plan(toy)) as ranks:
        group = TrainerGroup(ranks)
        group.train_step(toy.batches())
        in_the_midst(ranks, lambda victim: os.kill(victim, signal.SIGKILL))
        with pytest.raises(
            RankError, match=r"train_step, 2 processes.*: rank 1 was killed by SIGKILL.*last checkpoint"
        ):
            group.train_step(toy.batches())
        assert group.version == 1
        assert not leftover_ranks()
        with pytest.raises(RankError, match="rank 1 was killed"):
            group.save(tmp_path / "checkpoint", {})
    assert not (tmp_path / "checkpoint").exists()


def test_a_rank_that_is_lost_between_steps(tmp_path):
    toy = make_toy(tmp_path / "model")
    with processes(make_plan(toy)) as ranks:
        group = TrainerGroup(ranks)
        os.kill(ranks.process_ids[0], signal.SIGKILL)
        with pytest.raises(RankError, match="rank 0 was killed by SIGKILL"):
            group.state_tensors()


def test_a_rank_that_hangs_is_bounded_by_the_timeout(tmp_path):
    """It is never woken up. Red when the process group has no timeout (`init_process_group` without it: 30 minutes)."""
    toy = make_toy(tmp_path / "model")
    with processes(make_plan(toy), timeout_s=45.0, grace_s=1.0) as ranks:  # within which they must also find each other
        group = TrainerGroup(ranks)
        os.kill(ranks.process_ids[1], signal.SIGSTOP)
        with pytest.raises(RankError, match=r"rank 0 failed: .*; rank 1 did not answer"):
            group.train_step(toy.batches())


def test_a_rank_that_fails_alone(tmp_path):
    """An id beyond the vocabulary in one rank's pack: a bug, say, that no rule foresees. The others do not wait for it
    for ever; its traceback comes with the error."""
    toy = make_toy(tmp_path / "model")
    wrong = list(toy.experiences)
    wrong[0] = replace(wrong[0], ids_T=np.full_like(wrong[0].ids_T, 10_000))
    with processes(make_plan(toy), grace_s=2.0) as ranks:
        group = TrainerGroup(ranks)
        with pytest.raises(RankError, match=r"rank \d failed: IndexError") as caught:
            group.train_step([Minibatch(experiences=wrong)])
    (note,) = caught.value.__notes__
    assert "in train_step" in note
    assert "IndexError" in note


def test_an_error_of_one_rank_alone(tmp_path):
    """An error of ours that only one rank raises is no agreement: their weights may differ, so all are ended.

    Red when `_answers` raises the first error that came as itself."""
    toy = make_toy(tmp_path / "model")
    with processes(make_plan(toy)) as ranks:
        with pytest.raises(RankError, match=r"rank 1 failed: on rank 1 alone\. The last checkpoint is whole"):
            ranks.call("attribute", RaisesOn(1))
        with pytest.raises(RankError, match="on rank 1 alone"):
            ranks.call("attribute", "version")


def test_models_that_are_refused_are_refused_by_all_ranks(tmp_path):
    MambaConfig().save_pretrained(tmp_path / "model")
    toy = make_toy(tmp_path / "other")
    plan = replace(make_plan(toy), model_path=str(tmp_path / "model"))
    with pytest.raises(ModelError, match="layers of a kind"):
        RankProcesses(plan, 2, on_gpus=False)


SCRIPT = """
import os, signal, sys
from pathlib import Path
from group_toys import make_plan, make_toy
from sharpen.placement.ranks.processes import RankProcesses
toy = make_toy(Path(sys.argv[1]))
ranks = RankProcesses(make_plan(toy), 2, on_gpus=False)
print(*ranks.process_ids, flush=True)
if sys.argv[2] == "amid":
    os.kill(ranks.process_ids[1], signal.SIGSTOP)
    ranks.call("run", "train_step", toy.batches())
signal.pause()
"""


@pytest.mark.parametrize("when", ["idle", "amid"])
def test_a_coordinator_that_is_killed_leaves_no_ranks(tmp_path, when):
    """Neither idle ones nor one that waits for another in the midst of a step; nor the folder in which they met. Red
    without `_end_with_coordinator`, or when that does not remove the folder.

    The rank that was stopped is woken up at last: a stopped process can do nothing, not even end."""
    with forked("-c", SCRIPT, str(tmp_path / "model"), when) as process:
        ids = [int(number) for number in line_of(process).split()]
        assert len(ids) == 2
        assert leftover_folders(process.pid)
        time.sleep(1.0)  # whatever they do by then: nothing may be left
    assert ends(ids[0])
    os.kill(ids[1], signal.SIGCONT)
    assert ends(ids[1])
    assert not leftover_folders(process.pid)
