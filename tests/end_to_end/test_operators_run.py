"""Operators through a whole run: on tasks, on rollouts, of one's own, the certificate of what they left, and the table
of it in a monitor."""

import json
import sys
from pathlib import Path

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.evidence.certificate.certify import certify
from sharpen.learning.experience.reading import read_groups, read_trained
from sharpen.types import Outcome


async def letters(task, model):
    messages = [{"role": "user", "content": task["question"]}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=6)
    text = reply.choices[0].message.content or ""
    return WorkflowOutput(reward=text.count("e") / 6, metrics={"length": float(len(text))})


OWN = """
from dataclasses import replace
from sharpen.agent.operators import drop, with_reward

def by_index(groups, bonus):
    def changed(rollout):
        if rollout.index == 3:
            return drop(rollout, "the last one")
        return with_reward(rollout, rollout.reward + bonus * rollout.index)
    return [replace(group, rollouts=tuple(map(changed, group.rollouts))) for group in groups]
"""

TRACKIO = """
logged = []

class Table:
    def __init__(self, data):
        self.rows = data

class Run:
    def log(self, metrics, step):
        logged.append((step, metrics))

    def finish(self):
        pass

def init(**options):
    return Run()
"""


def test_what_operators_leave_is_trained_and_certified(
    tmp_path: Path, toy_model_dir: Path, toy_dataset: Path, monkeypatch, capsys
):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "trackio.py").write_text(TRACKIO)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = tune(
        workflow_func=letters,
        train_dataset=DatasetConfig(path=str(toy_dataset), split="train", total_steps=2),
        model=TunerModelConfig(model_path=str(toy_model_dir), max_model_len=96),
        algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=4, batch_size=3, learning_rate=1e-3),
        monitor_type="trackio",
        settings={
            "monitor_rollouts": 3,
            "checkpoint_root_dir": str(tmp_path / "runs"),
            "evaluation.before_and_after": False,
            "rollout.max_excluded_share": 0.0,
            "sampling.task_operators": [{"name": "random_sample", "args": {"count": 5}}],
            "sampling.operators": [{"name": f"{tmp_path / 'own.py'}:by_index", "args": {"bonus": 0.5}}],
        },
    )
    assert "5 of 36 training tasks are left" in capsys.readouterr().out
    groups = list(read_groups(found.run_dir / "run.db"))
    assert len({group.task.id for group in groups if group.id.startswith("step_")}) <= 5
    steps = [group for group in groups if group.id.startswith("step_")]
    assert {rollout.outcome for group in steps for rollout in group.rollouts if rollout.index == 3} == {
        Outcome.FILTERED
    }
    for rollout in (rollout for group in steps for rollout in group.rollouts if rollout.index == 2):
        assert rollout.reward == rollout.metrics["reward_before"] + 1.0
    trained = {call.rollout_id for call in read_trained(found.run_dir / "run.db")}
    assert trained
    assert not any(rollout_id.endswith("/3") for rollout_id in trained)
    assert not certify(found.run_dir).problems
    metrics = [json.loads(line) for line in (found.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["rollout/dropped"] for row in metrics if "rollout/dropped" in row] == [3.0, 3.0]
    check_tables(sys.modules.pop("trackio").logged, {one.id: one for group in steps for one in group.rollouts})


def check_tables(logged, recorded):
    """Each step has a table with as many rollouts as asked for, as they were recorded."""
    tables = {step: metrics["rollouts"].rows for step, metrics in logged if "rollouts" in metrics}
    assert {step: len(rows) for step, rows in tables.items()} == {1: 3, 2: 3}
    for row in (row for rows in tables.values() for row in rows):
        (call,) = recorded[row["rollout"]].calls
        assert row["reward"] == recorded[row["rollout"]].reward
        assert row["conversation"] == f"user: {call.messages[0]['content']}\n\nassistant: {call.response['content']}"
