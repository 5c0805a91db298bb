"""The suggested change: it fits, each smaller one does not, and nothing cheaper was passed over."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_toys import gpu, model_config, run_config, write_config

from sharpen.config.run import RunConfig
from sharpen.plan.fit import CHANGES, Limits, Settings, apply, suggest
from sharpen.plan.memory import Models, places
from sharpen.plan.predict import plan, read_models
from sharpen.plan.sizes import sizes_of
from sharpen.plan.workload import Workload, expected

SETTINGS: dict[str, Any] = {
    "model.max_model_len": 512,
    "algorithm.batch_size": 16,
    "trainer.max_tokens_per_micro_batch": 4096,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("model"), model_config(num_hidden_layers=12, hidden_size=256))


def of_run(folder: Path, **settings: Any) -> tuple[Any, Models, Workload]:
    config = run_config(folder, SETTINGS | settings)
    return config, read_models(config), expected(config)


@pytest.fixture(scope="module")
def usual(folder: Path) -> tuple[Any, Models, Workload]:
    return of_run(folder)


def smaller(config: RunConfig, limits: Limits, suggestion: Settings) -> Iterator[RunConfig]:
    """The configurations with one of the changes left out, or one step weaker."""
    for levels in (make(config, limits) for make in CHANGES):
        place = next((n for n, level in enumerate(levels) if level.items() <= suggestion.items()), None)
        if place is not None:
            rest = {name: value for name, value in suggestion.items() if name not in levels[place]}
            yield apply(config, rest if place == 0 else {**rest, **levels[place - 1]})


@settings(max_examples=4)
@given(share=st.floats(0.3, 0.99))
def test_it_fits_and_each_smaller_one_does_not(usual: tuple[Any, Models, Workload], share: float) -> None:
    """For a GPU with any share of the memory that the run as it is would take."""
    config, models, workload = usual
    needed = places(config, models, gpu(8), workload)[0].peak
    hardware = gpu(share * needed / 2**30)
    found = plan(config, models, hardware, workload)
    assert not found.fits
    suggestion = found.suggestion
    if suggestion is None:
        return
    assert plan(apply(config, suggestion), models, hardware, workload, suggests=False).fits
    weaker = list(smaller(config, Limits(num_gpus=1, workload=workload), suggestion))
    assert len(weaker) == len(suggestion)
    for changed in weaker:
        assert not plan(changed, models, hardware, workload, suggests=False).fits


def test_the_order_is_from_what_costs_least(usual: tuple[Any, Models, Workload]) -> None:
    """Each size of a GPU has its change: at first one, then two, with adapters last of those that are tried here."""
    config, models, workload = usual
    needed = places(config, models, gpu(8), workload)[0].peak
    suggestions = [
        plan(config, models, gpu(share * needed / 2**30), workload).suggestion for share in (0.95, 0.5, 0.3, 0.001)
    ]
    names = [None if found is None else [*found] for found in suggestions]
    assert names[0] == ["trainer.gradient_checkpointing"]
    assert names[-1] is None
    counts = [len(found) for found in names if found is not None]
    assert counts == sorted(counts)


def test_a_single_change_is_taken_no_further_than_it_must(usual: tuple[Any, Models, Workload]) -> None:
    """By a rule instead of a model: it fits from 1,024 tokens down, or with two slots. Checkpointing alone does not
    help, so that the micro-batch is next; 4096 -> 2048 -> 1024."""
    config, _, workload = usual
    limits = Limits(num_gpus=1, workload=workload)
    found = suggest(config, limits, lambda one: one.trainer.max_tokens_per_micro_batch <= 1024)
    assert found is not None
    assert found == {"trainer.max_tokens_per_micro_batch": 1024}
    found = suggest(config, limits, lambda one: one.engine.max_slots <= 2 and one.trainer.lora is not None)
    assert found is not None
    assert found["engine.max_slots"] == 2
    assert found["trainer.lora"].rank == 16


def test_a_micro_batch_is_not_made_smaller_than_the_longest_sequence(usual: tuple[Any, Models, Workload]) -> None:
    """A longer sequence goes alone: it would save nothing."""
    config, _, workload = usual
    limits = Limits(num_gpus=1, workload=workload)
    least = suggest(config, limits, lambda one: one.trainer.max_tokens_per_micro_batch <= workload.longest)
    assert least is not None
    assert least == {"trainer.max_tokens_per_micro_batch": workload.longest}
    assert suggest(config, limits, lambda one: one.trainer.max_tokens_per_micro_batch < workload.longest) is None


def test_settings_that_are_changed_are_those_of_a_run(folder: Path) -> None:
    config = run_config(folder)
    changed = apply(config, {"trainer.gradient_checkpointing": True, "engine.max_slots": 7})
    assert changed.trainer.gradient_checkpointing
    assert changed.engine.max_slots == 7
    assert config.engine.max_slots == 256
    assert sizes_of(model_config()).num_layers == 3
