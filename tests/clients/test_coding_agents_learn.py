"""Each coding agent is trained for two steps: a tiny model that was taught its format, a judge that reads the folder.

It sends a short prompt here (see `coding_agents`); docs/use/clients.md says what its own costs. The model is taught
more than one recording of the same: what differs between them is not to be said.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from coding_agents import AGENTS

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.certificate.certify import certify
from sharpen.experience.reading import read_groups, read_trained

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
RECORDINGS = 2
STEPS, GROUP = 2, 4


def workflow_of(name: str) -> Any:
    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        ended = await model.run(**AGENTS[name].start(task["question"], model, short=True), timeout_s=300)
        wrote = "answer.txt" in ended.created and ended.read_text("answer.txt") == "5\n"
        return WorkflowOutput(reward=float(wrote), response=ended.stdout)

    return workflow


@pytest.mark.parametrize("name", AGENTS)
def test_it_is_trained(name: str, tmp_path: Path) -> None:
    from coding_agent.teach import Conversation, record, teach

    task = {"question": "Write 5 into answer.txt."}
    (tmp_path / "train.jsonl").write_text(json.dumps(task) + "\n")
    diligent = record(workflow_of(name), [(task, AGENTS[name].says, 0.5)] * RECORDINGS)
    lazy = [Conversation(pieces=(each.pieces[0], ("Done.<|im_end|>", True)), share=0.5) for each in diligent]
    start = teach([*diligent, *lazy], tmp_path / "model", num_steps=100)
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
    assert {len(rollout.calls) for rollout in rollouts} <= {1, 2}
    assert any(call.parent == 0 for rollout in rollouts for call in rollout.calls)
    assert any(call.num_tokens > 0 for call in read_trained(journal))
