"""Writes understand/faults.md from the faults that tests plant: `python docs/make_faults.py`.

In: the tables of faults of the tests. Out: the page, with each fault.
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
or the beginning of its line names ([the certificate](certificate.md)). Tests repeat this with every change.

"""


def page() -> str:
    """Return the whole page."""
    _find_tests()
    parts = [_draws(), _batches(), _gradients(), _updates(), _verdict()]
    text = f"{INTRODUCTION}{sum(len(rows) for _, _, rows in parts)} faults in {len(parts)} places.\n"
    for title, words, rows in parts:
        kinds: dict[str, list[str]] = {}
        for fault, found in rows:
            kinds.setdefault(found, []).append(fault)
        lines = [f"- {found}{': ' if found else ''}{'; '.join(faults)}" for found, faults in kinds.items()]
        text += f"\n## {title}\n\n{words}\n\n" + "\n".join(lines) + "\n"
    return text


EXPERTS = "test_retrain_experts"
_OTHER = "with a teacher of other tokens"
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
    return "Draws", words, [(name, f"within {most} tokens") for name, (_, _, most) in faults.items()]


def _verdict() -> Part:
    words = (
        "In the evaluations before and after: found at the run's end, when the verdict is computed again from their "
        "rollouts (`tests/run/test_verdict_faults.py`; some thirty more, planted in the records and in the summary, "
        "in `tests/evidence/certificate/test_verdict_again.py`)."
    )
    return "Verdict", words, [(name, "") for name in _table("test_verdict_faults")]


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
    tables = {
        "faults": "",
        "eight_bits": "",
        "teacher": "with a teacher",
        "reread": _OTHER,
        "expert": "with an expert's rows",
    }
    names = [(name, kind) for part, kind in tables.items() for name in _table(f"test_retrain_{part}")]
    names += [(name, "in a mixture of experts") for kind in ("FAULTS", "BALANCES") for name in _table(EXPERTS, kind)]
    rows = []
    for name, kind in names:
        where, _, fault = name.rpartition(", ")
        rows.append((fault, where) if where.startswith(("in ", "with ", "over ", "beside ")) else (name, kind))
    return "Updates", words, rows


def _table(module: str, name: str = "FAULTS") -> dict[str, Any]:
    return dict(getattr(importlib.import_module(module), name))


def _find_tests() -> None:
    """Let tests be imported, as pytest lets them import each other."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    folders = (
        str(ROOT / folder) for folder in ("tests", "tests/evidence/certificate", "tests/run", *settings["pythonpath"])
    )
    sys.path += [folder for folder in folders if folder not in sys.path]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
