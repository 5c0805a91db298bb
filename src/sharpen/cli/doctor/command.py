"""`sharpen doctor`: look at this machine, and say what to do before a first run.

In: the machine, and a model if one is named. Out: a line for each check, and what to do about each that is not in
order. The exit code is 0 if a run is possible (there may be warnings), 1 if not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING

from sharpen.cli.arguments import add_json, print_json, say

if TYPE_CHECKING:
    from sharpen.cli.doctor.checks import Finding

_SIGNS = {"ok": "ok     ", "warning": "warning", "problem": "PROBLEM"}


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--no-step", action="store_true", help="do not train the step of a tiny model")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="a model's folder or name, whose gradients in the trainer are compared with a plain loop's",
    )
    add_json(parser)


def run_doctor(arguments: argparse.Namespace, out: IO[str] | None = None) -> int:
    """Print each finding as soon as it is made."""
    out = out or sys.stdout
    findings = []
    for finding in _findings(step=not arguments.no_step, model=arguments.model):
        findings.append(finding)
        if not arguments.json:
            say(f"{_SIGNS[finding.state]}  {finding.name:<9} {finding.what}", file=out)
            if finding.todo:
                say(f"{'':<19}-> {finding.todo}", file=out)
    problems = [finding.name for finding in findings if finding.state == "problem"]
    warnings = [finding.name for finding in findings if finding.state == "warning"]
    if arguments.json:
        print_json({"ready": not problems, "findings": [asdict(finding) for finding in findings]}, out)
    elif problems:
        say(f"\nnot ready: {', '.join(problems)}", file=out)
    else:
        say(f"\nready, with warnings: {', '.join(warnings)}" if warnings else "\nready", file=out)
    return 1 if problems else 0


def _findings(step: bool, model: str | None) -> Iterator[Finding]:
    from sharpen.cli.doctor import checks

    packages = checks.packages_check()
    yield checks.python_check()
    yield packages
    if packages.state != "problem":
        yield checks.gpu_check()
    yield checks.memory_check()
    yield checks.disk_check(Path("checkpoints").absolute())
    yield checks.proxy_check()
    yield checks.hub_check()
    if step and packages.state != "problem":
        from sharpen.cli.doctor.step import step_check

        with tempfile.TemporaryDirectory(prefix="sharpen-doctor-") as folder:
            yield step_check(Path(folder))
    if model is not None and packages.state != "problem":
        from sharpen.cli.doctor.gradients import gradients_check

        yield gradients_check(model)
