"""The directory of a run: made, or found again, and held by one process at a time.

In: the resolved configuration. Out: a `RunDirectory`: `<root>/<project>/<name>` with the settings written into it, and
the checkpoint to continue from, if a run of that fixed name left one. What a kill left half done is put right first;
nothing that was trained is ever begun anew without being told so.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import count
from pathlib import Path

import yaml

from sharpen.config.former import former_run
from sharpen.config.load import ResolvedConfig, write_resolved
from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError
from sharpen.experience.reading import read_steps
from sharpen.experience.records import EVALUATIONS
from sharpen.run.identity import Identity, trained_rows_stay
from sharpen.run.lock import locked
from sharpen.run.same_run import NOTED, RunRecord, check_same_run, keep_settings, read_recorded
from sharpen.trainer.checkpoint import pointed, repair, step_of
from sharpen.types import Task

TRAINING = "train_dataset"
"""Under this name the rows to train on are known again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDirectory:
    """Where everything of a run is. `checkpoint` is what it continues from; None for a fresh run. `notes` say what was
    found and done as it was opened."""

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
        """What the agent did when it was evaluated."""
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
        """What came out."""
        return self.path / "summary.json"


@contextlib.contextmanager
def open_run_directory(
    resolved: ResolvedConfig, config_path: Path | None, identities: Mapping[str, Identity], rows: Sequence[Task] = ()
) -> Iterator[RunDirectory]:
    """Make the directory, or find that of the fixed name again, with its latest checkpoint, and hold it. `identities`
    say what model and datasets are; they are noted beside the settings. `rows` are those to train on.

    Nothing is written before it is known that the run may go on there. Raises `ConfigError` if another run holds the
    directory, if a fixed name's directory belongs to another run, or if it has steps but no checkpoint to go on from;
    `CheckpointError` if none of its checkpoints is whole.
    """
    config = resolved.config
    path = _directory(config)
    with locked(path) as note:
        notes = [*filter(None, [note]), *repair(path)]
        checkpoint = pointed(path, "latest")
        if checkpoint is None:
            _check_unused(path)
        else:
            notes += _go_on(path, RunRecord.of(config, identities), checkpoint, rows)
        if config_path is not None:
            shutil.copyfile(config_path, path / "config.yaml")
        elif not (path / "config.yaml").exists():
            content = config.model_dump(mode="json", exclude_unset=True)
            (path / "config.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        noted = {f"{NOTED}{name}": dict(identity) for name, identity in identities.items()}
        write_resolved(path / "resolved.json", resolved, noted)
        yield RunDirectory(path=path, checkpoint=checkpoint, notes=tuple(notes))


def _directory(config: RunConfig) -> Path:
    """The directory of the name, made (or found where the default project had it under its former name); without a name
    `Experiment-<timestamp>`, with a number behind it if a run of the same second took that."""
    parent = (Path(config.checkpoint_root_dir) / config.project).absolute()
    if config.name is not None:
        if former := former_run(parent.parent, config.project, config.name):
            return former
        (parent / config.name).mkdir(parents=True, exist_ok=True)
        return parent / config.name
    parent.mkdir(parents=True, exist_ok=True)
    fresh = f"Experiment-{datetime.now():%Y%m%d%H%M%S}"
    for number in count(1):
        path = parent / (fresh if number == 1 else f"{fresh}.{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            break
    return path


def _check_unused(path: Path) -> None:
    """A directory without a checkpoint is begun anew only if no step was trained in it."""
    trained = max(_steps_in_journal(path / "run.db"), _steps_in_metrics(path / "metrics.jsonl"))
    if trained:
        raise ConfigError(
            f"the run {path.name!r} has trained {trained} steps and left no checkpoint to go on from ({path}): "
            "beginning anew in it would overwrite its records. Move or delete the folder to begin anew, or choose "
            "another experiment_name (algorithm.save_interval_steps says how often a checkpoint is saved)"
        )


def _steps_in_journal(journal: Path) -> int:
    return len(read_steps(journal)) if journal.exists() and journal.stat().st_size else 0


def _steps_in_metrics(metrics: Path) -> int:
    """The last step that has a line; a line that a kill cut short is none."""
    found = 0
    for line in metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else ():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found = max(found, int(json.loads(line)["step"]))
    return found


def _go_on(path: Path, now: RunRecord, checkpoint: Path, rows: Sequence[Task]) -> list[str]:
    """See to it that the run is the same, and keep the settings that are about to be replaced; what to tell the user.
    Raises `ConfigError` if it is another one."""
    before = read_recorded(path)
    if before is None:
        return ["resolved.json is missing: whether the run goes on with the settings that it began with is not known"]
    lines = []
    if _repaired(path, before.identities.get(TRAINING), now.identities.get(TRAINING), rows):
        lines.append("changed since the run was last begun: rows of train_dataset that it had not met yet")
        before = replace(before, identities={**before.identities, TRAINING: now.identities[TRAINING]})
    lines += check_same_run(path, before, now)
    if before.values != now.values:
        keep_settings(path, step_of(checkpoint))
    return lines


def _repaired(path: Path, before: Identity | None, now: Identity | None, rows: Sequence[Task]) -> bool:
    """Whether the training rows are others, as many, and those that the run has met are as they were."""
    if before is None or now is None or before == now or before["rows"] != now["rows"]:
        return False
    return trained_rows_stay(path / "run.db", rows)
