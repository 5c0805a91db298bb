"""`sharpen compare RUN RUN`: which run is better on the tasks that both were evaluated on, and what sets them apart.

In: two or more run directories. Out: a table of the runs, the paired difference of each pair with its interval, the
settings that differ. The exit code is 0 whatever came out.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sharpen.cli.arguments import add_json, add_price, add_runs, print_json, runs_of, say
from sharpen.errors import ConfigError

if TYPE_CHECKING:
    from sharpen.show.view.data.compare import ComparePage, Difference

INDEX_LIMIT_S = 600.0
"""How long reading the rollouts of a run may take; after that, what was read is compared, and this is said."""


def add_compare(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_runs(parser)
    add_price(parser)
    add_json(parser)


def run_compare(arguments: argparse.Namespace) -> int:
    """Print the comparison. Raises `ConfigError` if a run does not exist, or only one is named."""
    from sharpen.show.view.data.compare import compare_page
    from sharpen.show.view.data.measures import to_json
    from sharpen.show.view.folders import MARKS, Folder
    from sharpen.show.view.library import Library

    paths = [path.resolve() for path in runs_of(arguments)]
    if len(set(paths)) < 2:
        raise ConfigError(f"compare needs two different runs, and {paths[0]} is the only one named")
    for path in paths:
        if not any((path / mark).exists() for mark in MARKS):
            raise ConfigError(f"{path} is not a run directory: it has none of {', '.join(MARKS)}")
    with contextlib.ExitStack() as stack:
        library = stack.enter_context(contextlib.closing(Library(paths)))
        folders = [Folder.of(path) for path in dict.fromkeys(paths)]
        page = compare_page(
            [(folder, library.files(folder), library.index(folder, wait_s=INDEX_LIMIT_S)) for folder in folders],
            price_per_hour=arguments.price_per_hour,
        )
    if arguments.json:
        print_json(to_json(page))
        return 0
    for line in lines(page):
        say(line)
    if page.incomplete:
        say(f"sharpen: not all rollouts were read: {', '.join(page.incomplete)}", file=sys.stderr)
    return 0


def lines(page: ComparePage) -> Iterator[str]:
    """Yield the comparison as text."""
    from sharpen.show.report.render import TIME, costs, interval

    letters = {one.run.key: chr(ord("A") + place) for place, one in enumerate(page.runs)}
    for one in page.runs:
        run = one.run
        certified = {True: "certified", False: "certificate does not hold", None: "no certificate"}[run.certified]
        trained = f"{run.steps} steps of {run.algorithm} on {run.model}"
        yield f"{letters[run.key]}  {run.project}/{run.name}: {trained}, {certified}"
        if run.before is not None or run.after is not None:
            yield f"   {run.measure}: {interval(run.before)} -> {interval(run.after)}"
        yield from (f"   {name}: {cost}" for name, cost in costs(one.cost) if name in ("money", TIME))
    yield ""
    yield from (line for one in page.differences for line in _difference(one, letters))
    if not page.differences:
        yield "no two of them were evaluated on the same tasks"
    yield ""
    width = max((len(row.name) for row in page.settings), default=0)
    for row in page.settings:
        values = "  ".join(f"{letter}: {value}" for letter, value in zip(letters.values(), row.values, strict=True))
        yield f"{row.name:<{width}}  {values}"
    if not page.settings:
        yield "no setting differs"


def _difference(one: Difference, letters: dict[str, str]) -> Iterator[str]:
    """Yield which run is better at a place, if that is shown."""
    from sharpen.show.report.render import signed

    first, second = letters[one.first], letters[one.second]
    low, high = one.difference.low, one.difference.high
    shown = "not shown to differ"
    if low is not None and low > 0:
        shown = f"{second} is better"
    elif high is not None and high < 0:
        shown = f"{first} is better"
    yield f"{one.place}, {second} - {first}: {signed(one.difference)} over {one.shared} tasks: {shown}"
    if one.same_rows is False:
        yield "  careful: the tasks have the same ids, but the datasets differ"
    if one.only_first or one.only_second:
        yield f"  tasks of only one of them: {one.only_first} of {first}, {one.only_second} of {second}"
