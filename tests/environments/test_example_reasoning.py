"""The example trains by each of its documented lines, and `sharpen init --env` writes a folder that does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from lines import different
from pages import blocks

from sharpen.cli.main import main as sharpen

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
SHORT = ["--steps=1", "--batch-size=2", "--group-size=2", "--eval-tasks=2", "--max-tokens=8", "--max-model-len=512"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny model is made once: the first line makes it, the others find it."""
    return tmp_path_factory.mktemp("reasoning")


@pytest.mark.parametrize("line", different("examples/reasoning/main.py"), ids=" ".join)
def test_a_step_of_training(line: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from reasoning.main import main

    monkeypatch.chdir(folder)
    result = main([*line, *SHORT])
    recorded = json.loads((result.run_dir / "resolved.json").read_text())
    assert recorded["environment.type"]["value"] == "reasoning-gym"
    assert recorded["identity.environment.type"]["value"] == {"reasoning-gym": "0.1.25"}
    assert result.steps == 1


def test_init_writes_a_folder_that_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert sharpen(["init", "new", "--env", "reasoning-gym:chain_sum"]) == 0
    assert sorted(path.name for path in Path("new").iterdir()) == ["README.md", "model", "requirements.txt", "run.yaml"]
    monkeypatch.chdir("new")
    small = ["--set", "train_dataset.total_steps=1", "--set", "evaluation.max_tasks=2", "--set", "name=run"]
    assert sharpen(["check", "--config", "run.yaml"]) == 0
    assert sharpen(["run", "--config", "run.yaml", *small]) == 0
    summary = json.loads(Path("checkpoints/Sharpen/run/summary.json").read_text())
    assert summary["after"]["sampled"]["num_tasks"] == 2


def test_init_for_a_real_model(tmp_path: Path) -> None:
    assert sharpen(["init", str(tmp_path / "new"), "--env", "reasoning-gym:sudoku", "--model", "some/model"]) == 0
    settings = yaml.safe_load((tmp_path / "new/run.yaml").read_text())
    assert settings["environment"] == {"type": "reasoning-gym", "id": "sudoku", "args": {}}
    assert settings["model"] == {"model_path": "some/model", "max_model_len": 4096, "max_tokens": 512}


def test_the_program_of_the_page(tmp_path: Path, toy_model_dir: Path) -> None:
    """docs/use/environments.md, with the toy model and one step."""
    (program,) = [block.text for block in blocks("python") if block.page == "docs/use/environments.md"]
    settings = {"checkpoint_root_dir": str(tmp_path), "name": "page", "train_dataset.total_steps": 1}
    settings |= {"algorithm": {"batch_size": 2, "group_size": 2}, "evaluation.max_tasks": 2}
    small = (
        program.replace("Qwen/Qwen3-0.6B", str(toy_model_dir))
        .replace("=2048", "=512")
        .replace("max_tokens=512", "max_tokens=4")
    )
    exec(small.replace("tune(\n", f"tune(\n    settings={settings!r},\n"), {})
    assert json.loads((tmp_path / "Sharpen/page/certificate.json").read_text())["holds"]


@pytest.mark.slow
def test_the_tiny_model_learns(tmp_path: Path) -> None:
    script = EXAMPLES / "reasoning" / "main.py"
    subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=os.environ, check=True)
    (summary,) = (tmp_path / "checkpoints").rglob("summary.json")
    found = json.loads(summary.read_text())
    assert found["after"]["greedy"]["accuracy"] > found["before"]["greedy"]["accuracy"] + 0.2
