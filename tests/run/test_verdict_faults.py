"""Faults planted in what evaluates a running product: the certificate that the run writes at its end breaks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sharpen import WorkflowOutput
from sharpen.config.load import resolve
from sharpen.run.assembly import open_loop
from sharpen.run.evaluation import Evaluator
from sharpen.run.outcome import judge_run, write_outcome
from sharpen.show.monitor.statistics import Evaluation
from sharpen.types import Group


async def likes_letter(task, model):
    """Right is an answer with the letter 'e'."""
    reply = await model.client.chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": task["question"]}], max_tokens=8
    )
    return WorkflowOutput(reward=float("e" in (reply.choices[0].message.content or "")))


class Faulty:
    """An evaluator whose results go through `change`, with the name of the evaluation."""

    def __init__(self, evaluator: Evaluator, change: Callable[[Evaluation, str], Evaluation]) -> None:
        self.evaluator, self.change = evaluator, change

    def evaluate(self, version: int, *, name: str, with_further: bool) -> Evaluation:
        return self.change(self.evaluator.evaluate(version, name=name, with_further=with_further), name)


def is_right(group: Group) -> bool:
    return any(rollout.reward for rollout in group.rollouts)


def honest(evaluator):
    return evaluator


def greedy_taken_twice(evaluator):
    return Faulty(evaluator, lambda found, _: replace(found, sampled=found.greedy))


def wrong_answers_dropped_after(evaluator):
    def drop(found: Evaluation, name: str) -> Evaluation:
        right = {task: reward for task, reward in found.sampled.items() if reward}
        return replace(found, sampled=right) if name == "after" else found

    return Faulty(evaluator, drop)


def wrong_answers_dropped_from_the_records_too(evaluator):
    faulty = wrong_answers_dropped_after(evaluator)

    def keep(group: Group) -> None:
        if is_right(group) or not group.id.startswith("after/held-out/sampled/"):
            evaluator.keep(group)

    faulty.evaluator = replace(evaluator, keep=keep)
    return faulty


def run_with(fault, folder: Path, model: Path, dataset: Path) -> dict:
    """Return the certificate that a run of one step writes."""
    settings = {
        "checkpoint_root_dir": str(folder),
        "name": "run",
        "train_dataset": {"path": str(dataset), "split": "train", "total_steps": 1},
        "eval_dataset": {"path": str(dataset), "split": "test"},
        "model": {"model_path": str(model), "max_model_len": 128, "max_tokens": 8},
        "algorithm": {"group_size": 4, "batch_size": 4, "learning_rate": 2e-2},
        "certificate.retrain": "off",
        "check.enabled": False,
    }
    with open_loop(resolve(settings=settings), likes_letter, None) as (loop, site):
        assert loop.exam.evaluator is not None
        loop.exam = replace(loop.exam, evaluator=fault(loop.exam.evaluator))
        loop.run()
        write_outcome(loop, site, judge_run(loop, site))
        return json.loads((site.directory.path / "certificate.json").read_text())


FAULTS = {
    "the greedy results taken for the sampled ones too": (
        greedy_taken_twice,
        r"before, held-out, sampled: \d+ rewards are not those of the records",
    ),
    "wrong answers dropped after training": (
        wrong_answers_dropped_after,
        r"after, held-out, sampled: summary.json says accuracy 1.0, the records 0\.",
    ),
    "wrong answers dropped after training, from the records too": (
        wrong_answers_dropped_from_the_records_too,
        r"after, held-out, sampled: \d+ tasks were not evaluated",
    ),
}


@pytest.mark.parametrize(("fault", "sentence"), [(honest, None), *FAULTS.values()], ids=["honest", *FAULTS])
def test_a_fault_in_the_evaluation_breaks_the_run_s_certificate(fault, sentence, tmp_path, toy_model_dir, toy_dataset):
    certificate = run_with(fault, tmp_path, toy_model_dir, toy_dataset)
    assert certificate["holds"] == (sentence is None), certificate["problems"]
    assert sentence is None or any(re.match(sentence, problem) for problem in certificate["problems"])
    assert (certificate["verdict"] == "") == (sentence is not None)
