"""The verdict of the product and the one that is computed again, on evaluations of all kinds: they never differ."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from experience_builders import make_call
from planted_run import resolved

from sharpen.config.run import RunConfig
from sharpen.evidence.certificate.lineage import Lineage, Weights
from sharpen.evidence.certificate.verdict import Judged, judge_again
from sharpen.learning.experience.journal import Journal
from sharpen.learning.experience.reading import StepRecord
from sharpen.run.evaluation import Evaluator
from sharpen.run.progress import Measurement, Progress
from sharpen.show.monitor.summary import Summary, write_summary
from sharpen.show.monitor.verdict import Candidates, Checkpoint, Verdict, judge_rewards
from sharpen.types import MODEL_CAUSED, CallStatus, Group, Outcome, Rollout, Sampling, Task

KINDS = {
    "binary": lambda rng, skill: float(rng.random() < skill),
    "two": lambda rng, skill: 0.7 if rng.random() < skill else -1.0,
    "graded": lambda rng, skill: min(rng.randrange(5) / 4 + 0.25 * (rng.random() < skill), 1.0),
    "thirds": lambda rng, skill: rng.randrange(4) / 3,
    "real": lambda rng, skill: rng.gauss(skill, 0.5),
    "ties": lambda rng, skill: rng.choice([0.0, 0.1 + 0.2, 0.3]) + (rng.random() < skill),
}
SEEDS = 20
FAILURES = (Outcome.WORKFLOW_ERROR, Outcome.TIMEOUT, Outcome.JUDGE_ERROR, Outcome.BLOCKED_LOOP, *MODEL_CAUSED)


class Agent:
    """Stands for the runner: rollouts with rewards of a kind, some of which fail, with calls or without."""

    def __init__(self, rng: random.Random, *, peaked: bool) -> None:
        self.rng, self.kind = rng, KINDS[rng.choice([*KINDS])]
        self.skill, self.step = rng.choice([0.1, 0.5]), rng.choice([0.0, 0.1, 0.4, -0.4])
        self.peak = 4  # the version that is at its best
        self.failing, self.silent = rng.choice([0.0, 0.0, 0.1, 0.5]), rng.choice([0.0, 0.0, 0.05, 0.3])
        if peaked:
            self.peak, self.skill, self.step, self.failing, self.silent = 2, 0.1, 0.4, 0.0, 0.0
        self.clock = 0.0

    def run(self, tasks: Sequence[Task], *, version: int, open_session: str, **_: object) -> list[Group]:
        return [self._group(task, version, open_session) for task in tasks]

    def _group(self, task: Task, version: int, mode: str) -> Group:
        rng, self.clock = self.rng, self.clock + 1.0
        fails = rng.random() < self.failing and task.index > 0  # none at all ends the run
        outcome = rng.choice(FAILURES) if fails else Outcome.OK
        call = make_call(
            0,
            [1, 2],
            [3],
            versions_S=np.full(1, version, np.int32),
            sampling=Sampling(temperature=0.0 if mode == "greedy" else 1.0),
            status=rng.choice([CallStatus.USED, CallStatus.USED, CallStatus.ABANDONED]) if fails else CallStatus.USED,
        )
        rollout = Rollout(
            id="",
            group_id="",
            task_id=task.id,
            index=0,
            attempt=0,
            calls=() if rng.random() < self.silent else (call,),
            outcome=outcome,
            reward=None if fails else self.kind(rng, self.skill + (self.peak - abs(version - self.peak)) * self.step),
            started=self.clock,
        )
        return Group(id="", task=task, version=version, rollouts=(rollout,))


class Run:
    """A run of four steps, evaluated before, after, and now and then."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng, self.folder = random.Random(seed), folder
        rng = self.rng
        self.config: RunConfig = resolved(
            **{
                "rollout.failure_reward": rng.choice([None, 0.0, -1.0]),
                "rollout.max_excluded_share": rng.choice([0.1, 1.0]),
                "evaluation.max_without_calls": rng.choice([0.1, 1.0]),
                "evaluation.decided_by": rng.choice(["sampled", "greedy"]),
            }
        ).config
        peaked = seed % 5 == 0
        count = 40 if peaked else rng.choice([9, 10, 11, 16, 40])
        self.journal = Journal(folder / "evaluations.db")
        self.evaluator = Evaluator(
            config=self.config,
            runner=Agent(rng, peaked=peaked),  # type: ignore[arg-type]
            modes={"greedy": "greedy", "sampled": "sampled"},  # type: ignore[dict-item]
            tasks=_tasks("test", count),
            further={"more": _tasks("more", 5)} if rng.random() < 0.3 else {},
            progress=lambda *_: None,
            message=lambda _: None,
            keep=self.journal.add,
        )
        self.progress = Progress(step=4, version=4)

    def verdict(self) -> Verdict:
        """Evaluate as the loop does, write what it writes, and judge as it does."""
        self.progress = replace(self.progress, before=self._evaluate("before", 0))
        for step in (1, 2, 3) if self.rng.random() < 0.6 or self.evaluator.runner.peak == 2 else ():
            self._compare(step, self._evaluate(f"step {step}", step))
        self.progress = replace(self.progress, after=self._evaluate("after", 4))
        self._compare(4, self.progress.after)
        self.journal.close()
        progress, last = self.progress, self.folder / "checkpoint-4"
        best = None
        if progress.best_step not in (None, 4):
            (self.folder / "best").mkdir()
            folder = self.folder / f"checkpoint-{progress.best_step}"
            best = Checkpoint(step=progress.best_step, folder=folder, result=progress.best.rewards)
        verdict = judge_rewards(
            Candidates(
                original="toy",
                before=progress.before.rewards,
                last=Checkpoint(step=4, folder=last, result=progress.after.rewards),
                best=best,
                num_earlier=max(1, progress.num_evaluated - 1),
            ),
            self.config.evaluation.decided_by,
        )
        (last / "trainer_state").mkdir(parents=True)
        (last / "trainer_state" / "state.json").write_text(json.dumps({"position": progress.to_json()}))
        self._summarize(verdict)
        return verdict

    def again(self) -> Judged:
        steps = tuple(StepRecord(step=step, version=step, metrics={}) for step in (1, 2, 3, 4))
        lineage = Lineage(weights=Weights(name="checkpoint-4", step=4, version=4), steps=steps)
        return judge_again(self.folder, lambda _: self.config, lineage)

    def _evaluate(self, name: str, version: int) -> Measurement:
        found = self.evaluator.evaluate(version, name=name, with_further=not name.startswith("step"))
        return Measurement(rewards=found)

    def _compare(self, step: int, found: Measurement) -> None:
        progress = self.progress
        best = found.is_best(progress.best, progress.before, self.config.evaluation.decided_by)
        self.progress = replace(
            progress,
            best=found if best else progress.best,
            best_step=step if best else progress.best_step,
            num_evaluated=progress.num_evaluated + 1,
        )

    def _summarize(self, verdict: Verdict) -> None:
        counts = dict.fromkeys(("rollouts", "sampled_tokens", "trained_tokens", "computed_tokens"), 0)
        summary = Summary(
            before=self.progress.before.rewards,
            after=self.progress.after.rewards,
            seconds=1.0,
            seconds_to_first_step=None,
            steps=4,
            peak_memory_mb=None,
            model_dir=None,
            run_dir=self.folder,
            verdict=verdict,
            **counts,
        )
        write_summary(self.folder / "summary.json", summary)


