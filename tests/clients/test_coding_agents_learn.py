"""Each coding agent is trained for two steps: a tiny model that was taught its format, a judge that reads the folder.

It sends a short prompt here (see `coding_agents`); docs/use/clients.md says what its own costs. The model sees little
of it: not the names of folders, which differ from run to run. It always writes the file, and any of six digits into it:
both groups have four equal rewards in one of 46,000 runs.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from coding_agents import AGENTS

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.evidence.certificate.certify import certify
from sharpen.learning.experience.reading import read_groups, read_trained

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
DIGITS = range(3, 9)
STEPS, GROUP = 2, 4
WINDOW = 16


def workflow_of(name: str) -> Any:
    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        ended = await model.run(**AGENTS[name].start(task["question"], model, short=True), timeout_s=300)
        wrote = ended.read_text("answer.txt").strip() if "answer.txt" in ended.created else ""
        return WorkflowOutput(reward=int(wrote) / 10 if wrote.isdecimal() else 0.0, response=ended.stdout)

    return workflow


def writing(recorded: Any, digit: int) -> Any:
    """The same conversation, but that the model writes another digit."""
    pieces = [(text.replace("echo 5", f"echo {digit}") if said else text, said) for text, said in recorded.pieces]
    return replace(recorded, pieces=tuple(pieces))


@pytest.mark.parametrize("name", AGENTS)
def test_it_is_trained(name: str, tmp_path: Path) -> None:
    from coding_agent.teach import record, teach

    task = {"question": "Write a digit into answer.txt."}
    (tmp_path / "train.jsonl").write_text(json.dumps(task) + "\n")
    recorded = record(workflow_of(name), [(task, AGENTS[name].says, 1.0)])
    conversations = [writing(each, digit) for each in recorded for digit in DIGITS]
    start = teach(conversations, tmp_path / "model", num_steps=100, window=WINDOW)
    result = tune(
        workflow_func=workflow_of(name),
        train_dataset=DatasetConfig(path=str(tmp_path), split="train", total_steps=STEPS),
        model=TunerModelConfig(model_path=str(start), max_model_len=8192, max_tokens=120),
        algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=GROUP, batch_size=1, learning_rate=3e-4),
        settings={"checkpoint_root_dir": str(tmp_path / "runs"), "check": {"enabled": False}},
    )
    assert result.steps == STEPS
    assert certify(result.run_dir).holds
    journal = result.run_dir / "run.db"
    rollouts = [rollout for group in read_groups(journal) for rollout in group.rollouts]
    assert [rollout.outcome for rollout in rollouts] == ["ok"] * (STEPS * GROUP)
    assert [[call.parent for call in rollout.calls] for rollout in rollouts] == [[None, 0]] * (STEPS * GROUP)
    assert any(call.num_tokens > 0 for call in read_trained(journal))
