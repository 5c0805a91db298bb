"""A run that drops the text of old steps: what is left, what the certificate says, what commands say."""

import json
import shutil
import sqlite3
from contextlib import closing

import pytest

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.cli.main import main
from sharpen.errors import ConfigError
from sharpen.evidence.certificate.certify import certify
from sharpen.learning.experience.journal import Journal
from sharpen.learning.experience.reading import read_groups, step_of_group

SAID = "a phrase of the agent"


async def two_calls(task, model):
    messages = [{"role": "system", "content": SAID}, {"role": "user", "content": task["question"]}]
    text = ""
    for _ in range(2):
        reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=6)
        said = reply.choices[0].message.content or ""
        text += said
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
    return WorkflowOutput(reward=text.count("e") / 12, response=text)


def run(folder, model, dataset, *, steps, algorithm="grpo", **settings):
    return tune(
        workflow_func=two_calls,
        train_dataset=DatasetConfig(path=str(dataset), split="train", total_steps=steps),
        model=TunerModelConfig(model_path=str(model), max_model_len=256, max_tokens=8),
        algorithm=AlgorithmConfig(
            algorithm_type=algorithm, group_size=4, batch_size=3, learning_rate=1e-2, save_interval_steps=1
        ),
        project_name="P",
        experiment_name="trimmed",
        settings={
            "checkpoint_root_dir": str(folder),
            "trainer.keep_checkpoints": 10,
            "evaluation.before_and_after": False,
            "check.enabled": False,
            "certificate.retrain": "off",
            "rollout.failure_reward": 0.0,
            **settings,
        },
    ).run_dir


@pytest.fixture(scope="module")
def finished(tmp_path_factory, toy_model_dir, toy_dataset):
    """Two steps that keep all text, then two more of the same run that keep that of one step."""
    folder = tmp_path_factory.mktemp("trimmed")
    run(folder, toy_model_dir, toy_dataset, steps=2)
    return run(folder, toy_model_dir, toy_dataset, steps=4, **{"journal.keep_steps": 1})


