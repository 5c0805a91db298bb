"""Writes understand/faults.md from the faults that tests plant: `python docs/make_faults.py`.

In: the tables of faults of the tests. Out: the page, a row for each fault.
"""

from __future__ import annotations

import importlib
import sys
import tomllib
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("understand") / "faults.md"
ROOT = Path(__file__).parents[1]
INTRODUCTION = """\
# Faults, planted

<!-- Written by docs/make_faults.py from the tests; a test compares the two. -->

Each of these faults is put, one after the other, into a run that is right without it, and is found by what its section
or the second column names. Tests repeat this with every change, with the settings that a fault needs. What the names mean:
[the certificate](certificate.md).

"""


def page() -> str:
    """Return the whole page."""
    _find_tests()
    parts = [_draws(), _batches(), _gradients(), _updates(), _verdict()]
    rows = sum(len(rows) for _, _, rows in parts)
    text = f"{INTRODUCTION}{rows} faults in {len(parts)} places.\n"
    for title, words, rows in parts:
        text += f"\n## {title}\n\n{words}\n\n"
        if len({found for _, found in rows}) == 1:
            text += "".join(f"- {fault}\n" for fault, _ in rows)
        else:
            text += "| fault | found by |\n|---|---|\n" + "".join(f"| {fault} | {found} |\n" for fault, found in rows)
    return text


EXPERTS = "test_retrain_experts"
Part = tuple[str, str, list[tuple[str, str]]]


def _batches() -> Part:
    words = (
        "In what the trainer is about to receive: found before the update of the step in which it stands, and again "
        "afterwards from the records, by the same check (`tests/evidence/certificate/test_planted_faults.py`)."
    )
    faults = _table("test_planted_faults")
    return "Batches", words, [(name, ", ".join(f"`{one}`" for one in fault.found)) for name, fault in faults.items()]


def _draws() -> Part:
    words = (
        "In the engine's sampler, whose logprobs are right: found after the step in which so many tokens were drawn, "
        "and again from the records (`tests/evidence/certificate/test_draws.py`)."
    )
    faults = _table("test_draws")
    return "Draws", words, [(name, f"`draws`, within {most} tokens") for name, (_, _, most) in faults.items()]


def _verdict() -> Part:
    words = (
        "In the evaluations before and after: found at the run's end, when the verdict is computed again from their "
        "rollouts (`tests/run/test_verdict_faults.py`; some thirty more, planted in the records and in the summary, "
        "in `tests/evidence/certificate/test_verdict_again.py`)."
    )
    return "Verdict", words, [(name, "the verdict, computed again") for name in _table("test_verdict_faults")]


def _gradients() -> Part:
    words = (
        "In the trainer's passes: found before the first step, where the gradient of a small batch differs from a "
        "plain loop's (`tests/evidence/certificate/test_gradient_probe.py`)."
    )
    rows = []
    for name, (_, _, where) in _table("test_gradient_probe").items():
        rows.append((name, "every parameter" if where == "model." else f"`{where.rstrip('.')}`"))
    return "Gradients", words, rows


def _updates() -> Part:
    words = (
        "In what the trainer makes of a right batch: found in the step in which it stands (the second of two), when "
        "its updates are made once more. No other check sees one of them "
        "(`tests/evidence/certificate/test_retrain_faults.py` and its neighbours)."
    )
    tables = [_table(f"test_retrain_{part}") for part in ("faults", "eight_bits", "teacher", "expert")]
    rows = [(name, "the updates, made once more") for table in tables for name in table]
    rows += [
        (f"in a mixture of experts, {name}", "the updates, made once more")
        for table in ("FAULTS", "BALANCES")
        for name in _table(EXPERTS, table)
    ]
    return "Updates", words, rows


def _table(module: str, name: str = "FAULTS") -> dict[str, Any]:
    return dict(getattr(importlib.import_module(module), name))


def _find_tests() -> None:
    """Let tests be imported, as pytest lets them import each other."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    folders = (str(ROOT / folder) for folder in ("tests/evidence/certificate", "tests/run", *settings["pythonpath"]))
    sys.path += [folder for folder in folders if folder not in sys.path]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
