"""`sharpen certify RUN_DIR`: recompute a run's certificate from its records and compare it.

In: a run directory. Out: one line for each invariant, and whether all of them hold.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import IO

from sharpen.certificate.certify import certify


def print_certificate(run_dir: Path, *, logprobs: bool, as_json: bool, out: IO[str] | None = None) -> bool:
    """Print the recomputed certificate, and return whether it holds."""
    out = out or sys.stdout
    certificate = certify(run_dir, logprobs=logprobs)
    if as_json:
        print(json.dumps(certificate.to_json(), indent=2), file=out)
    else:
        for line in certificate.lines():
            print(line, file=out)
        verdict = "certified" if certificate.holds else "NOT certified"
        if certificate.holds and certificate.not_recomputed:
            verdict = "certified, except for what was not recomputed"
        print(f"{verdict}: {certificate.steps} steps of {run_dir}", file=out)
    return certificate.holds
