"""What `sharpen show` prints of a rollout, as if it had been trained.

In: groups, an empty folder for the run. Out: the text for the first rollout.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from pathlib import Path

from certified import certified

from sharpen.cli.show import add_show, run_show
from sharpen.types import Group


def shown(groups: Sequence[Group], run_dir: Path) -> str:
    certified(groups, run_dir)
    parser = argparse.ArgumentParser()
    add_show(parser)
    out = io.StringIO()
    run_show(parser.parse_args([str(run_dir), "--rollout", groups[0].rollouts[0].id]), out)
    return out.getvalue()
