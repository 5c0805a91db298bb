"""Whole runs with `trainer.num_processes`: the numbers of one process, a certificate, a rank killed in between."""

import json
import os
import re
import signal
import threading
from collections import Counter

import pytest
from group_toys import leftover_ranks, rank_process_ids
from rank_runs import BATCH_SIZE, GROUP_SIZE, assert_same_losses, disturbing, rows, run

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, tune
from sharpen.cli.main import FAILED, main
from sharpen.errors import RankError
from sharpen.evidence.certificate.certify import certify
from sharpen.evidence.certificate.plain.retrain import retrain
from sharpen.learning.experience.reading import read_groups_at, read_last_groups, read_steps

pytestmark = pytest.mark.distributed


def test_a_run_of_two_processes_is_that_of_one(tmp_path, toy_model_dir, toy_dataset, undisturbed):
    """The same rollouts, losses to 1e-6, a certificate that holds, weights that the engine was given from shared memory
    and that the trainer's logprobs agree with in every step. The updates, made once more by the plain loop, which knows
    no processes, are the same; what another rate would have made is found wrong."""
    two = run(tmp_path, toy_model_dir, toy_dataset, 2)
    assert_same_losses(undisturbed, two.run_dir)
    assert max(row["trainer/logprob_gap_max"] for row in rows(two.run_dir).values()) < 1e-4
    certificate = certify(two.run_dir)
    assert certificate.holds, certificate.problems
    assert not leftover_ranks()
    again = retrain(two.run_dir)
    assert [(one.first, one.last) for one in again.repeated] == [(1, 2), (3, 4)]
    assert not again.problems
    recorded = json.loads((two.run_dir / "resolved.json").read_text())
    recorded["algorithm.learning_rate"]["value"] *= 0.99
    (two.run_dir / "resolved.json").write_text(json.dumps(recorded))
    assert len(retrain(two.run_dir).problems) == 2


def kill_soon() -> None:
    """Stop the second rank, and kill it while the trainer waits for it."""
    victim = rank_process_ids()[1]
    os.kill(victim, signal.SIGSTOP)
    threading.Timer(2.0, os.kill, (victim, signal.SIGKILL)).start()


def test_a_rank_killed_in_a_step_ends_the_run_which_goes_on_from_its_checkpoint(
    tmp_path, toy_model_dir, toy_dataset, undisturbed, capfd
):
    """Killed while step 4 trains; the last checkpoint is that of step 2. The second session trains steps 3 and 4 again,
    in one process even, and ends where a run that nobody disturbed does; nothing is trained twice. One error says so:
    what the other rank met in consequence is not shown.

    Red when a trainer that cannot say whether its weights are whole (`Checkpoints._restore`) is taken to have them."""
    fixed = {"project_name": "P", "experiment_name": "fixed"}
    with pytest.raises(
        RankError, match=r"\(train_step, 2 processes\): rank 1 was killed by SIGKILL\. The last"
    ) as caught:
        run(tmp_path, toy_model_dir, toy_dataset, 2, workflow=disturbing(kill_soon, 4), **fixed)
    assert not leftover_ranks()
    assert not hasattr(caught.value, "__notes__")
    shown = capfd.readouterr()
    assert "step 4 is not complete and is dropped, the last checkpoint stays: global_step_2" in shown.out
    assert "Traceback" not in shown.err, shown.err
    run_dir = tmp_path / "P" / "fixed"
    assert (run_dir / "latest").resolve().name == "global_step_2"
    assert sorted(path.name for path in run_dir.glob("*global_step*")) == ["global_step_2"]
    result = run(tmp_path, toy_model_dir, toy_dataset, 1, **fixed)
    assert result.steps == 4
    assert_same_losses(undisturbed, run_dir)
    assert {record.step: record.version for record in read_steps(run_dir / "run.db")} == {1: 2, 2: 4, 3: 6, 4: 8}
    trained: Counter[str] = Counter()
    for keys in read_last_groups(run_dir / "run.db").values():
        groups = read_groups_at(run_dir / "run.db", keys)
        assert all(len(group.rollouts) == GROUP_SIZE for group in groups)
        trained.update(group.task.id for group in groups)
    assert set(trained.values()) == {1}
    assert len(trained) == 4 * BATCH_SIZE
    certificate = certify(run_dir)
    assert certificate.holds, certificate.problems


def test_the_command_says_so_by_its_exit_code(capsys):
    """The culprit's traceback comes before the error."""

    def fails(_):
        error = RankError("a process of the trainer was lost (train_step, 2 processes): rank 1 was killed by SIGKILL")
        error.add_note("rank 1:\nits traceback")
        raise error

    assert main(["check", "--config", "run.yaml"], commands={"check": fails}) == FAILED
    assert re.match("rank 1:\nits traceback\nsharpen: a process .* rank 1 was killed", capsys.readouterr().err)


TAUGHT = {
    "cpt": [{"text": f"question {i} yes yes" + "!" * i} for i in range(8)],
    "sft": [{"prompt": f"question {i}", "response": "yes yes" + "!" * i} for i in range(8)],
    "dpo": [{"prompt": f"question {i}", "chosen": "yes", "rejected": "no no" + "!" * i} for i in range(8)],
}


@pytest.mark.parametrize("algorithm", TAUGHT)
def test_runs_without_rollouts(tmp_path, toy_model_dir, algorithm):
    """`cpt`, `sft` and `dpo`, with held-out rows that all ranks measure: the losses of one process."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in TAUGHT[algorithm]))
    results = []
    for processes in (1, 2):
        results.append(
            tune(
                train_dataset=DatasetConfig(path=str(path), total_steps=3),
                eval_dataset=DatasetConfig(path=str(path)),
                model=TunerModelConfig(model_path=str(toy_model_dir), max_model_len=64),
                algorithm=AlgorithmConfig(algorithm_type=algorithm, batch_size=4, learning_rate=1e-3),
                settings={
                    "checkpoint_root_dir": str(tmp_path / str(processes)),
                    "trainer.num_processes": processes,
                    "trainer.max_tokens_per_micro_batch": 64,
                    "trainer.eps": 1e-3,
                },
            )
        )
    one, two = results
    assert_same_losses(one.run_dir, two.run_dir)
    assert two.loss_before == pytest.approx(one.loss_before, rel=1e-6)
    assert two.loss_after == pytest.approx(one.loss_after, rel=1e-6)
    assert two.loss_after < two.loss_before
    assert certify(two.run_dir).holds
    assert not leftover_ranks()
