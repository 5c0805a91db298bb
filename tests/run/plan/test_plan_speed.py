"""The time of a step by a copy of two layers: its arithmetic by hand, what is not measured, one measurement."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plan_toys import case_of, gpu, model_config, run_config, write_config
from transformers import Qwen3Config

from sharpen.cli.main import main
from sharpen.errors import ModelError
from sharpen.learning.recipe import EngineChoice, Job
from sharpen.models.checkpoint import stored_types
from sharpen.models.configuration import read_config
from sharpen.run.forecast import Forecast, after_run
from sharpen.run.plan.case import Case
from sharpen.run.plan.hardware import this_machine
from sharpen.run.plan.predict import about, computed_step_time, plan, step_time
from sharpen.run.plan.record import write_plan
from sharpen.run.plan.speed import Speed, fastest, measure_speed, whole, write_copy
from sharpen.run.plan.workload import AT_LIMITS, Workload

LARGE = {"vocab_size": 8000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4}
"""A model of 14 million parameters."""
WORK = Workload(
    sequences=8,
    prompt_tokens=100,
    answer_tokens=50,
    computed_tokens=600,
    loss_tokens=400,
    longest=150,
    generates=True,
    source="test",
)


def here(folder: Path, settings: Mapping[str, Any] | None = None, **changes: Any) -> Case:
    """A run on this machine's processor."""
    config = run_config(write_config(folder, model_config(**LARGE | changes)), settings)
    return case_of(config, replace(this_machine("cpu"), memory_bytes=2**33))


def test_a_second_layer_tells_all_layers_from_the_rest() -> None:
    assert whole(5.0, 8.0, 10) == (30.0, 2.0)
    assert whole(5.0, 4.0, 10) == (0.0, 5.0)  # noise
    assert whole(5.0, 11.0, 10) == (50.0, 0.0)  # noise: a layer takes no longer than a model with one


@pytest.mark.parametrize(("long_s", "turns"), [(60.0, 2), (0.0, 1)])
def test_what_takes_long_is_measured_once(long_s: float, turns: int) -> None:
    """Red as ten minutes before the first step, on a machine that was busy."""
    made: list[int] = []
    assert fastest(lambda: made.append(0), long_s=long_s) >= 0.0
    assert len(made) == turns


def test_the_seconds_of_a_step_by_hand() -> None:
    """Two tasks of four rollouts: prompts are 600 - 8 x 50 = 200 tokens; of 4 rows at a time there are two waves of 50
    steps."""
    speed = Speed(trained=0.01, scored=0.001, compared=(0.002, 0.0005), prompt=0.1, decode=0.2, rows=4, took=1.0)
    assert speed.generating(WORK) == pytest.approx(200 * 0.1 + 2 * 50 * 0.2)
    assert speed.training(WORK, 1) == pytest.approx(6.0 + 0.4 + 1.2 + 0.2)
    assert speed.training(WORK, 3) == pytest.approx(3 * 6.4 + 1.4)  # the reference computes once
    assert speed.generating(replace(WORK, generates=False)) == 0.0
    assert speed.generating(replace(WORK, sequences=2, computed_tokens=300)) == pytest.approx(20 + 10)  # one wave


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.123, "0.12 s"), (42.4, "42 s"), (150, "2.5 minutes"), (7200, "2.0 hours")]
)
def test_times_in_words(seconds: float, text: str) -> None:
    assert about(seconds) == text


def test_what_is_not_measured(tmp_path: Path) -> None:
    """Small models, other machines, other engines, several processes, models with experts or recurrent layers."""
    case = here(tmp_path / "model")
    assert measure_speed(replace(case, hardware=gpu(16))) is None
    assert measure_speed(replace(case, hardware=replace(case.hardware, name="CPU"))) is None
    assert measure_speed(replace(case, engine="vllm")) is None
    assert measure_speed(here(tmp_path / "small", num_hidden_layers=1)) is None
    assert measure_speed(here(tmp_path / "ranks", {"trainer.num_processes": 2})) is None
    assert measure_speed(here(tmp_path / "ppo", {"algorithm.algorithm_type": "ppo"})) is None


