"""TRAPS 31: a step of two minibatches that is ended at any place, by Ctrl-C once or twice or by any error."""

import linecache
from collections.abc import Callable
from pathlib import Path

import pytest
from step_walks import ROOT, SAVES, STEPS, Bench, Place, Planted, content, fail, interrupt, records, rollouts_bench, rows_bench

from agenttune.trainer.checkpoint import pointed


def check_directory(bench: Bench, run_dir: Path, step: int, place: Place) -> None:
    """What is on disk is what a step of the undisturbed run left, and the last that this one recorded."""
    for folder in run_dir.glob("global_step_*"):
        assert content(folder) == bench.whole[int(folder.name.removeprefix("global_step_"))], (place, folder.name)
    latest = pointed(run_dir, "latest")
    assert latest is not None, place
    if place.file not in SAVES:
        assert latest.name == f"global_step_{step}", place


BORDERS = (
    "self._start.begin(", "self._adam.step()", "self.version += 1", "values, alarms = summarize", "self.explorer.settle",
    "self.journal.add_step(progress", "self.progress = progress", "self._trainer.save(", "self._point_to_best(recorded)",
)  # fmt: skip
"""Lines at which a step passes from one state to the next."""


def walk(bench: Bench, way: str, *, every: bool = False) -> int:
    """End a session at its places, all or those at a border, and let another one go on from there; how many it were."""
    places = bench.places()
    first = next(place for place in places if place.function == "train_step")
    if way == "twice":
        places = places[places.index(first) + 1 :]
    chosen = places if every else [place for place in places if source(place).startswith(BORDERS)]
    for place in chosen:
        act: Callable[[], None] = fail if way == "error" else interrupt
        run_dir = bench.copy()
        session = bench.play(run_dir, {**({first: interrupt} if way == "twice" else {}), place: act})
        assert session.error is not None, place
        check_directory(bench, run_dir, session.step, place)
        assert bench.play(run_dir).error is None
        assert content(run_dir / f"global_step_{STEPS}") == bench.whole[STEPS], place
        assert records(run_dir) == records(bench.quiet), place
    return len(chosen)


def source(place: Place) -> str:
    return linecache.getline(str(ROOT / place.file), place.line).strip()


@pytest.fixture(scope="module")
def grpo(tmp_path_factory, toy_model_dir, toy_dataset):
    with rollouts_bench(tmp_path_factory.mktemp("grpo"), toy_model_dir, toy_dataset, "grpo") as bench:
        yield bench


@pytest.mark.parametrize("way", ["error", "once", "twice"])
def test_a_step_with_rollouts(grpo, way):
    assert walk(grpo, way) > 9
