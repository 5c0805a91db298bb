"""The run certificate: the results of the checks of every step behind the run's weights, in one file.

In: a run directory, whose `run.db` holds the checks that each step recorded. Out: `certificate.json`, written by the
run itself, with its verdict computed again (`certificate.verdict`); `certify` recomputes it from the recorded calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sharpen.evidence.certificate.checks import DRAWS, sentence
from sharpen.evidence.certificate.draws import DrawTest, ran_ahead
from sharpen.evidence.certificate.lineage import Lineage, in_words, read_lineage
from sharpen.files import write_whole
from sharpen.learning.experience.evidence import read_gradients, read_repeated
from sharpen.learning.experience.reading import count_calls, count_outcomes, count_taught, read_checks
from sharpen.types import Check


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobGaps:
    """How far the trainer's logprobs were from the engine's, over all compared tokens (natural logarithm). `versions`
    lists the policy versions whose gaps were recomputed."""

    mean: float
    max: float
    kl: float
    num_tokens: int
    versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LossGaps:
    """How far the losses recorded by a run without rollouts are from those measured again with the checkpoints of
    `steps` (0 is the model before training)."""

    compared: int
    max: float
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedSteps:
    """Steps (`first` to `last`) whose updates were made a second time, and how near the weights after them are to that:
    `cosine` between the two changes of the weights, `length` of the one as a multiple of the other's, and the
    `furthest` tensor, `share` of whose bound it is away."""

    first: int
    last: int
    cosine: float
    length: float
    furthest: str
    share: float

    @property
    def steps(self) -> str:
        """The steps in words."""
        return f"step {self.last}" if self.first == self.last else f"steps {self.first} to {self.last}"

    @property
    def line(self) -> str:
        """A line for the user."""
        return (
            f"{self.steps} repeated: cosine {self.cosine:.9f} and length {self.length:.7f} of the weights' change; the "
            f"furthest tensor is at {self.share:.0%} of its bound"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrained:
    """The steps whose updates were made once more; a sentence for each of these that does not agree; and one for each
    that was not repeated."""

    repeated: tuple[RepeatedSteps, ...] = ()
    problems: tuple[str, ...] = ()
    not_repeated: tuple[str, ...] = ()

    @classmethod
    def of(cls, parts: Sequence[Retrained]) -> Retrained:
        """Return several as one."""
        return cls(
            repeated=tuple(step for one in parts for step in one.repeated),
            problems=tuple(sentence for one in parts for sentence in one.problems),
            not_repeated=tuple(sentence for one in parts for sentence in one.not_repeated),
        )

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Retrained:
        """Read what `asdict` made. Raises `KeyError` or `TypeError` for something else."""
        return cls(
            repeated=tuple(RepeatedSteps(**step) for step in content["repeated"]),
            problems=tuple(content["problems"]),
            not_repeated=tuple(content["not_repeated"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedGradients:
    """The trainer's gradients of a small batch, compared with a plain loop's after `step`, on the `machine` that then
    trained: of `num_tensors`, which are a share of all (`part`; `tensors` are their names, if not all), the `furthest`
    is `share` of its `bound` away, in lengths of the gradient. `not_compared` says why they were not."""

    step: int
    machine: str
    num_tensors: int = 0
    part: float = 0.0
    tensors: tuple[str, ...] = ()
    furthest: str = ""
    share: float = 0.0
    bound: float = 0.0
    not_compared: str = ""

    @classmethod
    def from_json(cls, step: int, content: Mapping[str, Any]) -> ComparedGradients:
        """Read what the run recorded. Raises `KeyError` or `TypeError` for something else."""
        return cls(step=step, **{**content, "tensors": tuple(content["tensors"])})

    @property
    def line(self) -> str:
        """A line for the user."""
        when = "before the first step" if self.step == 0 else f"after step {self.step}"
        if self.not_compared:
            return f"{when}: {self.not_compared}"
        whose = "all tensors" if self.part == 1.0 else f"{self.num_tensors} tensors"
        return f"{when}: those of a plain loop in {whose}; the furthest is at {self.share:.0%} of its bound"


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The results for the `steps` behind the checkpoint `weights` (None: no checkpoint was saved). `checks` are totals
    over these steps; `problems` describes each failure in a sentence. `undone` counts the steps in `run.db` that no
    saved weights contain: they were repeated, or never saved.

    `truncated_tokens` counts the trained tokens sampled with `top_p`, `top_k` or `min_p` from a support that is not
    recorded: their logprobs are not compared.
    `outcomes` counts the run's rollouts by outcome, `calls` their calls by status, `rows` the rows of a run without
    rollouts by what happened to them. `repeated` are the steps whose updates were made once more, `not_repeated` says
    why others were not that should have been; `gradients` are those that were compared when a session began. `verdict`
    says what of the evaluations was computed again and agrees.
    `staleness` is (the age of the oldest trained token, the age allowed) in policy versions, for runs whose rollouts
    run ahead of the training. `draws` are the tests of whether the tokens were drawn from the recorded distributions,
    `untested` says of which steps' tokens this is not known. `not_recomputed` lists what cannot be recomputed and is
    therefore not covered.
    """

    weights: str | None
    steps: int
    undone: int = 0
    checks: tuple[Check, ...]
    logprob_gaps: LogprobGaps | None
    truncated_tokens: int = 0
    staleness: tuple[int, int] | None = None
    outcomes: Mapping[str, int]
    calls: Mapping[str, int]
    rows: Mapping[str, int] = field(default_factory=dict)
    losses: LossGaps | None = None
    repeated: tuple[RepeatedSteps, ...] = ()
    gradients: tuple[ComparedGradients, ...] = ()
    draws: tuple[DrawTest, ...] = ()
    untested: tuple[str, ...] = ()
    not_repeated: tuple[str, ...] = ()
    verdict: str = ""
    problems: tuple[str, ...] = field(default=())
    not_recomputed: tuple[str, ...] = field(default=())

    @property
    def holds(self) -> bool:
        """Whether every invariant held in every step."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Return the certificate as plain JSON, `holds` first."""
        return {"holds": self.holds, **asdict(self)}

    def lines(self) -> list[str]:
        """Return the certificate as text, one line for each invariant."""
        lines = [
            f"{'broken' if check.broken else 'ok':>7}  {check.name:<12} {check.checked:>12,} checked"
            for check in self.checks
        ]
        if self.logprob_gaps is not None:
            gaps = self.logprob_gaps
            lines.append(
                f"{'':>7}  logprobs     {gaps.num_tokens:>12,} compared: mean gap {gaps.mean:.2e}, max {gaps.max:.2e}, "
                f"KL {gaps.kl:.2e}"
            )
        if self.truncated_tokens:
            lines.append(
                f"{'':>7}  logprobs     {self.truncated_tokens:>12,} not compared: sampled with top_p, top_k or min_p, "
                "and from which tokens is not recorded"
            )
        lines += [f"{'broken' if one.problem else 'ok':>7}  {one.name:<12} {one.line}" for one in self.draws]
        if self.staleness is not None:
            oldest, allowed = self.staleness
            lines.append(f"{'':>7}  staleness    at most {oldest} policy versions behind, of {allowed} allowed")
        if self.losses is not None:
            steps = ", ".join(map(str, self.losses.steps))
            lines.append(
                f"{'':>7}  losses       {self.losses.compared:>12,} compared: max gap {self.losses.max:.2e}, with the "
                f"weights after steps {steps}"
            )
        compared = [one for one in self.gradients if not one.not_compared]
        lines += [f"{'ok' if one.share <= 1.0 else 'broken':>7}  gradients    {one.line}" for one in compared]
        lines += [f"{'ok' if one.share <= 1.0 else 'broken':>7}  updates      {one.line}" for one in self.repeated]
        if self.verdict:
            lines.append(f"{'ok':>7}  verdict      {self.verdict}")
        for name, counts in (("rollouts", self.outcomes), ("calls", self.calls), ("rows", self.rows)):
            if counts:
                by_kind = ", ".join(f"{count} {kind}" for kind, count in counts.items())
                lines.append(f"{'':>7}  {name:<12} {by_kind}")
        if self.undone:
            lines.append(f"{'':>7}  undone       {self.undone:>12,} steps in run.db are in no weights: not counted")
        lines += [f"  - not recomputed: {exception}" for exception in self.not_recomputed]
        lines += [f"  - not tested: {what}" for what in self.untested]
        lines += [f"  - not compared: gradients {one.line}" for one in self.gradients if one.not_compared]
        lines += [f"  - not made once more: {exception}" for exception in self.not_repeated]
        if rest := self.steps - sum(1 + one.last - one.first for one in self.repeated):
            whose = f"of {'the other ' if self.repeated else ''}{rest} steps"
            lines.append(f"  - not made once more (sharpen certify --retrain does it): the optimizer's updates {whose}")
        return [*lines, *(f"  ! {problem}" for problem in self.problems)]


