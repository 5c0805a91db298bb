"""The suggested change: it fits, each smaller one does not, and nothing cheaper was passed over."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_toys import case_of, gpu, model_config, run_config, write_config

from sharpen.run.plan.case import Case
from sharpen.run.plan.memory import places
from sharpen.run.plan.predict import CHANGES, Settings, plan, suggest

SETTINGS: dict[str, Any] = {
    "model.max_model_len": 512,
    "algorithm.batch_size": 16,
    "trainer.max_tokens_per_micro_batch": 4096,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("model"), model_config(hidden_size=256))


@pytest.fixture(scope="module")
def usual(folder: Path) -> Case:
    return case_of(run_config(folder, SETTINGS), gpu(8))


def with_share(case: Case, share: float) -> Case:
    """The same on a GPU with this share of the memory that it takes."""
    return replace(case, hardware=gpu(share * places(case)[0].peak / 2**30))


def smaller(case: Case, suggestion: Settings) -> Iterator[Case]:
    """The cases with one of the changes left out, or one step weaker."""
    for levels in (make(case) for make in CHANGES):
        place = next((n for n, level in enumerate(levels) if level.items() <= suggestion.items()), None)
        if place is not None:
            rest = {name: value for name, value in suggestion.items() if name not in levels[place]}
            yield case.changed(rest if place == 0 else {**rest, **levels[place - 1]})


@settings(max_examples=4)
@given(share=st.floats(0.3, 0.99))
def test_it_fits_and_each_smaller_one_does_not(usual: Case, share: float) -> None:
    """For a GPU with any share of the memory that the run as it is would take."""
    case = with_share(usual, share)
    found = plan(case)
    assert not found.fits
    suggestion = found.suggestion
    if suggestion is None:
        return
    assert plan(case.changed(suggestion), suggests=False).fits
    weaker = list(smaller(case, suggestion))
    assert len(weaker) == len(suggestion)
    for changed in weaker:
        assert not plan(changed, suggests=False).fits


def test_the_order_is_from_what_costs_least(usual: Case) -> None:
    """Each size of a GPU has its change: at first one, then two, with adapters last of those that are tried here."""
    suggestions = [plan(with_share(usual, share)).suggestion for share in (0.95, 0.5, 0.3, 0.001)]
    names = [None if found is None else [*found] for found in suggestions]
    assert names[0] == ["trainer.gradient_checkpointing"]
    assert names[-1] is None
    counts = [len(found) for found in names if found is not None]
    assert counts == sorted(counts)


def test_a_single_change_is_taken_no_further_than_it_must(usual: Case) -> None:
    """By a rule instead of a model: it fits from 1,024 tokens down, or with two slots. Checkpointing alone does not
    help, so that the micro-batch is next; 4096 -> 2048 -> 1024."""
    found = suggest(usual, lambda one: one.config.trainer.max_tokens_per_micro_batch <= 1024)
    assert found == {"trainer.max_tokens_per_micro_batch": 1024}
    found = suggest(usual, lambda one: one.config.engine.max_slots <= 2 and one.config.trainer.lora is not None)
    assert found is not None
    assert found["engine.max_slots"] == 2
    assert found["trainer.lora"].rank == 16


def test_a_micro_batch_is_not_made_smaller_than_the_longest_sequence(usual: Case) -> None:
    """A longer sequence goes alone: it would save nothing."""
    longest = usual.workload.longest
    least = suggest(usual, lambda one: one.config.trainer.max_tokens_per_micro_batch <= longest)
    assert least == {"trainer.max_tokens_per_micro_batch": longest}
    assert suggest(usual, lambda one: one.config.trainer.max_tokens_per_micro_batch < longest) is None


def test_settings_that_are_changed_are_those_of_a_run(usual: Case) -> None:
    changed = usual.changed({"trainer.gradient_checkpointing": True, "engine.max_slots": 7}).config
    assert changed.trainer.gradient_checkpointing
    assert changed.engine.max_slots == 7
    assert usual.config.engine.max_slots == 256
