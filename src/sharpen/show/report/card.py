"""The model card of a checkpoint, in Hugging Face's form: YAML for the hub, then what a reader needs to know.

In: the report of the run, a checkpoint, what the card of the base model said about licence and languages. Out: the
text of `README.md`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from sharpen.files import write_whole
from sharpen.learning.trainer.checkpoint import step_of
from sharpen.models.pieces import auto_class
from sharpen.show.report.contents import Report, kept_checkpoints, read_report
from sharpen.show.report.render import markdown_template

MARK = "<!-- This card is written by Sharpen at the end of the run -->"
_KEPT = ("license", "license_name", "license_link", "language")
"""What a tuned model has in common with its base model."""
_SHOWN = re.compile(r"(algorithm|loss|trainer|sampling|critic|sync)\.|seed$|model\.max_")
"""Settings of the training; paths and names of this machine are nobody's business."""


def write_cards(run_dir: Path, report: Report | None = None, *, replace: bool = True) -> list[Path]:
    """Write the card of each kept checkpoint and return the paths. A checkpoint has the base model's `README.md`, which
    is replaced; without `replace`, any that is not ours stays as it is. A link gets none: it may lead anywhere. Without
    the run's report this reads it, and all rollouts for it."""
    report = report or read_report(run_dir)
    written = []
    for checkpoint in kept_checkpoints(run_dir):
        if checkpoint.is_symlink():
            continue
        path = checkpoint / "README.md"
        before = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        if before and not replace and MARK not in before:
            continue
        write_whole(path, card(report, checkpoint, front_matter(before)), lasting=False)
        written.append(path)
    return written


def front_matter(text: str) -> Mapping[str, Any]:
    """Return the YAML at the top of a card; empty if there is none that can be read."""
    match = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    try:
        found = yaml.safe_load(match[1]) if match else None
    except (yaml.YAMLError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_plain(value: Any) -> bool:
    """Whether this is a text, or several: what else a stranger's card may hold there is not taken over."""
    texts = value if isinstance(value, list) else [value]
    return all(isinstance(text, str) for text in texts)


def card(report: Report, checkpoint: Path, base: Mapping[str, Any]) -> str:
    """Return the card. `base` is the front matter of the base model's card, or of an earlier card of this one."""
    run = report.page.run
    head: dict[str, Any] = {name: base[name] for name in _KEPT if _is_plain(base.get(name))}
    head |= {"library_name": "transformers", "pipeline_tag": "text-generation"}
    on_hub = bool(run.model and re.fullmatch(r"[\w.-]+/[\w.-]+", run.model)) and not Path(run.model or "").exists()
    if on_hub:
        head["base_model"] = run.model
    head["tags"] = ["sharpen", "reinforcement-learning", *([run.algorithm] if run.algorithm else [])]
    name, step = checkpoint.name, step_of(checkpoint)
    best = report.use is not None and not report.use.original and Path(report.use.model).name == name
    body = markdown_template("card.md").render(
        report=report,
        page=report.page,
        mark=MARK,
        loader=auto_class(checkpoint),
        step=step,
        base=run.model if on_hub else Path(run.model or "").name,
        settings=[(name, value) for name, value in report.settings if _SHOWN.match(name)],
        is_chosen=best,
        is_last=step == run.steps,
    )
    return f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---\n\n{body.strip()}\n"
