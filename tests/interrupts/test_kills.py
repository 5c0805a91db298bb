"""Runs that are killed at random moments, or interrupted twice, and go on until they are done: as if nobody had.

`KILLS=50 pytest -m slow tests/interrupts/test_kills.py` kills as often; `KILLS_SEED` chooses the moments.
"""

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from killed_run import STEPS, main
from processes import alive, python
from step_walks import content, records

from sharpen.certificate.certify import certify
from sharpen.trainer.checkpoint import load, pointed

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("KILLS", "4"))
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, toy_model_dir, toy_dataset) -> Path:
    return main(tmp_path_factory.mktemp("undisturbed"), toy_model_dir, toy_dataset, "run")


@contextmanager
def forks(folder: Path, model: Path, dataset: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that forks one for each session."""
    arguments = [str(HERE / "killed_run.py"), str(folder), str(model), str(dataset)]
    with python(*arguments, stdin=subprocess.PIPE, stderr=None) as process:
        yield process


def session(parent: Any, name: str, run_dir: Path, after_s: float, send: list[signal.Signals]) -> int:
    """One process, to which these signals are sent some time after it began to train and has a checkpoint to go on
    from; its exit code."""
    began = time.time()
    parent.stdin.write(f"{name}\n")
    parent.stdin.flush()
    child = int(parent.stdout.readline())
    while alive(child) and (pointed(run_dir, "latest") is None or last_step_at(run_dir) < began):
        time.sleep(0.005)
    time.sleep(after_s)
    for number in send:
        with suppress(ProcessLookupError):
            os.kill(child, number)
        time.sleep(0.03)
    code = int(parent.stdout.readline())
    assert code in (0, -signal.SIGKILL, 130), code
    return code


def last_step_at(run_dir: Path) -> float:
    """When the last whole line was written."""
    metrics = run_dir / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    return max((json.loads(line)["time"] for line in lines if line.endswith("\n")), default=0.0)


def check_whole(run_dir: Path) -> None:
    """Whatever is there under its name is whole, and `latest` points to it."""
    latest = pointed(run_dir, "latest")
    assert latest is not None
    for folder in run_dir.glob("global_step_*"):
        saved = load(folder)
        step = int(folder.name.removeprefix("global_step_"))
        assert (saved.state["position"]["step"], saved.state["version"]) == (step, 2 * step)
        assert all(tensor.isfinite().all() for tensor in saved.weights.values())


@pytest.mark.parametrize(
    "send", [[signal.SIGKILL], [signal.SIGINT, signal.SIGINT]], ids=["killed", "interrupted twice"]
)
def test_a_run_that_is_ended_at_random_moments_ends_as_if_nobody_had(
    tmp_path, toy_model_dir, toy_dataset, undisturbed, send
):
    rng, ended, runs, whole = random.Random(int(os.environ.get("KILLS_SEED", "0"))), 0, 0, content_of_end(undisturbed)
    with forks(tmp_path, toy_model_dir, toy_dataset) as parent:
        while ended < KILLS:
            runs += 1
            run_dir, code = tmp_path / "P" / f"run {runs}", -1
            while code != 0:
                code = session(parent, f"run {runs}", run_dir, rng.uniform(0.0, 1.5), send if ended < KILLS else [])
                ended += code != 0
                check_whole(run_dir)
                print(f"{ended} of {KILLS}: run {runs}, exit code {code}, {pointed(run_dir, 'latest')}", flush=True)
            assert content_of_end(run_dir) == whole
            assert records(run_dir) == records(undisturbed)
            certificate = certify(run_dir, logprobs=False)
            assert certificate.holds, certificate.problems
        assert parent.stdin is not None
        parent.stdin.close()
    print(f"ended {ended} times in {runs} runs")


def content_of_end(run_dir: Path) -> dict:
    return content(run_dir / f"global_step_{STEPS}")