@pytest.mark.parametrize("lora", [None, {"rank": 4, "base": "shared"}])
def test_a_step_is_measured_with_the_runs_own_trainer_and_engine(tmp_path: Path, lora: Any) -> None:
    settings = {"trainer.lora": lora, "trainer.gradient_checkpointing": True, "loss.kl": "none"}
    case = here(tmp_path, settings)
    time = step_time(case, ())
    assert time is not None
    assert time.speed is not None
    speed = time.speed
    assert min(speed.trained, speed.scored, speed.prompt, speed.decode) >= 0, speed  # 0 where noise is more
    assert time.seconds > 0
    assert speed.compared == (0.0, 0.0)
    assert speed.rows == 8
    assert time.seconds == pytest.approx(speed.generating(case.workload) + speed.training(case.workload, 1))
    line = time.line(100)
    assert line.startswith("a step computes for "), line
    assert all(part in line for part in (", 100 steps ", "generating", "on top")), line
    limits = computed_step_time(replace(case, workload=replace(case.workload, source=AT_LIMITS)), speed).line(100)
    assert limits.startswith("a step computes for at most "), limits
    assert AT_LIMITS in limits, limits
    content = json.loads(json.dumps(plan(case, time=time, suggests=False).to_json()))
    again = computed_step_time(case, Speed(**content["speed"]))
    assert round(again.seconds, 3) == content["step_s"]  # as the end of a run has it, for the lengths that came


def test_a_copy_that_cannot_be_written_ends_no_run_and_no_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red where a full disk goes through to the run, or where nothing says that there is no forecast."""
    case = here(tmp_path / "model")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "no such folder"))
    with pytest.raises(ModelError, match=r"a copy of two layers cannot be measured: .*no such folder"):
        measure_speed(case)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    job = Job(recipe=case.recipe, workflow=here, judge=None, folder=tmp_path, engine=None)
    (line,) = Forecast(job=job, plan=plan(case)).begin(run_dir)
    assert line.startswith("no forecast of a step's time: a copy")
    model = {"model_path": str(tmp_path / "model"), "max_model_len": 256, "max_tokens": 64}
    settings = {"model": model, "train_dataset": {"path": "tasks.jsonl"}}
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    main(["plan", "--config", str(tmp_path / "run.yaml"), "--set", "engine.device=cpu"])
    out, err = capsys.readouterr()
    assert not err
    assert "no forecast of a step's time: a copy" in out
    assert "time of a step: unknown" in out


class AtLeastThree(Qwen3Config):
    """A configuration that refuses to be one of fewer layers."""

    def __deepcopy__(self, _: Any) -> Any:
        raise ValueError("three layers at least")


def test_a_model_that_refuses_fewer_layers_ends_no_run(tmp_path: Path) -> None:
    """Red where what transformers says of a copy goes through to the run."""
    case = here(tmp_path)
    config = AtLeastThree(**case.models.config.to_dict())
    with pytest.raises(ModelError, match="a copy of two layers cannot be measured: three layers at least"):
        measure_speed(replace(case, models=replace(case.models, config=config)))


def test_a_runs_end_holds_its_steps_against_what_was_measured_before(tmp_path: Path) -> None:
    """For the lengths that came: 8 sequences of 30 + 25 tokens in place of the longest."""
    case = here(tmp_path / "model", {"loss.kl": "none", "engine.device": "cpu"})
    speed = Speed(trained=0.01, scored=0.001, compared=(0.0, 0.0), prompt=0.1, decode=0.2, rows=8, took=1.0)
    engine = EngineChoice(type="embedded", reason="by hand")
    job = Job(recipe=case.recipe, workflow=here, judge=None, folder=tmp_path, engine=engine)
    before = plan(case, time=computed_step_time(case, speed), suggests=False).to_json()
    write_plan(tmp_path, {"before": before})
    tokens = {"tokens/sampled": 200, "trainer/computed_tokens": 300, "trainer/trained_tokens": 150}
    row = {"step": 1, "time/step_s": 20.0, "trainer/sequence_tokens": 440, **tokens}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row))
    (line,) = after_run(job, tmp_path)
    seconds = (300 - 8 * 25) * 0.1 + 25 * 0.2 + 300 * 0.01 + 150 * 0.001
    assert f"step {seconds:.3g} s predicted ({before['step_s']:.3g} before the lengths were known), 20 measured" in line


def test_a_reference_is_measured_too(tmp_path: Path) -> None:
    speed = measure_speed(here(tmp_path, {"loss.kl": "k3", "loss.kl_coef": 0.1}))
    assert speed is not None
    assert sum(speed.compared) > 0


def test_weights_are_of_the_files_type(tmp_path: Path) -> None:
    config = read_config(write_config(tmp_path / "model", model_config(dtype="bfloat16", **LARGE)))
    folder = tmp_path / "copy"
    folder.mkdir()
    write_copy(config, 2, folder)
    assert stored_types(folder) == {"BF16"}
    assert read_config(folder).num_hidden_layers == 2
    assert config.num_hidden_layers == 4
