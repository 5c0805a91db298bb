"""`reward_curve.png`: reward over the training, with the evaluations.

In: `metrics.jsonl`, so that a resumed run draws its whole history. Out: one picture, drawn without a display.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

INK, MUTED, GRID = "#1f2937", "#6b7280", "#e5e7eb"
REWARD, GREEDY, SAMPLED = "#2563eb", "#d97706", "#059669"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measured value with its 95% interval, if it has one."""

    step: int
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(slots=True, kw_only=True)
class Curve:
    """The contents of the picture: training reward by step, and evaluations."""

    reward: list[Point] = field(default_factory=list)
    greedy: list[Point] = field(default_factory=list)
    sampled: list[Point] = field(default_factory=list)


def read_curve(metrics: Path) -> Curve:
    """Collect `reward/mean` and `eval/{greedy,sampled}/{accuracy,low,high}` from `metrics.jsonl`."""
    curve = Curve()
    for line in metrics.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if (reward := row.get("reward/mean")) is not None:
            curve.reward.append(Point(step=row["step"], value=reward))
        for mode, points in (("greedy", curve.greedy), ("sampled", curve.sampled)):
            name = f"eval/{mode}"
            if (value := row.get(f"{name}/accuracy")) is not None:
                points.append(
                    Point(step=row["step"], value=value, low=row.get(f"{name}/low"), high=row.get(f"{name}/high"))
                )
    return curve


def smoothed(values: Sequence[float]) -> list[float]:
    """Average each value with its neighbours, a twentieth of the run to each side, so without lag."""
    reach = max(1, len(values) // 20)
    return [fmean(values[max(0, index - reach) : index + reach + 1]) for index in range(len(values))]


def with_gaps(steps: Sequence[int], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the points with one that is not a number where steps are missing, so that no line is drawn across."""
    xs: list[float] = []
    ys: list[float] = []
    for step, value in zip(steps, values, strict=True):
        if xs and step > xs[-1] + 1:
            xs.append(math.nan)
            ys.append(math.nan)
        xs.append(step)
        ys.append(value)
    return xs, ys


def draw_reward_curve(metrics: Path, picture: Path, title: str = "Reward") -> None:
    """Draw `metrics.jsonl` to a PNG of 1600 x 900 pixels."""
    curve = read_curve(metrics)
    steps = [point.step for point in curve.reward]
    rewards = [point.value for point in curve.reward]
    with _picture(picture, title, "reward") as axes:
        if steps:
            dots = {"alpha": 0.25, "markersize": 3.5, "markeredgewidth": 0}
            axes.plot(steps, rewards, "o", color=REWARD, label="training reward", **dots)
            axes.plot(*with_gaps(steps, smoothed(rewards)), color=REWARD, linewidth=2, label="smoothed")
        _draw_evaluations(axes, curve.greedy, GREEDY, "held-out greedy", "D")
        _draw_evaluations(axes, curve.sampled, SAMPLED, "held-out sampled", "s")
        everything = [*curve.reward, *curve.greedy, *curve.sampled]
        if everything and all(0 <= point.value <= 1 for point in everything):
            axes.set_ylim(-0.03, 1.03)


def draw_loss_curve(metrics: Path, picture: Path, title: str = "Loss") -> None:
    """Draw `trainer/loss` and, if held-out rows were measured, `eval/loss` of `metrics.jsonl` to a PNG of 1600 x 900
    pixels."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    with _picture(picture, title, "loss") as axes:
        for name, label, color, marker in (
            ("trainer/loss", "training loss", REWARD, "o"),
            ("eval/loss", "held-out loss", GREEDY, "D"),
        ):
            points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
            if points:
                style = {"marker": marker, "color": color, "markersize": 4, "linewidth": 1.5}
                style |= {"linestyle": "none"} if name.startswith("eval/") else {}  # measured at these steps alone
                axes.plot(*zip(*points, strict=True), label=label, **style)


@contextlib.contextmanager
def _picture(path: Path, title: str, measure: str) -> Iterator[Any]:
    """Yield axes to draw on; on exit add the legend, or a note that there is no data, and save the picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=200)  # measuring all texts to place them is a third of the time
    canvas = FigureCanvasAgg(figure)
    axes: Any = figure.add_axes((0.1, 0.185, 0.88, 0.71))
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK, pad=12, y=1.0)
    axes.set_xlabel("step", color=MUTED)
    axes.set_ylabel(measure, color=MUTED)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    yield axes
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="lower center", ncols=4, frameon=False, fontsize=9, labelcolor=INK)
    else:
        axes.text(0.5, 0.5, "no step was trained", transform=axes.transAxes, ha="center", color=MUTED)
    canvas.print_png(path, pil_kwargs={"compress_level": 1})


def _draw_evaluations(axes: Any, points: Sequence[Point], color: str, label: str, marker: str) -> None:
    if not points:
        return
    steps = [point.step for point in points]
    with_bars = [point for point in points if point.low is not None and point.high is not None]
    bars = ([getattr(point, name) for point in with_bars] for name in ("step", "low", "high"))
    axes.vlines(*bars, color=color, linewidth=1.8, alpha=0.7)
    text = f"{label} (bar: 95%)" if with_bars else label
    axes.plot(steps, [point.value for point in points], marker, color=color, markersize=6, label=text)
