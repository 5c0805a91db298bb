"""Real runs of a toy model with one cause planted in each, and one that learns."""

import argparse
import io
import json
from collections import Counter

import pytest

from sharpen import AlgorithmConfig, DatasetConfig, JudgeOutput, TunerModelConfig, WorkflowOutput, tune
from sharpen.cli.diagnose import run_diagnose
from sharpen.errors import ConfigError, RolloutError
from sharpen.evidence.diagnose.data import by_group
from sharpen.evidence.diagnose.diagnosis import diagnose, read_rows, read_run
from sharpen.learning.experience.journal import Journal
from sharpen.types import Group, Outcome, Rollout, Task


async def answers(task, model):
    """One call of eight tokens."""
    reply = await model.client.chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": task["question"]}], max_tokens=8
    )
    text, reason = reply.choices[0].message.content or "", reply.choices[0].finish_reason
    return WorkflowOutput(response={"text": text, "reason": reason, "question": task["question"]})


def lower_case(text):
    return [letter for letter in text if letter.islower() and letter.isascii()]


async def lower(task, response):
    """The share of lower-case letters: many texts have it, so that a policy can learn without collapsing."""
    return JudgeOutput(reward=len(lower_case(response["text"])) / max(1, len(response["text"])))


async def varied(task, response):
    """Many different lower-case letters: whoever says the same token again and again gets nothing."""
    return JudgeOutput(reward=max(0, len(set(lower_case(response["text"]))) - 5) / 5)


async def nothing(task, response):
    return JudgeOutput(reward=0.0)


async def letter(task, response):
    """The share of the letter e: what pays is a text of nothing else."""
    return JudgeOutput(reward=response["text"].count("e") / 8)


async def ending(task, response):
    """Right if the answer came to its end."""
    return JudgeOutput(reward=float(response["reason"] == "stop"))


async def breaks(task, response):
    if int(response["question"].removeprefix("question ")) % 3 == 0:
        raise KeyError("answer")
    return await lower(task, response)


async def always_breaks(task, response):
    raise KeyError("answer")


@pytest.fixture
def run(tmp_path, toy_model_dir, toy_dataset):
    def start(judge, *, steps, learning_rate=2e-2, tasks=4, **settings):
        result = tune(
            workflow_func=answers,
            judge_func=judge,
            train_dataset=DatasetConfig(path=str(toy_dataset), split="train", total_steps=steps),
            model=TunerModelConfig(model_path=str(toy_model_dir), max_model_len=128, max_tokens=8),
            algorithm=AlgorithmConfig(group_size=8, batch_size=tasks, learning_rate=learning_rate),
            settings={
                "checkpoint_root_dir": str(tmp_path),
                "loss.kl": "none",
                "deterministic": True,
                "evaluation": {"before_and_after": False, "hold_out": False},
                "check.enabled": False,
                **settings,
            },
        )
        return result.run_dir

    return start


def named(run_dir):
    return [finding.name for finding in diagnose(read_run(run_dir))]


def test_a_run_that_learns_has_no_findings(run):
    run_dir = run(lower, steps=10, learning_rate=3e-2)
    data = read_run(run_dir)
    assert data.reward.late > data.reward.early + 0.3
    assert named(run_dir) == []
    out = io.StringIO()
    assert run_diagnose(argparse.Namespace(run=str(run_dir), root=None, json=False), out) == 0
    assert out.getvalue().splitlines()[1:] == ["no cause found for a flat reward"]


def test_a_judge_that_always_gives_zero(run):
    run_dir = run(nothing, steps=3)
    assert named(run_dir)[0] == "all_wrong"
    out = io.StringIO()
    assert run_diagnose(argparse.Namespace(run=str(run_dir), root=None, json=False), out) == 0
    lines = out.getvalue().splitlines()
    assert lines[0] == "3 steps, mean reward 0.000 -> 0.000 (first and last steps)"
    assert "1. all_wrong" in lines
    assert any(line.startswith("    see: step_1/train/") for line in lines)
    assert max(map(len, (line for line in lines if str(run_dir) not in line))) <= 100


def test_a_judge_that_fails_on_some_tasks(run):
    run_dir = run(breaks, steps=2, **{"rollout.max_excluded_share": 1.0, "rollout.max_attempts": 2})
    found = diagnose(read_run(run_dir))[0]
    assert found.name == "judge_failures"
    assert "KeyError" in found.quotes[0]
    rollouts = {seen.id: seen.outcome for seen in read_run(run_dir).last}
    assert [rollouts[id_] for id_ in found.examples] == ["judge_error"] * 3


