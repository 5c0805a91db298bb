"""TRAPS 31: a step of two minibatches that is ended at any place, by Ctrl-C once or twice or by any error."""

import contextlib
import json
import linecache
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from step_walks import (
    BATCH_SIZE,
    ROOT,
    SAVES,
    SAVING,
    STEPS,
    Bench,
    Place,
    content,
    fail,
    interrupt,
    records,
    rollouts_bench,
    rows_bench,
)

from sharpen.learning.trainer.checkpoint import load, pointed


def check_directory(bench: Bench, run_dir: Path, step: int, place: Place) -> None:
    """What is on disk is what a step of the undisturbed run left, and the last that this one recorded."""
    for folder in run_dir.glob("global_step_*"):
        assert content(folder) == bench.whole[int(folder.name.removeprefix("global_step_"))], (place, folder.name)
    latest = pointed(run_dir, "latest")
    assert latest is not None, place
    if place.file not in SAVES and place.function not in SAVING:
        assert latest.name == f"global_step_{step}", place


BORDERS = (
    "self._start.begin(", "rule.step()", "self.version += 1", "values, alarms =", "self.supply.settle(",
    "self.journal.add_step(", "self.progress = progress", "self._trainer.save(", "self._point_to_best(rec",
)  # fmt: skip
"""Lines at which a step passes from one state to the next."""


def walk(bench: Bench, way: str, *, every: int = 0) -> int:
    """End a session at its places, one of so `every` or those at a border, and let another one go on from there; how
    many it were."""
    places = bench.places
    first = next(place for place in places if place.function == "train_step")
    if way == "twice":
        places = places[places.index(first) + 1 :]
    chosen = places[::every] if every else [place for place in places if source(place).startswith(BORDERS)]
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


def test_every_border_is_a_line_of_the_source():
    """Red for a name that was changed there, whose border was then no longer tried."""
    lines = [line.strip() for path in ROOT.rglob("*.py") for line in path.read_text().splitlines()]
    assert [border for border in BORDERS if not any(line.startswith(border) for line in lines)] == []


@pytest.fixture(scope="module")
def grpo(tmp_path_factory, toy_model_dir, toy_dataset):
    with rollouts_bench(tmp_path_factory.mktemp("grpo"), toy_model_dir, toy_dataset, "grpo") as bench:
        yield bench


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """Conversations and pairs to learn from."""
    folder = tmp_path_factory.mktemp("rows")
    for i in range(20):
        asked = [{"role": "user", "content": f"question {i}"}]
        row = {"messages": [*asked, {"role": "assistant", "content": "yes " * (i % 5 + 1)}]}
        row |= {"prompt": asked, "chosen": "yes " * (i % 3 + 1), "rejected": "no"}
        with (folder / "train.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
    return folder


@pytest.fixture(scope="module")
def sft(tmp_path_factory, toy_model_dir, rows):
    with rows_bench(tmp_path_factory.mktemp("sft"), toy_model_dir, rows, "sft") as bench:
        yield bench


@pytest.mark.parametrize("way", ["error", "once", "twice"])
def test_a_step_with_rollouts_ended_at_its_borders(grpo, way):
    """Red when `_restore` (run/steps.py) does not go back, when `_record` (run/loop.py) sets `progress` before the
    step is in `run.db`, when `live_tensors` (optimizer.py) lacks the moments."""
    assert walk(grpo, way) > 9


@pytest.mark.parametrize("way", ["error", "twice"])
def test_a_step_with_rows_ended_at_its_borders(sft, way):
    """Red for the same of `run/rows.py` and `learning/trainer/row_loss.py`."""
    assert walk(sft, way) > 6


def test_the_walked_steps_are_those_of_the_real_run(grpo):
    """What the bench hands out again trains to the weights that the run had which rolled it out."""
    weights = load(grpo.quiet / f"global_step_{STEPS}").weights
    assert all(torch.equal(weights[name], tensor) for name, tensor in grpo.trained.items())


def test_a_group_is_on_disk_before_it_is_trained(grpo):
    """Red when `_draw` (run/rollouts.py) does not flush the journal: its writer is kept waiting for a moment, and
    another connection sees committed rows only."""
    places, run_dir, seen = grpo.places, grpo.copy(), []
    adding = next(place for place in places if source(place).startswith("self.journal.add(group)"))
    training = next(place for place in places if place.function == "train_step")

    def hold() -> None:
        connection = sqlite3.connect(run_dir / "run.db", check_same_thread=False)
        connection.execute("BEGIN IMMEDIATE")
        threading.Timer(0.5, connection.close).start()

    def look() -> None:
        with contextlib.closing(sqlite3.connect(run_dir / "run.db")) as connection:
            seen.append(connection.execute("SELECT count(*) FROM groups").fetchone()[0])

    assert grpo.play(run_dir, {adding: hold, training: look}).error is None
    assert seen == [2 * BATCH_SIZE], "its own groups and those of the step before it"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["error", "once", "twice"])
@pytest.mark.parametrize("kind", ["grpo", "ppo", "lora", "two epochs"])
def test_all_over_a_step_with_rollouts(tmp_path, toy_model_dir, toy_dataset, kind, way):
    more = {"lora": {"trainer.lora": {"rank": 4}}, "two epochs": {"trainer.num_minibatches": 1, "trainer.epochs": 2}}
    algorithm = kind if kind == "ppo" else "grpo"
    with rollouts_bench(tmp_path, toy_model_dir, toy_dataset, algorithm, **more.get(kind, {})) as bench:
        assert walk(bench, way, every=3 if kind == "grpo" else 9) > 30


@pytest.mark.slow
@pytest.mark.parametrize("way", ["error", "once", "twice"])
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_all_over_a_step_with_rows(tmp_path, toy_model_dir, rows, kind, way):
    with rows_bench(tmp_path, toy_model_dir, rows, kind) as bench:
        assert walk(bench, way, every=9) > 20