def write_certificate(run_dir: Path, certificate: Certificate) -> None:
    """Write `certificate.json`."""
    write_whole(run_dir / "certificate.json", f"{json.dumps(certificate.to_json(), indent=2)}\n", lasting=False)


def recorded_certificate(run_dir: Path, lineage: Lineage | None = None) -> Certificate:
    """Return the certificate as recorded by the steps behind the run's weights."""
    journal, lineage = run_dir / "run.db", lineage or read_lineage(run_dir)
    steps = {record.step: record.metrics for record in lineage.steps}
    by_step = {step: checks for step, checks in read_checks(journal).items() if step in steps}
    groups = {key for keys in lineage.groups.values() for key in keys}
    updates = recorded_updates(journal, lineage)
    return Certificate(
        weights=None if lineage.weights is None else lineage.weights.name,
        steps=len(steps),
        undone=lineage.undone,
        checks=add_up(by_step.values()),
        logprob_gaps=_recorded_gaps(steps.values()),
        truncated_tokens=int(sum(metrics.get("batch/loss_tokens_truncated", 0.0) for metrics in steps.values())),
        staleness=_recorded_staleness(steps.values()),
        outcomes=count_outcomes(journal, groups),
        calls=count_calls(journal, groups),
        rows=count_taught(journal, steps),
        untested=untested(lineage, by_step),
        repeated=updates.repeated,
        gradients=_recorded_gradients(journal, lineage),
        problems=(*lineage.problems, *problems_of(by_step), *_unchecked_steps(steps, by_step), *updates.problems),
        not_repeated=updates.not_repeated,
    )


