"""`sharpen plan`: what it prints, and its exit codes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from sharpen.cli.main import main

Plan = Callable[..., int]
GIVEN = ("--set=trainer.max_tokens_per_micro_batch=8192", "--set=trainer.gradient_checkpointing=false")
"""The defaults, which a run then keeps."""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A run of a model of 3 blocks, 512 wide, of which there is nothing but its configuration."""
    model = Qwen3Config(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=1000,
    )
    model.save_pretrained(tmp_path / "model")
    file = tmp_path / "run.yaml"
    file.write_text(
        "train_dataset: {path: tasks.jsonl}\n"
        "model: {model_path: model, max_model_len: 512, max_tokens: 256}\n"
        "algorithm: {algorithm_type: grpo, group_size: 4, batch_size: 8}\n"
    )
    return file


@pytest.fixture
def plan(config_file: Path) -> Plan:
    def call(*options: str) -> int:
        return main(["plan", "--config", str(config_file), *options])

    return call


def test_it_fits(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--gpu", "L4") == 0
    out = capsys.readouterr().out
    assert "on 1 x L4, 22.0 GiB" in out
    assert "policy: moments" in out
    assert "it fits, with" in out
    assert "a step takes" not in out
    assert "±15%" in out
    assert max(len(line) for line in out.splitlines() if "/" not in line) <= 80


def test_it_fits_by_what_a_run_chooses(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    """With what somebody set it does not; a suggestion is of settings."""
    assert plan("--gpu-memory", "1.5GB") == 0
    assert "memory: micro-batches of" in capsys.readouterr().out
    assert plan("--gpu-memory", "1.5GB", *GIVEN) == 1


def test_it_does_not_fit_and_what_would(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    """The settings that are printed can be given as they are; then it fits."""
    assert plan("--gpu-memory", "1GB", *GIVEN) == 1
    out = capsys.readouterr().out
    assert "it does not fit: trainer and engine needs" in out
    advice = out.split("the smallest change that makes it fit:\n")[1].splitlines()
    changes = [f"--set={line.strip().replace(': ', '=', 1)}" for line in advice]
    assert changes
    assert plan("--gpu-memory", "1GB", *GIVEN, *changes) == 0


def test_nothing_helps(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--gpu-memory", "5MB") == 1  # less than the weights: no pass has to be traced to know it
    assert "use larger devices or a smaller model" in capsys.readouterr().out


def test_this_machine(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--set", "engine.device=cpu", "--prompt-tokens", "20", "--answer-tokens", "30") == 0
    out = capsys.readouterr().out
    assert "this machine's CPU" in out
    assert "to spare" in out
    assert "prompt 20, answer 30 tokens" in out


def test_learning_from_rows(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--gpu", "L4", "--set", "algorithm.algorithm_type=dpo") == 0
    out = capsys.readouterr().out
    assert "engine" not in out
    assert "reference: weights" in out


def test_as_json(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--gpu-memory", "1.5GB", "--json", *GIVEN) == 1
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert not content["fits"]
    assert content["suggestion"] == {"trainer.gradient_checkpointing": True}
    assert content["places"][0]["capacity_mb"] == 1536


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpu", "Voodoo2"], "RTX-4090"),
        (["--gpus", "0"], "--gpus must be at least 1"),
        (["--gpu-memory", "lots"], "80GB"),
        (["--gpu", "L4", "--prompt-tokens", "600"], "model.max_model_len (512)"),
        (["--gpu", "L4", "--set", "model.model_path=nothing/here/at/all"], "config.json cannot be read"),
        (["--gpu", "L4", "--set", "algorithm.algorithm_type=on_policy_distill"], "distill.teacher_path"),
        (["--gpu", "L4", "--like", "nowhere"], "no directory"),  # and no run, of none or of some here
        (["--gpu", "L4", "--like", "."], "no trained step"),
        (["--gpu", "L4", "--like", "nowhere", "--prompt-tokens", "5"], "--like cannot be combined"),
    ],
)
def test_bad_input(plan: Plan, capsys: pytest.CaptureFixture[str], options: list[str], said: str) -> None:
    assert plan(*options) == 2
    err = capsys.readouterr().err
    assert err.startswith("sharpen: ")
    assert said in err


def test_a_run_without_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--run", str(tmp_path)]) == 2
    assert f"{tmp_path} has no readable plan.json" in capsys.readouterr().err
    assert main(["plan", "--run", str(tmp_path), "--gpu", "L4"]) == 2
    assert "--gpu has no effect with --run" in capsys.readouterr().err
