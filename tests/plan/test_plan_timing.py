"""The time of a step, by hand."""

from dataclasses import replace
from pathlib import Path

import pytest
from plan_toys import CPU, gpu, model_config, run_config, write_config

from sharpen.errors import ConfigError
from sharpen.plan.hardware import GPUS, chosen_hardware, gpu_by_name, measured_rates, parse_memory, this_machine
from sharpen.plan.predict import read_models
from sharpen.plan.sizes import sizes_of
from sharpen.plan.timing import EFFICIENCIES, forward_flops, generation_seconds, step_time
from sharpen.plan.workload import Workload, expected, metrics_of, of_run

LINEAR = 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160)
WORK = Workload(
    sequences=8,
    prompt_tokens=100,
    answer_tokens=50,
    computed_tokens=600,
    loss_tokens=400,
    longest=150,
    generates=True,
    source="by hand",
)


def test_a_forward_pass_by_hand() -> None:
    """2 operations a weight, 4 x heads x head size x context a layer, 2 x vocabulary x width where it is scored."""
    sizes = sizes_of(model_config())
    assert forward_flops(sizes, 1, 0, 0) == 2 * LINEAR
    assert forward_flops(sizes, 10, 7, 0) == 10 * (2 * LINEAR + 4 * 3 * 4 * 16 * 7)
    assert forward_flops(sizes, 0, 0, 5) == 2 * 500 * 64 * 5


def test_generation_by_hand() -> None:
    """200 prompt tokens at once, then 2 waves of 50 decode steps of 4 rows, each as slow as reading, or arithmetic."""
    sizes = sizes_of(model_config())
    prefill = forward_flops(sizes, 200, 50, 0) / 1e9
    reading = (2 * sizes.parameters + 4 * 125 * 384) / 1e6
    assert generation_seconds(sizes, WORK, 4, 1e9, 1e6, 2) == pytest.approx(prefill + 2 * 50 * reading)
    arithmetic = forward_flops(sizes, 4, 125, 4) / 1e9
    assert generation_seconds(sizes, WORK, 4, 1e9, 1e15, 2) == pytest.approx(prefill + 2 * 50 * arithmetic)


def test_a_step_by_hand(tmp_path: Path) -> None:
    """sft: forward and backward of 600 tokens, 400 of them scored, and the optimizer; nothing is generated."""
    config = run_config(write_config(tmp_path, model_config()), {"algorithm.algorithm_type": "sft"})
    models = read_models(config)
    found = step_time(config, models, gpu(16), replace(WORK, generates=False))
    assert found is not None
    assert found.generate_s == found.sync_s == 0
    training = 3 * forward_flops(models.policy, 600, 75, 400) / 1e14
    assert found.train_s == pytest.approx(training + 28 * models.policy.parameters / 1e12)
    high, low = EFFICIENCIES["cuda"]
    assert (found.low_s, found.high_s) == (found.at_peak_s / high, found.at_peak_s / low)
    assert found.low_s < found.likely_s < found.high_s


def test_longer_and_slower_never_takes_less(tmp_path: Path) -> None:
    folder = write_config(tmp_path, model_config())

    def seconds(**settings: object) -> float:
        config = run_config(folder, {key.replace("__", "."): value for key, value in settings.items()})
        found = step_time(config, read_models(config), CPU, expected(config))
        assert found is not None
        return found.at_peak_s

    for key, values in {
        "model__max_tokens": (8, 64, 128),
        "algorithm__batch_size": (1, 4, 16),
        "trainer__epochs": (1, 2, 3),
        "trainer__gradient_checkpointing": (False, True),
        "algorithm__algorithm_type": ("grpo", "ppo"),
    }.items():
        found = [seconds(**{key: value}) for value in values]
        assert found == sorted(found), key


def test_without_rates_there_is_no_time(tmp_path: Path) -> None:
    config = run_config(write_config(tmp_path, model_config()))
    hardware = chosen_hardware(None, None, "24GB")
    assert hardware is not None
    assert step_time(config, read_models(config), hardware, expected(config)) is None


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
    """Two steps of 8 rollouts: 160 and 240 sampled of 400 and 480 tokens, so 25 sampled and 30 before them."""
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
    assert (found.answer_tokens, found.prompt_tokens, found.computed_tokens, found.loss_tokens) == (25, 30, 320, 200)
    assert len(metrics_of(tmp_path)) == 2
    assert of_run(config, tmp_path / "nothing") is None


def test_sizes_of_memory() -> None:
    assert parse_memory("80GB") == parse_memory(" 80 gib") == parse_memory("80") == 80 * 2**30
    assert parse_memory("512MB") == 2**29
    for text in ("", "GB", "-1GB", "0GB", "8 parsecs"):
        with pytest.raises(ConfigError, match="80GB"):
            parse_memory(text)


def test_gpus_by_name() -> None:
    assert gpu_by_name("nvidia h100") is GPUS["H100"]
    assert gpu_by_name("a100 80gb") is GPUS["A100-80GB"]
    with pytest.raises(ConfigError, match="A100-40GB, A100-80GB"):
        gpu_by_name("Voodoo2")
    with pytest.raises(ConfigError, match="--gpus must be at least 1"):
        chosen_hardware("H100", 0, None)
    halved = chosen_hardware("H100", 4, "40GB")
    assert halved is not None
    assert (halved.count, halved.memory_bytes, halved.bandwidth) == (4, 40 * 2**30, 3350e9)
    assert chosen_hardware(None, None, None) is None


def test_this_machine_is_measured() -> None:
    here = measured_rates(this_machine("cpu"), seconds=0.01)
    assert here.memory_bytes > 2**20
    assert here.bandwidth is not None
    assert here.float32_flops is not None
    assert here.bandwidth > 1e8
    assert here.float32_flops > 1e8
    assert here.measured
