"""Runs that are killed at random moments and at aimed places, and go on until they are done: as if nobody had.

    python kills.py --kills 50 --seed 0 --kind synchronous

Each run is begun again until it ends. After each kill whatever is on disk under its name must be whole; in the end a
deterministic run has the weights and records of one that nobody killed, to the last bit, and the certificate of every
run holds. The last line is the count.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))  # tests/

from aims import AIMS, Aim
from killed_run import KINDS, STEPS, Orders, main
from processes import alive, python
from step_walks import content, records

from sharpen.evidence.certificate.certify import certify
from sharpen.learning.trainer.checkpoint import is_whole, load, pointed

HERE = Path(__file__).parent
MOST_TIMES = 6
"""An aim is one of the first so many times that its line is reached in a session."""

MOST_MISSED = 5


@contextmanager
def forks(folder: Path, model: Path, dataset: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that forks one for each session."""
    arguments = [str(HERE / "killed_run.py"), str(folder), str(model), str(dataset)]
    with python(*arguments, stdin=subprocess.PIPE, stderr=None, paths=[HERE]) as process:
        yield process


def session(parent: Any, orders: Orders, run_dir: Path, after_s: float, send: Sequence[signal.Signals]) -> int:
    """One process, which kills itself at its aim, or to which these signals are sent some time after it began to train
    and has a checkpoint to go on from; its exit code."""
    began = time.time()
    parent.stdin.write(f"{orders.to_json()}\n")
    parent.stdin.flush()
    child = int(parent.stdout.readline())
    while send and alive(child) and (pointed(run_dir, "latest") is None or last_step_at(run_dir) < began):
        time.sleep(0.005)
    time.sleep(after_s if send else 0.0)
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
    """Whatever is there under its name is whole, and once there was a checkpoint there is one."""
    for folder in run_dir.glob("global_step_*"):
        assert is_whole(folder), folder
        saved = load(folder)
        step = int(folder.name.removeprefix("global_step_"))
        assert (saved.state["position"]["step"], saved.state["version"]) == (step, 2 * step)
        assert all(tensor.isfinite().all() for tensor in saved.weights.values())


def check_ended(run_dir: Path, unbroken: Path | None) -> None:
    """A run that is done has each step once, in its weights, its records, its monitor and its certificate."""
    last = pointed(run_dir, "latest")
    assert last is not None
    assert last.name == f"global_step_{STEPS}"
    if unbroken is not None:
        assert content(last) == content(unbroken / last.name)
        assert records(run_dir) == records(unbroken)
    lines = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(1, STEPS + 1))
    assert tensorboard_steps(run_dir) == lines
    assert [path.name for path in run_dir.glob(".*")] == []
    certificate = certify(run_dir, logprobs=False)
    assert certificate.holds, certificate.problems
    assert certificate.steps == STEPS
    if certificate.staleness is not None:
        oldest, allowed = certificate.staleness
        assert oldest <= allowed


def tensorboard_steps(run_dir: Path) -> list[int]:
    """The steps that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "monitor" / "tensorboard")).Reload()
    return [event.step for event in events.Scalars("reward/mean")]


@dataclass(kw_only=True)
class Harness:
    """Kills runs of one kind until it has killed as often as asked."""

    folder: Path
    kind: str
    unbroken: Path | None
    seed: int
    send: Sequence[signal.Signals] = (signal.SIGKILL,)
    killed: Counter[str] = field(default_factory=Counter)
    runs: int = 0

    def kill(self, parent: Any, num_random: int, aims: Sequence[tuple[str, Aim]]) -> None:
        """Kill at random moments and at these aims (kind, place), then let the last run end."""
        rng = random.Random(self.seed)
        todo: list[tuple[str, Aim | None]] = [*aims, *([("random", None)] * num_random)]
        rng.shuffle(todo)
        missed: Counter[Aim | None] = Counter()
        while todo:
            self.runs += 1
            name, code = f"{self.kind} {self.runs}", -1
            run_dir = self.folder / "P" / name
            while code != 0:
                what, aim = todo.pop() if todo else ("", None)
                orders = Orders(name=name, kind=self.kind, aim=aim and aim._replace(time=rng.randint(1, MOST_TIMES)))
                code = session(parent, orders, run_dir, rng.uniform(0.0, 1.5), self.send if what == "random" else ())
                if code != 0:
                    self.killed[what] += 1
                elif what:  # the run ended before its moment: another one is killed
                    todo.append((what, aim))
                    missed[aim] += aim is not None
                    assert missed[aim] < MOST_MISSED, f"{aim} is never reached"
                check_whole(run_dir)
                print(f"{self.kind}: {name}, {what or 'to its end'}{f' {aim}' if aim else ''}: {code}", flush=True)
            check_ended(run_dir, self.unbroken)

    @property
    def line(self) -> str:
        """What was done."""
        counts = ", ".join(f"{count} {what}" for what, count in sorted(self.killed.items()))
        return f"{self.kind}: {sum(self.killed.values())} kills ({counts}) in {self.runs} runs, 0 broken"


def unbroken_run(folder: Path, model: Path, dataset: Path, kind: str) -> Path | None:
    """A run that nobody kills, if those of its kind are the same to the last bit."""
    if not KINDS[kind].get("deterministic"):
        return None
    return main(folder, model, dataset, Orders(name="unbroken", kind=kind))


def all_aims(kind: str) -> list[tuple[str, Aim]]:
    """Every place that a run of this kind reaches in its own process, once: with Ray the engine is in another one."""
    elsewhere = ("inference/",) if KINDS[kind].get("execution") == "ray" else ()
    return [(what, aim) for what, aims in AIMS.items() for aim in aims if not aim.file.startswith(elsewhere)]


def run() -> None:
    """The script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="at random moments, for each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append", choices=[*KINDS], help="default: synchronous and asynchronous")
    parser.add_argument("--model", type=Path, help="a folder (default: a toy model is made)")
    arguments = parser.parse_args()
    from conftest import make_toy_model

    lines = []
    with tempfile.TemporaryDirectory(prefix="kills-") as place:
        folder = Path(place)
        model = arguments.model or make_toy_model(folder / "model")
        rows = "".join(f"{json.dumps({'question': f'question {number}'})}\n" for number in range(40))
        (folder / "data").mkdir()
        (folder / "data" / "train.jsonl").write_text(rows)
        for kind in arguments.kind or ["synchronous", "asynchronous"]:
            unbroken = unbroken_run(folder / "unbroken", model, folder / "data", kind)
            harness = Harness(folder=folder / "killed", kind=kind, unbroken=unbroken, seed=arguments.seed)
            with forks(harness.folder, model, folder / "data") as parent:
                harness.kill(parent, arguments.kills, all_aims(kind))
                assert parent.stdin is not None
                parent.stdin.close()
            lines.append(harness.line)
    print("; ".join(lines))


if __name__ == "__main__":
    run()
