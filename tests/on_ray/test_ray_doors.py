"""Parts of somebody's own reach the actors of Ray: each imports them by the name in the settings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.config.functions import PREPARED, import_object
from sharpen.learning.experience.reading import read_groups

EXTEND = Path(__file__).parents[2] / "examples" / "extend"


async def letters(task: Any, model: Any) -> WorkflowOutput:
    """One call in Ollama's words, rewarded for the letter 'e'."""
    asked = {"model": "any", "messages": [{"role": "user", "content": task["question"]}], "stream": False}
    async with httpx.AsyncClient() as client:
        reply = await client.post(f"{model.keyed_url.removesuffix('/v1')}/api/chat", json=asked)
    return WorkflowOutput(reward=reply.json()["message"]["content"].count("e") / 8)


@pytest.fixture
def squares(toy_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model of the example's family."""
    monkeypatch.setenv(PREPARED, "[]")  # what is brought here is brought in no later test
    settings = json.loads((toy_model_dir / "config.json").read_text())
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    module = import_object(f"{EXTEND / 'family.py'}:SquaresForCausalLM")
    model = module(module.config_class(**{name: settings[name] for name in sizes}, max_position_embeddings=128))
    folder = shutil.copytree(toy_model_dir, tmp_path / "squares", ignore=shutil.ignore_patterns("*.safetensors"))
    model.save_pretrained(folder)
    return Path(folder)


def test_all_kinds_of_parts_at_once(cluster: Any, tmp_path: Path, squares: Path, toy_dataset: Path, capsys) -> None:
    """The family is known in the actors of the engine, the worker and the trainer: none has this process's environment,
    since the Ray was joined."""
    names = ("engine.py", "tool_format.py", "protocol.py", "family.py", "algorithm.py")
    engine, form, protocol, family, ranks = (shutil.copy(EXTEND / name, tmp_path) for name in names)
    result = tune(
        workflow_func=letters,
        train_dataset=DatasetConfig(path=str(toy_dataset), split="train", total_steps=2),
        model=TunerModelConfig(
            model_path=str(squares), max_model_len=128, max_tokens=8, tool_call_parser=f"{form}:PHI4_MINI"
        ),
        algorithm=AlgorithmConfig(algorithm_type=f"{ranks}:RANKS", group_size=4, batch_size=2, learning_rate=1e-3),
        settings={
            "checkpoint_root_dir": str(tmp_path / "runs"),
            "execution": "ray",
            "cluster.num_workers": 1,
            "families": [f"{family}:SQUARES"],
            "gateway.protocols": [f"{protocol}:OLLAMA"],
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
