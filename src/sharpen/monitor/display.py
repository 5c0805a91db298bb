"""The display of a run, while it works and at its end.

In: steps, evaluations, messages. Out: on a terminal one live block that is redrawn in place; elsewhere (a CI log, a
pipe, a notebook) one plain line for each step, at most 100 columns, without control characters. Numbers here are
rounded: `metrics.jsonl` and `summary.json` hold them exactly. If the stream closes, the run continues without it.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TextIO, cast

from sharpen.monitor import spent
from sharpen.monitor.stream import LastingStream
from sharpen.monitor.table import comparison_lines, number, shortened

if TYPE_CHECKING:
    from rich.text import Text

    from sharpen.monitor.statistics import Evaluation
    from sharpen.monitor.verdict import Verdict

PLAIN_WIDTH = 100
LIVE_WIDTH = 80
BARS = "▁▂▃▄▅▆▇█"
_COLOUR = {True: "green", False: "bold red"}
_PART_COLOURS = {"generating": "green", "waiting": "bright_black", "training": "blue", "syncing": "yellow"}
_BAR = 24
_MOVED = 0.1  # on a stream without redrawing, shares are printed again when one has changed by this much


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


class Display:
    """Shows one run on `stream`: live if that is a terminal, else line by line. Used from one thread."""

    def __init__(self, total_steps: int, stream: TextIO) -> None:
        self._total_steps = total_steps
        self._stream = LastingStream(stream)
        self._rewards: deque[float] = deque(maxlen=400)
        self._seconds: deque[float] = deque(maxlen=20)
        self._last: StepReport | None = None
        self._activity = ""
        self._doing, self._doing_since = "", 0.0
        self._printed_shares: Mapping[str, float] = {}
        self._evaluation_started: dict[str, float] = {}
        self._live: Any = None
        if _can_redraw(stream):
            self._live = self._start_live()

    def message(self, text: str) -> None:
        """Print one message; it stays above the live block."""
        if self._live is None:
            self._print(text)
        else:
            self._live.console.print(text, markup=False, highlight=False)

    def step(self, report: StepReport) -> None:
        """Show a finished step."""
        self._last = report
        self._activity = ""
        self._seconds.append(report.seconds)
        shown = report.reward if report.loss is None else report.loss
        if shown is not None:
            self._rewards.append(shown)
        if self._live is None:
            self._print(self._step_line(report))
            if report.metrics:
                self._print(f"  {metrics_line(report.metrics, PLAIN_WIDTH - 2)}")
            self._print_spent(report.spent)
        else:
            self._live.refresh()
        if report.note:
            self.message(f"  step {report.step}: {report.note}")

    def rollouts(self, done: int, total: int) -> None:
        """Show how many of the current step's rollouts are done (on a terminal only)."""
        self._activity = f"rollouts {done}/{total}"

    def doing(self, what: str) -> None:
        """Show what the coordinator is doing (`training`) and for how long; an empty text ends it (on a terminal
        only)."""
        self._doing, self._doing_since = what, time.monotonic()

    def evaluation(self, name: str, done: int, total: int) -> None:
        """Show the progress of an evaluation; without a terminal only its end."""
        started = self._evaluation_started.setdefault(name, time.monotonic())
        self._activity = f"evaluating {name} {done}/{total}"
        if done < total:
            return
        del self._evaluation_started[name]
        self._activity = ""
        if self._live is None:
            self._print(f"evaluated {name}: {total} tasks in {duration(time.monotonic() - started)}")

    def table(self, before: Evaluation, after: Evaluation) -> None:
        """Print the table *before -> after*; ends the live block."""
        self.close()
        self._print("")
        for line in comparison_lines(before, after):
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
        verdict; the very last line is `run directory: PATH`."""
        self.close()
        self._print("")
        for line in usage_lines(run_dir, verdict.model, picture, tensorboard, options):
            self._print(line)
        self._print("")
        for line in verdict.lines():
            self._print(line)
        self.run_directory(run_dir)

    def run_directory(self, run_dir: Path) -> None:
        """Print the last line of every run, plain and unwrapped."""
        self.close()
        self._print(f"run directory: {run_dir}")

    def close(self) -> None:
        """End the live block, leaving its last state above what follows. May be called twice."""
        if self._live is not None:
            self._activity = self._doing = ""
            self._live.refresh()
            self._live.stop()
            self._live = None

    def _print(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def _print_spent(self, shares: spent.Shares) -> None:
        """Print how the time was spent for the first step, and again when the shares have changed."""
        if shares and any(
            abs(share - self._printed_shares.get(part, -1.0)) >= _MOVED for part, share in shares.items()
        ):
            self._printed_shares = shares
            self._print(f"  time: {spent.line(shares)}")

    def _step_line(self, report: StepReport) -> str:
        width = len(str(self._total_steps))
        parts = [
            f"step {report.step:>{width}}/{self._total_steps}",
            _measure(report),
            *([f"flat {report.flat:>5}"] if report.flat else []),
            f"{report.tokens_per_s:>9,.0f} tokens/s",
            f"{report.seconds:6.2f} s",
            f"left {duration(self._seconds_left(report))}",
            *([] if report.certified is None else ["certified" if report.certified else "NOT CERTIFIED"]),
        ]
        return "  ".join(parts)

    def _seconds_left(self, report: StepReport) -> float:
        """Estimate the remaining seconds from the last steps."""
        return fmean(self._seconds) * max(0, self._total_steps - report.step)

    def _start_live(self) -> Any:
        from rich.console import Console
        from rich.live import Live

        live = Live(
            console=Console(file=cast(TextIO, self._stream), highlight=False),
            get_renderable=self._block,
            refresh_per_second=8,
            transient=False,
            redirect_stderr=False,
        )
        live.start()
        return live

    def _block(self) -> Text:
        """Return the live block: a bar with the step, speed and time left; the reward with its history; how the last
        step's time was spent, and the current activity."""
        from rich.text import Text

        report = self._last
        done = report.step if report else 0
        filled = round(_BAR * done / max(1, self._total_steps))
        block = Text(no_wrap=True, overflow="ellipsis")
        block.append("━" * filled, "bold blue").append("━" * (_BAR - filled), "bright_black")
        block.append(f"  step {done}/{self._total_steps}", "bold")
        if report:
            left = f"{duration(self._seconds_left(report))} left" if done < self._total_steps else "done"
            block.append(f"   {report.tokens_per_s:,.0f} tokens/s   {report.seconds:.2f} s/step   {left}")
        block.append("\n")
        block.append(sparkline(self._rewards, _BAR).ljust(_BAR), "green")
        block.append("  " + " ".join(_measure(report).split()), "bold")
        if report and report.flat:
            block.append(f"   flat groups {report.flat}")
        if report and report.certified is not None:
            block.append("   ✓ certified" if report.certified else "   ✗ not certified", _COLOUR[report.certified])
        if report and report.metrics:
            block.append(f"\n{'':{_BAR}}  {metrics_line(report.metrics, LIVE_WIDTH - _BAR - 2)}", "bright_black")
        if report and report.spent:
            _append_shares(block, report.spent)
        doing = f"{self._doing} {duration(time.monotonic() - self._doing_since)}" if self._doing else ""
        if now := ", ".join(filter(None, (doing, self._activity))):
            block.append(f"\n{'now:':>{_BAR}}  {now}", "cyan")
        return block