def recorded_updates(journal: Path, lineage: Lineage) -> Retrained:
    """Return what the run found when it made the updates of some of its steps once more."""
    known = {(record.step, record.session) for record in lineage.steps}
    found = [
        Retrained.from_json(content) for step, session, content in read_repeated(journal) if (step, session) in known
    ]
    return Retrained.of(found)


def _recorded_gradients(journal: Path, lineage: Lineage) -> tuple[ComparedGradients, ...]:
    """The gradients that were compared before the steps behind the run's weights."""
    known = {record.session for record in lineage.steps}
    return tuple(
        ComparedGradients.from_json(step, content)
        for step, session, content in read_gradients(journal)
        if session in known
    )


def untested(lineage: Lineage, by_step: Mapping[int, Sequence[Check]]) -> tuple[str, ...]:
    """Say of which steps it was not tested whether their tokens were drawn from the recorded distributions, and why."""
    reasons: dict[str, list[int]] = {}
    for record in lineage.steps:
        tested = [check.checked for check in by_step.get(record.step, ()) if check.name == DRAWS]
        if any(tested) or not record.metrics.get("tokens/sampled"):
            continue
        if ran_ahead(record.metrics):
            why = "their rollouts ran ahead of the training, so that which tokens train when depends on what they are"
        elif not tested:
            why = "an earlier version of Sharpen did not test it"
        else:
            why = (
                "no call counts. One does if its tokens are of the weights before the step's first update, were drawn "
                "without top_p, top_k and a seed of the request, and trained for a reason that lies before them"
            )
        reasons.setdefault(why, []).append(record.step)
    return tuple(
        f"whether the tokens of steps {in_words(steps)} were drawn from the recorded distributions: {why}"
        for why, steps in reasons.items()
    )


def _unchecked_steps(steps: Mapping[int, Mapping[str, float]], by_step: Mapping[int, Sequence[Check]]) -> list[str]:
    """Describe the steps without any check, and those with tokens of the current weights but no compared logprob."""
    problems = []
    if without := [step for step in steps if not by_step.get(step)]:
        problems.append(f"no check was recorded in {len(without)} steps: {in_words(without)}")
    uncompared = [
        step
        for step, metrics in steps.items()
        if metrics.get("batch/loss_tokens", 0.0) > metrics.get("batch/loss_tokens_truncated", 0.0)
        and "sync/staleness_max" not in metrics
        and not _num_compared(metrics)
    ]
    if uncompared:
        problems.append(f"no logprob was compared with the engine's in {len(uncompared)} steps: {in_words(uncompared)}")
    return problems


def _num_compared(metrics: Mapping[str, float]) -> float:
    return metrics.get("trainer/logprob_gap_tokens", 0.0)


def _recorded_gaps(steps: Iterable[Mapping[str, float]]) -> LogprobGaps | None:
    prefix = "trainer/logprob_gap_"
    rows = [metrics for metrics in steps if _num_compared(metrics)]
    num_tokens = int(sum(row[f"{prefix}tokens"] for row in rows))
    if not num_tokens:
        return None
    return LogprobGaps(
        mean=sum(row[f"{prefix}mean"] * row[f"{prefix}tokens"] for row in rows) / num_tokens,
        max=max(row[f"{prefix}max"] for row in rows),
        kl=sum(row[f"{prefix}kl"] * row[f"{prefix}tokens"] for row in rows) / num_tokens,
        num_tokens=num_tokens,
    )


def _recorded_staleness(steps: Iterable[Mapping[str, float]]) -> tuple[int, int] | None:
    """Return (the oldest trained token's age, the age allowed) in policy versions; None if no rollouts ran ahead."""
    rows = [(row["sync/staleness_max"], row["sync/staleness_allowed"]) for row in steps if "sync/staleness_max" in row]
    return (int(max(rows)[0]), int(rows[-1][1])) if rows else None


def add_up(steps: Iterable[Sequence[Check]]) -> tuple[Check, ...]:
    """Return one check for each invariant, added up over the steps."""
    totals: dict[str, Check] = {}
    for checks in steps:
        for check in checks:
            before = totals.get(check.name, Check(name=check.name, checked=0, broken=0))
            totals[check.name] = Check(
                name=check.name,
                checked=before.checked + check.checked,
                broken=before.broken + check.broken,
                first=before.first or check.first,
            )
    return tuple(totals.values())


def problems_of(by_step: Mapping[int, Sequence[Check]]) -> tuple[str, ...]:
    """Return a sentence for each broken check, with its step."""
    return tuple(
        f"step {step}: {sentence(check)}" for step, checks in by_step.items() for check in checks if check.broken
    )
