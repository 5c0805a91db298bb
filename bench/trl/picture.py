"""The picture of `bench-trl`: training reward over steps and over seconds, mean and band of the seeds, both sides.

In: the runs of both sides. Out: one PNG, drawn without a display.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runs import Run, band, smoothed

INK, MUTED, GRID = "#1f2937", "#6b7280", "#e5e7eb"
COLORS = {"TRL": "#d97706", "Sharpen": "#2563eb"}
POINTS = 400


def draw(trl: Sequence[Run], ours: Sequence[Run], picture: Path) -> None:
    """Rewards are smoothed over five steps; the band is from the lowest to the highest seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.8), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    over_steps, over_seconds = figure.subplots(1, 2, sharey=True)
    for name, runs in (("TRL", trl), ("Sharpen", ours)):
        rewards = [smoothed([step.reward for step in run.steps]) for run in runs]
        _curve(over_steps, range(1, len(rewards[0]) + 1), rewards, name)
        first, last = max(run.steps[0].end_s for run in runs), min(run.train_s for run in runs)
        grid = [first + (last - first) * index / (POINTS - 1) for index in range(POINTS)]
        _curve(over_seconds, grid, [_at(run, grid) for run in runs], name)
    _style(over_steps, "step")
    _style(over_seconds, "seconds of training")
    over_steps.set_ylabel("training reward", color=MUTED)
    over_steps.set_ylim(0, 1.02)
    over_seconds.set_xlim(left=0)
    title = "The quickstart, tuned by TRL and by Sharpen"
    figure.suptitle(title, x=0.02, ha="left", fontsize=11, fontweight="bold", color=INK)
    handles, labels = over_steps.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9, labelcolor=INK)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)


def _at(run: Run, grid: Sequence[float]) -> list[float]:
    """Smoothed rewards at these seconds, straight lines between the ends of steps."""
    import numpy as np

    ends = [step.end_s for step in run.steps]
    found: list[float] = np.interp(grid, ends, smoothed([step.reward for step in run.steps])).tolist()
    return found


def _curve(axes: Any, places: Sequence[float], rewards_ST: Sequence[Sequence[float]], name: str) -> None:
    low, mean, high = band(rewards_ST)
    marker = "o" if len(places) == 1 else None
    axes.fill_between(places, low, high, color=COLORS[name], alpha=0.18, linewidth=0)
    axes.plot(places, mean, color=COLORS[name], linewidth=2, marker=marker, label=f"{name} (seeds: {len(rewards_ST)})")


def _style(axes: Any, label: str) -> None:
    axes.set_xlabel(label, color=MUTED)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