def _append_shares(block: Text, shares: spent.Shares) -> None:
    """Append a bar of the parts with their names, on a line of at most 80 columns."""
    block.append("\n")
    whole, begin = max(1.0, sum(shares.values())), 0.0
    for part, share in shares.items():
        end = begin + _BAR * share / whole
        block.append("━" * (round(end) - round(begin)), _PART_COLOURS[part])
        begin = end
    block.append(" " * (_BAR - round(begin)))
    for part, share in shares.items():
        block.append(f"  {part} {share:.0%}", _PART_COLOURS[part])


def _can_redraw(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal that can move its cursor and show the bars."""
    return stream.isatty() and os.environ.get("TERM") != "dumb" and "utf" in (stream.encoding or "").lower()


def usage_lines(run_dir: Path, model: str, picture: Path | None, tensorboard: bool, options: str) -> list[str]:
    """Return lines on how to use the model and where the results are. `options` are those of `vllm serve`."""
    lines = [
        f'transformers:  AutoModelForCausalLM.from_pretrained("{model}")',
        f"vLLM:          vllm serve {model}{options}",
    ]
    if picture is not None:
        lines.append(f"reward curve:  {picture}")
    if (report := run_dir / "report.html").exists():
        lines.append(f"report:        {report}")
    if tensorboard:
        lines.append(f"TensorBoard:   tensorboard --logdir {run_dir / 'monitor' / 'tensorboard'}")
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


def sparkline(values: Sequence[float] | deque[float], width: int) -> str:
    """Draw the values as at most `width` bars, averaged in equal parts, from the minimum (lowest bar) to the
    maximum."""
    values = list(values)
    if not values:
        return ""
    width = min(width, len(values))
    bounds = [index * len(values) // width for index in range(width + 1)]
    means = [fmean(values[start:end]) for start, end in pairwise(bounds)]
    least, spread = min(means), max(means) - min(means)
    return "".join(BARS[round((mean - least) / spread * (len(BARS) - 1)) if spread else 0] for mean in means)


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
