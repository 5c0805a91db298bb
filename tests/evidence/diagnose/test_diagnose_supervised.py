"""Causes in runs without rollouts: each planted in the numbers of a healthy run, and in real runs of a toy model."""

from __future__ import annotations

import argparse
import io
import json
import math
import random

import pytest
from diagnose_plants import config, noisy, rows
from hypothesis import given
from hypothesis import strategies as st

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, tune
from sharpen.cli.diagnose import run_diagnose
from sharpen.evidence.diagnose.diagnosis import diagnose, read_run
from sharpen.evidence.diagnose.rows import RowRunData

STEPS = 40


def curves(steps=STEPS, **changes):
    """Metrics of a run that learns (names with `__` for `/`); `changes` replace some."""
    found = {
        "trainer__loss": [
            1.5 * 0.93**step + 0.5 + wave for step, wave in enumerate(noisy(0.0, 0.0, 0.04, steps=steps))
        ],
        "trainer__grad_norm": noisy(1.2, 0.6, 0.1, steps=steps, seed=1),
        "trainer__learning_rate": [1e-5] * steps,
        "batch__rows": [32.0] * steps,
        "batch__rows_too_long": [0.0] * steps,
        "batch__rows_empty": [0.0] * steps,
    }
    return found | changes


HELD_OUT = ((0, 2.1), (10, 1.4), (20, 1.0), (30, 0.8), (40, 0.75))


def run(metrics=None, held_out=HELD_OUT, **sections):
    return RowRunData(config=config(**sections), rows=rows(metrics or curves()), held_out=held_out)


def names(data):
    found = diagnose(data)
    for finding in found:
        assert finding.what
        assert finding.advice
        assert finding.evidence
        assert 0 < len(finding.examples) <= 3
        assert all(isinstance(value, float) for value in finding.evidence.values()), finding.evidence
    return [finding.name for finding in found]


def test_a_healthy_run_has_no_findings_nor_has_any_beginning_of_it():
    assert names(run()) == []
    for steps in range(1, STEPS):
        held_out = tuple(pair for pair in HELD_OUT if pair[0] <= steps)
        assert names(RowRunData(config=config(), rows=rows(curves())[:steps], held_out=held_out)) == [], steps


@given(seed=st.integers(0, 10**6), noise=st.floats(0.0, 0.15))
def test_healthy_runs_of_any_noise_have_no_findings(seed, noise):
    waves = noisy(0.0, 0.0, noise, seed=seed)
    metrics = curves(trainer__loss=[1.5 * 0.93**step + 0.5 + wave for step, wave in enumerate(waves)])
    assert names(run(metrics)) == []


def test_a_model_that_knows_the_rows_already_has_no_findings():
    """A flat loss near 0: there is nothing left to learn."""
    assert names(run(curves(trainer__loss=noisy(0.03, 0.03, 0.005)), held_out=((0, 0.04), (40, 0.04)))) == []


def test_rows_that_are_too_long():
    too_long = [8.0] * STEPS
    too_long[6] = 20.0
    (finding,) = diagnose(run(curves(batch__rows=[24.0] * STEPS, batch__rows_too_long=too_long)))
    assert finding.name == "rows_left_out"
    assert finding.what.startswith("26% of the rows are longer than model.max_model_len")
    assert finding.examples[0] == "step 7"
    assert "above 1024" in finding.advice
    assert names(run(curves(batch__rows_too_long=[3.0] * STEPS))) == [], "below a tenth"


def test_rows_without_anything_to_learn():
    (finding,) = diagnose(run(curves(batch__rows_empty=[4.0] * STEPS)))
    assert finding.name == "rows_left_out"
    assert "without a token to learn" in finding.what


def test_a_loss_that_rises_from_the_beginning():
    metrics = curves(trainer__loss=noisy(2.0, 6.0, 0.1), trainer__grad_norm=noisy(1.0, 9.0, 0.2))
    assert names(run(metrics, held_out=((0, 2.0), (40, 6.2))))[0] == "learning_rate_too_high"


def test_a_loss_that_falls_and_is_lost_again():
    down, up = [2.0 - 0.07 * step for step in range(15)], [1.0 + 0.03 * step for step in range(25)]
    norms = [1.0] * 15 + [1.0 + step for step in range(25)]
    found = diagnose(run(curves(trainer__loss=[*down, *up], trainer__grad_norm=norms)))
    assert [finding.name for finding in found] == ["learning_rate_too_high"]
    assert found[0].evidence["lowest loss"] == pytest.approx(1.02, abs=0.06)
    calm = curves(trainer__loss=[*down, *up], trainer__grad_norm=[1.0] * STEPS)
    assert names(run(calm)) == [], "other rows may be harder: gradients say that the model did not break"


def test_a_loss_that_is_lost_after_steps_without_rows():
    """Steps whose rows are all too long have neither loss nor gradient: the lowest loss is named by its step."""
    down, up = [2.0 - 0.07 * step for step in range(15)], [1.0 + 0.03 * step for step in range(15)]
    norms = [1.0] * 15 + [9.0, 8.0] + [1.0] * 13
    absent = [math.nan] * 10
    (found,) = diagnose(run(curves(trainer__loss=absent + down + up, trainer__grad_norm=absent + norms)))
    assert found.name == "learning_rate_too_high"
    assert found.examples[0] == "step 26"  # the middle of the lowest steps
    assert found.evidence["gradient norm until then"] == 1.0
    assert found.evidence["largest gradient norm after"] == 9.0


