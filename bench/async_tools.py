"""`make bench-async`: the quickstart with tools that wait, asynchronous against synchronous.

Both sides in one run on the same machine: 16 tasks x 8 rollouts a step, 64 rollouts in flight, the same seconds of
waiting for each (task, rollout of the task, call), log-normal with median 0.5 s and 95th percentile 3 s; the
quickstart's model, data and settings. One side waits for each step's last rollout before it trains, the other one goes
on (`fully_async`, at most 2 policy versions behind). About ten minutes.

What the trace holds: begin and end of every rollout, of every tool wait in it, and of every request at the engine.
While rollouts are in flight, the engine is `idle` where it has no request. That is `forced` by the tools where every
rollout in flight is inside a tool wait; the rest (`beyond`) is ours: agents, clients, gateway, starting rollouts late.

Targets: `rollouts_per_s` >= 2.0 (asynchronous over synchronous, of the training alone), `idle_beyond` <= 0.10 of the
time in which rollouts are in flight (asynchronous), `accuracy_apart` <= 0: the 95% intervals of both sides' final
accuracies on held-out tasks have a part in common, greedy ones and sampled ones.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as `tune()` does, before torch is loaded

import plain
import report
import torch
from agent import MAX_CALLS, MAX_TOKENS, SYSTEM, TOOLS, calculator, judge

from sharpen import WorkflowOutput
from sharpen.config.load import resolve
from sharpen.contracts import Engine, GenerateRequest, Generation
from sharpen.placement.local import LocalServing
from sharpen.run.assembly import open_loop
from sharpen.run.loop import Loop
from sharpen.show.monitor import spent
from sharpen.show.monitor.statistics import Accuracy, Evaluation, by_mode

MEDIAN_S, PERCENTILE_95_S, Z_95 = 0.5, 3.0, 1.645
IN_FLIGHT = 64
SIDES: Mapping[str, Mapping[str, Any]] = {
    "synchronous": {},
    "asynchronous": {"sync.style": "fully_async", "sync.max_staleness": 2},
}
TARGETS_AT_LEAST = {"rollouts_per_s": 2.0}
TARGETS_AT_MOST = {"idle_beyond": 0.10, "accuracy_apart": 0.0}


def wait_s(question: str, rollout: int, call: int, median_s: float = MEDIAN_S) -> float:
    """Seconds that a tool takes: log-normal, and the same for the same call on both sides."""
    digest = hashlib.blake2b(f"{question}/{rollout}/{call}".encode(), digest_size=8).digest()
    uniform = (int.from_bytes(digest) + 0.5) / 2**64
    sigma = math.log(PERCENTILE_95_S / MEDIAN_S) / Z_95
    return median_s * math.exp(sigma * statistics.NormalDist().inv_cdf(uniform))


@dataclass(slots=True)
class Trace:
    """Begins (+1) and ends (-1) in time: of rollouts, of tool waits, of requests at the engine."""

    events: list[tuple[float, str, int]] = field(default_factory=list)
    waited_s: float = 0.0

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        """Note the begin and the end of this block."""
        self.events.append((time.time(), kind, 1))
        try:
            yield
        finally:
            self.events.append((time.time(), kind, -1))

    def idle(self) -> dict[str, float]:
        """Seconds with rollouts in flight, and those of them in which the engine had no request: all, and forced.
        Besides the seconds of all rollouts, and of all requests."""
        found = {"in_flight": 0.0, "idle": 0.0, "forced": 0.0, "rollout_seconds": 0.0, "request_seconds": 0.0}
        counts: Counter[str] = Counter()
        before = 0.0
        for now, kind, change in sorted(self.events, key=lambda event: event[0]):
            seconds = now - before
            if counts["rollout"]:
                found["in_flight"] += seconds
                found["rollout_seconds"] += counts["rollout"] * seconds
                found["request_seconds"] += counts["request"] * seconds
                if not counts["request"]:
                    found["idle"] += seconds
                    if counts["wait"] == counts["rollout"]:
                        found["forced"] += seconds
            counts[kind] += change
            before = now
        return found


class TracedEngine:
    """The engine of a run, with its requests noted."""

    def __init__(self, engine: Engine, trace: Trace) -> None:
        self._engine, self._trace = engine, trace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerateRequest) -> Generation:
        """As the engine does."""
        with self._trace.span("request"):
            return await self._engine.generate(request)


def make_workflow(trace: Trace, median_s: float) -> Callable[[dict[str, Any], Any], Awaitable[WorkflowOutput]]:
    """The quickstart's agent with a tool that takes its time; in evaluations it does not."""
    import asyncio

    begun: Counter[str] = Counter()

    async def solve(task: dict[str, Any], model: Any, rollout: int | None) -> str | None:
        messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["question"]}]
        for number in range(MAX_CALLS):
            reply = await model.client.chat.completions.create(
                model=model.name, messages=messages, tools=TOOLS, max_tokens=MAX_TOKENS
            )
            message = reply.choices[0].message
            if not message.tool_calls:
                text: str | None = message.content
                return text
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                if rollout is not None:
                    seconds = wait_s(task["question"], rollout, number, median_s)
                    trace.waited_s += seconds
                    with trace.span("wait"):
                        await asyncio.sleep(seconds)
                result = calculator(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return None

    async def run_agent(task: dict[str, Any], model: Any) -> WorkflowOutput:
        if not model.recorded:
            return WorkflowOutput(response=await solve(task, model, None))
        rollout = begun[task["question"]]
        begun[task["question"]] += 1
        with trace.span("rollout"):
            return WorkflowOutput(response=await solve(task, model, rollout))

    return run_agent


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one side did: rollouts of the steps and the seconds of the training, final accuracy, figures of the trace
    (seconds), shares of the steps' time, the oldest token (policy versions)."""

    rollouts: int
    seconds: float
    after: Mapping[str, Accuracy]
    trace: Mapping[str, float]
    shares: Mapping[str, float]
    stalest: float
    waited_s: float

    @property
    def beyond(self) -> float:
        """The share of the time with rollouts in flight in which the engine had no request and no tool forced that."""
        return (self.trace["idle"] - self.trace["forced"]) / self.trace["in_flight"]


def run(sync: Mapping[str, Any], steps: int, median_s: float, *, evaluate: bool) -> Outcome:
    """One side, from the model as it is shipped."""
    trace = Trace()
    with tempfile.TemporaryDirectory() as folder:
        resolved = resolve(
            settings={
                "checkpoint_root_dir": folder,
                "train_dataset": {"path": str(plain.QUICKSTART / "data"), "split": "train", "total_steps": steps},
                "eval_dataset": {"path": str(plain.QUICKSTART / "data"), "split": "test"},
                "model": {"model_path": str(plain.QUICKSTART / "model"), "max_model_len": 512},
                "algorithm": {
                    "algorithm_type": "grpo",
                    "batch_size": 16,
                    "group_size": 8,
                    "learning_rate": 3e-4,
                    "eval_interval_steps": steps + 1,
                    "save_interval_steps": steps + 1,
                },
                "engine.type": "embedded",
                "loss.kl": "none",
                "trainer": {"beta2": 0.95, "weight_decay": 0.0},
                "rollout.max_concurrent_rollouts": IN_FLIGHT,
                "evaluation.before_and_after": False,
                "check.enabled": False,
                **sync,
            }
        )
        with open_loop(resolved, make_workflow(trace, median_s), judge) as (loop, site):
            assert isinstance(loop.serving, LocalServing)
            loop.serving.gateway.engine = TracedEngine(loop.serving.engine, trace)
            loop.run()
            lines = (site.directory.path / "metrics.jsonl").read_text().splitlines()
            rows = [row for row in map(json.loads, lines) if "rollout/count" in row]
            began = next(when for when, kind, _ in trace.events if kind == "rollout")
            trained_at = rows[-1]["time"]
            trace.events = [event for event in trace.events if event[0] <= trained_at and event[0] >= began]
            return Outcome(
                rollouts=sum(int(row["rollout/count"]) for row in rows),
                seconds=trained_at - began,
                after=by_mode(_final(loop)) if evaluate else {},
                trace=trace.idle(),
                shares=spent.shares(rows),
                stalest=max(row.get("sync/staleness_max", 0.0) for row in rows),
                waited_s=trace.waited_s,
            )


def _final(loop: Loop) -> Evaluation:
    """The final weights on the held-out tasks, with tools that do not wait."""
    assert loop.exam.evaluator is not None
    loop.source.serve()
    return loop.exam.evaluator.evaluate(loop.trainer.version, name="after", with_further=False)


def main() -> int:
    """Measure, print, write `bench/out/async.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--median-s", type=float, default=MEDIAN_S, help="seconds of a tool in the middle")
    parser.add_argument("--no-evaluation", action="store_true", help="speed alone, for a short run")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    found = {}
    for side in arguments.sides:
        print(f"--- {side}", flush=True)
        found[side] = run(SIDES[side], arguments.steps, arguments.median_s, evaluate=not arguments.no_evaluation)
    if len(found) < len(SIDES):
        print(found)
        return 0
    slow, fast = found["synchronous"], found["asynchronous"]
    ratios = {
        "rollouts_per_s": (fast.rollouts / fast.seconds) / (slow.rollouts / slow.seconds),
        "idle_beyond": fast.beyond,
    }
    if not arguments.no_evaluation:
        both = [(slow.after[mode], fast.after[mode]) for mode in slow.after]
        ratios["accuracy_apart"] = max(0.0, *(max(a.low - b.high, b.low - a.high) for a, b in both))
    return report.finish(
        "async",
        header=(f"{arguments.steps} steps of 16 x 8 rollouts", *found, "ratio"),
        rows=_rows(found),
        ratios=ratios,
        at_least=TARGETS_AT_LEAST,
        at_most={name: target for name, target in TARGETS_AT_MOST.items() if name in ratios},
        extra={
            "steps": arguments.steps,
            "seconds": {side: one.seconds for side, one in found.items()},
            "trace": {side: one.trace for side, one in found.items()},
            "shares": {side: dict(one.shares) for side, one in found.items()},
        },
    )


def _rows(found: Mapping[str, Outcome]) -> list[tuple[object, ...]]:
    sides = list(found.values())
    rows: list[tuple[object, ...]] = []

    def add(name: str, values: list[float], ratio: bool = False) -> None:
        rows.append((name, *values, values[1] / values[0] if ratio else None))

    add("seconds of training", [one.seconds for one in sides])
    add("rollouts/s", [one.rollouts / one.seconds for one in sides], ratio=True)
    add("rollouts in flight, mean", [one.trace["rollout_seconds"] / one.seconds for one in sides])
    add("seconds of tools, per rollout", [one.waited_s / one.rollouts for one in sides])
    add("seconds at the engine, per rollout", [one.trace["request_seconds"] / one.rollouts for one in sides])
    for part in spent.PARTS:
        add(f"{part}, share of the steps", [one.shares[part] for one in sides])
    add("engine idle, share of the time in flight", [one.trace["idle"] / one.trace["in_flight"] for one in sides])
    add("  forced by tools", [one.trace["forced"] / one.trace["in_flight"] for one in sides])
    add("  beyond", [one.beyond for one in sides])
    add("oldest token, policy versions", [one.stalest for one in sides])
    for mode in sides[0].after:
        add(f"{mode} accuracy", [one.after[mode].accuracy for one in sides])
        add("  from", [one.after[mode].low for one in sides])
        add("  to", [one.after[mode].high for one in sides])
    return rows


if __name__ == "__main__":
    sys.exit(main())
