"""Find which of the recorded steps led to a run's weights.

In: a run directory: its step records in the order of writing, the sessions that wrote them, and the checkpoint that
`latest` points to. Out: a `Lineage`. A run that resumes from an earlier checkpoint repeats its later steps: their old
records stay in `run.db`, but belong to no weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sharpen.errors import CheckpointError
from sharpen.learning.experience.evidence import SessionRecord, read_sessions, read_step_groups
from sharpen.learning.experience.reading import StepRecord, read_last_groups, read_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A checkpoint: the name of its folder, the step after which it was saved, and its policy version."""

    name: str
    step: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """The steps behind the weights, in order, and for each the groups rolled out for it, by their keys in `run.db`.
    `weights` is None if there is no checkpoint: `steps` are then all recorded steps. `undone` counts step records that
    belong to no weights. `problems` describes what is missing or contradictory."""

    weights: Weights | None
    steps: tuple[StepRecord, ...]
    groups: dict[int, tuple[int, ...]] = field(default_factory=dict)
    undone: int = 0
    problems: tuple[str, ...] = ()

    def version_before(self, step: int) -> int:
        """Return the policy version that a step began with."""
        return next((record.version for record in self.steps if record.step == step - 1), 0)


def read_lineage(run_dir: Path, *, running: bool = False) -> Lineage:
    """Return the steps behind the checkpoint that `latest` points to; of a `running` run, those behind the weights that
    it now trains. Raises `JournalError`, and `CheckpointError` for a checkpoint whose state cannot be read."""
    journal = run_dir / "run.db"
    weights, records = None if running else latest_weights(run_dir), read_steps(journal)
    steps, problems = chain(records, read_sessions(journal), weights)
    noted, guessed = read_step_groups(journal), read_last_groups(journal)
    groups = {
        record.step: tuple(sorted(key for key, replayed in noted[record.step] if not replayed))
        if record.step in noted
        else tuple(guessed.get(record.step, ()))
        for record in steps
    }
    return Lineage(
        weights=weights, steps=tuple(steps), groups=groups, undone=len(records) - len(steps), problems=tuple(problems)
    )


def latest_weights(run_dir: Path) -> Weights | None:
    """Return the checkpoint that `latest` points to, None if there is none."""
    from sharpen.learning.trainer.checkpoint import pointed  # imports torch

    folder = pointed(run_dir, "latest")
    number = None if folder is None else re.search(r"\d+$", folder.name)
    if folder is None or number is None:
        return None
    try:
        state = json.loads((folder / "trainer_state" / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read which steps led to the checkpoint {folder}: {error}") from error
    return Weights(name=folder.name, step=int(number.group()), version=int(state["version"]))


def chain(
    records: Sequence[StepRecord], sessions: Sequence[SessionRecord], weights: Weights | None
) -> tuple[list[StepRecord], list[str]]:
    """Return the records that led to `weights` (None: to the last record), and a sentence for each contradiction."""
    begins = {session.id: session for session in sessions}
    chosen: list[StepRecord] = []
    problems: list[str] = []
    ended: set[str] = set()
    last: str | None = None
    for record in records:
        if record.session != last and last is not None:
            ended.add(last)
        if record.session in ended:
            problems.append(
                f"step {record.step} was trained by a session that had ended: two runs wrote into this directory at "
                "once"
            )
        elif record.session != last and record.session in begins:
            chosen = _resume(chosen, begins[record.session], problems)
        last = record.session
        chosen = [earlier for earlier in chosen if earlier.step < record.step]
        chosen.append(record)
    if weights is not None:
        chosen = [earlier for earlier in chosen if earlier.step <= weights.step]
        problems += _missing(chosen, weights)
    else:
        problems += _gaps([earlier.step for earlier in chosen], chosen[-1].step if chosen else 0)
    return chosen, list(dict.fromkeys(problems))


def _resume(records: list[StepRecord], session: SessionRecord, problems: list[str]) -> list[StepRecord]:
    """Return the records that a resuming session builds on."""
    records = [earlier for earlier in records if earlier.step <= session.step]
    if records and records[-1].step == session.step and records[-1].version != session.version:
        problems.append(
            f"a session resumed after step {session.step} with weights of version {session.version}, but that step in "
            f"run.db led to version {records[-1].version}: these are not its weights"
        )
    return records


def _missing(records: Sequence[StepRecord], weights: Weights) -> list[str]:
    problems = _gaps([record.step for record in records], weights.step)
    if records and records[-1].step == weights.step and records[-1].version != weights.version:
        problems.append(
            f"{weights.name} holds weights of version {weights.version}, but step {weights.step} in run.db led to "
            f"version {records[-1].version}: these are not its weights"
        )
    return problems


def _gaps(steps: Sequence[int], until: int) -> list[str]:
    missing = sorted(set(range(1, until + 1)) - set(steps))
    if not missing:
        return []
    return [
        f"{len(missing)} of the {until} steps behind the weights are not in run.db and cannot be checked: "
        f"{in_words(missing)}"
    ]


def in_words(steps: Sequence[int]) -> str:
    """Format steps as ranges: `1 to 4, 7`."""
    parts: list[list[int]] = []
    for step in sorted(set(steps)):
        if parts and parts[-1][-1] == step - 1:
            parts[-1].append(step)
        else:
            parts.append([step])
    return ", ".join(f"{part[0]} to {part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
