"""`make chaos`: the quickstart, whose agent, judge and engine fail by chance all the time.

In: a seed. Out: what it cost and what the model can do in the end, on the last lines; exit code 1 if the model is worse
than without the failures, if a failed rollout was trained, or if there were more attempts than the failures explain.

Of the attempts in training 30% crash (an exception, `sys.exit`, `os._exit`), 10% hang until their time limit, and of
the judge's calls 10% raise; 5% of all calls of the engine fail. None of this depends on what the model says, so each
retry goes on from the same answers. Evaluations have the engine's failures alone. On a busy machine give a longer
`--timeout`: it ends the rollouts of evaluations too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, tune
from sharpen.errors import EngineError
from sharpen.learning.experience.reading import read_groups, read_trained
from sharpen.placement import local

CRASH, HANG, JUDGE, ENGINE = 0.3, 0.1, 0.1, 0.05
ENOUGH = 0.9
"""Accuracy on the held-out tasks (greedy) that the quickstart reaches without failures."""
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"


class Chance:
    """Draws failures. Each kind has its own draws, so that its n-th one is the same in whatever order threads ask."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._draws: dict[str, Random] = {}
        self._lock = threading.Lock()
        self.drawn: Counter[str] = Counter()

    def happens(self, what: str, share: float) -> bool:
        """Whether this time something happens."""
        with self._lock:
            draws = self._draws.setdefault(what, Random(f"{self._seed}/{what}"))
            happens = draws.random() < share
            self.drawn[what] += happens
        return happens


def faulty(
    workflow: Callable[..., Awaitable[Any]], chance: Chance, hang: float = HANG
) -> Callable[..., Awaitable[Any]]:
    """Return the workflow with crashes and hangs, before or after its work, in training."""

    async def run(task: dict[str, Any], model: Any, task_set: str | None) -> Any:
        if task_set is not None:
            return await workflow(task, model)
        late = chance.happens("late", 0.5)
        output = await workflow(task, model) if late else None
        if chance.happens("crash", CRASH):
            crash(chance)
        if chance.happens("hang", hang / (1 - CRASH)):
            await asyncio.Event().wait()
        return output if late else await workflow(task, model)

    return run


def crash(chance: Chance) -> None:
    """Fail in one of three ways."""
    if chance.happens("exit", 1 / 3):
        sys.exit(0)
    if chance.happens("os._exit", 1 / 2):
        os._exit(0)
    raise RuntimeError("a tool is broken")


def faulty_judge(judge: Callable[..., Awaitable[Any]], chance: Chance) -> Callable[..., Awaitable[Any]]:
    """Return the judge with errors, in training."""

    async def run(task: dict[str, Any], response: Any, task_set: str | None) -> Any:
        if task_set is None and chance.happens("judge", JUDGE):
            raise TimeoutError("the judge's server is gone")
        return await judge(task, response)

    return run


class FaultyEngine:
    """An engine that fails some of the gateway's calls."""

    def __init__(self, engine: Any, chance: Chance) -> None:
        self._engine, self._chance = engine, chance

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: Any) -> Any:
        """As the engine, or not."""
        if self._chance.happens("engine", ENGINE):
            raise EngineError("the engine has hiccups")
        return await self._engine.generate(request)


@contextlib.contextmanager
def faulty_engines(chance: Chance) -> Iterator[None]:
    """Let the engine fail behind every gateway that this process makes within."""
    make_gateway = local.make_gateway

    def faulty_gateway(model: Any, engine: Any, *rest: Any, **options: Any) -> Any:
        return make_gateway(model, FaultyEngine(engine, chance), *rest, **options)

    local.make_gateway = faulty_gateway
    try:
        yield
    finally:
        local.make_gateway = make_gateway


def cost(run_dir: Path, chance: Chance, max_attempts: int) -> tuple[int, float]:
    """Print what the run cost; return its attempts, and how many its failures explain."""
    rollouts, attempts = 0, 0
    outcomes: Counter[str] = Counter()
    for group in read_groups(run_dir / "run.db"):
        rollouts += len(group.rollouts)
        attempts += len(group.rollouts) + len(group.attempts)
        outcomes.update(one.outcome.value for one in (*group.rollouts, *group.attempts))
    share = 1 - outcomes["ok"] / attempts
    explained = (1 - share**max_attempts) / (1 - share) * rollouts
    print(f"planted: {dict(chance.drawn)}")
    print(
        f"{rollouts} rollouts, {attempts} attempts, {explained:.0f} explained by {share:.1%} failures: {dict(outcomes)}"
    )
    return attempts, explained


def trained_failures(run_dir: Path) -> set[str]:
    """Return the rollouts that failed and were trained nevertheless."""
    failed = {one.id for group in read_groups(run_dir / "run.db") for one in group.rollouts if not one.scored}
    return failed & {call.rollout_id for call in read_trained(run_dir / "run.db")}


def main() -> int:
    """Run the quickstart with failures."""
    parser = argparse.ArgumentParser(description="The quickstart under failures.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--timeout", type=float, default=15.0, help="rollout.timeout_s")
    parser.add_argument("--root", default="checkpoints", help="folder of the run")
    arguments = parser.parse_args()
    sys.path.insert(0, str(QUICKSTART))
    from agent import judge, run_agent

    logging.getLogger("sharpen.gateway").setLevel(logging.CRITICAL)  # a traceback for each planted failure
    chance, data = Chance(arguments.seed), str(QUICKSTART / "data")
    with faulty_engines(chance):
        result = tune(
            workflow_func=faulty(run_agent, chance),
            judge_func=faulty_judge(judge, chance),
            train_dataset=DatasetConfig(path=data, split="train", total_steps=arguments.steps),
            eval_dataset=DatasetConfig(path=data, split="test"),
            model=TunerModelConfig(model_path=str(QUICKSTART / "model"), max_model_len=512),
            algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=8, batch_size=16, learning_rate=3e-4),
            project_name="Chaos",
            settings={
                "checkpoint_root_dir": arguments.root,
                "seed": arguments.seed,
                "engine.type": "embedded",
                "loss.kl": "none",
                "trainer": {"beta2": 0.95, "weight_decay": 0.0},
                "rollout.timeout_s": arguments.timeout,
            },
        )
    attempts, explained = cost(result.run_dir, chance, max_attempts=3)
    accuracy, found = result.after["greedy"].accuracy, []
    if failed := trained_failures(result.run_dir):
        found.append(f"{len(failed)} failed rollouts were trained, {min(failed)} first")
    if attempts > 1.1 * explained:
        found.append(f"{attempts} attempts, {explained:.0f} are explained")
    if accuracy < ENOUGH:
        found.append(f"greedy accuracy {accuracy:.3f}, {ENOUGH} is reached without failures")
    print("\n".join([*found, f"seed {arguments.seed}: greedy accuracy {accuracy:.3f}: {len(found)} problems"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
