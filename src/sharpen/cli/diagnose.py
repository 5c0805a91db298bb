"""`sharpen diagnose RUN`: why the reward or the loss is flat, with evidence.

In: a run directory. Out: the course of the reward or loss, then each cause: what it is, its numbers, examples, advice.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING

from sharpen.cli.arguments import add_json, add_run, print_json, run_of, say
from sharpen.screen import PLAIN, command_lines, fitted, text_width

if TYPE_CHECKING:
    from sharpen.evidence.diagnose.data import RolloutRunData
    from sharpen.evidence.diagnose.finding import Finding
    from sharpen.evidence.diagnose.rows import RowRunData

_INDENT = " " * 4


def add_diagnose(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_run(parser)
    add_json(parser)


def run_diagnose(arguments: argparse.Namespace, out: IO[str] | None = None) -> int:
    """Print the causes. The exit code is 0 whether there are any or not."""
    from sharpen.evidence.diagnose.diagnosis import diagnose, read_run

    out, run_dir = out or sys.stdout, run_of(arguments)
    data = read_run(run_dir)
    findings = diagnose(data)
    if arguments.json:
        print_json({"run_dir": str(run_dir), "findings": [asdict(finding) for finding in findings]}, out)
        return 0
    for line in lines(run_dir, data, findings, text_width(out)):
        say(line, file=out)
    return 0


def lines(
    run_dir: Path, data: RolloutRunData | RowRunData, findings: tuple[Finding, ...], width: int = PLAIN
) -> Iterator[str]:
    """Yield the report, at most `width` columns wide (except for longer ids)."""
    from sharpen.evidence.diagnose.rows import RowRunData

    learns_from_rows = isinstance(data, RowRunData)
    yield from _loss_lines(data) if isinstance(data, RowRunData) else _reward_lines(run_dir, data)
    if not findings:
        yield f"no cause found for a {'loss that does not fall' if learns_from_rows else 'flat reward'}"
    for number, finding in enumerate(findings, 1):
        yield ""
        yield f"{number}. {finding.name}"
        yield from _wrapped(finding.what, width)
        yield from _wrapped("; ".join(f"{name}: {value:.4g}" for name, value in finding.evidence.items()), width)
        yield from (line for quote in finding.quotes for line in _wrapped(f'"{quote}"', width))
        if finding.examples and not finding.read_first:
            yield from _wrapped(f"see: {', '.join(finding.examples)}", width)
        if finding.read_first:
            yield from _wrapped(f"read first: {', '.join(finding.read_first)}", width)
        yield from _wrapped(f"-> {finding.advice}", width)
    if any("/" in example for finding in findings for example in finding.examples):
        yield ""
        yield from command_lines("read a rollout:  ", f"sharpen show {run_dir} --rollout ID", width)


def _reward_lines(run_dir: Path, data: RolloutRunData) -> Iterator[str]:
    """Yield a line on the steps and the reward, and one on the evaluation if there was one."""
    from sharpen.cli.list_runs import measured
    from sharpen.evidence.diagnose.series import early_mean, late_mean
    from sharpen.show.view.files import read_json

    rewards = data.values("reward/mean")
    early, late = early_mean(rewards), late_mean(rewards)
    if early is None or late is None:
        yield f"{len(data.rows)} steps, no reward in any of them"
    else:
        highest = f", highest {data.reward.peak:.3f}" if data.reward else ""
        yield f"{len(data.rows)} steps, mean reward {early:.3f} -> {late:.3f} (first and last steps){highest}"
    path = run_dir / "summary.json"
    summary, problems = read_json(path) if path.exists() else ({}, [])
    yield from problems
    before, after = (measured(summary, when, "greedy") for when in ("before", "after"))
    if before is not None and after is not None:
        yield f"held-out tasks, greedy: {before:.3f} -> {after:.3f}"


def _loss_lines(data: RowRunData) -> Iterator[str]:
    """Yield the same lines for a run without rollouts."""
    from sharpen.evidence.diagnose.series import early_mean, late_mean

    losses = data.values("trainer/loss")
    early, late = early_mean(losses), late_mean(losses)
    if early is None or late is None:
        yield "no step was trained"
    else:
        yield f"{len(losses)} steps, training loss {early:.4g} -> {late:.4g} (first and last steps)"
    if data.held_out:
        (_, before), (_, after) = data.held_out[0], data.held_out[-1]
        best_step, best = min(data.held_out, key=lambda pair: pair[1])
        yield f"held-out loss {before:.4g} -> {after:.4g}, lowest {best:.4g} after step {best_step}"


def _wrapped(text: str, width: int) -> list[str]:
    return fitted(f"{_INDENT}{' '.join(text.split())}", width, hanging=len(_INDENT))
