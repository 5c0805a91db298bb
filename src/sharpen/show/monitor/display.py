"""The display of a run, while it works and at its end.

In: steps, evaluations, messages. Out: one line for each step and each evaluation; beside them, on a terminal
(`monitor.live`) and in a notebook (`monitor.notebook`), a live block that says how far the run is and what it does now;
elsewhere (a CI log, a pipe) plain lines of at most 100 columns, without control characters. Numbers here are rounded:
`metrics.jsonl` and `summary.json` hold them exactly. If the stream closes, the run continues without it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, TextIO, cast

from sharpen.models.pieces import auto_class
from sharpen.screen import cells, columns_of, command_lines, fitted, text_width
from sharpen.show.monitor import spent
from sharpen.show.monitor.figures import number
from sharpen.show.monitor.notebook import block_for
from sharpen.show.monitor.stream import LastingStream
from sharpen.show.monitor.table import comparison_lines, evaluation_line, shortened

if TYPE_CHECKING:
    from rich.text import Text

    from sharpen.show.monitor.statistics import Evaluation
    from sharpen.show.monitor.verdict import Verdict

BARS = "▁▂▃▄▅▆▇█"
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_PART_COLOURS = {"generating": "green", "waiting": "bright_black", "training": "blue", "syncing": "yellow"}
_BAR = 24
_REMIND_S = 60.0
"""On a stream without redrawing, how often a long evaluation says how far it is."""
_MOVED, _STEPS_BETWEEN = 0.1, 10
"""On a stream without redrawing, shares are printed again when one has changed by this much, so many steps later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One finished step. `reward` is None if no rollout was scored.

    `flat` says how many groups have equal rewards, and therefore no signal (`9/16`). `certified` is whether every check
    of the run certificate held, None if there is none. `note` is a remark on this step (`3 of 128 rollouts excluded`).
    A run without rollouts has a `loss` instead of a reward. `spent` is the share of time of each part of the step
    (`monitor.spent`), empty if not measured. `metrics` are the means of what workflow and judge measured, prefixed with
    who measured it (`judge/right`).
    """

    step: int
    reward: float | None
    tokens_per_s: float
    seconds: float
    flat: str = ""
    certified: bool | None = None
    note: str = ""
    loss: float | None = None
    spent: spent.Shares = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Count:
    """Something of which the number is known: an evaluation's tasks, the rollouts of a step."""

    what: str
    done: int
    total: int
    started: float
    reminded: float

    @property
    def seconds_left(self) -> float | None:
        """Estimate the remaining seconds, once something is done."""
        return (time.monotonic() - self.started) * (self.total - self.done) / self.done if self.done else None


