"""An agent that asks for temperature 0 gives no token that can be trained: nothing about such a run may look green."""

import pytest

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.errors import NoSignalError


async def greedy(task, model):
    """As many agents are set up: no noise, a reward that differs by chance."""
    await model.client.chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": task["question"]}], max_tokens=2, temperature=0
    )
    greedy.calls += 1
    return WorkflowOutput(reward=float(greedy.calls % 2))


greedy.calls = 0


def run(tmp_path, model_dir, dataset, *, check):
    return tune(
        workflow_func=greedy,
        train_dataset=DatasetConfig(path=str(dataset), split="train", total_steps=1),
        model=TunerModelConfig(model_path=str(model_dir), max_model_len=128, max_tokens=2),
        algorithm=AlgorithmConfig(group_size=2, batch_size=2),
        settings={
            "checkpoint_root_dir": str(tmp_path),
            "check.enabled": check,
            "evaluation.before_and_after": False,
            "loss.kl": "none",
        },
    )


def test_the_check_ends_the_run(tmp_path, toy_model_dir, toy_dataset, capsys):
    with pytest.raises(NoSignalError, match="no call can be trained"):
        run(tmp_path, toy_model_dir, toy_dataset, check=True)
    assert "calls were sampled at temperature 0" in capsys.readouterr().out


def test_without_the_check_each_step_says_that_it_trained_nothing(tmp_path, toy_model_dir, toy_dataset, capsys):
    run(tmp_path, toy_model_dir, toy_dataset, check=False)
    assert "no token was trained: all 4 calls were sampled at temperature 0" in capsys.readouterr().out
