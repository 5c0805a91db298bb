"""A run's own plan: refused where it cannot fit, written before, compared after."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from sharpen import DatasetConfig, TunerModelConfig, tune
from sharpen.cli.main import main
from sharpen.config.load import resolve
from sharpen.config.public import AlgorithmConfig
from sharpen.errors import ConfigError
from sharpen.learning.recipe import EngineChoice, Job, recipe_of
from sharpen.run.forecast import after_run, settle
from sharpen.run.plan.record import FILE


def write_model(folder: Path, *, width: int, depth: int) -> Path:
    """The configuration of a model, without weights."""
    Qwen3Config(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=depth,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        head_dim=64,
        vocab_size=2000,
    ).save_pretrained(folder)
    return folder


def a_job(folder: Path, **settings: Any) -> Job[Any]:
    config = resolve(
        None,
        {
            "model": {"model_path": str(folder), "max_model_len": 128, "max_tokens": 64},
            "train_dataset": {"path": "tasks.jsonl"},
            "algorithm": {"algorithm_type": "grpo"},
            "engine": {"device": "cpu"},
            **settings,
        },
    ).config
    engine = EngineChoice(type="embedded", reason="by hand")
    return Job(recipe=recipe_of(config), workflow=a_job, judge=None, folder=folder, engine=engine)


def test_a_model_that_no_machine_has_room_for_is_refused(tmp_path: Path) -> None:
    """About 10 million million parameters, of which nothing is made; what is said names the numbers."""
    job = a_job(write_model(tmp_path / "huge", width=2**19, depth=4))
    with pytest.raises(ConfigError, match="weights, gradients and moments alone need") as raised:
        settle(job)
    assert "policy: moments" in str(raised.value)
    assert not (tmp_path / FILE).exists()


def test_a_plan_before_and_its_error_after(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = a_job(write_model(tmp_path / "model", width=256, depth=2))
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    assert list(settle(job, evaluated=3).begin(run_dir)) == []
    before = json.loads((run_dir / FILE).read_text())["before"]
    assert before["fits"]
    assert before["comparable_mb"] > 500
    assert before["evaluated"] == 3
    rows = [
        {"step": n, "time/step_s": n, "tokens/sampled": 1024, "trainer/computed_tokens": 1500}
        | {"trainer/trained_tokens": 1024, "trainer/sequence_tokens": 3000}
        for n in (1, 2, 6)
    ]
    (run_dir / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (line,) = after_run(job, run_dir)
    assert line.startswith("plan: peak memory ")
    assert "step" not in line  # nobody has measured one before
    content = json.loads((run_dir / FILE).read_text())
    assert content["before"] == before
    assert content["measured"]["step_s"] == 2
    assert content["known"]["longest"] == 12  # 3,000 tokens of 256 rollouts
    assert content["known"]["evaluated"] == 3
    error = content["error"]["peak memory"]
    measured = content["measured"]["peak_memory_mb"]
    assert error == pytest.approx((content["known"]["comparable_mb"] - measured) / measured)
    assert main(["plan", "--run", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert "peak memory, MiB" in out
    assert f"{error:+.1%}" in out
    assert max(len(part) for part in out.splitlines()) <= 80 or str(run_dir) in out


def test_the_next_run_says_how_long_a_step_took(tmp_path: Path) -> None:
    """What one run measured, the next of the same settings expects, and is held against at its end."""
    job = a_job(write_model(tmp_path / "model", width=256, depth=2))
    for name, seconds in (("first", 2.0), ("second", 4.0)):
        run_dir = tmp_path / "runs" / name
        run_dir.mkdir(parents=True)
        said = list(settle(job).begin(run_dir))
        (run_dir / "metrics.jsonl").write_text(json.dumps({"step": 1, "time/step_s": seconds}))
        (line,) = after_run(job, run_dir)
    (predicted,) = said
    assert "2 s" in predicted
    assert "median of 1 steps of first" in predicted
    assert line.endswith("step 2 s predicted, 4 measured: -50%")


def test_without_a_plan_nothing_is_compared(tmp_path: Path) -> None:
    job = a_job(write_model(tmp_path / "model", width=64, depth=1))
    assert list(settle(job).begin(tmp_path)) == []  # smaller than plans are made for
    assert not (tmp_path / FILE).exists()
    assert list(after_run(job, tmp_path)) == []


def test_a_model_that_cannot_be_planned_still_runs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    (line,) = settle(a_job(tmp_path)).begin(tmp_path)
    assert line.startswith("no plan of this run")


def test_a_whole_run_states_its_error(
    tmp_path: Path, write_toy_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A real run of a model of a million parameters, taught two rows."""
    folder = write_toy_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    for name, value in {"hidden_size": 256, "intermediate_size": 1024}.items():
        config[name] = value
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 2))
    result = tune(
        train_dataset=DatasetConfig(path=str(tmp_path / "rows.jsonl"), total_steps=1),
        model=TunerModelConfig(model_path=str(folder), max_model_len=128),
        algorithm=AlgorithmConfig(algorithm_type="sft", batch_size=2),
        settings={"checkpoint_root_dir": str(tmp_path / "runs"), "evaluation.hold_out": False},
    )
    assert "plan: peak memory" in capsys.readouterr().out
    content = json.loads((result.run_dir / FILE).read_text())
    assert content["measured"]["num_steps"] == 1
    assert content["known"]["computed_tokens"] > 0
