"""`sharpen report [RUN]`: write the report of a run, which may still be running, or print it as Markdown.

In: a run directory. Out: `report.html` in it, or `--output FILE`; Markdown on standard output with `--md`. Model cards
in the checkpoints are brought up to date, except those that somebody else wrote.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sharpen.cli.arguments import add_json, add_price, add_run, print_json, run_of, say
from sharpen.errors import ConfigError
from sharpen.files import check_links, write_whole


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_run(parser)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--md", action="store_true", help="print it as Markdown, for a pull request")
    what.add_argument("--output", type=Path, metavar="FILE", help="write this file (default: report.html in the run)")
    add_price(parser)
    add_json(parser)


def _why_no_report(run_dir: Path) -> str:
    """Return why there is nothing to report of a run that an explorer (or a server) has begun; empty otherwise."""
    from sharpen.placement.exchange.store import EXPLORER

    run = run_dir.absolute().parent if run_dir.absolute().name == EXPLORER else run_dir
    trained = any((run / name).exists() for name in ("run.db", "evaluations.db", "metrics.jsonl"))
    if not (run / EXPLORER / "resolved.json").exists() or (trained and run == run_dir):
        return ""
    if trained:
        return f"{run_dir} is the explorer's folder, which has no results: sharpen report {run}"
    return (
        f"{run} was explored or served, and nothing of it has been trained or evaluated: its report comes with the "
        "trainer (mode: train, for the same name)"
    )


def run_report(arguments: argparse.Namespace) -> int:
    """Write or print the report. Raises `ConfigError` if there is no such run, or the file cannot be written."""
    from sharpen.show.report.card import write_cards
    from sharpen.show.report.contents import read_report
    from sharpen.show.report.render import NAME, html, markdown
    from sharpen.show.view.data.measures import to_json
    from sharpen.show.view.folders import MARKS

    run_dir = run_of(arguments)
    if why_not := _why_no_report(run_dir):
        raise ConfigError(why_not)
    if not any((run_dir / mark).exists() for mark in MARKS):
        raise ConfigError(f"{run_dir} is not a run directory: it has none of {', '.join(MARKS)}")
    report = read_report(run_dir, price_per_hour=arguments.price_per_hour)
    if arguments.json:
        print_json({"headline": report.headline, **to_json(report)})
        return 0
    if arguments.md:
        say(markdown(report), end="")
        return 0
    path = arguments.output or run_dir / NAME
    try:
        if arguments.output is None:
            check_links(run_dir)
        write_whole(path, html(report), lasting=False)
        if arguments.output is None:
            write_cards(run_dir, report, replace=False)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or path} cannot be written: {error.strerror}; name another file with --output"
        ) from error
    say(path)
    return 0
