"""Replay through the whole line: what trains again, the certificate offline, a diagnosis, a kill in between."""

import contextlib
import json
import re
import shutil
import sqlite3
from pathlib import Path

import pytest
from killed_runs import run_killed

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.cli.main import main
from sharpen.errors import ConfigError
from sharpen.evidence.certificate.certify import certify
from sharpen.evidence.diagnose.diagnosis import diagnose, read_run
from sharpen.learning.experience.reading import read_groups, read_steps, read_trained
from sharpen.learning.trainer.checkpoint import load, pointed
from sharpen.types import noise_name, step_of_group

BATCH_SIZE = 3
REPLAY = {"sampling.replay_share": 0.7, "sampling.max_staleness": 4, "trainer.num_minibatches": 2}


async def letters(task, model):
    """Two calls, the second after the first one's answer; the reward is the share of the letter 'e'."""
    messages = [{"role": "user", "content": task["question"]}]
    text = ""
    for _ in range(2):
        reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=6)
        said = reply.choices[0].message.content or ""
        text += said
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
    return WorkflowOutput(reward=text.count("e") / 12)


def run(folder: Path, model: Path, dataset: Path, *, steps: int, algorithm: str = "grpo", settings=None, workflow=None):
    return tune(
        workflow_func=workflow or letters,
        train_dataset=DatasetConfig(path=str(dataset), split="train", total_steps=steps),
        eval_dataset=DatasetConfig(path=str(dataset), split="test"),
        model=TunerModelConfig(model_path=str(model), max_model_len=256, max_tokens=8),
        algorithm=AlgorithmConfig(
            algorithm_type=algorithm, group_size=4, batch_size=BATCH_SIZE, learning_rate=1e-2, save_interval_steps=3
        ),
        project_name="P",
        experiment_name="fixed",
        settings={
            "checkpoint_root_dir": str(folder),
            "evaluation.before_and_after": False,
            "check.enabled": False,
            "rollout.failure_reward": 0.0,
            "deterministic": True,
            "certificate.retrain": "off",
            "engine.max_slots": 12,
            **(REPLAY if settings is None else settings),
        },
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory, toy_model_dir, toy_dataset):
    """A run of seven steps with two minibatches each, in one go."""
    return run(tmp_path_factory.mktemp("replay"), toy_model_dir, toy_dataset, steps=7).run_dir


def rows(run_dir: Path) -> list[dict]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return list({row["step"]: row for row in lines if "rollout/count" in row}.values())


def trained_groups(run_dir: Path, step: int) -> tuple[set[str], set[str]]:
    """The ids of the groups that trained in a step: fresh ones, those that trained again."""
    found = {call.group_id for call in read_trained(run_dir / "run.db", step=step)}
    fresh = {id_ for id_ in found if step_of_group(id_) == step}
    return fresh, found - fresh


def give_former_ids(journal: Path) -> None:
    """Rename the groups and rollouts of a journal as earlier versions did: by the number of steps before."""
    columns = {
        "groups": ["id"],
        "rollouts": ["id", "group_id"],
        "trained": ["group_id", "rollout_id"],
        "spans": ["group_id", "rollout_id"],
        "entropies": ["rollout_id"],
        "entropy_sums": ["rollout_id"],
        "step_groups": ["group_id"],
    }
    with contextlib.closing(sqlite3.connect(journal)) as connection, connection:
        connection.create_function("former", 1, noise_name)
        for table, names in columns.items():
            connection.execute(f"UPDATE {table} SET {', '.join(f'{name} = former({name})' for name in names)}")


def former(value: object) -> str:
    """A value as text, with the ids of earlier versions."""
    return re.sub(r"step_\d+/", lambda found: noise_name(found[0]), str(value))


def test_groups_of_earlier_steps_train_again_and_nothing_is_rolled_out_twice(finished):
    """Red when `keep` (replay.py) is not called after the step, or `_outcome` (rollouts.py) counts replayed groups."""
    versions = {group.id: group.version for group in read_groups(finished / "run.db")}
    assert len(versions) == len(list(read_groups(finished / "run.db"))) == 7 * BATCH_SIZE
    start, replayed = 0, 0
    for row, record in zip(rows(finished), read_steps(finished / "run.db"), strict=True):
        _, again = trained_groups(finished, record.step)
        assert row["batch/groups_replayed"] == len(again) == (0 if record.step == 1 else 2)
        ages = [start - versions[id_] for id_ in again]
        assert row["batch/replay_age_max"] == max(ages, default=0) <= 4
        assert row["batch/replay_age_mean"] == pytest.approx(sum(ages) / len(ages) if ages else 0.0)
        assert row["batch/groups"] == BATCH_SIZE + len(again)
        assert row["rollout/count"] == 4 * BATCH_SIZE
        assert row["batch/replay_memory"] <= BATCH_SIZE * 3
        assert 0.0 < row["trainer/sample_share"] <= 1.0
        assert row["trainer/logprob_gap_tokens"] > 0
        start, replayed = record.version, replayed + len(again)
    assert replayed == 12
    assert max(row["batch/replay_uses_max"] for row in rows(finished)) >= 2


