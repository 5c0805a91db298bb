"""The directory of a run: made, or found again.

In: the resolved configuration. Out: a `RunDirectory`: `<root>/<project>/<name>` with the settings written into it, and
the checkpoint to continue from, if a run of that fixed name left one.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import yaml

from agenttune.algorithm.supervised import SUPERVISED
from agenttune.config.load import Resolved, write_resolved
from agenttune.config.run import RunConfig
from agenttune.errors import ConfigError
from agenttune.trainer.checkpoint import pointed


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDirectory:
    """Where everything of a run is. `checkpoint` is what it continues from; None for a fresh run."""

    path: Path
    checkpoint: Path | None

    @property
    def journal(self) -> Path:
        """The SQLite journal of rollouts and steps."""
        return self.path / "run.db"

    @property
    def metrics(self) -> Path:
        """One JSON line for each logged step."""
        return self.path / "metrics.jsonl"

    @property
    def picture(self) -> Path:
        """The reward curve."""
        return self.path / "reward_curve.png"

    @property
    def summary(self) -> Path:
        """What came out."""
        return self.path / "summary.json"


def open_run_directory(resolved: Resolved, config_path: Path | None) -> RunDirectory:
    """Make the directory, or find that of the fixed name again, with its latest checkpoint.

    Raises `ConfigError` if a fixed name's directory belongs to another model.
    """
    config = resolved.config
    path = Path(config.checkpoint_root_dir) / config.project / (config.name or _fresh_name(config))
    path = path.absolute()
    checkpoint = pointed(path, "latest")
    if checkpoint is not None:
        _check_same_model(path, config)
        _check_same_kind(path, config)
    path.mkdir(parents=True, exist_ok=True)
    if config_path is not None:
        shutil.copyfile(config_path, path / "config.yaml")
    elif not (path / "config.yaml").exists():
        content = config.model_dump(mode="json", exclude_unset=True)
        (path / "config.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    write_resolved(path / "resolved.json", resolved)
    return RunDirectory(path=path, checkpoint=checkpoint)


def _fresh_name(config: RunConfig) -> str:
    """`Experiment-<timestamp>`, with a number behind it if a run of the same second took that."""
    name = f"Experiment-{datetime.now():%Y%m%d%H%M%S}"
    parent = Path(config.checkpoint_root_dir) / config.project
    number = 1
    while (parent / name).exists():
        number += 1
        name = f"{name.split('.')[0]}.{number}"
    return name


def _check_same_kind(path: Path, config: RunConfig) -> None:
    """A run that learns from rollouts is not continued by one that does not, nor by one of another kind of rows."""
    recorded = path / "resolved.json"
    earlier = json.loads(recorded.read_text(encoding="utf-8")) if recorded.exists() else {}
    before, now = earlier.get("algorithm.algorithm_type", {}).get("value"), config.algorithm.algorithm_type
    if before != now and (before in SUPERVISED or now in SUPERVISED):
        raise ConfigError(
            f"the run {path.name!r} exists and is one of {before!r}, but algorithm_type is {now!r}: choose another "
            f"experiment_name (to go on from what it learnt, give its checkpoint as model_path)"
        )


def _check_same_model(path: Path, config: RunConfig) -> None:
    recorded = path / "resolved.json"
    earlier = json.loads(recorded.read_text(encoding="utf-8")) if recorded.exists() else {}
    model_path = earlier.get("model.model_path", {}).get("value")
    if model_path is not None and Path(model_path).name != Path(config.model.model_path).name:
        raise ConfigError(
            f"the run {path.name!r} exists and tunes {model_path!r}, but model_path is {config.model.model_path!r}: "
            "choose another experiment_name, or the same model"
        )
