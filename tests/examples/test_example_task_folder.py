"""The example with Harbor's task folders: each task by its solution and by nothing, and two steps of training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lines import different
from scripted_models import Scripted, tool_call

from sharpen import EnvironmentConfig
from sharpen.agent.environments.harbor import Harbor

TASKS = Path(__file__).parents[2] / "examples" / "task_folder" / "tasks"
CONFIG = EnvironmentConfig(type="harbor", id=str(TASKS), args={"sandbox": "root"})


@pytest.mark.parametrize("solved", [True, False])
def test_the_tests_know_a_solution(scripted: Callable[..., Scripted], play: Callable[..., Any], solved: bool) -> None:
    from task_folder.main import behaviours

    harbor = Harbor(CONFIG)
    rows = [dict(row) for split in ("train", "test") for row in harbor.tasks(split)]
    right = {task["name"]: say("") for task, say, share in behaviours(rows, TASKS) if share == 0.3}
    assert len(right) == 3
    for task in rows:
        call = json.loads(right[task["name"]].split("\n")[1])
        model = scripted(*([tool_call("bash", json.dumps(call["arguments"]))] if solved else []), "Done.")
        output = play(harbor.workflow, models=[model], task=task, model=model)
        assert play(harbor.judge, models=[], task=task, response=output.response).reward == float(solved)


@pytest.mark.parametrize("line", different("examples/task_folder/main.py"), ids=" ".join)
def test_two_steps_of_training(line: list[str], tmp_path: Path, short: list[str]) -> None:
    """By a model whose lessons were cut short."""
    from task_folder.main import main, tiny_model

    from sharpen.learning.experience.reading import read_groups

    tiny = tiny_model(CONFIG, tmp_path / "model", num_steps=2)
    result = main([*line, *short, f"--data={TASKS}", f"--model={tiny}", "--sandbox=root"])
    rollouts = [rollout for group in read_groups(result.run_dir / "run.db") for rollout in group.rollouts]
    assert (result.steps, {rollout.outcome for rollout in rollouts}) == (2, {"ok"})
    assert all(rollout.calls and "commands" in rollout.metrics for rollout in rollouts)
    recorded = json.loads((result.run_dir / "resolved.json").read_text())
    assert recorded["identity.train_dataset"]["value"]["rows"] == 2
