"""What a plan is made for: the time that was measured, lengths, devices."""

import json
from pathlib import Path
from typing import Any

import pytest
from plan_toys import CPU, gpu, model_config, run_config, write_config

from sharpen.errors import ConfigError
from sharpen.run.plan.hardware import Hardware, chosen_hardware, gpu_by_name, parse_memory, this_machine
from sharpen.run.plan.predict import last_step_time, settings_key
from sharpen.run.plan.workload import expected, metrics_of, of_run


def a_run(folder: Path, config: Any, seconds: float | None, *, age: int, hardware: str = "CPU") -> Path:
    """The directory of a run whose steps took so long; ended `age` seconds before others."""
    folder.mkdir()
    content = {"before": {"settings": settings_key(config), "hardware": hardware}}
    if seconds is not None:
        content["measured"] = {"step_s": seconds, "num_steps": 3}
    (folder / "plan.json").write_text(json.dumps(content))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 3, "time": 1e9 - age}) + "\n")
    return folder


def test_a_step_takes_what_the_last_run_of_the_same_settings_measured(tmp_path: Path) -> None:
    """Whatever its name, its seed, its length and what it was evaluated on; not one of other settings or devices, nor
    one that measured nothing; and files that hold something else are passed over."""
    folder = write_config(tmp_path / "model", model_config())
    config = run_config(folder)
    same = run_config(folder, {"train_dataset.total_steps": 7, "evaluation.max_tasks": 3})
    other = run_config(folder, {"algorithm.batch_size": 3})
    runs = [
        a_run(tmp_path / "older", config, 4.0, age=5),
        a_run(tmp_path / "last", same, 2.0, age=4),
        a_run(tmp_path / "other", other, 9.0, age=3),
        a_run(tmp_path / "elsewhere", config, 8.0, age=2, hardware="GPU"),
        a_run(tmp_path / "stopped", config, None, age=1),
        tmp_path / "nothing",
    ]
    foreign = a_run(tmp_path / "foreign", config, None, age=0)
    (foreign / "plan.json").write_text("[]")
    found = last_step_time(config, CPU, [foreign, *runs])
    assert found is not None
    assert (found.seconds, found.source) == (2.0, "median of 3 steps of last")
    assert last_step_time(other, gpu(1), runs) is None


def test_lengths_are_the_limits_or_what_was_given(tmp_path: Path) -> None:
    config = run_config(write_config(tmp_path, model_config()))
    at_most = expected(config)
    assert (at_most.prompt_tokens, at_most.answer_tokens, at_most.longest) == (192, 64, 256)
    assert at_most.computed_tokens == 2 * (192 + 4 * 64)  # a prompt is computed once for its four rollouts
    given = expected(config, 10, 20)
    assert (given.longest, given.computed_tokens, given.loss_tokens) == (30, 2 * (10 + 80), 160)
    for lengths in ((0, None), (256, None), (None, 256), (200, 100)):
        with pytest.raises(ConfigError, match="max_model_len"):
            expected(config, *lengths)


def test_lengths_of_a_run(tmp_path: Path) -> None:
    """Two steps of 8 rollouts: 160 and 240 sampled of 400 and 480 tokens, so 25 sampled and 30 before them on the mean;
    the second is the larger."""
    config = run_config(write_config(tmp_path / "model", model_config()))
    rows = [
        '{"step": 1, "tokens/sampled": 160, "trainer/computed_tokens": 300, "trainer/trained_tokens": 150, '
        '"trainer/sequence_tokens": 400}',
        '{"step": 2, "tokens/sampled": 240, "trainer/computed_tokens": 340, "trainer/trained_tokens": 250, '
        '"trainer/sequence_tokens": 480}',
        '{"step": 3, "tokens',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    found = of_run(config, tmp_path)
    assert found is not None
    assert (found.answer_tokens, found.prompt_tokens, found.computed_tokens, found.loss_tokens) == (25, 30, 340, 250)
    assert len(metrics_of(tmp_path)) == 2
    assert of_run(config, tmp_path / "nothing") is None


def test_sizes_of_memory() -> None:
    assert parse_memory("80GB") == parse_memory(" 80 gib") == parse_memory("80") == 80 * 2**30
    assert parse_memory("512MB") == 2**29
    for text in ("", "GB", "-1GB", "0GB", "8 parsecs"):
        with pytest.raises(ConfigError, match="80GB"):
            parse_memory(text)


def test_gpus_by_name() -> None:
    assert gpu_by_name("nvidia h100") == Hardware(name="H100", kind="cuda", count=1, memory_bytes=int(79.1 * 2**30))
    assert gpu_by_name("a100 80gb").name == "A100-80GB"
    with pytest.raises(ConfigError, match="A100-40GB, A100-80GB"):
        gpu_by_name("Voodoo2")
    with pytest.raises(ConfigError, match="--gpus must be at least 1"):
        chosen_hardware("H100", 0, None)
    halved = chosen_hardware("H100", 4, "40GB")
    assert halved is not None
    assert (halved.count, halved.memory_bytes) == (4, 40 * 2**30)
    assert chosen_hardware(None, None, None) is None


def test_this_machine() -> None:
    here = this_machine("cpu")
    assert here.kind == "cpu"
    assert here.memory_bytes > 2**20