def test_a_run_that_its_judge_stopped_can_be_diagnosed_without_any_step(run, tmp_path):
    with pytest.raises(RolloutError):
        run(always_breaks, steps=2, **{"rollout.max_attempts": 1})
    (run_dir,) = (tmp_path / "Sharpen").iterdir()
    data = read_run(run_dir)
    assert data.rows == ()
    assert [finding.name for finding in diagnose(data)][:2] == ["ended_by_an_error", "judge_failures"]


def test_answers_cut_off_before_they_end(run):
    assert named(run(ending, steps=3))[0] == "truncation"


def test_a_learning_rate_of_next_to_nothing(run):
    assert named(run(lower, steps=12, learning_rate=1e-9)) == ["learning_rate_too_low"]


def test_a_learning_rate_far_too_high(run):
    """Which way such a run goes is chance, and another on another processor: the first that had learnt and lost it. The
    seeds begin with one of which one run was enough where it was tried."""
    for seed in (2, 4, 3, 5, 6, 1):
        data = read_run(run(varied, steps=20, learning_rate=0.3, tasks=2, seed=seed))
        rewards = data.values("reward/mean")
        if max(rewards) > 0.1 > 0.05 > sum(rewards[-5:]) / 5:
            break
    else:
        pytest.fail("no run had learnt something, and lost it")
    found = diagnose(data)[0]
    assert found.name == "learning_rate_too_high"
    assert "entropy" in found.what


def test_a_judge_that_pays_for_repetitions(run):
    """Not every run finds many texts of the letter; the first that comes to one, with the surest seed first."""
    for seed in (1, 3, 2, 4, 0, 5):
        data = read_run(run(letter, steps=16, learning_rate=4e-2, seed=seed))
        if Counter(seen.fingerprint for seen in data.last).most_common(1)[0][1] > len(data.last) / 4:
            break
    else:
        pytest.fail("no run came to one text")
    assert diagnose(data)[0].name == "degenerate_text"


def test_of_a_long_run_only_both_ends_are_read(tmp_path):
    write_settings(tmp_path)
    with Journal(tmp_path / "run.db") as journal:
        for number in range(200):
            journal.add(tiny_group(number))
    data = read_run(tmp_path)
    assert list(by_group(data.first)) == [f"step-{number}/t" for number in range(24)]
    assert list(by_group(data.last)) == [f"step-{number}/t" for number in range(176, 200)]
    assert data.outcomes == {"ok": 400}


def write_settings(folder, **more):
    settings = {"train_dataset.path": "data", "model.model_path": "model", "model.max_model_len": 64, **more}
    resolved = {name: {"value": value, "origin": "argument"} for name, value in settings.items()}
    (folder / "resolved.json").write_text(json.dumps(resolved))
    (folder / "metrics.jsonl").write_text("")


def test_settings_of_another_version_are_told(tmp_path):
    write_settings(tmp_path, **{"rollout.attempts": 3})
    Journal(tmp_path / "run.db").close()
    with pytest.raises(ConfigError, match=r"is from another version of Sharpen.*rollout\.attempts"):
        read_run(tmp_path)


def tiny_group(number):
    name = f"step-{number}/t"
    values = {"group_id": name, "task_id": "t", "attempt": 0, "calls": (), "outcome": Outcome.OK}
    rollouts = tuple(Rollout(id=f"{name}/{index}", index=index, reward=float(index), **values) for index in range(2))
    return Group(id=name, task=Task(id="t", index=0, row={}), version=number, rollouts=rollouts)


def test_a_run_directory_is_needed(tmp_path):
    with pytest.raises(ConfigError, match=r"it has no run\.db"):
        read_run(tmp_path)


def test_rows_merge_what_one_step_logged_in_parts_and_leave_out_what_is_no_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    parts = [
        {"step": 0, "time": 1.0, "eval/greedy/accuracy": 0.1},
        {"step": 1, "time": 1.0, "rollout/count": 8.0, "reward/mean": None},
        {"step": 1, "time": 2.0, "eval/greedy/accuracy": 0.2},
    ]
    path.write_text("".join(json.dumps(part) + "\n" for part in parts) + '{"step": 2, "rollo')
    (row,) = read_rows(path)
    assert row.step == 1
    assert row.metrics == {"time": 2.0, "rollout/count": 8.0, "eval/greedy/accuracy": 0.2}
