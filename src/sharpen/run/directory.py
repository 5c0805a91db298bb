"""The directory of a run: created or reopened, and locked by one process at a time.

In: the resolved configuration. Out: a `RunDirectory`: `<root>/<project>/<name>` with the settings written into it, and
the checkpoint to continue from, if an earlier run of that name left one. What a killed run left half done is repaired
first. A run that has trained is never started over without the user's request.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from sharpen.config.load import ResolvedConfig, write_config, write_given, write_resolved
from sharpen.config.resuming import ANOTHER_NAME
from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError, JournalError
from sharpen.evidence.certificate.lineage import in_words
from sharpen.evidence.diagnose.diagnosis import read_rows
from sharpen.evidence.ended import forget_ended, note_ended
from sharpen.learning.experience.reading import read_group_ids, read_steps
from sharpen.learning.experience.records import EVALUATIONS
from sharpen.learning.trainer.checkpoint import PREFIX, pointed, repair, step_of
from sharpen.models.identity import Identity
from sharpen.run.identity import ROWS, changed_rows, used_rows_unchanged
from sharpen.run.lock import locked
from sharpen.run.same_run import IDENTITY, RunRecord, check_same_run, keep_settings, read_recorded
from sharpen.types import Task

TRAINING = "train_dataset"
"""Name of the training rows among the identities."""

_FILES = (
    *("run.db", EVALUATIONS, "metrics.jsonl", "resolved.json", "config.yaml", "summary.json", "certificate.json"),
    *("reward_curve.png", "loss_curve.png", "report.html"),
)
_RECORDS: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "run.db": (read_steps, "the records of the steps so far, which the certificate then does not cover"),
    EVALUATIONS: (read_group_ids, "what the agent did in earlier evaluations"),
    "metrics.jsonl": (read_rows, "the curves so far"),
}
"""The records that a run adds to: how each is read, and what a run lacks that goes on without it."""
_PASSING = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDirectory:
    """The paths of a run. `checkpoint` is the one to continue from, None for a new run. `notes` are lines for the user
    about what was found and repaired."""

    path: Path
    checkpoint: Path | None
    notes: tuple[str, ...] = ()

    @property
    def journal(self) -> Path:
        """The SQLite journal of rollouts and steps."""
        return self.path / "run.db"

    @property
    def metrics(self) -> Path:
        """One JSON line for each logged step."""
        return self.path / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        """The rollouts of the evaluations."""
        return self.path / EVALUATIONS

    @property
    def picture(self) -> Path:
        """The reward curve."""
        return self.path / "reward_curve.png"

    @property
    def loss_picture(self) -> Path:
        """The loss curve of a run that learns from rows."""
        return self.path / "loss_curve.png"

    @property
    def summary(self) -> Path:
        """The summary of the run."""
        return self.path / "summary.json"


@contextlib.contextmanager
def open_run_directory(
    resolved: ResolvedConfig, config_path: Path | None, identities: Mapping[str, Identity], rows: Sequence[Task] = ()
) -> Iterator[RunDirectory]:
    """Create the run's directory, or reopen an existing one with its latest checkpoint, and lock it. `identities` tell
    the model and the datasets apart and are recorded with the settings. `rows` are the rows to train on. What ends the
    block early is noted in the run's summary.

    Nothing is written before the run is known to be the same. Raises `ConfigError` if another process has the lock, if
    the directory belongs to another run, if a record of the run is damaged, or if it has trained steps but no
    checkpoint; `CheckpointError` if none of its checkpoints is complete.
    """
    config = resolved.config
    try:
        path = _directory(config, resolved.fresh_name)
    except OSError as error:
        raise ConfigError(
            f"the run's directory cannot be made: {error.strerror}: {error.filename!r}. checkpoint_root_dir is "
            f"{config.checkpoint_root_dir!r}: it must be a folder that can be written"
        ) from error
    with locked(path) as note:
        notes = [*filter(None, [note]), *repair(path)]
        checkpoint = pointed(path, "latest")
        notes += _check_records(path, has_steps=checkpoint is not None and step_of(checkpoint) > 0)
        if checkpoint is None:
            _check_unused(path)
        else:
            notes += _continue(path, RunRecord.of(config, identities), checkpoint, rows)
        if config_path is not None:
            write_config(config_path, path / "config.yaml")
        elif not (path / "config.yaml").exists():
            write_given(config.model_dump(mode="json", exclude_unset=True), path / "config.yaml")
        noted = {f"{IDENTITY}{name}": dict(identity) for name, identity in identities.items()}
        write_resolved(path / "resolved.json", resolved, noted)
        forget_ended(path)
        try:
            yield RunDirectory(path=path, checkpoint=checkpoint, notes=tuple(notes))
        except BaseException as error:
            note_ended(path, error)
            raise


def _directory(config: RunConfig, fresh: str) -> Path:
    """Return the named directory, created if missing. A run without a name gets `fresh`, with a number appended if that
    exists."""
    parent = (Path(config.checkpoint_root_dir) / config.project).absolute()
    if config.name is not None:
        (parent / config.name).mkdir(parents=True, exist_ok=True)
        return parent / config.name
    parent.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        path = parent / (fresh if number == 1 else f"{fresh}.{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            break
    return path


def chosen_before(config: RunConfig) -> Mapping[str, Any] | None:
    """Return the settings that the run of this name chose by itself, by dotted name; None if it is a new run. Raises
    `ConfigError` if its record cannot be read."""
    path = Path(config.checkpoint_root_dir) / config.project / (config.name or "")
    if config.name is None or not any(path.glob(f"{PREFIX}*")):
        return None
    record = read_recorded(path)
    return {} if record is None else {name: record.values[name] for name in record.chosen}


def _check_records(path: Path, *, has_steps: bool) -> list[str]:
    """Return a line for each record that is empty, though steps were trained. Raises `ConfigError` if one is damaged:
    before anything is loaded, and before anything is written to it."""
    if folders := [name for name in _FILES if (path / name).is_dir()]:
        raise ConfigError(f"{path / folders[0]} is a folder, where the run has a file: move it out of {path}")
    lines = []
    for name, (read, lost) in _RECORDS.items():
        file, log = path / name, path / f"{name}-wal"
        if not file.exists():
            continue
        is_empty = file.stat().st_size == 0
        if is_empty and not (has_steps and name == "run.db"):  # a kill may leave an empty file
            lines += [f"{name} is empty: the run goes on without {lost}"] if has_steps else []
            continue
        try:
            read(file)
        except (ConfigError, JournalError) as error:
            cause = error.__cause__
            if isinstance(cause, sqlite3.OperationalError) and cause.sqlite_errorcode & 0xFF in _PASSING:
                raise
            problem = f"{file} is empty, though steps were trained" if is_empty else str(error)
            both = name if not log.exists() or not log.stat().st_size else f"{name} and {log.name}"
            raise ConfigError(
                f"the run {path.name!r} cannot go on: {problem}. Restore it from a copy, or move {both} out of the "
                f"folder: the run then goes on without {lost}"
            ) from error
    return lines


def _check_unused(path: Path) -> None:
    """Raise `ConfigError` if steps were trained in this directory, which has no checkpoint."""
    trained = max(_steps_in_journal(path / "run.db"), _steps_in_metrics(path / "metrics.jsonl"))
    if trained:
        raise ConfigError(
            f"the run {path.name!r} has trained {trained} steps but has no checkpoint to continue from ({path}), and "
            "starting over would overwrite its records. Move or delete the folder to start over, or choose "
            f"{ANOTHER_NAME} (algorithm.save_interval_steps sets how often a checkpoint is saved)"
        )


def _steps_in_journal(journal: Path) -> int:
    return len(read_steps(journal)) if journal.exists() and journal.stat().st_size else 0


def _steps_in_metrics(metrics: Path) -> int:
    """Return the last step with a complete line; a line that a kill cut short does not count."""
    last = 0
    for line in metrics.read_text(encoding="utf-8", errors="replace").splitlines() if metrics.exists() else ():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            last = max(last, int(json.loads(line)["step"]))
    return last


def _continue(path: Path, now: RunRecord, checkpoint: Path, rows: Sequence[Task]) -> list[str]:
    """Check that the run is the same, keep the settings that are about to be replaced, and return lines for the user.
    Raises `ConfigError` if it is another run."""
    before = read_recorded(path)
    if before is None:
        return ["resolved.json is missing: the settings of this run cannot be compared with those it started with"]
    lines = []
    if _only_unused_rows_changed(path, before.identities.get(TRAINING), now.identities.get(TRAINING), rows):
        lines.append("changed since the run last started: rows of train_dataset that it had not used yet")
        before = replace(before, identities={**before.identities, TRAINING: now.identities[TRAINING]})
    lines += check_same_run(path, before, now)
    if len(rows) > ROWS and (changed := changed_rows(path / "run.db", rows)):  # fewer rows are compared whole
        lines.append(
            f"changed since the run used them: {len(changed)} rows of train_dataset ({', '.join(changed[:3])}"
            f"{', ...' if len(changed) > 3 else ''})"
        )
    if missing := _missing_records(path / "run.db", step_of(checkpoint)):
        lines.append(missing)
    if before.values != now.values:
        keep_settings(path, step_of(checkpoint))
    return lines


def _missing_records(journal: Path, step: int) -> str:
    """Return a line on the steps up to `step` that are not in the journal; empty if all are."""
    recorded = {record.step for record in read_steps(journal)} if journal.exists() else set()
    missing = sorted(set(range(1, step + 1)) - recorded)
    if not missing:
        return ""
    return (
        f"run.db does not have the records of {len(missing)} of the {step} steps behind {PREFIX}{step} "
        f"({in_words(missing)}): the certificate cannot cover them and will not hold. To train on from these weights "
        f"with a certificate, give them as model_path under {ANOTHER_NAME}"
    )


def _only_unused_rows_changed(path: Path, before: Identity | None, now: Identity | None, rows: Sequence[Task]) -> bool:
    """Whether training rows changed, but neither their number nor any row that the run has used."""
    if before is None or now is None or before == now or before["rows"] != now["rows"]:
        return False
    return used_rows_unchanged(path / "run.db", rows)
