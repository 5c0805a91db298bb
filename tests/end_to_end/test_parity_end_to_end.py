"""A run in bfloat16 from `tune()` to what it wrote: rounding is measured at its start, whatever trains, and an honest
run is not stopped."""

import pytest

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.learning.experience.reading import read_parity, read_steps


async def prefers_letter(task, model):
    """The reward is the share of the letter 'e' in the answer."""
    reply = await model.client.chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": task["question"]}], max_tokens=8
    )
    return WorkflowOutput(reward=(reply.choices[0].message.content or "").count("e") / 8)


def run(tmp_path, model_dir, dataset, *, steps=2, temperature=1.0, name="run", **settings):
    return tune(
        workflow_func=prefers_letter,
        train_dataset=DatasetConfig(path=str(dataset), split="train", total_steps=steps),
        model=TunerModelConfig(model_path=str(model_dir), max_model_len=128, max_tokens=8, temperature=temperature),
        algorithm=AlgorithmConfig(group_size=4, batch_size=4, learning_rate=2e-2),
        experiment_name=name,
        settings={
            "checkpoint_root_dir": str(tmp_path),
            "check.enabled": False,
            "certificate.retrain": "off",
            "evaluation.before_and_after": False,
            "engine.dtype": "bfloat16",
            "trainer.dtype": "bfloat16",
            **settings,
        },
    )


def test_a_run_in_bfloat16_measures_its_rounding_and_notes_it(tmp_path, toy_model_dir, toy_dataset, capsys):
    first = run(tmp_path, toy_model_dir, toy_dataset)
    noted = read_parity(first.run_dir / "run.db")
    assert 0.001 < noted["rounding"] < 0.05
    assert noted["engine_gap"] < 3 * noted["rounding"]
    assert (noted["trainer_dtype"], noted["engine_dtype"]) == ("bfloat16", "bfloat16")
    assert "rounding: bfloat16 moves this model's logits by" in capsys.readouterr().out
    steps = read_steps(first.run_dir / "run.db")
    assert all(0.0 <= step.metrics["trainer/logprob_gap_off"] < 0.2 for step in steps)
    again = run(tmp_path, toy_model_dir, toy_dataset, steps=3)  # a resumed session measures the same
    assert read_parity(again.run_dir / "run.db") == noted
    plain = run(tmp_path, toy_model_dir, toy_dataset, steps=1, name="plain", **FLOAT32)
    assert read_parity(plain.run_dir / "run.db") is None


FLOAT32 = {"engine.dtype": "float32", "trainer.dtype": "float32"}


@pytest.mark.parametrize(("temperature", "settings"), [(0.02, {}), (0.05, FLOAT32), (0.02, FLOAT32)])
def test_honest_runs_near_temperature_0_go_on(tmp_path, toy_model_dir, toy_dataset, temperature, settings):
    """In float32 they were stopped: a logprob there is a logit times 50."""
    found = run(tmp_path, toy_model_dir, toy_dataset, temperature=temperature, **settings)
    assert len(read_steps(found.run_dir / "run.db")) == 2
