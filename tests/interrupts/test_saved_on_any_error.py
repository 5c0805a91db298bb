"""An agent that asks for what cannot be had, late in a run, does not cost the steps that were trained."""

import contextlib
import sqlite3
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from step_walks import letters

from sharpen import AlgorithmConfig, DatasetConfig, TuneResult, TunerModelConfig, tune
from sharpen.errors import JournalError, SharpenError
from sharpen.evidence.diagnose.diagnosis import diagnose, read_run
from sharpen.evidence.ended import read_ended
from sharpen.learning.trainer.checkpoint import load, pointed

PLAIN = f"{Path(__file__).parents[2] / 'examples' / 'extend' / 'engine.py'}:PlainEngine"
"""An engine that does not record what `top_p` left."""


def run(folder: Path, model: Path, dataset: Path, workflow: Callable[..., Any], engine: str = "embedded") -> TuneResult:
    """Five steps of 8 rollouts; none is saved before the last."""
    return tune(
        workflow_func=workflow,
        train_dataset=DatasetConfig(path=str(dataset), split="train", total_steps=5),
        model=TunerModelConfig(model_path=str(model), max_model_len=128, max_tokens=8),
        algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=4, batch_size=2, learning_rate=1e-2),
        project_name="P",
        experiment_name="fixed",
        settings={
            "checkpoint_root_dir": str(folder),
            "engine.type": engine,
            "check.enabled": False,
            "evaluation": {"before_and_after": False, "hold_out": False},
        },
    )


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
        run(tmp_path, toy_model_dir, toy_dataset, cuts_the_tail, PLAIN)
    latest = pointed(tmp_path / "P" / "fixed", "latest")
    assert load(latest).state["position"]["step"] == 2
    assert "; saving a checkpoint of step 2, the last whole one" in capsys.readouterr().out
    ended = read_ended(tmp_path / "P" / "fixed")
    assert "top_p" in ended.message
    assert "after step 2" in diagnose(read_run(tmp_path / "P" / "fixed"))[0].what


def test_a_journal_that_breaks_in_step_3_saves_step_2_and_is_one_error(tmp_path, toy_model_dir, toy_dataset, capsys):
    """Red when a failed write of later rollouts forbids every checkpoint, and when what cannot be written at the end is
    raised in the place of what ended the run."""
    journal = tmp_path / "P" / "fixed" / "run.db"
    rollouts = 0

    async def breaks(task, model):
        nonlocal rollouts
        rollouts += 1
        if rollouts == 2 * 4 * 2 + 1:
            with contextlib.closing(sqlite3.connect(journal)) as connection:
                connection.execute("ALTER TABLE rollouts RENAME TO others")
        return await letters(task, model)

    with pytest.raises(JournalError) as error:
        run(tmp_path, toy_model_dir, toy_dataset, breaks)
    assert load(pointed(journal.parent, "latest")).state["position"]["step"] == 2
    printed = "".join(traceback.format_exception(error.value))
    assert printed.count("JournalError: ") == 1
    assert "During handling" not in printed
    said = capsys.readouterr().out
    assert "; saving a checkpoint of step 2, the last whole one" in said
    assert "the results so far could not be written" in said
    assert read_ended(journal.parent).kind == "JournalError"
