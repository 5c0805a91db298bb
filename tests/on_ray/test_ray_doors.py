"""Parts of somebody's own reach the actors of Ray: each imports them by the name in the settings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.learning.experience.reading import read_groups

EXTEND = Path(__file__).parents[2] / "examples" / "extend"


async def letters(task: Any, model: Any) -> WorkflowOutput:
    """One call, rewarded for the letter 'e'."""
    reply = await model.client.chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": task["question"]}], max_tokens=8
    )
    return WorkflowOutput(reward=(reply.choices[0].message.content or "").count("e") / 8)


def test_an_engine_and_a_format(cluster: Any, tmp_path: Path, toy_model_dir: Path, toy_dataset: Path, capsys) -> None:
    engine, form = (shutil.copy(EXTEND / name, tmp_path) for name in ("engine.py", "tool_format.py"))
    result = tune(
        workflow_func=letters,
        train_dataset=DatasetConfig(path=str(toy_dataset), split="train", total_steps=2),
        model=TunerModelConfig(
            model_path=str(toy_model_dir), max_model_len=128, max_tokens=8, tool_call_parser=f"{form}:PHI4_MINI"
        ),
        algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=4, batch_size=2, learning_rate=1e-3),
        settings={
            "checkpoint_root_dir": str(tmp_path / "runs"),
            "execution": "ray",
            "cluster.num_workers": 1,
            "engine.type": f"{engine}:PlainEngine",
            "rollout.failure_reward": 0.0,
            "evaluation.before_and_after": False,
        },
    )
    printed = capsys.readouterr().out
    assert "engine.py:PlainEngine" in printed
    assert "tool calls phi4_mini (as set)" in printed
    assert json.loads((result.run_dir / "certificate.json").read_text())["holds"]
    calls = [call for group in read_groups(result.run_dir / "run.db") for one in group.rollouts for call in one.calls]
    assert {version for call in calls for version in call.versions_S.tolist()} == {0, 1}
