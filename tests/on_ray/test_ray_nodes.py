"""Machines and processes that are lost while a run goes on, and where its parts are placed. Several Ray nodes here."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from ray_workflows import lingers
from test_ray_equality import run, steps

from agenttune.certify import certify
from agenttune.errors import RankError
from agenttune.experience.reading import read_groups, read_trained

QUICK = {"evaluation.before_and_after": False, "check.enabled": False, "algorithm.save_interval_steps": 1}


@contextmanager
def after_step_one(folder: Path, act: Callable[[], None]) -> Iterator[None]:
    """Do something from another thread once the first step of the run below `folder` has ended and is saved."""

    def watch() -> None:
        while not ended.is_set():
            if any(folder.rglob("latest")):
                time.sleep(0.2)  # rollouts of the next step are in flight
                act()
                return
            time.sleep(0.05)

    ended = threading.Event()
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def rollouts_of(folder: Path) -> list[Any]:
    return [rollout for group in read_groups(folder / "run.db") for rollout in group.rollouts]


def trained(folder: Path) -> Counter[tuple[int, str, int]]:
    """How often each call trained: its step, its rollout, its number."""
    return Counter((call.step, call.rollout_id, call.call) for call in read_trained(folder / "run.db"))


def test_a_node_that_is_lost_costs_nothing_but_time(cluster, tmp_path, toy_model_dir, toy_dataset, caplog):
    """A node with a rollout worker is killed while its rollouts run: they are done again elsewhere, with the same
    noise; all that was asked for trains once. Red when `OnWorkers.run` gives up on an attempt that was lost."""
    options = {**QUICK, "workflow": lingers}
    local = run(tmp_path / "local", toy_model_dir, toy_dataset, execution="local", **options)
    node = cluster.add_node(num_cpus=1)
    with after_step_one(tmp_path / "ray", lambda: cluster.remove_node(node, allow_graceful=False)):
        folder = run(tmp_path / "ray", toy_model_dir, toy_dataset, execution="ray", **options)
    assert "its 8 rollouts run again" in caplog.text
    ours, theirs = rollouts_of(local), rollouts_of(folder)
    assert [(one.id, one.reward) for one in theirs] == [(one.id, one.reward) for one in ours]
    assert len({one.metrics["pid"] for one in theirs}) >= 2
    assert trained(folder) == trained(local)
    assert set(trained(folder).values()) == {1}
    assert certify(folder).holds


def test_engines_and_ranks_share_gpus_and_give_the_same_losses(cluster, tmp_path, toy_model_dir, toy_dataset, capsys):
    """Two GPUs by Ray's account (the computing is on the CPU): an engine and a rank on each. Red when
    `RayServing.publish` loads the weights of the step before."""
    local = run(tmp_path / "local", toy_model_dir, toy_dataset, execution="local", **QUICK)
    node = cluster.add_node(num_cpus=4, num_gpus=2)
    seen: list[float] = []
    settings = {
        "trainer.num_processes": 2,
        "model.inference_engine_num": 2,
        "cluster.colocate": True,
        "cluster.num_workers": 1,
    }
    try:
        with after_step_one(tmp_path / "ray", lambda: seen.append(ray.available_resources().get("GPU", 0.0))):
            folder = run(
                tmp_path / "ray",
                toy_model_dir,
                toy_dataset,
                execution="ray",
                **QUICK,
                **settings,
            )
    finally:
        cluster.remove_node(node)
    assert seen == [0.0]
    assert "2 engine(s) (embedded) and 1 rollout worker(s) in actors, the trainer in 2 more" in capsys.readouterr().out
    for one, other in zip(rollouts_of(local), rollouts_of(folder), strict=True):
        for call, same in zip(one.calls, other.calls, strict=True):
            np.testing.assert_array_equal(call.sampled_ids_S, same.sampled_ids_S)
    for one_step, other_step in zip(steps(local), steps(folder), strict=True):
        assert one_step["trainer/loss"] == pytest.approx(other_step["trainer/loss"], abs=1e-6)
    assert certify(folder).holds


def test_a_rank_that_is_lost_ends_the_run_which_goes_on_from_its_checkpoint(
    cluster, tmp_path, toy_model_dir, toy_dataset
):
    """Red when `RayRanks._collect` waits for all ranks: the others wait for the lost one."""
    settings = {**QUICK, "trainer.num_processes": 2, "cluster.num_workers": 1, "name": "fixed"}

    def kill() -> None:
        ranks = [one for one in psutil.process_iter(["cmdline"]) if "RankActor" in " ".join(one.info["cmdline"] or [])]
        ranks[-1].kill()

    options = {"execution": "ray", "workflow": lingers, **settings}
    with after_step_one(tmp_path, kill), pytest.raises(RankError, match=r"was lost.*continues from the last one"):
        run(tmp_path, toy_model_dir, toy_dataset, **options)
    folder = run(tmp_path, toy_model_dir, toy_dataset, **options)
    assert [step["step"] for step in steps(folder)] == [1, 2, 3]
    assert {step for step, _, _ in trained(folder)} == {1, 2, 3}
    assert set(trained(folder).values()) == {1}
    assert certify(folder).holds
