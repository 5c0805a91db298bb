"""Runs on a toy model that are ended at a chosen place of a step, as often as one likes.

The parts of a run are put together once, as `tune` does. What its first session rolled out is handed to all others
again (`Again`), so that they train bit for bit the same, in milliseconds. A *place* is a line of the code that trains,
records and saves, in the second step of a session, whose first one is not saved: the first or the second time that it
is reached in that step.
"""

import contextlib
import io
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import sharpen
from sharpen import WorkflowOutput
from sharpen.agent.rollout.refill import StepRollouts
from sharpen.agent.tasks.order import make_order
from sharpen.config.load import ResolvedConfig, resolve
from sharpen.learning.experience.journal import Journal
from sharpen.learning.experience.reading import read_groups, read_steps, read_taught, read_trained
from sharpen.learning.trainer.checkpoint import load, point, pointed
from sharpen.run.assembly import open_loop
from sharpen.run.loop import Loop
from sharpen.run.progress import Progress
from sharpen.show.monitor.display import Display
from sharpen.show.monitor.metrics import JsonlSink, Monitor
from sharpen.types import step_of_group

STEPS, BATCH_SIZE, GROUP_SIZE = 3, 2, 4
ROOT = Path(sharpen.__file__).parent
WALKED = (
    "run/loop.py", "run/rollouts.py", "run/rows.py", "run/steps.py", "learning/trainer/trainer.py",
    "learning/trainer/rollout_loss.py", "learning/trainer/row_loss.py", "learning/trainer/critic.py",
    "learning/trainer/optimizer.py", "learning/trainer/step_start.py", "learning/trainer/checkpoint.py",
    "learning/experience/journal.py", "show/monitor/metrics.py",
)  # fmt: skip
CHECKPOINT = "learning/trainer/checkpoint.py"
SAVES = ("run/steps.py", CHECKPOINT)
SAVING = ("save", "_save", "_position", "state_tensors")
"""Files and functions in which an error may be one of saving itself, which leaves the last checkpoint."""


class Place(NamedTuple):
    """A line, and how often it was reached."""

    file: str
    function: str
    line: int
    time: int


class Walker:
    """Traces the lines of `WALKED`; at some places something happens."""

    def __init__(self, acts: Mapping[Place, Callable[[], None]], begun: Callable[[], bool]) -> None:
        self.seen: list[Place] = []
        self._acts, self._begun = dict(acts), begun
        self._files = {str(ROOT / name): name for name in WALKED}
        self._times: Counter[tuple[str, int]] = Counter()

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        file = self._files.get(frame.f_code.co_filename)
        if file is None:
            return None
        if event == "line" and self._begun():
            self._times[file, frame.f_lineno] += 1
            place = Place(file, frame.f_code.co_name, frame.f_lineno, self._times[file, frame.f_lineno])
            self.seen.append(place)
            if act := self._acts.pop(place, None):
                act()
        return self


@contextlib.contextmanager
def walking(acts: Mapping[Place, Callable[[], None]], begun: Callable[[], bool]) -> Iterator[Walker]:
    """From when the session has `begun` its second step."""
    walker, before = Walker(acts, begun), sys.gettrace()
    sys.settrace(walker)
    try:
        yield walker
    finally:
        sys.settrace(before)


class Planted(Exception):
    """An error that nobody has in a list."""


def fail() -> None:
    raise Planted("here")


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class Again:
    """An explorer that hands out what was rolled out before."""

    def __init__(self, groups: list, orders: list[Mapping[str, Any]], done: int) -> None:
        self.schedule = SimpleNamespace(overlaps=False, max_staleness=0)
        self._groups, self._orders, self._done = groups, orders, done

    def gather(self, trainer: Any) -> StepRollouts:
        groups = tuple(group for group in self._groups if step_of_group(group.id) == self._done + 1)
        self._done += 1
        size = len(groups)
        return StepRollouts(groups=groups, batch_size=size, usable=size, refill_rounds=0, seconds=0.1, refill_s=0.0)

    def probe(self) -> tuple:
        return ()

    def settle(self, trainer: Any) -> None: ...

    def position(self) -> tuple[Mapping[str, Any], list]:
        return self._orders[self._done - 1], []

    def take_times(self) -> dict[str, float]:
        return dict.fromkeys(("rollout", "generate", "wait", "drain", "idle", "sync"), 0.0)

    def close(self) -> None: ...


class Session(NamedTuple):
    """How a session went: what ended it, the step it had recorded, and the places that it came to."""

    error: BaseException | None
    step: int
    seen: list[Place]