@pytest.fixture
def copied(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run", symlinks=True)


def test_only_the_last_steps_have_text_and_all_have_numbers(finished):
    """Red when a run does not trim after its checkpoints, or trims steps that it was to keep."""
    for group in read_groups(finished / "run.db"):
        old = step_of_group(group.id) <= 3
        for rollout in group.rollouts:
            assert rollout.trimmed is old
            assert [len(call.messages) for call in rollout.calls] == ([0, 0] if old else [2, 4])
            assert all(len(call.logprobs_S) == len(call.sampled_ids_S) > 0 for call in rollout.calls)
    # The last step's prompts only, each once for a rollout: what follows builds on it.
    assert (finished / "run.db").read_bytes().count(SAID.encode()) == 3 * 4


def test_the_certificate_says_what_it_checked_and_what_is_gone(finished, capsys):
    whole = certify(finished)
    assert whole.holds, whole.problems
    assert whole.logprob_gaps.num_tokens == sum(
        len(call.sampled_ids_S)
        for group in read_groups(finished / "run.db")
        for r in group.rollouts
        for call in r.calls
    )
    checked = {check.name: (check.checked, check.broken) for check in whole.checks}
    noted = json.loads((finished / "certificate.json").read_text())["checks"]
    assert checked == {check["name"]: (check["checked"], check["broken"]) for check in noted}
    (gone,) = whole.not_recomputed
    assert "36 rollouts of steps 1 to 3" in gone
    assert "journal.keep_steps" in gone
    assert main(["certify", str(finished), "--no-logprobs"]) == 0
    assert "except for what was not recomputed" in capsys.readouterr().out


def test_numbers_that_changed_are_found_in_trimmed_steps_too(copied):
    with closing(sqlite3.connect(copied / "run.db")) as connection, connection:
        connection.execute("UPDATE rollouts SET reward = reward + 0.5 WHERE idx = 0 AND group_id GLOB 'step_1/*'")
    problems = certify(copied, logprobs=False).problems
    assert any(problem.startswith("step 1: ") and "expected" in problem for problem in problems)


def test_evaluations_of_old_steps_lose_their_text_too(tmp_path, toy_model_dir, toy_dataset, capsys):
    """Red before: `evaluations.db` grew by what each of them said. Those before and after the training are compared."""
    folder = run(
        tmp_path,
        toy_model_dir,
        toy_dataset,
        steps=3,
        **{
            "journal.keep_steps": 1,
            "evaluation.before_and_after": True,
            "algorithm.eval_interval_steps": 1,
            "evaluation.max_tasks": 2,
            "eval_dataset.path": str(toy_dataset),
            "eval_dataset.split": "train",
        },
    )
    groups = list(read_groups(folder / "evaluations.db"))
    trimmed = {group.id.split("/")[0]: group.rollouts[0].trimmed for group in groups}
    assert trimmed == {"before": False, "step-1": True, "step-2": False, "after": False}
    task = groups[0].task.id
    assert main(["show", str(folder), "--task", task]) == 0
    assert SAID in capsys.readouterr().out
    old = next(group.rollouts[0] for group in groups if group.rollouts[0].trimmed)
    assert main(["show", str(folder), "--rollout", old.id]) == 0
    assert "journal.keep_steps" in capsys.readouterr().out
    assert main(["report", str(folder)]) == 0


def test_states_that_only_text_showed_cannot_be_certified(tmp_path, toy_model_dir, toy_dataset):
    """Refused before the run; a journal that was trimmed all the same does not hold, and says which step."""
    with pytest.raises(ConfigError, match=r"journal\.keep_steps is 1.*gigpo"):
        run(tmp_path, toy_model_dir, toy_dataset, steps=1, algorithm="gigpo", **{"journal.keep_steps": 1})
    folder = run(tmp_path, toy_model_dir, toy_dataset, steps=2, algorithm="gigpo")
    assert certify(folder, logprobs=False).holds
    with Journal(folder / "run.db") as journal:
        journal.trim(1)
    (problem,) = certify(folder, logprobs=False).problems
    assert problem.startswith("step 1 cannot be checked")


def test_commands_say_that_text_was_dropped(finished, tmp_path, capsys):
    gone, there = "step_1", "step_4"
    assert main(["show", str(finished), "--step", "1"]) == 0
    assert "journal.keep_steps" in capsys.readouterr().out
    names = {group.id.split("/")[0]: group.rollouts[0].id for group in read_groups(finished / "run.db")}
    assert main(["show", str(finished), "--rollout", names[gone]]) == 0
    shown = capsys.readouterr().out
    assert "journal.keep_steps" in shown
    assert "asks the same" not in shown
    assert main(["show", str(finished), "--rollout", names[there]]) == 0
    shown = capsys.readouterr().out
    assert SAID in shown
    assert "journal.keep_steps" not in shown
    assert main(["show", str(finished), "--rollout", names[gone], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trimmed"] is True
    rows = tmp_path / "rows.jsonl"
    assert main(["export", str(finished), "--for", "sft", "--min-reward", "0", "--to", str(rows)]) == 0
    assert "left out: 36 rollouts whose text the run dropped" in capsys.readouterr().out
    assert {json.loads(line)["rollout"].split("/")[0] for line in rows.read_text().splitlines()} == {there}
    (tmp_path / "judge.py").write_text("async def judge(task, response):\n    assert response\n    return 1.0\n")
    assert main(["rescore", str(finished), "--judge", f"{tmp_path / 'judge.py'}:judge"]) == 0
    said = capsys.readouterr()
    assert "36 cannot be judged" in said.out + said.err
    assert "the judge failed" not in said.out + said.err


def test_a_run_without_any_text_left_is_said_to_have_none(copied, tmp_path, capsys):
    with Journal(copied / "run.db") as journal:
        journal.trim(4)
    assert main(["export", str(copied), "--for", "dpo", "--to", str(tmp_path / "rows.jsonl")]) == 2
    assert "48 rollouts whose text the run dropped" in capsys.readouterr().err
    (tmp_path / "judge.py").write_text("async def judge(task, response):\n    return 1.0\n")
    assert main(["rescore", str(copied), "--judge", f"{tmp_path / 'judge.py'}:judge"]) == 1
    assert main(["diagnose", str(copied)]) in (0, 1)
    assert main(["report", str(copied)]) == 0
