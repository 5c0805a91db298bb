"""`sharpen certify RUN`: recompute a run's certificate from its records and compare it.

In: a run directory. Out: one line for each invariant, and whether all of them hold.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from sharpen.cli.arguments import add_imports, add_json, add_run, print_json, run_of, say
from sharpen.config.functions import load_place


def add_certify(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_run(parser)
    parser.add_argument("--no-logprobs", action="store_true", help="do not score the tokens again (loads no model)")
    parser.add_argument(
        "--retrain",
        nargs="*",
        type=int,
        metavar="STEP",
        help="make the updates of these steps once more, by a plain loop, and compare every weight (default: all steps "
        "with checkpoints)",
    )
    parser.add_argument(
        "--trust",
        action="append",
        default=[],
        metavar="FILE",
        help="load this file (or module) of the run's author, for the second formula of a part of the algorithm",
    )
    add_imports(parser)
    add_json(parser)


def run_certify(arguments: argparse.Namespace) -> int:
    """Print the recomputed certificate; the command fails if it does not hold."""
    for place in arguments.trust:
        load_place(place)
    holds = print_certificate(
        run_of(arguments), logprobs=not arguments.no_logprobs, as_json=arguments.json, retrain=arguments.retrain
    )
    return 0 if holds else 1


def print_certificate(
    run_dir: Path,
    *,
    logprobs: bool,
    as_json: bool,
    out: IO[str] | None = None,
    retrain: Sequence[int] | None = None,
) -> bool:
    """Print the recomputed certificate, and return whether it holds. `retrain`: the steps whose updates are repeated
    too; an empty list means all."""
    from sharpen.evidence.certificate.certify import certify

    out = out or sys.stdout
    certificate = certify(run_dir, logprobs=logprobs)
    if retrain is not None:
        from sharpen.evidence.certificate.plain.retrain import with_updates

        certificate = with_updates(certificate, run_dir, retrain, lambda line: say(line, file=sys.stderr))
    if as_json:
        print_json(certificate.to_json(), out)
    else:
        for line in certificate.lines():
            say(line, file=out)
        verdict = "certified" if certificate.holds else "NOT certified"
        if certificate.holds and certificate.not_recomputed:
            verdict = "certified, except for what was not recomputed"
        say(f"{verdict}: {certificate.steps} steps of {run_dir}", file=out)
    return certificate.holds
