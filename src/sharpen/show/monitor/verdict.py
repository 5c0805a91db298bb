"""The verdict on a run: whether the model became better, and which model to use.

In: what was measured on held-out tasks (or rows) at the start, at the end, and at the best step between. Out: a
`Verdict`. It is decided by paired differences with their intervals, and the original is one of the candidates: a model
that is not shown to be better is not recommended.

    the last step's interval is above 0              better: the last step
    it is below 0                                    worse: keep the original
    it contains 0                                    not shown to be better: keep the original
    the best of the earlier evaluations is above 0   better: that step
    and the last step is not, or the best is above
    the last step, which is above 0

The last step is fixed before the run, so its 95% interval can be taken at face value. The best of many evaluations is
best partly by luck (the winner's curse): its interval is widened so that the intervals of all evaluations hold jointly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, Literal, TypeVar

from sharpen.screen import PLAIN, fitted
from sharpen.show.monitor.figures import signed, with_ends
from sharpen.show.monitor.statistics import (
    Difference,
    Evaluation,
    distinct_rewards,
    is_binary,
    loss_difference,
    paired_difference,
)
from sharpen.types import Mode

Kind = Literal["better", "not_shown", "worse", "unknown"]
RowLosses = Mapping[str, tuple[float, int]]
"""For each held-out row the sum of its losses, and their number."""
MIN_TASKS = 10
"""With fewer held-out tasks there is no verdict: one lucky answer would be more than a tenth of the result."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`kind` compares the trained model with the original: `better`, `not_shown` (to be better), `worse`, or `unknown`
    if nothing was measured that decides it. `difference` is how much better it is (negative: worse) by `measure` on
    `num_tasks` held-out tasks, with the interval `low` to `high`; None if nothing was measured. A lower loss counts as
    better.

    `model` is the model to use, in the form that `from_pretrained` takes (a folder, or a name on the hub): the
    checkpoint after `step`, or the `original`. `text` is the verdict in one sentence; `remarks` are additional
    sentences.
    """

    kind: Kind
    model: str
    original: bool
    text: str
    step: int | None = None
    measure: str = ""
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    num_tasks: int = 0
    remarks: tuple[str, ...] = ()

    def lines(self, width: int = PLAIN) -> list[str]:
        """Format for display, at most `width` columns except for the model's name: the sentence, the remarks, and the
        model to use."""
        model = f"{self.model} (the original model)" if self.original else self.model
        texts = [f"verdict: {self.text}", *(f"{'':9}{remark}" for remark in self.remarks), f"use:     {model}"]
        return [line for text in texts for line in fitted(text, width, hanging=9)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(Generic[T]):
    """The checkpoint after a step and its evaluation, None if it was not evaluated."""

    step: int
    folder: Path
    result: T | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates(Generic[T]):
    """The models that a run produces: the `original` (a folder or a hub name) and its evaluation, the last step, and
    the best of `num_earlier` earlier evaluated steps, None if that is the last step or the original."""

    original: str
    before: T | None
    last: Checkpoint[T]
    best: Checkpoint[T] | None = None
    num_earlier: int = 0


Gain = Callable[[T, T, int], Difference]
"""How much better the second is than the first, with an interval that holds jointly with as many others as the third
argument says."""


def judge_rewards(models: Candidates[Evaluation], decided_by: Mode) -> Verdict:
    """Return the verdict by the rewards of held-out tasks, in the mode `decided_by` (in the other mode if that was not
    evaluated)."""
    evaluated = [evaluation for evaluation in (models.before, models.last.result) if evaluation is not None]
    if no_result := next((evaluation.no_result for evaluation in evaluated if evaluation.no_result), ""):
        return _unknown(models, no_result)
    mode, other = decided_by, _other(decided_by)
    if evaluated and not all(evaluation.rewards[mode] for evaluation in evaluated):
        mode, other = other, mode
    best = None if models.best is None else models.best.result
    among = distinct_rewards(*evaluated, best)
    verdict = _judge(models, f"{mode} {'accuracy' if is_binary(among) else 'reward'}", "task", _gain_of(mode, among))
    if verdict.kind == "unknown" or models.before is None or models.last.result is None:
        return verdict
    chosen = best if best is not None and models.best is not None and verdict.step == models.best.step else None
    if remark := _about_time(models.before, chosen or models.last.result, mode, among):
        verdict = _add_remark(verdict, remark)
    by_other = _gain_of(other, among)(models.before, models.last.result, 1)
    if by_other.high < 0.0 and verdict.kind != "worse" and verdict.step == models.last.step:
        remark = f"but the {other} result got worse: {signed(by_other)}; evaluation.decided_by chose {mode}"
        return _add_remark(verdict, remark)
    if by_other.low > 0.0 and verdict.kind != "better":
        remark = f"but the {other} result got better: {signed(by_other)}; evaluation.decided_by chose {mode}"
        return _add_remark(verdict, remark)
    return verdict


def _about_time(before: Evaluation, after: Evaluation, mode: Mode, among: frozenset[float]) -> str:
    """Return what the difference is without the tasks that a time limit ended, if there are any: a machine that was
    busy, or one that was not warm yet, looks like a model that knows less."""
    late = [set(evaluation.out_of_time.get(mode, ())) for evaluation in (before, after)]
    if not (out := late[0] | late[1]):
        return ""
    rest = {task: reward for task, reward in before.rewards[mode].items() if task not in out}
    gain = paired_difference(rest, after.rewards[mode], among=among)  # over the tasks in both
    counted = f"{len(late[0])} tasks before and {len(late[1])} after ran out of time and count as failed"
    if gain.num_tasks < MIN_TASKS:
        return f"{counted}: {gain.num_tasks} are left without them"
    return f"{counted}; without them: {signed(gain)} ({gain.num_tasks} tasks)"


def is_best(latest: Evaluation, best: Evaluation | None, before: Evaluation | None, decided_by: Mode) -> bool:
    """Return whether a checkpoint becomes `best`: it is no worse than the best so far, or, if it is the first, better
    than the start (if that was evaluated), on average over the tasks that both have."""
    if latest.no_result:
        return False
    reference = best if best is not None else before
    if reference is None or reference.no_result:
        return True
    mode = decided_by if latest.rewards[decided_by] and reference.rewards[decided_by] else _other(decided_by)
    gain = paired_difference(reference.rewards[mode], latest.rewards[mode]).difference
    return gain > 0.0 or (gain == 0.0 and best is not None)


def is_best_loss(latest: RowLosses, best: RowLosses | None, before: RowLosses | None) -> bool:
    """Like `is_best`, by the loss on held-out rows."""
    reference = best if best is not None else before
    if reference is None:
        return True
    change = loss_difference(reference, latest).difference
    return change < 0.0 or (change == 0.0 and best is not None)


def judge_losses(models: Candidates[RowLosses]) -> Verdict:
    """Return the verdict by the loss on held-out rows; a lower loss is better."""

    def gain(first: RowLosses, second: RowLosses, looks: int) -> Difference:
        loss = loss_difference(first, second, looks)
        return Difference(difference=-loss.difference, low=-loss.high, high=-loss.low, num_tasks=loss.num_tasks)

    return _judge(models, "held-out loss", "row", gain)


def _judge(models: Candidates[T], measure: str, unit: str, gain: Gain[T]) -> Verdict:
    if models.before is None or models.last.result is None:
        return _unknown(models, "nothing was evaluated both before and after the training", untested=True)
    of_last = gain(models.before, models.last.result, 1)
    if of_last.num_tasks < MIN_TASKS:
        return _unknown(models, f"{of_last.num_tasks} held-out {unit}s are too few (at least {MIN_TASKS})")
    if math.isnan(of_last.low):
        return _unknown(models, f"the interval of {measure} is unknown")
    last_is_better = of_last.low > 0.0
    if (best := models.best) is not None and best.result is not None:
        looks = models.num_earlier
        rival = models.last.result if last_is_better else models.before
        if gain(rival, best.result, looks).low > 0.0:
            return _better(best, gain(models.before, best.result, looks), measure, unit, looks)
    if last_is_better:
        return _better(models.last, of_last, measure, unit, 0)
    kind: Kind = "worse" if of_last.high < 0.0 else "not_shown"
    if kind == "worse":
        text = f"worse by {with_ends(-of_last.difference, -of_last.high, -of_last.low, unit=unit)}"
    else:
        text = f"not shown to be better: {signed(of_last, unit=unit)}"
    return Verdict(
        kind=kind,
        model=models.original,
        original=True,
        text=f"{text} ({measure}, {of_last.num_tasks} held-out {unit}s). Keep the original",
        step=models.last.step,
        measure=measure,
        difference=of_last.difference,
        low=of_last.low,
        high=of_last.high,
        num_tasks=of_last.num_tasks,
        remarks=_about_few_changes(of_last, unit),
    )


def _about_few_changes(gain: Difference, unit: str) -> tuple[str, ...]:
    """Return why an interval ends exactly at 0, if it does."""
    if gain.difference == 0.0 or 0.0 not in (gain.low, gain.high):
        return ()
    side = "better" if gain.difference > 0.0 else "worse"
    return (f"so few {unit}s changed that chance alone makes a model look as much {side} in over 2.5% of cases",)


def _better(chosen: Checkpoint[T], gain: Difference, measure: str, unit: str, looks: int) -> Verdict:
    remarks: tuple[str, ...] = ()
    if looks > 1:
        remarks = (
            f"step {chosen.step} is the best of {looks} evaluated before the end: its interval is widened so that all "
            f"{looks} hold jointly",
        )
    where = f" at step {chosen.step}" if looks else ""
    return Verdict(
        kind="better",
        model=str(chosen.folder),
        original=False,
        text=f"better by {signed(gain, unit=unit)}{where} ({measure}, {gain.num_tasks} held-out {unit}s)",
        step=chosen.step,
        measure=measure,
        difference=gain.difference,
        low=gain.low,
        high=gain.high,
        num_tasks=gain.num_tasks,
        remarks=remarks,
    )


def _unknown(models: Candidates[T], why: str, *, untested: bool = False) -> Verdict:
    """Return the verdict if nothing decides: the original, or, if no evaluation was requested, the last step."""
    advice = "The last step is untested" if untested else "Keep the original"
    model = str(models.last.folder) if untested else models.original
    return Verdict(kind="unknown", model=model, original=not untested, text=f"none: {why}. {advice}")


def _add_remark(verdict: Verdict, remark: str) -> Verdict:
    return replace(verdict, remarks=(*verdict.remarks, remark))


def _other(mode: Mode) -> Mode:
    return "greedy" if mode == "sampled" else "sampled"


def _gain_of(mode: Mode, among: frozenset[float]) -> Gain[Evaluation]:
    return lambda first, second, looks: paired_difference(first.rewards[mode], second.rewards[mode], looks, among=among)
