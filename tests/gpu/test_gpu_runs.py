"""The quickstart for a few steps on a GPU: engine and trainer agree in every step, whatever way the weights move."""

import json
from pathlib import Path

import pytest

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, tune

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
ROUNDED = {"engine.dtype": "bfloat16", "trainer.dtype": "bfloat16"}
EXACT = {"engine.dtype": "float32", "trainer.dtype": "float32"}


def run(agent, folder, *, steps=3, temperature=1.0, settings=None):
    """The metrics of each step, and the result."""
    data = str(QUICKSTART / "data")
    result = tune(
        workflow_func=agent.run_agent,
        judge_func=agent.judge,
        train_dataset=DatasetConfig(path=data, split="train", total_steps=steps),
        eval_dataset=DatasetConfig(path=data, split="test"),
        model=TunerModelConfig(model_path=str(QUICKSTART / "model"), max_model_len=512, temperature=temperature),
        algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=8, batch_size=4, learning_rate=3e-4),
        settings={
            "checkpoint_root_dir": str(folder),
            "engine.type": "embedded",
            "engine.device": "cuda",
            "loss.kl": "none",
            "evaluation.max_tasks": 32,
            **(settings or {}),
        },
    )
    lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if "trainer/loss" in line]
    assert len(found) == steps
    return found, result


def test_bfloat16_is_the_default_and_agrees(agent, tmp_path, capsys):
    steps, _ = run(agent, tmp_path, temperature=0.9)
    assert "training attention: PyTorch's variable-length flash kernel" in capsys.readouterr().out
    assert all(0 < step["trainer/logprob_gap_mean"] < 0.01 for step in steps)
    assert all(step["trainer/logprob_gap_tokens"] > 0 for step in steps)


@pytest.mark.parametrize("kl", ["none", "k3"])
def test_float32_agrees_to_the_tolerance_of_a_cpu(agent, tmp_path, kl):
    steps, _ = run(agent, tmp_path, settings={**EXACT, "loss.kl": kl})
    assert max(step["trainer/logprob_gap_max"] for step in steps) < 1e-4


def test_adapters(agent, tmp_path):
    pytest.importorskip("peft")
    steps, _ = run(agent, tmp_path, settings={**ROUNDED, "trainer.lora.rank": 8})
    assert all(step["trainer/logprob_gap_mean"] < 0.01 for step in steps)


def test_weights_that_move_under_rollouts_in_flight(agent, tmp_path):
    """The engine records and replays its graphs while the trainer computes in another thread."""
    steps, _ = run(agent, tmp_path, steps=4, settings={**ROUNDED, "sync.style": "fully_async"})
    assert all(step["trainer/loss"] == step["trainer/loss"] for step in steps)


def test_gradient_checkpointing(agent, tmp_path):
    steps, _ = run(agent, tmp_path, settings={**ROUNDED, "trainer.gradient_checkpointing": True})
    assert all(step["trainer/logprob_gap_mean"] < 0.01 for step in steps)


@pytest.mark.two_gpus
def test_a_trainer_of_two_ranks(agent, tmp_path):
    """FSDP2 over nccl."""
    steps, _ = run(agent, tmp_path, settings={**ROUNDED, "trainer.num_processes": 2})
    assert all(step["trainer/logprob_gap_mean"] < 0.01 for step in steps)


@pytest.mark.vllm
def test_vllm_on_a_gpu(agent, tmp_path, capsys):
    settings = {"engine.type": "vllm", "engine.kv_cache_mb": 2048, "engine.max_slots": 64}
    steps, _ = run(agent, tmp_path, settings=settings)
    assert "engine: vllm" in capsys.readouterr().out
    assert all(step["trainer/logprob_gap_mean"] < 0.02 for step in steps)