class Display:
    """Shows one run on `stream`: live if that is a terminal or a notebook, else line by line. Used from one thread."""

    def __init__(self, total_steps: int, stream: TextIO) -> None:
        self._total_steps = total_steps
        self._stream = LastingStream(stream)
        self._values: list[float] = []
        self._seconds: deque[float] = deque(maxlen=20)
        self._last: StepReport | None = None
        self._count: _Count | None = None
        self._doing, self._doing_since = "", 0.0
        self.num_events = 0
        """How often something was said, begun or counted."""
        self._printed_shares: Mapping[str, float] = {}
        self._printed_at: int | None = None
        self._block = block_for(stream, cast(TextIO, self._stream), self._block_lines)
        if self._block is not None:
            self._block.start()

    def set_total_steps(self, total: int) -> None:
        """Say how many steps the run has, once its data are read."""
        self._total_steps = total

    def message(self, text: str, style: str = "") -> None:
        """Print one message; it stays above the live block."""
        self.num_events += 1
        if self._block is not None:
            self._block.print_above(f"{self._fit(text)}\n", style=style)
        else:
            self._print(self._fit(text))

    def panel(self, title: str, rows: Mapping[str, str], commands: Mapping[str, str]) -> None:
        """Print what a run is, at its very beginning, and the commands to look at it. Paths stay whole, on one line of
        their own."""
        width = max(map(len, rows), default=0)
        self.message(title, "bold")
        for name, text in rows.items():
            self.message(f"  {name:<{width}}  {text}")
        for name, text in commands.items():
            self.message(self._command(f"  {name:<{width}}  ", text))

    def step(self, report: StepReport) -> None:
        """Show a finished step: one line, and remarks below it."""
        self._last = report
        self._count = None
        self._seconds.append(report.seconds)
        shown = report.reward if report.loss is None else report.loss
        if shown is not None:
            self._values.append(shown)
        self.message(self._step_line(report, self.columns))
        if self._block is None:
            self._print_spent(report)
        if report.note:
            self.message(f"  step {report.step}: {report.note}")

    def rollouts(self, done: int, total: int) -> None:
        """Show how many of the current step's rollouts are done (on a terminal only)."""
        self._counted("rollouts", done, total)

    def doing(self, what: str, *, alone: bool = False) -> None:
        """Show what the coordinator is doing (`training`) and for how long; an empty text ends it (on a terminal
        only). With `alone`, whatever was counted has ended."""
        if alone:
            self._count = None
        self.num_events += 1
        self._doing_since = time.monotonic()
        self._doing = what
        self._refresh()

    def evaluation(self, name: str, done: int, total: int) -> None:
        """Show the progress of an evaluation; without a terminal once a minute, and its end."""
        count = self._counted(f"evaluating {name}", done, total)
        now = time.monotonic()
        if self._block is not None:
            return
        if done >= total:
            self._print(f"evaluated {name}: {total} tasks in {duration(now - count.started)}")
        elif now - count.reminded >= _REMIND_S:
            count.reminded = now
            self._print(f"evaluating {name}: {done} of {total} tasks")

    def checking(self, done: int, total: int) -> None:
        """Show how many rollouts of the check before the first step are done (on a terminal only)."""
        self._counted("checking agent and judge", done, total)

    def evaluated(self, step: int, found: Evaluation, before: Evaluation | None) -> None:
        """Print the result of an evaluation after `step`, with the change since `before` (None: this is the first)."""
        further = {} if before is None else before.further
        for name, one, first in (
            ("held-out", found, before),
            *((name, inner, further.get(name)) for name, inner in found.further.items()),
        ):
            for line in evaluation_line(f"{name} @{step}", one, first, found, self.columns):
                self.message(line, "bold")

    def table(self, before: Evaluation, after: Evaluation) -> None:
        """Print the table *before -> after*; ends the live block."""
        self.close()
        self._print("")
        for line in comparison_lines(before, after, width=self.columns):
            self._print(line)

    def usage(
        self,
        run_dir: Path,
        verdict: Verdict,
        picture: Path | None,
        *,
        tensorboard: bool,
        options: str,
    ) -> None:
        """Print how to use the model that the verdict recommends (`options` are vLLM's), where the results are, and the
        verdict; the very last line is `run directory: PATH` (on a terminal too narrow for it, two)."""
        self.close()
        self._print("")
        for line in usage_lines(run_dir, verdict.model, picture, tensorboard, options, self._screen):
            self._print(line)
        self._print("")
        for line in verdict.lines(self.columns):
            self._print(line)
        self.run_directory(run_dir)

    def stopped(self, run_dir: Path, *, step: int | None, trained: int, named: bool) -> None:
        """Print how to go on with a run that ended early: after `step`, the last one saved (None: there is none) of
        those `trained`."""
        self.close()
        self._print("")
        if step is None and trained:
            self._print(self._fit("no step was saved: to start over, delete the run directory, or choose another name"))
        elif step is None:
            self._print("no step was trained: the next start begins anew")
        elif named:
            self._print(f"to go on after step {step}: start the same again")
        else:
            self._print(
                self._fit(
                    f"to go on after step {step}: start the same again with --set name={run_dir.name} "
                    f'(from Python: experiment_name="{run_dir.name}")'
                )
            )
        self._print(self._command("what it did:   ", f"sharpen show {run_dir}"))
        self.run_directory(run_dir)

    def run_directory(self, run_dir: Path) -> None:
        """Print the last line of every run; a path that does not fit stands on a line of its own."""
        self.close()
        self._print("\n".join(fitted(f"run directory: {run_dir}", self._screen)))

    def close(self) -> None:
        """End the live block. May be called twice."""
        if self._block is not None:
            self._count, self._doing = None, ""
            self._block.stop(keep=False)

    def _counted(self, what: str, done: int, total: int) -> _Count:
        """Take note of how much is done of something, and return the note."""
        self.num_events += 1
        count, now = self._count, time.monotonic()
        if count is None or count.what != what:
            count = _Count(what, done, total, now, now)
        count.done, count.total = done, total
        begun = self._count is not count
        self._count = count if done < total else None
        if begun:
            self._refresh()
        return count

    @property
    def columns(self) -> int:
        """The width of what is laid out."""
        return text_width(self._stream) if self._block is None else self._block.columns

    @property
    def _screen(self) -> int | None:
        """The width that no line may exceed; None on a stream that has none."""
        if self._block is not None:
            return self._block.columns
        return columns_of(self._stream) if self._stream.isatty() else None

    def _fit(self, text: str) -> str:
        return "\n".join(part for line in text.split("\n") for part in fitted(line, self._screen))

    def _command(self, label: str, command: str) -> str:
        return "\n".join(command_lines(label, command, self._screen))

    def _refresh(self) -> None:
        """Draw the block at once where something begins or ends; numbers in it are drawn now and then."""
        if self._block is not None:
            self._block.refresh()

    def _print(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def _print_spent(self, report: StepReport) -> None:
        """Print the speed and how the time was spent for the first step, and again when the shares have changed, at
        most every ten steps."""
        shares, last = report.spent, self._printed_at
        too_soon = last is not None and report.step < last + _STEPS_BETWEEN
        if not too_soon and any(
            abs(share - self._printed_shares.get(part, -1.0)) >= _MOVED for part, share in shares.items()
        ):
            self._printed_shares, self._printed_at = shares, report.step
            self._print(f"  time: {spent.line(shares)}; {report.tokens_per_s:,.0f} tokens/s")

    def _step_line(self, report: StepReport, columns: int) -> str:
        """Return the step in one line: its reward, as many of the owner's metrics as fit, what is wrong with it."""
        width = len(str(self._total_steps))
        head = f"step {report.step:>{width}}/{self._total_steps}  {_measure(report)}"
        tail = [
            *([f"flat {report.flat}"] if report.flat else []),
            f"{report.seconds:.2f} s",
            *([] if self._block is not None else [f"left {duration(self._seconds_left(report))}"]),
            *(["NOT CERTIFIED"] if report.certified is False else []),
        ]
        end = "  ".join(tail)
        room = columns - len(head) - len(end) - 4
        metrics = metrics_line(own_names(report.metrics), room) if report.metrics and room >= 12 else ""
        return "  ".join(filter(None, (head, metrics, end)))

    def _seconds_left(self, report: StepReport) -> float:
        """Estimate the remaining seconds from the last steps."""
        return fmean(self._seconds) * max(0, self._total_steps - report.step)

    def _block_lines(self, columns: int) -> list[Text]:
        """Return the live block: how far the run is, the reward's course, and what happens now."""
        return [*self._progress_lines(columns), *self._now_lines(columns)]

    def _progress_lines(self, columns: int) -> Iterator[Text]:
        from rich.text import Text

        report, bar = self._last, _BAR if columns >= 80 else _BAR // 2
        if report is None:
            return
        line = bar_of(report.step, self._total_steps, bar).append(f"  step {report.step}/{self._total_steps}", "bold")
        left = f"{duration(self._seconds_left(report))} left" if report.step < self._total_steps else "done"
        speed = (f"{fmean(self._seconds):.2f} s/step", f"{report.tokens_per_s:,.0f} tokens/s")
        yield _with_what_fits(line, [(part, "") for part in (left, *speed)], columns)
        low, high = scale(self._values)
        curve = Text(sparkline(self._values[-400:], bar, low, high).ljust(bar), "green")
        parts = [(" ".join(_measure(report).split()), "bold")]
        if report.certified is not None:
            parts.append(("certified", "green") if report.certified else ("NOT CERTIFIED", "bold red"))
        yield _with_what_fits(curve, [*parts, (f"(bars: {low:g} to {high:g})", "dim")], columns)
        if report.spent:
            shares = [(f"{part} {share:.0%}", _PART_COLOURS[part]) for part, share in report.spent.items()]
            yield _with_what_fits(Text(), shares, columns)

    def _now_lines(self, columns: int) -> Iterator[Text]:
        from rich.text import Text

        bar, count, doing = _BAR if columns >= 80 else _BAR // 2, self._count, self._doing
        if count is not None:
            left = count.seconds_left
            shown = "" if left is None else f"  {duration(left)} left"
            yield bar_of(count.done, count.total, bar, "cyan").append(
                f"  {count.what} {count.done}/{count.total}{shown}", "cyan"
            )
        if doing:
            now = time.monotonic()
            wheel = SPINNER[int(now * 5) % len(SPINNER)]
            yield Text(f"{wheel} {doing} {duration(now - self._doing_since)}", "cyan")


def _with_what_fits(line: Text, parts: Sequence[tuple[str, str]], columns: int) -> Text:
    """Add parts, each with its style, to a line, as many as fit: none is cut."""
    for part, style in parts:
        gap = "  " if line.plain else ""
        if line.cell_len + cells(gap + part) >= columns:
            break
        line.append(gap).append(part, style)
    return line


def bar_of(done: int, total: int, width: int, style: str = "bold blue") -> Text:
    """Return a bar; what is done and what is left are different letters, so that it can be read without colours."""
    from rich.text import Text

    filled = round(width * min(done, total) / max(1, total))
    return Text("━" * filled, style).append("╌" * (width - filled), "bright_black")


def scale(values: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and the highest value of a curve's bars: 0 and 1, unless a value lies outside."""
    return min(0.0, *values, 0.0), max(1.0, *values, 1.0)


def own_names(metrics: Mapping[str, float]) -> Mapping[str, float]:
    """Return the metrics without the prefix that says who measured them, where that is clear without it."""
    short = {name: name.rpartition("/")[2] for name in metrics}
    names = list(short.values())
    return {short[name] if names.count(short[name]) == 1 else name: value for name, value in metrics.items()}


def usage_lines(
    run_dir: Path, model: str, picture: Path | None, tensorboard: bool, options: str, width: int | None = None
) -> list[str]:
    """Return lines on how to use the model and where the results are, of at most `width` columns (None: as long as they
    are). `options` are those of `vllm serve`."""
    load, end = f"{auto_class(Path(model))}.from_pretrained(", f'"{model}")'
    whole = width is None or not cells(end) + 4 <= width < cells(load + end) + 15
    lines = [f"transformers:  {load}{end}"] if whole else [f"transformers:  {load}", f"    {end}"]
    lines += command_lines("vLLM:          ", f"vllm serve {model}{options}", width)
    if picture is not None:
        lines += fitted(f"reward curve:  {picture}", width)
    if (report := run_dir / "report.html").exists():
        lines += fitted(f"report:        {report}", width)
    if tensorboard:
        directory = run_dir / "monitor" / "tensorboard"
        lines += command_lines("TensorBoard:   ", f"tensorboard --logdir {directory}", width)
    return lines


def metrics_line(metrics: Mapping[str, float], width: int) -> str:
    """Format as many metrics as fit, and the number of the others: `judge/right 0.523 workflow/turns 3.0 (+2)`."""
    parts = [f"{shortened(name, width // 2)} {number(value)}" for name, value in metrics.items()]
    for count in range(len(parts), 0, -1):
        rest = len(parts) - count
        line = "  ".join([*parts[:count], *([f"(+{rest})"] if rest else [])])
        if len(line) <= width:
            return line
    return f"({len(parts)} metrics)"


def sparkline(values: Sequence[float], width: int, low: float, high: float) -> str:
    """Draw the values as at most `width` bars, averaged in equal parts, from `low` (lowest bar) to `high`."""
    if not values:
        return ""
    width = min(width, len(values))
    bounds = [index * len(values) // width for index in range(width + 1)]
    means = [fmean(values[start:end]) for start, end in pairwise(bounds)]
    spread = (high - low) or 1.0
    return "".join(BARS[round(min(1.0, max(0.0, (mean - low) / spread)) * (len(BARS) - 1))] for mean in means)


def duration(seconds: float) -> str:
    """Format seconds as `4.2s`, `3:07` or `2:03:07`."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _measure(report: StepReport | None) -> str:
    """Format the value of the curve: the reward, or the loss of a run without rollouts."""
    if report is not None and report.loss is not None:
        return f"loss {report.loss:8.4f}"
    return f"reward {_reward(report.reward if report else None)}"


def _reward(reward: float | None) -> str:
    return f"{'none':>6}" if reward is None else f"{reward:6.3f}"