@pytest.mark.parametrize(("rate", "advice"), [(1e-8, "to 1e-07"), (0.0, "it is 0")])
def test_a_loss_that_does_not_fall(rate, advice):
    metrics = curves(trainer__loss=noisy(2.0, 2.0, 0.05), trainer__learning_rate=[rate] * STEPS)
    (finding,) = diagnose(run(metrics, held_out=((0, 2.0), (40, 1.99))))
    assert finding.name == "loss_not_falling"
    assert advice in finding.advice


def test_noisy_rows_hide_progress_that_the_held_out_loss_shows():
    metrics = curves(trainer__loss=noisy(2.0, 1.9, 0.4))
    assert names(run(metrics, held_out=((0, 2.0), (40, 1.7)))) == []


def test_overfitting():
    found = diagnose(run(held_out=((0, 2.1), (10, 1.2), (20, 1.1), (30, 1.3), (40, 1.6))))
    assert [finding.name for finding in found] == ["overfitting"]
    assert found[0].examples == ("step 20", "step 40")
    assert found[0].evidence["lowest held-out loss"] == 1.1
    assert names(run(held_out=((0, 2.1), (20, 1.1), (40, 1.12)))) == [], "less than a twentieth"


def test_gradient_spikes():
    norms = noisy(1.0, 0.6, 0.05)
    norms[20], norms[30] = 50.0, 80.0
    found = diagnose(run(curves(trainer__grad_norm=norms)))
    assert [finding.name for finding in found] == ["gradient_spikes"]
    assert found[0].examples == ("step 31", "step 21")
    first = [40.0, 30.0, *noisy(1.0, 0.6, 0.05)[2:]]
    assert names(run(curves(trainer__grad_norm=first))) == [], "the first steps of a run have large gradients"


def test_any_numbers_are_diagnosed():
    draw = random.Random(0)
    for _ in range(200):
        steps = draw.randrange(1, 50)
        metrics = {name: [10 ** draw.uniform(-4, 3) for _ in range(steps)] for name in curves()}
        held_out = tuple((step, 10 ** draw.uniform(-4, 3)) for step in range(draw.randrange(4)))
        diagnose(RowRunData(config=config(), rows=rows(metrics), held_out=held_out))


@pytest.fixture
def taught(tmp_path, toy_model_dir):
    def start(data, *, learning_rate, steps=24, **settings):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in data))
        return tune(
            train_dataset=DatasetConfig(path=str(path), total_steps=steps),
            model=TunerModelConfig(model_path=str(toy_model_dir), max_model_len=64),
            algorithm=AlgorithmConfig(
                algorithm_type="sft", batch_size=4, learning_rate=learning_rate, eval_interval_steps=8
            ),
            settings={"checkpoint_root_dir": str(tmp_path / "runs"), **settings},
        ).run_dir

    return start


def said(run_dir):
    out = io.StringIO()
    assert run_diagnose(argparse.Namespace(run=str(run_dir), root=None, json=False), out) == 0
    return out.getvalue().splitlines()


ANSWERS = [{"prompt": f"question {i}", "response": ("yes", "no")[i % 2]} for i in range(40)]


def test_a_real_run_that_learns_has_no_findings(taught):
    lines = said(taught(ANSWERS, learning_rate=3e-3))
    assert lines[0].startswith("24 steps, training loss ")
    assert lines[1].startswith("held-out loss ")
    assert lines[2:] == ["no cause found for a loss that does not fall"]


def test_a_real_learning_rate_far_too_high(taught):
    """It jumps at once, and then scatters: only the first step's loss, that of the untrained model, shows it."""
    found = diagnose(read_run(taught(ANSWERS, learning_rate=1.0)))
    assert [finding.name for finding in found] == ["learning_rate_too_high"]


def test_a_real_learning_rate_of_next_to_nothing(taught):
    run_dir = taught(ANSWERS, learning_rate=1e-9)
    assert [finding.name for finding in diagnose(read_run(run_dir))] == ["loss_not_falling"]
    assert "1. loss_not_falling" in said(run_dir)


def test_real_rows_that_do_not_fit(taught):
    longer = [{"prompt": "long " * 80, "response": "yes"} for _ in range(10)]
    assert diagnose(read_run(taught(ANSWERS[:30] + longer, learning_rate=3e-3)))[0].name == "rows_left_out"


def test_real_rows_learnt_by_heart(taught):
    """Answers that nothing in the question tells: the twelve that are trained are learnt, the others are not."""
    draw = random.Random(1)
    data = [{"prompt": f"question {i}", "response": "".join(draw.choices("abcdefghij", k=8))} for i in range(14)]
    found = diagnose(read_run(taught(data, learning_rate=1e-2, steps=64)))
    assert found[0].name == "overfitting"
