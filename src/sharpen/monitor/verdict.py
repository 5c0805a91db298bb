"""What a run was good for, in one word, and which model to use: this one, or the one that it began with.

In: what was measured on held-out tasks (or rows) at the start, at the end, and at the best step between. Out: a
`Verdict`. It goes by paired differences with their intervals, and the original counts as a checkpoint: a model that is
not shown to be better is not recommended.

    the last step's interval lies above 0           better: the last step
    it lies below 0                                  worse: keep the original
    it holds 0                                       not shown to be better: keep the original
    an earlier step, the best of those evaluated,    better: that step
    lies above 0 where the last does not, or above
    the last where it does

The last step is fixed before the run, so that its 95% interval says what it seems to. The best of many evaluations is
best by luck, too (the winner's curse): its intervals are widened so that those of all the evaluations hold at once.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, Literal, TypeVar

from sharpen.monitor.statistics import Difference, Evaluation, is_binary, loss_difference, paired_difference
from sharpen.types import Mode

Kind = Literal["better", "not_shown", "worse", "unknown"]
RowLosses = Mapping[str, tuple[float, int]]
"""The sum of each held-out row's losses, and their number."""
MIN_TASKS = 10
"""Below so many held-out tasks nothing is said: one lucky answer more or less would be a tenth of the whole."""
WIDTH = 100
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`kind`, of what was trained against the original: `better`, `not_shown` (to be better), `worse`; `unknown` where
    nothing says. `difference` is how much better (negative: worse) by `measure` on `num_tasks` held-out tasks, with its
    interval `low` to `high`; None where nothing was measured. A loss counts as better where it is less.

    `model` is the model to use, a folder (or a name on the hub) as `from_pretrained` takes it: a checkpoint, the one
    after `step`, or the `original`. `text` is the whole in one sentence; `remarks` are what else should be known.
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

    def lines(self) -> list[str]:
        """For people, at most 100 columns but for the model's name: the sentence, the remarks, and what to use."""
        used = f"{self.model} (the model as it was)" if self.original else self.model
        said = [_wrapped("verdict: ", self.text), *(_wrapped(" " * 9, remark) for remark in self.remarks)]
        return [*(line for lines in said for line in lines), f"use:     {used}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(Generic[T]):
    """The checkpoint after a step and what was measured of it, None if nothing was."""

    step: int
    folder: Path
    found: T | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates(Generic[T]):
    """The models that a run leaves: the `original` (a folder or a hub's name) and what was measured of it, the last
    step, and the best of `num_earlier` steps evaluated before it, None if that is the last one or the original."""

    original: str
    before: T | None
    last: Checkpoint[T]
    best: Checkpoint[T] | None = None
    num_earlier: int = 0


Gain = Callable[[T, T, int], Difference]
"""How much better the second is than the first, as one of so many intervals that are to hold at once."""


def judge_rewards(models: Candidates[Evaluation], decided_by: Mode) -> Verdict:
    """By the rewards of held-out tasks in the mode `decided_by` (the other one where that was not evaluated)."""
    evaluated = [one for one in (models.before, models.last.found) if one is not None]
    if no_result := next((one.no_result for one in evaluated if one.no_result), ""):
        return _unknown(models, no_result)
    mode, other = decided_by, _other(decided_by)
    if evaluated and not all(one.rewards[mode] for one in evaluated):
        mode, other = other, mode
    rewards = [reward for one in evaluated for reward in one.rewards[mode].values()]
    verdict = _judge(models, f"{mode} {'accuracy' if is_binary(rewards) else 'reward'}", "tasks", _gain_of(mode))
    if verdict.kind == "unknown" or models.before is None or models.last.found is None:
        return verdict
    beside = _gain_of(other)(models.before, models.last.found, 1)
    if beside.high < 0.0 and verdict.kind != "worse" and verdict.step == models.last.step:
        return _with(verdict, f"but {other} it got worse: {_shown(beside)}; evaluation.decided_by chose {mode}")
    if beside.low > 0.0 and verdict.kind != "better":
        return _with(verdict, f"but {other} it got better: {_shown(beside)}; evaluation.decided_by chose {mode}")
    return verdict


def is_best(found: Evaluation, best: Evaluation | None, before: Evaluation | None, decided_by: Mode) -> bool:
    """Whether a checkpoint becomes `best`: it is no worse than the best so far, and the first one better than the start
    (where that was evaluated), on average over the tasks that both have."""
    if found.no_result:
        return False
    known = best if best is not None else before
    if known is None or known.no_result:
        return True
    mode = decided_by if found.rewards[decided_by] and known.rewards[decided_by] else _other(decided_by)
    gain = paired_difference(known.rewards[mode], found.rewards[mode]).difference
    return gain > 0.0 or (gain == 0.0 and best is not None)


def is_least(found: RowLosses, best: RowLosses | None, before: RowLosses | None) -> bool:
    """The same by the loss on held-out rows."""
    known = best if best is not None else before
    if known is None:
        return True
    change = loss_difference(known, found).difference
    return change < 0.0 or (change == 0.0 and best is not None)


def judge_losses(models: Candidates[RowLosses]) -> Verdict:
    """By the loss on held-out rows; less is better."""

    def gain(first: RowLosses, second: RowLosses, looks: int) -> Difference:
        found = loss_difference(first, second, looks)
        return Difference(difference=-found.difference, low=-found.high, high=-found.low, num_tasks=found.num_tasks)

    return _judge(models, "held-out loss", "rows", gain)


def _judge(models: Candidates[T], measure: str, unit: str, gain: Gain[T]) -> Verdict:
    if models.before is None or models.last.found is None:
        return _unknown(models, "nothing was evaluated both before and after the training", untested=True)
    of_last = gain(models.before, models.last.found, 1)
    if of_last.num_tasks < MIN_TASKS:
        return _unknown(models, f"{of_last.num_tasks} held-out {unit} are too few (at least {MIN_TASKS})")
    if math.isnan(of_last.low):
        return _unknown(models, f"the interval of {measure} is not known")
    last_is_better = of_last.low > 0.0
    if (best := models.best) is not None and best.found is not None:
        looks = models.num_earlier
        against = models.last.found if last_is_better else models.before
        if gain(against, best.found, looks).low > 0.0:
            return _better(best, gain(models.before, best.found, looks), measure, unit, looks)
    if last_is_better:
        return _better(models.last, of_last, measure, unit, 0)
    kind: Kind = "worse" if of_last.high < 0.0 else "not_shown"
    told = f"worse by {-of_last.difference:.3f}" if kind == "worse" else "not shown to be better"
    shown = _shown(of_last) if kind == "not_shown" else f"[{-of_last.high:.3f}, {-of_last.low:.3f}]"
    joint = ": " if kind == "not_shown" else " "
    return Verdict(
        kind=kind,
        model=models.original,
        original=True,
        text=f"{told}{joint}{shown} ({measure}, {of_last.num_tasks} held-out {unit}). Keep the original",
        step=models.last.step,
        measure=measure,
        difference=of_last.difference,
        low=of_last.low,
        high=of_last.high,
        num_tasks=of_last.num_tasks,
    )


def _better(chosen: Checkpoint[T], found: Difference, measure: str, unit: str, looks: int) -> Verdict:
    remarks: tuple[str, ...] = ()
    if looks > 1:
        remarks = (
            f"step {chosen.step} is the best of {looks} evaluated before the end: its interval is widened so that all "
            f"{looks} hold at once",
        )
    where = f" at step {chosen.step}" if looks else ""
    return Verdict(
        kind="better",
        model=str(chosen.folder),
        original=False,
        text=f"better by {_shown(found)}{where} ({measure}, {found.num_tasks} held-out {unit})",
        step=chosen.step,
        measure=measure,
        difference=found.difference,
        low=found.low,
        high=found.high,
        num_tasks=found.num_tasks,
        remarks=remarks,
    )


def _unknown(models: Candidates[T], why: str, *, untested: bool = False) -> Verdict:
    """Nothing says which is better: the original, or where nobody asked, the last step as it is."""
    said = "The last step is untested" if untested else "Keep the original"
    model = str(models.last.folder) if untested else models.original
    return Verdict(kind="unknown", model=model, original=not untested, text=f"none: {why}. {said}")


def _with(verdict: Verdict, remark: str) -> Verdict:
    return replace(verdict, remarks=(*verdict.remarks, remark))


def _other(mode: Mode) -> Mode:
    return "greedy" if mode == "sampled" else "sampled"


def _gain_of(mode: Mode) -> Gain[Evaluation]:
    return lambda first, second, looks: paired_difference(first.rewards[mode], second.rewards[mode], looks)


def _wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=label, subsequent_indent=" " * 9)


def _shown(found: Difference) -> str:
    return f"{found.difference:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"
