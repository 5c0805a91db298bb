"""Writes a report as a page or as Markdown.

In: a run directory. Out: `report.html`: one file without scripts, which asks for nothing outside of it; Markdown. Text
of rollouts is escaped in both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from html import escape
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from sharpen.agent.transcript import clean_for_page
from sharpen.files import write_whole
from sharpen.show.monitor import figures
from sharpen.show.report.contents import Report
from sharpen.show.view.data.measures import Count, Measure
from sharpen.show.view.data.run import Cost

NAME = "report.html"
TIME = "time, evaluations included"
_TEMPLATES = Path(__file__).with_name("templates")
_MARKDOWN = re.compile(r"([\\`*_\[\]#|~])")


def write_report(run_dir: Path, report: Report) -> None:
    """Write `report.html` into a run directory."""
    write_whole(run_dir / NAME, html(report), lasting=False)


def html(report: Report) -> str:
    """Return the page."""
    return _environment(markup=True).get_template("report.html").render(report=report, page=report.page)


def markdown(report: Report) -> str:
    """Return the report as Markdown, for a pull request."""
    text = markdown_template("report.md").render(report=report, page=report.page)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def markdown_template(name: str) -> Template:
    """Return a template that writes Markdown."""
    return _environment(markup=False).get_template(name)


@cache
def _environment(*, markup: bool) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=markup,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: clean_for_page(value) if isinstance(value, str) else value,
    )
    environment.filters |= {
        "interval": interval,
        "signed": signed,
        "number": number,
        "plain": plain,
        "fenced": fenced,
        "reward": reward,
    }
    environment.globals |= {"costs": costs, "duration": duration, "stacked": stacked, "total": total}
    return environment


def number(value: float | None) -> str:
    """Format a number: `0.523`, `12.3`, `1,234`."""
    return "unknown" if value is None else figures.number(value)


def interval(measure: Measure | None) -> str:
    """Format a value with its interval: `0.418 [0.376, 0.461]`."""
    return _with_ends(measure, sign=False)


def signed(measure: Measure | None) -> str:
    """Format a difference with its interval: `+0.561 [+0.514, +0.604]`."""
    return _with_ends(measure, sign=True)


def _with_ends(measure: Measure | None, *, sign: bool) -> str:
    if measure is None:
        return "not measured"
    if measure.low is None or measure.high is None:
        return figures.number(measure.value, sign=sign)
    return figures.with_ends(measure.value, measure.low, measure.high, sign=sign)


def reward(value: float | None) -> str:
    """Format the reward of a rollout."""
    return "no reward" if value is None else f"{value:g}"


def plain(text: object) -> str:
    """Escape a text for Markdown, on one line: no markup of its own, no HTML, no table cell, no mention or link."""
    line = " ".join(str(text).split())
    return escape(_MARKDOWN.sub(r"\\\1", line), quote=False).replace("@", "@\u200b").replace("://", ":\u200b//")


def fenced(text: str) -> str:
    """Return a text as a block of code, between fences longer than any in it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def duration(hours: float) -> str:
    """Format hours: `42 s`, `12 min`, `3.4 h`."""
    seconds = 3600 * hours
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if hours < 2 else f"{hours:.1f} h"


def costs(cost: Cost) -> list[tuple[str, str]]:
    """Return what is known of a run's costs, by name."""
    tokens = {
        "tokens sampled": cost.sampled_tokens,
        "tokens trained on": cost.trained_tokens,
        "tokens computed by the trainer": cost.computed_tokens,
    }
    shown = [(TIME, duration(cost.hours))] if cost.hours is not None else []
    shown += [(name, f"{count:,}") for name, count in tokens.items() if count is not None]
    if cost.peak_memory_mb is not None:
        shown.append(("peak memory of the process", f"{cost.peak_memory_mb / 1024:.1f} GiB"))
    if cost.money is not None and cost.price_per_hour is not None:
        shown.append(("money", f"{number(cost.money)} at {number(cost.price_per_hour)} an hour"))
    return shown


def stacked(shares: Sequence[tuple[str, float]]) -> list[tuple[str, float, float]]:
    """Return (name, start, share) of the parts of a whole, one after the other."""
    found, start = [], 0.0
    for name, share in shares:
        found.append((name, start, share))
        start += share
    return found


def total(counts: Sequence[Count]) -> int:
    """Return the sum of counts, at least 1."""
    return sum(one.count for one in counts) or 1