def _tasks(name: str, count: int) -> list[Task]:
    return [Task(id=f"{name}/{number}", index=number, row={}) for number in range(count)]


@pytest.fixture
def runs(tmp_path) -> Iterator[tuple[Run, Verdict]]:
    """Runs of many kinds, each with its verdict."""
    journal = Journal(tmp_path / "run.db")
    journal.begin(0, 0)
    journal.close()

    def made() -> Iterator[tuple[Run, Verdict]]:
        for seed in range(SEEDS):
            folder = tmp_path / str(seed)
            folder.mkdir()
            (folder / "run.db").symlink_to(tmp_path / "run.db")
            run = Run(folder, seed)
            yield run, run.verdict()

    return made()


def test_both_give_the_same_verdict(runs):
    """Red with another interval, another reward of a failure, another best step, or another share that voids."""
    kinds = set()
    for run, verdict in runs:
        found = run.again()
        assert (found.problems, found.not_recomputed) == ((), ()), (run.folder, verdict)
        assert found.line.endswith(f"rewards read again: {verdict.kind}"), (found, verdict)
        kinds.add((verdict.kind, verdict.step, verdict.measure.split()[-1:] == ["accuracy"]))
    assert {kind for kind, *_ in kinds} == {"better", "worse", "not_shown", "unknown"}
    assert {step for kind, step, _ in kinds if kind == "better"} > {4}, "the best of several looks is among them"
    assert {accuracy for *_, accuracy in kinds} == {True, False}


def test_the_model_of_the_verdict_is_that_of_its_step(runs):
    """Red when another checkpoint than the better one is recommended unseen."""
    run = next(run for run, verdict in runs if verdict.kind == "better")
    path = run.folder / "summary.json"
    content = json.loads(path.read_text())
    content["verdict"]["model"] = str(run.folder / "checkpoint-3")
    path.write_text(json.dumps(content))
    (problem,) = run.again().problems
    assert problem.startswith("the verdict is of step 2, its model is")
    assert problem.endswith("checkpoint-3")
