"""`sharpen export RUN --for sft`: what was recorded, as the rows that supervised training reads.

In: a recording or a run. Out: a JSONL file; what was left out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from sharpen.cli.arguments import add_json, add_run, print_json, run_of
from sharpen.errors import ConfigError


def add_export(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_run(parser)
    parser.add_argument(
        "--for", dest="algorithm", required=True, choices=("sft", "dpo"), help="what reads the rows (algorithm_type)"
    )
    parser.add_argument("--to", required=True, type=Path, metavar="FILE", help="the JSONL file to write; none is there")
    parser.add_argument("--min-reward", type=float, metavar="R", help="sft: only rollouts with at least this reward")
    add_json(parser)


def run_export(arguments: argparse.Namespace) -> int:
    """Write the rows. Raises `ConfigError` if there are none."""
    from sharpen.experience.reading import read_groups
    from sharpen.record.rows import LeftOut, dpo_rows, sft_rows

    run_dir = run_of(arguments)
    journal = run_dir / "run.db"
    if not journal.exists():
        raise ConfigError(f"{run_dir} is not a run directory: it has no run.db")
    if arguments.algorithm == "dpo" and arguments.min_reward is not None:
        raise ConfigError("--min-reward is for sft: dpo compares higher rewards with lower ones")
    left_out, groups = LeftOut(), read_groups(journal)
    rows = (
        list(sft_rows(groups, arguments.min_reward, left_out))
        if arguments.algorithm == "sft"
        else list(dpo_rows(groups, left_out))
    )
    if not rows:
        raise ConfigError("\n".join([f"{run_dir} has nothing for {arguments.algorithm}", *left_out.lines()]))
    try:
        with arguments.to.open("x", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
    except OSError as error:
        raise ConfigError(f"--to {arguments.to} cannot be written: {error.strerror}") from error
    if arguments.json:
        print_json({"rows": len(rows), "file": str(arguments.to), "left_out": list(left_out.lines())})
        return 0
    print(f"{len(rows)} rows for {arguments.algorithm} in {arguments.to}")
    for line in left_out.lines():
        print(line)
    return 0