def test_the_certificate_holds_and_certify_draws_the_same_replay(finished):
    """Red when `certify` does not call `keep`, or `audit` gets no `replayed`."""
    found = certify(finished)
    assert found.holds, found.problems
    written = json.loads((finished / "certificate.json").read_text())
    assert json.loads(json.dumps(found.to_json()))["checks"] == written["checks"]
    checked = {check.name: check.checked for check in found.checks}
    assert checked["accounted"] == 7 * BATCH_SIZE * 4
    assert checked["replay"] == 12
    assert checked["groups"] == 7 * BATCH_SIZE + 12


def test_certify_sees_another_replay_than_the_seed_gives(finished, tmp_path):
    run_dir = shutil.copytree(finished, tmp_path / "run", symlinks=True)
    resolved = json.loads((run_dir / "resolved.json").read_text())
    resolved["seed"]["value"] = 5
    (run_dir / "resolved.json").write_text(json.dumps(resolved))
    problems = certify(run_dir, logprobs=False).problems
    assert any("replayed" in problem and "but the seed draws" in problem for problem in problems)
    run_dir = shutil.copytree(finished, tmp_path / "other", symlinks=True)
    _, again = trained_groups(run_dir, 4)
    with sqlite3.connect(run_dir / "run.db") as connection:
        connection.execute("DELETE FROM trained WHERE step = 4 AND group_id = ?", (sorted(again)[0],))
    problems = certify(run_dir, logprobs=False).problems
    assert all(problem.startswith("step 4: ") for problem in problems)
    assert problems


def test_a_diagnosis_does_not_take_replay_for_an_error(finished, capsys):
    assert not {found.name for found in diagnose(read_run(finished))} & {
        "excluded", "empty_masks", "kl_blow_up", "clip_fraction", "reward_scale", "zero_variance",
    }  # fmt: skip
    assert main(["diagnose", str(finished)]) == 0
    assert "replay" not in capsys.readouterr().out


def test_a_step_whose_fresh_groups_are_all_flat_trains_on_replayed_ones(tmp_path, toy_model_dir, toy_dataset):
    """Red when the loop passes no probe: nothing would be compared with the engine in such a step."""
    calls = 0

    async def flat_from_the_second_step(task, model):
        nonlocal calls
        calls += 1
        output = await letters(task, model)
        return output if calls <= 4 * BATCH_SIZE else WorkflowOutput(reward=0.5)

    settings = {**REPLAY, "sampling.max_refill": 0, "sampling.replay_priority": "recency"}
    result = run(
        tmp_path, toy_model_dir, toy_dataset, steps=3, algorithm="dapo", settings=settings,
        workflow=flat_from_the_second_step,
    )  # fmt: skip
    found = rows(result.run_dir)
    assert [row["batch/groups_dropped_flat"] for row in found] == [0, BATCH_SIZE, BATCH_SIZE]
    assert all(row["trainer/num_updates"] == 2 for row in found)
    assert all(row["trainer/logprob_gap_tokens"] > 0 for row in found)
    assert [trained_groups(result.run_dir, step)[0] for step in (2, 3)] == [set(), set()]
    certificate = certify(result.run_dir)
    assert certificate.holds, certificate.problems


def test_replay_that_would_be_wrong_is_refused_before_anything_is_loaded(tmp_path, toy_dataset):
    with pytest.raises(ConfigError, match="'reinforce' has no probability ratio"):
        run(tmp_path, tmp_path / "no model", toy_dataset, steps=1, algorithm="reinforce")


def test_trap_13_a_killed_run_goes_on_with_the_replay_of_an_uninterrupted_one(
    tmp_path, finished, toy_model_dir, toy_dataset
):
    """Killed in step 6, with the last checkpoint after step 3: steps 4 and 5 are done again, from the memory that step
    3 left, not that of step 5. Red when `run.assembly` does not restore the memory. What was killed is of an earlier
    version, whose ids count the steps before: red when a step is known by its id alone, or the noise follows the id."""
    run_dir = run_killed(run, letters, tmp_path, toy_model_dir, toy_dataset, recorded=5, steps=7)
    assert load(pointed(run_dir, "latest")).state["position"]["step"] == 3
    give_former_ids(run_dir / "run.db")
    run(tmp_path, toy_model_dir, toy_dataset, steps=7)
    ids = {group.id for group in read_groups(run_dir / "run.db")}
    assert {id_[:5] for id_ in ids} == {"step-", "step_"}
    for step in range(1, 8):
        groups = trained_groups(run_dir, step)
        assert groups[0] & ids == groups[0]
        assert [{former(id_) for id_ in some} for some in groups] == [
            {former(id_) for id_ in some} for some in trained_groups(finished, step)
        ]
        ours, theirs = (read_trained(folder / "run.db", step=step) for folder in (run_dir, finished))
        assert former(ours) == former(theirs)
    names = ("batch/groups_replayed", "batch/replay_age_mean", "batch/replay_uses_max", "batch/replay_memory")
    for ours, theirs in zip(rows(run_dir), rows(finished), strict=True):
        assert [ours[name] for name in names] == [theirs[name] for name in names]
    assert (pointed(run_dir, "latest") / "model.safetensors").read_bytes() == (
        pointed(finished, "latest") / "model.safetensors"
    ).read_bytes()
    found = certify(run_dir)
    assert found.holds, found.problems
    staleness = {check.name: check for check in found.checks}["staleness"]
    assert staleness.checked
    assert not staleness.broken
