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
import pytest
import ray
from ray_workflows import actors_of, has_ended, waits_at_a_gate
from test_ray_equality import run, steps

from sharpen.errors import RankError
from sharpen.evidence.certificate.certify import certify
from sharpen.learning.experience.reading import read_groups, read_trained
from sharpen.placement.cluster.ranks import RayRanks
from sharpen.placement.ranks.answers import RankAnswer

QUICK = {
    "workflow": waits_at_a_gate,
    "evaluation.before_and_after": False,
    "check.enabled": False,
    "algorithm.save_interval_steps": 1,
}


@contextmanager
def at_the_gate(folder: Path, act: Callable[[], None], *, version: int, rollouts: int = 16) -> Iterator[dict[str, Any]]:
    """Do something from another thread while all rollouts of a step are in flight; settings of such a run."""

    def watch() -> None:
        while not ended.wait(0.05):
            if len(list(folder.glob("waiting-*"))) >= rollouts:
                act()
                break
        (folder / "open").touch()

    folder.mkdir()
    ended = threading.Event()
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield {"workflow_args": {"gate": str(folder), "version": version}}
    finally:
        ended.set()
        thread.join()


@pytest.fixture(scope="module")
def local(tmp_path_factory: Any, toy_model_dir: Path, toy_dataset: Path) -> Path:
    """What one process makes of it."""
    folder = tmp_path_factory.mktemp("local")
    nowhere = {"gate": str(folder), "version": None}
    return run(folder, toy_model_dir, toy_dataset, execution="local", workflow_args=nowhere, **QUICK)


def rollouts_of(folder: Path) -> dict[str, Any]:
    """By id; the last of an id is the one that trained, where a step was made twice."""
    return {rollout.id: rollout for group in read_groups(folder / "run.db") for rollout in group.rollouts}


def trained(folder: Path) -> Counter[tuple[int, str, int]]:
    """How often each call trained: its step, its rollout, its number."""
    return Counter((call.step, call.rollout_id, call.call) for call in read_trained(folder / "run.db"))


def assert_same(folder: Path, local: Path) -> None:
    """The same rollouts, each call trained once in the same step, the same losses."""
    ours, theirs = rollouts_of(local), rollouts_of(folder)
    assert {id_: one.reward for id_, one in theirs.items()} == {id_: one.reward for id_, one in ours.items()}
    for id_, one in ours.items():
        for call, same in zip(one.calls, theirs[id_].calls, strict=True):
            np.testing.assert_array_equal(call.sampled_ids_S, same.sampled_ids_S)
    for one_step, other_step in zip(steps(local), steps(folder), strict=True):
        assert one_step["trainer/loss"] == pytest.approx(other_step["trainer/loss"], abs=1e-6)
    assert trained(folder) == trained(local)
    assert set(trained(folder).values()) == {1}
    assert certify(folder).holds


def test_a_node_that_is_lost_costs_nothing_but_time(cluster, local, tmp_path, toy_model_dir, toy_dataset, caplog):
    """A node with a rollout worker is killed while its rollouts run: they are done again elsewhere, with the same
    noise; all that was asked for trains once. Red when `OnWorkers.run` gives up on an attempt that was lost."""
    node = cluster.add_node(num_cpus=1)

    def kill() -> None:
        workers = actors_of("RolloutWorker")
        cluster.remove_node(node, allow_graceful=False)
        deadline = time.monotonic() + 300
        while not any(map(has_ended, workers)) and time.monotonic() < deadline:  # it lives on for a moment
            time.sleep(0.05)

    with at_the_gate(tmp_path / "gate", kill, version=1) as gate:
        folder = run(tmp_path, toy_model_dir, toy_dataset, execution="ray", **QUICK, **gate)
    assert "its 8 rollouts run again" in caplog.text
    assert len({one.metrics["pid"] for one in rollouts_of(folder).values()}) >= 2
    assert_same(folder, local)


def test_engines_and_ranks_share_gpus_and_a_rank_that_is_lost_ends_the_run(
    cluster, local, tmp_path, toy_model_dir, toy_dataset, capsys
):
    """Two nodes with a GPU each by Ray's account (the computing is on the CPU): an engine and a rank on each. In the
    third step a rank is killed; one process goes on from the checkpoint. Red when `RayServing.publish` loads the
    weights of the step before, and when `_receive` sees none in a rank that is gone."""
    nodes = [cluster.add_node(num_cpus=2, num_gpus=1) for _ in range(2)]
    free: list[float] = []
    settings = {
        "trainer.num_processes": 2,
        "model.inference_engine_num": 2,
        "cluster.colocate": True,
        "cluster.num_workers": 1,
    }

    def kill() -> None:
        free.append(ray.available_resources().get("GPU", 0.0))
        actors_of("RankActor")[-1].kill()

    try:
        with (
            at_the_gate(tmp_path / "gate", kill, version=2) as gate,
            pytest.raises(RankError, match=r"was lost.*last checkpoint is whole"),
        ):
            run(tmp_path, toy_model_dir, toy_dataset, name="fixed", execution="ray", **QUICK, **gate, **settings)
    finally:
        for node in nodes:
            cluster.remove_node(node)
    assert free == [0.0]
    assert "2 engine(s) (embedded) and 1 rollout worker(s) in actors, the trainer in 2 more" in capsys.readouterr().out
    folder = run(tmp_path, toy_model_dir, toy_dataset, name="fixed", execution="local", **QUICK, **gate)
    assert "continuing fixed after step 2" in capsys.readouterr().out
    assert [step["step"] for step in steps(folder)] == [1, 2, 3]
    assert_same(folder, local)


def test_a_rank_that_is_silent_is_not_waited_for_once_another_is_lost(cluster):
    """Red when `RankCalls._collect` waits for all ranks."""

    class Rank:
        def place(self) -> tuple[str, str, int]:
            return "node", "127.0.0.1", 1

        def load(self, plan: Any, rank: int, *arguments: Any) -> RankAnswer:
            self.rank = rank
            return RankAnswer()

        def serve(self, call: Any) -> None:
            import os
            import time

            if self.rank == 0:
                os._exit(1)
            time.sleep(1e6)

    actors = [ray.remote(Rank).options(num_cpus=1).remote() for _ in range(2)]
    ranks = RayRanks(None, actors, grace_s=1.0)
    with pytest.raises(
        RankError, match=r"train_step, 2 processes.*rank 0 was lost.*; rank 1 did not answer and was ended"
    ):
        ranks.call("run", "train_step")
    with pytest.raises(RankError, match="rank 0 was lost"):
        ranks.weights()
