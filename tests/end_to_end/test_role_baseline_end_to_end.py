"""Moving baselines of roles through the whole line: in checkpoints, over a pause, in the certificate."""

import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.errors import DatasetError
from sharpen.evidence.certificate.certify import certify
from sharpen.evidence.certificate.plain.retrain import retrain
from sharpen.learning.trainer.checkpoint import load, pointed


async def plays(task, model):
    """The second player's reward is 1 less."""
    messages = [{"role": "user", "content": task["question"]}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=6)
    return WorkflowOutput(reward=(reply.choices[0].message.content or "").count("e") / 6 - task["player"])


def run(folder: Path, model: Path, *, steps: int, roles: list[str] | None = None):
    rows = folder / "rows"
    rows.mkdir(exist_ok=True)
    lines = [json.dumps({"question": f"q{number}", "player": number % 2}) for number in range(8)]
    (rows / "train.jsonl").write_text("\n".join(lines) + "\n")
    return tune(
        workflow_func=plays,
        train_dataset=DatasetConfig(path=str(rows), split="train", total_steps=steps),
        model=TunerModelConfig(model_path=str(model), max_model_len=256, max_tokens=8),
        algorithm=AlgorithmConfig(
            algorithm_type="rae", group_size=1, batch_size=4, learning_rate=1e-2, save_interval_steps=2
        ),
        project_name="P",
        experiment_name="fixed",
        settings={
            "checkpoint_root_dir": str(folder / "runs"),
            "loss.advantage_args": {"roles": roles or ["player"], "decay": 0.8},
            "evaluation.before_and_after": False,
            "evaluation.hold_out": 0,
            "check.enabled": False,
            "rollout.failure_reward": 0.0,
            "deterministic": True,
        },
    ).run_dir


def numbers(run_dir: Path) -> list[dict[str, float]]:
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{name: one for name, one in row.items() if name.startswith("baseline/")} for row in rows]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, toy_model_dir):
    """Five steps in one go."""
    return run(tmp_path_factory.mktemp("roles"), toy_model_dir, steps=5)


def test_each_player_has_a_baseline_and_the_certificate_follows_it(finished):
    found = certify(finished)
    assert found.holds, found.problems
    last = numbers(finished)[-1]
    assert last["baseline/1"] < -0.5 < last["baseline/0"]
    saved = load(pointed(finished, "latest")).state["position"]["roles"]
    assert {f"baseline/{role}": one for role, one in saved.items()} == last


def test_a_run_that_paused_goes_on_with_its_baselines(finished, tmp_path, toy_model_dir):
    run(tmp_path, toy_model_dir, steps=3)
    continued = run(tmp_path, toy_model_dir, steps=5)
    assert numbers(continued) == numbers(finished)
    assert certify(continued, logprobs=False).holds


def test_the_updates_made_once_more_have_the_same_advantages(finished):
    made = retrain(finished)
    assert made.repeated
    assert not made.problems, made.problems


def test_rewards_of_a_step_that_are_gone_or_changed_are_said(finished, tmp_path):
    run_dir = shutil.copytree(finished, tmp_path / "gone", symlinks=True)
    with sqlite3.connect(run_dir / "run.db") as connection:
        connection.execute("DELETE FROM steps WHERE step = 2")
    problems = " ".join(certify(run_dir, logprobs=False).problems)
    assert "step 3 cannot be checked: it compares with baselines that follow from the rewards of all steps" in problems
    run_dir = shutil.copytree(finished, tmp_path / "changed", symlinks=True)
    with sqlite3.connect(run_dir / "run.db") as connection:
        connection.execute("UPDATE rollouts SET reward = reward + 1 WHERE key = 1")
    problems = certify(run_dir, logprobs=False).problems
    assert any(problem.startswith("step 2: ") and "with advantage" in problem for problem in problems)


def test_a_task_without_a_role_is_refused_at_the_start(tmp_path, toy_model_dir):
    with pytest.raises(DatasetError, match="roles has 'side', and task train/0 has no such field"):
        run(tmp_path, toy_model_dir, steps=1, roles=["side"])
