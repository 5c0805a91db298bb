"""`make bench-capacity`: how much passes through all that is not the model, and what many GPUs would ask of it.

The whole product on an engine that answers at once (`at_once.py`): gateway, judge, journal on disk, drawing of the
batch, audit; no update. The agent makes calls in one conversation, each a whole HTTP request or one of the SDK in the
run's process. Each line of the tables has a process of its own; a first step warms up, medians of the others count.

- calls, rollouts and sampled tokens a second: of the rollouts alone (`gather`), by wall time.
- CPU ms a call: of the rollouts, all threads of the process, the agent's client among them. Over HTTP the client is in
  the same process: `raw` has aiohttp where `http` has OpenAI's client.
- ms a rollout after it: journal, draw and audit, each alone on the groups of the last step, by wall time; `step` is
  the whole time between the last rollout and the next batch.
- journal: bytes of `run.db` per rollout, after the run.
- kB in flight: the slope of the process's resident memory over rollouts whose call waits for its answer.
- threads: shares of the CPU time of the rollouts by thread. All Python of a process shares one interpreter lock: the
  sum is what saturates first, and its largest share says where.
- With Ray (in an environment that has it, as `make test-ray` makes one): CPU ms a rollout of the coordinator's process
  and of the rollout workers' and engine's, apart. Agents, gateways and judges are in the workers, so that the first
  bounds a run of any number of workers.

Then `scale.py` says by the real schedule what 8 to 4,096 GPUs would need.

    python bench/capacity.py [--rollouts 512] [--in-flight 64 512 4096] [--repeats 3]
    python bench/capacity.py --measured bench/out/capacity.json    # the tables of what was measured before
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as `tune()` does, before torch is loaded

import numpy as np
import plain
import psutil
import report
import scale
from at_once import Asker, NoTrainer, judge
from growth import CONTEXT, make_model

from sharpen.config.load import resolve
from sharpen.evidence.certificate.audit import audit
from sharpen.evidence.certificate.delivery import delivery
from sharpen.evidence.certificate.rules import Rules
from sharpen.learning.experience.draw import draw_batches
from sharpen.learning.experience.journal import Journal
from sharpen.placement.local import LocalServing, start_serving
from sharpen.run.assembly import assemble, open_site
from sharpen.run.data import read_tasks
from sharpen.run.decide import decide
from sharpen.run.forecast import settle
from sharpen.run.loop import Loop
from sharpen.run.rollouts import RolloutSource
from sharpen.show.monitor.summary import run_clock
from sharpen.types import Group

GROUP = 8
WAYS = ("in process", "http", "raw")


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one process measures. `rollouts` are those of a step, all in flight at once. `workers`: of Ray; 0 is one
    process."""

    way: str = "in process"
    calls: int = 8
    tokens: int = 64
    rollouts: int = 512
    workers: int = 0
    repeats: int = 3


@dataclass(kw_only=True)
class Cost:
    """The medians of a case: seconds of the rollouts and of the rest of a step; CPU seconds of the rollouts here and in
    the processes below; seconds of journal, draw and audit, each alone; bytes of the journal of one step; CPU shares
    by thread; bytes of resident memory before the rollouts and with all of them in flight."""

    rollouts_s: float = 0.0
    step_s: float = 0.0
    cpu_s: float = 0.0
    below_s: float = 0.0
    step_cpu_s: float = 0.0
    journal_s: float = 0.0
    draw_s: float = 0.0
    audit_s: float = 0.0
    journal_bytes: float = 0.0
    memory: float = 0.0
    threads: dict[str, float] = field(default_factory=dict)


