"""Writes reference/commands.md from the command line's own parser: `python docs/make_commands.py`.

In: `sharpen.cli.main.build_parser()`. Out: the page, each command with its arguments and options.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from sharpen.cli.main import build_parser

PAGE = Path(__file__).with_name("reference") / "commands.md"
INTRODUCTION = """\
# Commands

<!-- Written by docs/make_commands.py from src/sharpen/cli; a test compares the two. -->

`sharpen COMMAND --help` prints the same. Exit codes: **0** the work was done, **1** it failed or the answer is no,
**2** bad input, **130** interrupted. Errors go to standard error.
"""


def page() -> str:
    """Return the whole page."""
    return "\n".join([INTRODUCTION, *(line for name, parser in commands() for line in section(name, parser))])


def commands() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in build_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, parser in action.choices.items():
                parser.description = helps.get(name) or parser.description
                yield name, parser


def section(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the lines of one command."""
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS and action.dest != "help"]
    yield from (f"## sharpen {name}", "", f"{sentence(parser.description or '')}", "")
    if shown:
        yield from ("| argument | |", "|---|---|", *map(row, shown), "")


def row(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else f" {value_of(action)}"
    names = [f"`{name}{value}`" for name in action.option_strings] or [f"`{value_of(action)}`"]
    required = "required: " if action.required and action.option_strings else ""
    text = (action.help or "").replace("|", "\\|").replace("%%", "%")
    return f"| {', '.join(names)} | {required}{text} |"


def value_of(action: argparse.Action) -> str:
    """Return how the help names an argument's value."""
    if action.metavar is not None:
        name = action.metavar if isinstance(action.metavar, str) else " ".join(action.metavar)
    elif action.choices is not None:
        name = "{" + ",".join(map(str, action.choices)) + "}"
    else:
        name = action.dest.upper()
    return {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} ..."}.get(str(action.nargs), name)


def sentence(text: str) -> str:
    """Return a help text as a sentence."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?", "!")) else ".")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
