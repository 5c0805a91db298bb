"""The certificate covers exactly the steps behind the weights that it names, or says which it cannot."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest
from experience_builders import make_group
from planted_run import MINIBATCHES, a_rollout, draw, online, resolved

from sharpen.config.load import write_resolved
from sharpen.evidence.certificate.certificate import recorded_certificate
from sharpen.evidence.certificate.certify import certify
from sharpen.evidence.certificate.delivery import delivery
from sharpen.evidence.certificate.lineage import in_words, read_lineage
from sharpen.learning.experience.journal import Journal
from sharpen.types import Group

RUN = resolved(**{"algorithm.batch_size": 2, "algorithm.group_size": 2})


def groups_of(step: int) -> list[Group]:
    version = (step - 1) * MINIBATCHES
    names = [f"step-{step - 1}/{task}" for task in "ab"]
    return [
        make_group([a_rollout(name, 0, 1.0, version=version), a_rollout(name, 1, 0.0, version=version)], name)
        for name in names
    ]


def train(journal: Journal, step: int) -> None:
    """A step as a run leaves it in its journal."""
    groups = groups_of(step)
    batches = draw(groups, RUN)
    for group in groups:
        journal.add(group)
    delivered = delivery(batches)
    journal.add_checks(step, online(groups, batches, RUN, version=(step - 1) * MINIBATCHES))
    experiences = [one for batch in batches for one in batch.experiences]
    metrics = {"batch/loss_tokens": 9.0, "trainer/logprob_gap_tokens": 9.0}
    metrics |= {f"trainer/logprob_gap_{name}": 0.0 for name in ("mean", "max", "kl")}
    journal.add_step(step, step * MINIBATCHES, metrics, experiences, delivered)


def session(run_dir: Path, begin: int, steps: Sequence[int]) -> None:
    """A session that goes on behind step `begin` and trains these."""
    run_dir.mkdir(exist_ok=True)
    write_resolved(run_dir / "resolved.json", RUN)
    with Journal(run_dir / "run.db") as journal:
        journal.begin(begin, begin * MINIBATCHES)
        for step in steps:
            train(journal, step)


def checkpoint(run_dir: Path, step: int, version: int | None = None) -> None:
    """What a checkpoint leaves that says which weights it holds."""
    folder = run_dir / f"global_step_{step}"
    (folder / "trainer_state").mkdir(parents=True)
    state = {"version": step * MINIBATCHES if version is None else version}
    (folder / "trainer_state" / "state.json").write_text(json.dumps(state))
    (run_dir / "latest").unlink(missing_ok=True)
    (run_dir / "latest").symlink_to(folder.name)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_steps_that_were_done_again_count_once(run_dir: Path) -> None:
    """Killed behind 7, gone on from 4, ended behind 5: five steps, ten groups. Red when all records count."""
    session(run_dir, 0, range(1, 8))
    session(run_dir, 4, [5])
    checkpoint(run_dir, 5)
    for found in (recorded_certificate(run_dir), certify(run_dir, logprobs=False)):
        assert found.holds, found.problems
        assert (found.weights, found.steps, found.undone) == ("global_step_5", 5, 3)
        assert found.outcomes == {"ok": 5 * 2 * 2}
        assert found.calls == {"used": 5 * 2 * 2 * 2}
        assert {check.name: check.checked for check in found.checks}["accounted"] == 5 * 2 * 2
    assert "undone" in "\n".join(found.lines())


def test_steps_behind_no_checkpoint_are_not_behind_the_weights(run_dir: Path) -> None:
    """Killed behind 7, and the last checkpoint is of 4; also when a session went on from there and trained nothing."""
    session(run_dir, 0, range(1, 8))
    checkpoint(run_dir, 4)
    assert (recorded_certificate(run_dir).steps, recorded_certificate(run_dir).undone) == (4, 3)
    session(run_dir, 4, [])
    found = certify(run_dir, logprobs=False)
    assert found.holds
    assert (found.steps, found.undone) == (4, 3)


def test_a_deleted_journal_is_said(run_dir: Path) -> None:
    """'certified: 2 steps' of 6. Red when gaps are not looked for."""
    session(run_dir, 0, range(1, 5))
    (run_dir / "run.db").unlink()
    session(run_dir, 4, [5, 6])
    checkpoint(run_dir, 6)
    for found in (recorded_certificate(run_dir), certify(run_dir, logprobs=False)):
        assert not found.holds
        assert found.steps == 2
        assert found.problems[0] == (
            "4 of the 6 steps behind the weights are not in run.db and cannot be checked: 1 to 4"
        )


def test_two_runs_in_one_directory_are_said(run_dir: Path) -> None:
    """Each with a session of its own, writing in turns. Red when sessions are not noted."""
    run_dir.mkdir()
    write_resolved(run_dir / "resolved.json", RUN)
    with Journal(run_dir / "run.db") as one, Journal(run_dir / "run.db") as other:
        for journal in (one, other):
            journal.begin(0, 0)
            journal.flush()
        for step in (1, 2):
            for journal in (one, other):
                train(journal, step)
                journal.flush()
    checkpoint(run_dir, 2)
    found = certify(run_dir, logprobs=False)
    assert "two runs wrote into this directory at once" in found.problems[0]
    assert not recorded_certificate(run_dir).holds


def test_weights_of_another_run_are_said(run_dir: Path) -> None:
    """The checkpoint of a run that made another number of updates."""
    session(run_dir, 0, [1, 2])
    checkpoint(run_dir, 2, version=7)
    (problem,) = certify(run_dir, logprobs=False).problems
    assert problem.startswith("global_step_2 holds weights of version 7, but step 2 in run.db led to version 4")


def test_a_session_behind_other_weights_is_said(run_dir: Path) -> None:
    session(run_dir, 0, [1, 2])
    with Journal(run_dir / "run.db") as journal:
        journal.begin(2, 9)
        train(journal, 3)
    checkpoint(run_dir, 3)
    assert "that step in run.db led to version 4" in certify(run_dir, logprobs=False).problems[0]


def test_a_step_that_nothing_was_looked_at_in_is_said(run_dir: Path) -> None:
    """And one in which no logprob was compared."""
    session(run_dir, 0, [1, 2])
    checkpoint(run_dir, 2)
    with sqlite3.connect(run_dir / "run.db") as connection:
        connection.execute("DELETE FROM checks WHERE step = 1")
        connection.execute("""UPDATE steps SET metrics = '{"batch/loss_tokens": 9}' WHERE step = 2""")
    assert recorded_certificate(run_dir).problems == (
        "no check was recorded in 1 steps: 1",
        "no logprob was compared with the engine's in 1 steps: 2",
    )


def test_what_an_older_sharpen_did_not_store_is_named(run_dir: Path) -> None:
    """A directory without the tables that came later still certifies, by what it has."""
    session(run_dir, 0, [1, 2])
    checkpoint(run_dir, 2)
    with sqlite3.connect(run_dir / "run.db") as connection:
        for table in ("spans", "step_groups", "sessions", "step_sessions"):
            connection.execute(f"DROP TABLE {table}")
    found = certify(run_dir, logprobs=False)
    assert found.holds, found.problems
    assert found.not_recomputed[0].startswith(
        "weights, places, ids and updates of the trained tokens of 2 steps (1 to 2)"
    )
    with sqlite3.connect(run_dir / "run.db") as connection:
        connection.execute("UPDATE trained SET advantage = -advantage WHERE step = 2")
    assert any("was trained on" in problem for problem in certify(run_dir, logprobs=False).problems)


def test_settings_of_earlier_sessions_are_those_of_their_steps(run_dir: Path) -> None:
    """`resolved.until_step_N.json` holds for the steps up to N."""
    session(run_dir, 0, [1])
    shutil.move(run_dir / "resolved.json", run_dir / "resolved.until_step_1.json")
    other = resolved(**{"algorithm.batch_size": 2, "algorithm.group_size": 2, "loss.advantage": "rloo"})
    write_resolved(run_dir / "resolved.json", other)
    checkpoint(run_dir, 1)
    assert certify(run_dir, logprobs=False).holds
    (run_dir / "resolved.until_step_1.json").unlink()
    assert not certify(run_dir, logprobs=False).holds


def test_the_lineage_names_groups_and_versions(run_dir: Path) -> None:
    session(run_dir, 0, [1, 2])
    checkpoint(run_dir, 2)
    lineage = read_lineage(run_dir)
    assert lineage.groups == {1: (1, 2), 2: (3, 4)}
    assert (lineage.version_before(1), lineage.version_before(2)) == (0, 2)
    assert in_words([7, 1, 2, 4]) == "1 to 2, 4, 7"


def test_weights_on_another_disk_are_those_of_the_certificate(run_dir: Path, tmp_path: Path) -> None:
    """Red with the link resolved: the certificate named no weights, and was built over all records."""
    session(run_dir, 0, range(1, 6))
    checkpoint(run_dir, 3)
    (run_dir / "global_step_3").rename(tmp_path / "disk")
    (run_dir / "global_step_3").symlink_to(tmp_path / "disk")
    found = read_lineage(run_dir)
    assert found.weights is not None
    assert found.weights.name == "global_step_3"
    assert [record.step for record in found.steps] == [1, 2, 3]