@contextlib.contextmanager
def open_case(case: Case, folder: Path) -> Iterator[Loop]:
    """Open the loop of a run in which no model computes."""
    resolved = resolve(
        settings={
            "checkpoint_root_dir": str(folder),
            "name": "capacity",
            "train_dataset.path": str(plain.QUICKSTART / "data"),
            "model": {"model_path": str(make_model(folder / "model")), "max_model_len": CONTEXT},
            "algorithm": {"algorithm_type": "grpo", "batch_size": case.rollouts // GROUP, "group_size": GROUP},
            "rollout.max_concurrent_rollouts": case.rollouts,
            "engine.type": f"{Path(__file__).parent / 'at_once.py'}:AtOnce",
            "loss.kl": "none",
            "evaluation.hold_out": False,
            "check.enabled": False,
            "certificate": {"retrain": "off", "on_violation": "warn"},
            **(
                {"execution": "ray", "cluster": {"num_workers": case.workers, "rollouts_per_worker": case.rollouts}}
                if case.workers
                else {}
            ),
        }
    )
    agent = Asker(way=case.way, calls=case.calls, tokens=case.tokens)
    forecast = settle(decide(resolved.config, agent.talk, judge))
    job = cast(Any, forecast.job)
    with contextlib.ExitStack() as stack:
        data = read_tasks(job.recipe)
        site = stack.enter_context(open_site(resolved, None, forecast, data, clock=run_clock()))
        serving = start_serving(job)
        stack.callback(serving.close)
        loop = assemble(site, serving, cast(Any, NoTrainer()))
        stack.callback(loop.monitor.close)
        stack.callback(loop.journal.close)
        yield loop


def cpu_below() -> float:
    """Return the CPU seconds of all processes below this one."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def cpu_of_threads() -> Counter[str]:
    """Return the CPU seconds of this process's Python threads by name, numbers at the end left out."""
    names = {thread.native_id: thread.name.rstrip("0123456789_-") for thread in threading.enumerate()}
    found: Counter[str] = Counter()
    for thread in psutil.Process().threads():
        found[names.get(thread.id, "others")] += thread.user_time + thread.system_time
    return found


def measure(loop: Loop, case: Case) -> Cost:
    """Make a step, then journal, draw and audit once more, each alone."""
    cost = Cost()
    if isinstance(loop.serving, LocalServing):
        engine: Any = loop.serving.engine  # an `AtOnce`, though of a module that was loaded by the file's path
        engine.when_full = lambda: setattr(cost, "memory", float(psutil.Process().memory_info().rss))
        engine.hold = case.rollouts if case.calls == 1 else 0
    below, threads, marks = cpu_below(), cpu_of_threads(), [(time.perf_counter(), time.process_time())]
    gathered = loop.source.gather(loop.progress)
    marks.append((time.perf_counter(), time.process_time()))
    cost.below_s, spent = cpu_below() - below, cpu_of_threads() - threads
    cost.threads = {name: seconds / spent.total() for name, seconds in spent.most_common()}
    outcome = loop.source.train(gathered, loop.progress)
    loop._record(outcome, marks[1][0] - marks[0][0], 0.0)
    loop.journal.flush()
    marks.append((time.perf_counter(), time.process_time()))
    if outcome.failure is not None:
        raise outcome.failure
    if broken := [check for check in outcome.checks if check.broken]:
        raise AssertionError(f"the certificate finds {broken}")
    (cost.rollouts_s, cost.cpu_s), (cost.step_s, cost.step_cpu_s) = (
        (after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(marks)
    )
    alone(loop, gathered.groups, cost)
    return cost


def alone(loop: Loop, groups: tuple[Group, ...], cost: Cost) -> None:
    """Time journal, draw and audit on the groups of a step."""
    assert isinstance(loop.source, RolloutSource)
    algorithm, rules = loop.source.recipe.algorithm, Rules.of(loop.config)
    with tempfile.TemporaryDirectory() as name, Journal(Path(name) / "run.db") as journal:
        began = time.perf_counter()
        for group in groups:
            journal.add(group)
        journal.flush()
        cost.journal_s = time.perf_counter() - began
    began = time.perf_counter()
    batches = draw_batches(groups, algorithm, 1)
    cost.draw_s = time.perf_counter() - began
    delivered = delivery(batches)
    began = time.perf_counter()
    audit(groups, delivered, rules, version=0)
    cost.audit_s = time.perf_counter() - began


def run(case: Case) -> Cost:
    """Measure a case in this process."""
    with tempfile.TemporaryDirectory() as name, open(os.devnull, "w") as nowhere:
        with contextlib.redirect_stdout(nowhere), open_case(case, Path(name)) as loop:
            costs = [measure(loop, case) for _ in range(1 + case.repeats)][1:]
            run_dir = loop.run_dir
        size = (run_dir / "run.db").stat().st_size / (1 + case.repeats)
    names = [name for name in Cost.__dataclass_fields__ if name != "threads"]
    middle = {name: statistics.median(getattr(cost, name) for cost in costs) for name in names}
    return Cost(**{**middle, "journal_bytes": size, "threads": costs[-1].threads})


def apart(work: Callable[[Case], Cost], case: Case) -> Cost:
    """Run it in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, case).result()


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    """Return what is measured: ways and shapes, rollouts in flight, workers of Ray."""
    base = Case(rollouts=arguments.rollouts, repeats=arguments.repeats)
    sizes = list(itertools.product(arguments.calls, arguments.tokens))
    shapes = [replace(base, way=way, calls=calls, tokens=tokens) for calls, tokens in sizes for way in arguments.ways]
    crowds = [
        replace(base, way=way, calls=1, tokens=min(arguments.tokens), rollouts=count)
        for way in arguments.ways
        for count in arguments.in_flight
    ]
    has_ray = importlib.util.find_spec("ray") is not None
    if not has_ray:
        print("Ray is not installed here: no lines of workers (see make test-ray)")
    ray = [
        replace(base, calls=calls, tokens=tokens, workers=count)
        for calls, tokens in sizes
        for count in arguments.workers
    ]
    return list(dict.fromkeys((*(ray if has_ray else ()), *shapes, *crowds)))


def row_of(case: Case, cost: Cost) -> tuple[object, ...]:
    """Return a line of the table."""
    calls = case.rollouts * case.calls
    each = [1e3 * seconds / case.rollouts for seconds in (cost.journal_s, cost.draw_s, cost.audit_s, cost.step_s)]
    return (
        f"{case.way}, {case.calls} x {case.tokens}, {case.rollouts} in flight"
        + (f", {case.workers} of Ray" if case.workers else ""),
        calls / cost.rollouts_s,
        case.rollouts / cost.rollouts_s,
        calls * case.tokens / cost.rollouts_s,
        1e3 * cost.cpu_s / calls,
        1e3 * cost.below_s / calls,
        *each,
        cost.journal_bytes / case.rollouts / 1e3,
        ", ".join(f"{name} {share:.0%}" for name, share in [*cost.threads.items()][:4]),
    )


def kilobytes_in_flight(found: list[tuple[Case, Cost]], way: str) -> float | None:
    """Return the slope of resident memory over rollouts in flight."""
    points = [(case.rollouts, cost.memory) for case, cost in found if case.way == way and cost.memory]
    if len({count for count, _ in points}) < 2:
        return None
    return float(np.polyfit([count for count, _ in points], [memory for _, memory in points], 1)[0]) / 1e3


def kept(found: list[tuple[Case, Cost]]) -> list[dict[str, Any]]:
    """Return what was measured as JSON."""
    return [{"case": asdict(case), "cost": asdict(cost)} for case, cost in found]


def costs_of(found: list[tuple[Case, Cost]]) -> list[scale.Costs]:
    """Return what a rollout of each shape costs: with the fewest workers of Ray, and in one process beside it."""
    alone = {(case.calls, case.tokens): (case, cost) for case, cost in reversed(found) if not case.workers}
    costs: dict[tuple[int, int], scale.Costs] = {}
    for case, cost in found:
        shape = (case.calls, case.tokens)
        if case.workers and shape not in costs:
            beside, one = alone[shape]
            costs[shape] = scale.Costs(
                calls=case.calls,
                tokens=case.calls * case.tokens,
                worker_s=cost.below_s / case.rollouts,
                receive_s=cost.cpu_s / case.rollouts,
                step_s=cost.step_s / case.rollouts,
                journal_bytes=cost.journal_bytes / case.rollouts,
                alone_s=one.cpu_s / beside.rollouts,
            )
    return [*costs.values()]


def main() -> int:
    """Measure, print, write `bench/out/capacity.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=512, help="of a step, where the shape of calls changes")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--calls", type=int, nargs="+", default=[1, 8], help="of a rollout")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 1000], help="sampled in a call")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2], help="of Ray")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--measured", type=Path, nargs="+", help="figures of earlier runs: measure nothing")
    arguments = parser.parse_args()
    if arguments.measured:
        files = [json.loads(path.read_text()) for path in arguments.measured]
        found = [(Case(**one["case"]), Cost(**one["cost"])) for content in files for one in content["cases"]]
    else:
        found = []
        for case in cases_of(arguments):
            found.append((case, cost := apart(run, case)))
            report.OUT.mkdir(parents=True, exist_ok=True)  # what is cut off leaves what it measured
            (report.OUT / "capacity.json").write_text(json.dumps({"cases": kept(found)}))
            print(f"  {case}: {cost.rollouts_s:.2f} s rollouts, {cost.step_s:.2f} s after", flush=True)
    least = min(case.tokens for case, _ in found)
    one_shape = [(case, cost) for case, cost in found if (case.calls, case.tokens) == (1, least)]
    slopes = {way: kilobytes_in_flight(one_shape, way) for way in WAYS}
    ratios = {f"kB in flight, {way}": slope for way, slope in slopes.items() if slope is not None}
    code = report.finish(
        "capacity",
        header=(
            *("case", "calls/s", "rollouts/s", "tokens/s", "CPU ms/call", "below ms/call"),
            *("journal ms", "draw ms", "audit ms", "step ms", "journal kB", "threads"),
        ),
        rows=[row_of(case, cost) for case, cost in found],
        ratios=ratios,
        extra={"cases": kept(found)},
    )
    if costs := costs_of(found):
        print(f"\n{scale.__doc__}")
        print(report.table(scale.HEADER, [row for one in costs for row in scale.rows(one)]), "\n")
        print(report.table(scale.ENDS_HEADER, [row for one in costs for row in scale.ends(one)]))
    return code


if __name__ == "__main__":
    sys.exit(main())
