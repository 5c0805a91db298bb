"""An agent that asks for what cannot be had, late in a run, does not cost the steps that were trained."""

import pytest
from step_walks import letters

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, tune
from sharpen.errors import SharpenError
from sharpen.trainer.checkpoint import load, pointed


def test_a_sampling_that_cannot_be_trained_in_step_3_saves_step_2(tmp_path, toy_model_dir, toy_dataset, capsys):
    """Red when `saved_on_failure` (steps.py) has a list of errors without `SamplingError`."""
    rollouts = 0

    async def cuts_the_tail(task, model):
        nonlocal rollouts
        rollouts += 1
        if rollouts > 2 * 4 * 2:
            await model.client.chat.completions.create(
                model=model.name, messages=[{"role": "user", "content": "?"}], max_tokens=2, top_p=0.9
            )
        return await letters(task, model)

    with pytest.raises(SharpenError, match="top_p"):
        tune(
            workflow_func=cuts_the_tail,
            train_dataset=DatasetConfig(path=str(toy_dataset), split="train", total_steps=5),
            model=TunerModelConfig(model_path=str(toy_model_dir), max_model_len=128, max_tokens=8),
            algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=4, batch_size=2, learning_rate=1e-2),
            project_name="P",
            experiment_name="fixed",
            settings={
                "checkpoint_root_dir": str(tmp_path),
                "check.enabled": False,
                "evaluation": {"before_and_after": False, "hold_out": False},
            },
        )
    latest = pointed(tmp_path / "P" / "fixed", "latest")
    assert load(latest).state["position"]["step"] == 2
    assert "; saving a checkpoint of step 2, the last whole one" in capsys.readouterr().out
