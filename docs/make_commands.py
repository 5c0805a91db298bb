"""Writes reference/commands.md from the command line's own parser: `python docs/make_commands.py`.

In: `sharpen.cli.main.build_parser()`. Out: the page, each command with its arguments and options.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Container, Iterator
from pathlib import Path

from sharpen.cli.main import build_parser

PAGE = Path(__file__).with_name("reference") / "commands.md"
INTRODUCTION = """\
# Commands

<!-- Written by docs/make_commands.py from src/sharpen/cli; a test compares the two. -->

`sharpen COMMAND --help` prints the same.

## What they have in common

- **RUN** is a run's directory, or its name (`my_run`, `project/my_run`, or a beginning that only one run has) below
  `--root`. Without RUN it is the run that recorded something last. A run may still be working. `serve` and
  `eval --model` take a run by its whole name: its best checkpoint, or the latest.
- **Errors** are on stderr and begin with `sharpen: `: what was wrong, the value, what to do. A traceback is a fault of
  ours.
- **A pipe, a file or a terminal that closes** does not end a run.
- **On a terminal** a few lines at the bottom say how far the work is. What your agent prints from Python goes above
  them; output of subprocesses and libraries in C may mix with them: capture it, or set `TERM=dumb` for plain lines.
- **Width and colour**: `COLUMNS` makes lines narrower, `NO_COLOR=1` takes colours away.
- **Completion in the shell**: `pip install 'sharpen[completion]'`, and once for each shell
  `eval "$(register-python-argcomplete sharpen)"`.

| exit code | |
|---|---|
| 0 | the work asked for was done |
| 1 | it failed, or the answer is no |
| 2 | bad input: command line, configuration, dataset, model |
| 130 | interrupted, by Ctrl-C, or by SIGTERM while a run is open; a run has saved a checkpoint |
"""

PAGES = {
    "init": "start/own-agent",
    "doctor": "start/own-agent",
    "run": "start/guide",
    "seeds": "use/several-runs",
    "sweep": "use/several-runs",
    "compare": "use/several-runs",
    "plan": "use/plan",
    "algorithms": "reference/algorithms",
    "models": "reference/models",
    "show": "use/diagnose",
    "view": "use/view",
    "report": "use/report",
    "rescore": "use/report",
    "judge": "use/judges",
    "diagnose": "use/diagnose",
    "certify": "understand/certificate",
    "serve": "use/serve",
    "record": "use/record",
    "record import": "use/record",
    "export": "use/report",
}
"""Where a command is explained."""
ANSWERS_NO = {
    "doctor": "no run is possible",
    "check": "the run is not ready",
    "eval": "nothing could be evaluated, or it says nothing about the model",
    "seeds": "a run failed",
    "sweep": "no trial was measured",
    "plan": "it does not fit",
    "rescore": "the judge failed on every rollout",
    "judge": "the judge failed on every answer, or is below `judge_floor`",
    "certify": "it does not hold",
    "serve": "engine or trainer failed",
    "record": "something could not be recorded",
}
"""When a command answers 1, where that is more than that it failed."""
SEVERAL = 5
"""An argument that as many commands have, with the same help, is explained once."""


def page() -> str:
    """Return the whole page."""
    shown = list(commands())
    count = Counter(row(action) for _, parser in shown for action in arguments(parser))
    common = [line for line, number in count.items() if number >= SEVERAL]
    first = ["## Arguments of several commands", "", "| argument | |", "|---|---|", *common, ""]
    return "\n".join(
        [INTRODUCTION, *first, *(line for name, parser in shown for line in section(name, parser, common))]
    )


def arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    left_out = (argparse._HelpAction, argparse._SubParsersAction)
    return [one for one in parser._actions if one.help != argparse.SUPPRESS and not isinstance(one, left_out)]


def commands(
    parser: argparse.ArgumentParser | None = None, before: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield each command, and behind it what is said after its name: `record`, `record import`."""
    for action in (parser or build_parser())._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, choice in action.choices.items():
                choice.description = helps.get(name) or choice.description
                yield before + name, choice
                yield from commands(choice, f"{before}{name} ")


def section(name: str, parser: argparse.ArgumentParser, common: Container[str]) -> Iterator[str]:
    """Yield the lines of one command."""
    more = f" [More](../{PAGES[name]}.md)." if name in PAGES else ""
    no = f" Answers 1 if {ANSWERS_NO[name]}." if name in ANSWERS_NO else ""
    yield from (f"## sharpen {name}", "", f"{sentence(parser.description or '')}{no}{more}", "")
    known = [action for action in arguments(parser) if row(action) in common]
    if known:
        yield from (
            f"[Common arguments](#arguments-of-several-commands): {', '.join(name_of(one) for one in known)}.",
            "",
        )
    own = [row(action) for action in arguments(parser) if row(action) not in common]
    if own:
        yield from ("| argument | |", "|---|---|", *own, "")


def row(action: argparse.Action) -> str:
    required = "required: " if action.required and action.option_strings else ""
    text = (action.help or "").replace("|", "\\|").replace("%%", "%")
    return f"| {names(action)} | {required}{text} |"


def names(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else f" {value_of(action)}"
    return ", ".join([f"`{name}{value}`" for name in action.option_strings] or [f"`{value_of(action)}`"])


def name_of(action: argparse.Action) -> str:
    return f"`{action.option_strings[0] if action.option_strings else value_of(action)}`"


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