class Bench:
    """One kind of run. `start` is a run directory before its first step; `whole` has the checkpoint of each step as it
    must be, `quiet` a run that nobody disturbed."""

    def __init__(self, folder: Path, loop: Loop, resume: Callable[[Progress], dict[str, Any]]) -> None:
        self._folder, self._loop, self._resume = folder, loop, resume
        self._number = 0
        self.start = folder / "start"
        loop.trainer.save(self.start / "global_step_0", loop.progress.to_json())
        point(self.start, "latest", self.start / "global_step_0")
        self.quiet = self.copy()
        self.play(self.quiet, interval=1)
        self.whole = {step: content(self.quiet / f"global_step_{step}") for step in range(STEPS + 1)}

    def copy(self) -> Path:
        """A run directory before the first step."""
        self._number += 1
        return Path(shutil.copytree(self.start, self._folder / str(self._number), symlinks=True))

    def play(
        self, run_dir: Path, acts: Mapping[Place, Callable[[], None]] | None = None, *, interval: int = 2
    ) -> Session:
        """One session in this directory, from its latest checkpoint to the end, or to what ends it. One without `acts`
        is not traced, which takes half of the time, and sees no places."""
        old, latest = self._loop, pointed(run_dir, "latest")
        assert latest is not None
        progress = replace(Progress.from_json(old.trainer.restore(latest)), version=old.trainer.version)
        algorithm = old.config.algorithm.model_copy(update={"save_interval_steps": interval})
        sink = JsonlSink(run_dir / "metrics.jsonl", progress.step)
        error, begun_at = None, progress.step
        with Journal(run_dir / "run.db") as journal, contextlib.closing(sink):
            loop = replace(
                old,
                config=old.config.model_copy(update={"algorithm": algorithm}),
                journal=journal,
                monitor=Monitor(sink),
                display=Display(STEPS, io.StringIO()),
                run_dir=run_dir,
                total_steps=STEPS,
                progress=progress,
                source=replace(old.source, journal=journal, **self._resume(progress)),
                times={},
            )
            traced = contextlib.nullcontext() if acts is None else walking(acts, lambda: loop.progress.step > begun_at)
            with traced as walker:
                try:
                    loop.run()
                except (Planted, KeyboardInterrupt) as caught:
                    error = caught
        return Session(error, loop.progress.step, walker.seen if walker else [])

    @cached_property
    def places(self) -> list[Place]:
        """Where the second step of a session comes by, up to its save: each line, the first two times."""
        seen = self.play(self.copy(), {}).seen
        saved = [number for number, place in enumerate(seen) if place[:2] == (CHECKPOINT, "prune")]
        return [place for place in seen[: saved[0] + 8] if place.time <= 2]


def content(checkpoint: Path) -> dict[str, Any]:
    """All weights and moments of a checkpoint, and the position without what differs between any two runs."""
    saved = load(checkpoint)
    tensors = {path.name: path.read_bytes() for path in checkpoint.rglob("*.safetensors") if path.stem != "random"}
    position = {k: v for k, v in saved.state["position"].items() if k != "seconds_to_first_step"}
    return {**tensors, **saved.state, "position": position}


def records(run_dir: Path) -> dict[str, Any]:
    """What a run says of itself, step by step, without times."""
    steps = {step.step: step for step in read_steps(run_dir / "run.db")}
    journal = run_dir / "run.db"
    return {
        "steps": {number: (step.version, untimed(step.metrics)) for number, step in steps.items()},
        "trained": {step: read_trained(journal, step=step) for step in steps},
        "taught": read_taught(journal),
        "metrics": [untimed(line) for line in map(_json, (run_dir / "metrics.jsonl").read_text().splitlines())],
    }


def untimed(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Without what says how long something took."""
    words = ("time", "second", "per_s")
    return {name: value for name, value in numbers.items() if not any(word in name for word in words)}


def _json(line: str) -> dict[str, Any]:
    import json

    found: dict[str, Any] = json.loads(line)
    return found


async def letters(task, model):
    """One call; the reward is the share of the letter 'e'."""
    reply = await model.client.chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": task["question"]}], max_tokens=8
    )
    return WorkflowOutput(reward=(reply.choices[0].message.content or "").count("e") / 8)


def settings(folder: Path, model: Path, dataset: Path, algorithm: str, **more: Any) -> ResolvedConfig:
    return resolve(
        settings={
            "checkpoint_root_dir": str(folder),
            "train_dataset": {"path": str(dataset), "split": "train", "total_steps": STEPS},
            "model": {"model_path": str(model), "max_model_len": 128, "max_tokens": 8},
            "algorithm": {
                "algorithm_type": algorithm,
                "group_size": GROUP_SIZE,
                "batch_size": BATCH_SIZE,
                "learning_rate": 1e-2,
            },
            "evaluation": {"before_and_after": False, "hold_out": False},
            "check.enabled": False,
            "certificate.retrain": "off",  # it reads the run's own directory: these sessions are in copies of it
            "deterministic": True,
            "trainer.num_minibatches": 2,
            "trainer.keep_checkpoints": 9,
            **more,
        }
    )


@contextlib.contextmanager
def rollouts_bench(folder: Path, model: Path, dataset: Path, algorithm: str, **more: Any) -> Iterator[Bench]:
    """Of a run with rollouts: they are rolled out once, by the real engine."""
    resolved = settings(folder, model, dataset, algorithm, **more)
    with open_loop(resolved, letters, None) as (loop, site):
        loop.trainer.save(folder / "untrained", {})
        start, orders = loop.progress.order, []
        while loop.progress.step < STEPS:
            loop.run_step()
            orders.append(loop.progress.order)
        loop.journal.flush()
        groups = list(read_groups(site.directory.journal))
        trained = {name: tensor.clone() for name, tensor in loop.trainer.state_tensors().items()}
        loop.trainer.restore(folder / "untrained")
        loop.progress = Progress(order=start)
        bench = Bench(folder, loop, lambda progress: {"supply": Again(groups, orders, progress.step)})
        bench.trained = trained
        yield bench


@contextlib.contextmanager
def rows_bench(folder: Path, model: Path, dataset: Path, algorithm: str, **more: Any) -> Iterator[Bench]:
    """Of a run that learns from rows."""
    resolved = settings(folder, model, dataset, algorithm, **more)
    config = resolved.config
    with open_loop(resolved, None, None) as (loop, site):

        def resume(progress: Progress) -> dict[str, Any]:
            order = make_order(site.data.training, config.sampling, seed=config.seed, batch_size=BATCH_SIZE)
            order.restore(progress.order)
            return {"order": order}

        yield Bench(folder, loop, resume)
