"""What the tests of `sharpen init` have in common: write a folder, train one step in it."""

from __future__ import annotations

from pathlib import Path

SMALL = {
    "train_dataset.total_steps": 1,
    "algorithm.batch_size": 2,
    "algorithm.group_size": 2,
    "evaluation.max_tasks": 1,
    "model.max_model_len": 128,
    "model.max_tokens": 4,
    "check.enabled": "false",
    "name": "one",
}


def check_starter(folder: Path, model: Path, framework: str = "agentscope") -> str:
    """Write a starter and train a step with a random model, whose rewards are all 0: agent, judge, tasks and settings
    fit together. Gives the text of its `agent.py`."""
    from sharpen.cli.main import main
    from sharpen.learning.experience.reading import read_groups

    starter = folder / framework
    assert main(["init", str(starter), "--from", framework, "--model", str(model)]) == 0
    settings = SMALL | {"checkpoint_root_dir": folder / "runs"}
    overrides = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    assert main(["run", "--config", str(starter / "run.yaml"), *overrides]) == 0
    rollouts = [r for group in read_groups(folder / "runs/Sharpen/one/run.db") for r in group.rollouts]
    assert len(rollouts) == 4
    for rollout in rollouts:
        assert (rollout.outcome, len(rollout.calls)) == ("ok", 1), rollout.error
        assert [message["role"] for message in rollout.calls[0].messages] == ["system", "user"]
    return (starter / "agent.py").read_text()
