"""Operators through a whole run: on tasks, on rollouts, of one's own, and the certificate of what they left."""

import json
from pathlib import Path

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.certificate.certify import certify
from sharpen.experience.reading import read_groups, read_trained
from sharpen.types import Outcome


async def letters(task, model):
    messages = [{"role": "user", "content": task["question"]}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=6)
    text = reply.choices[0].message.content or ""
    return WorkflowOutput(reward=text.count("e") / 6, metrics={"length": float(len(text))})


OWN = """
from dataclasses import replace
from sharpen.operators import drop, with_reward

def by_index(groups, bonus):
    def changed(rollout):
        if rollout.index == 3:
            return drop(rollout, "the last one")
        return with_reward(rollout, rollout.reward + bonus * rollout.index)
    return [replace(group, rollouts=tuple(map(changed, group.rollouts))) for group in groups]
"""


def test_what_operators_leave_is_trained_and_certified(tmp_path: Path, toy_model_dir: Path, toy_dataset: Path, capsys):
    (tmp_path / "own.py").write_text(OWN)
    found = tune(
        workflow_func=letters,
        train_dataset=DatasetConfig(path=str(toy_dataset), split="train", total_steps=2),
        model=TunerModelConfig(model_path=str(toy_model_dir), max_model_len=96),
        algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=4, batch_size=3, learning_rate=1e-3),
        settings={
            "checkpoint_root_dir": str(tmp_path / "runs"),
            "evaluation.before_and_after": False,
            "rollout.max_excluded_share": 0.0,
            "sampling.task_operators": [{"name": "random_sample", "args": {"count": 5}}],
            "sampling.operators": [{"name": f"{tmp_path / 'own.py'}:by_index", "args": {"bonus": 0.5}}],
        },
    )
    assert "5 of 36 training tasks are left" in capsys.readouterr().out
    groups = list(read_groups(found.run_dir / "run.db"))
    assert len({group.task.id for group in groups if group.id.startswith("step-")}) <= 5
    steps = [group for group in groups if group.id.startswith("step-")]
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
