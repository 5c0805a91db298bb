"""The model that a server serves, and how it samples: from a run's checkpoint, or from any model's own files.

In: a path (a model's folder, a run's folder, or a name on the hub) and the settings given. Out: `ServedModel`, and the
configuration of the server.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharpen.config.load import ResolvedConfig, resolve
from sharpen.errors import ConfigError, ModelError
from sharpen.learning.trainer.checkpoint import best_of_run
from sharpen.models.files import model_folder
from sharpen.run.same_run import read_recorded

DEFAULT_PORT = 8000
MOST_TOKENS = 32_768
"""The longest context that is served unless one is named: a model's own may need more memory than there is."""
SECTIONS = ("model", "families", "engine", "gateway", "deterministic")
"""The settings that a server has."""
_OF_A_RUN = (
    *("model.max_model_len", "model.temperature", "model.top_p", "model.top_k", "model.min_p"),
    *("model.max_tokens", "model.enable_thinking", "model.tool_call_parser", "model.reasoning_parser"),
    *("engine.dtype", "families"),
)
"""The settings of a run that its checkpoints are served with, but for code that they name: a run's folder may come from
anybody."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model's files, the `name` that clients see, the `settings` that belong to it, by dotted name, and where these
    come from."""

    folder: Path
    name: str
    settings: Mapping[str, Any]
    origin: str


def find_model(path: str) -> ServedModel:
    """Return the model at `path`: of a run's folder the best checkpoint, or the latest if none was evaluated.

    Raises `ModelError` if there is none, `ConfigError` if the records of its run cannot be read.
    """
    given = Path(path).expanduser()
    checkpoint = best_of_run(given)
    folder = checkpoint or model_folder(path, "the model")
    run = folder.parent if folder.is_dir() and (folder.parent / "resolved.json").is_file() else None
    if run is not None and (record := read_recorded(run)) is not None:
        settings = {name: record.values[name] for name in _OF_A_RUN if name in record.values}
        code = [name for name, value in settings.items() if ":" in str(value)]
        origin = f"as {run.name} was trained"
        if code:
            named = shlex.join(word for name in code for word in ("--set", f"{name}={json.dumps(settings.pop(name))}"))
            origin += f" (without the code that it names; if you trust it: {named})"
        return ServedModel(folder=folder, name=run.name, settings=settings, origin=origin)
    name = given.absolute().name if given.is_dir() else path
    return ServedModel(folder=folder, name=name, settings=_own_settings(folder), origin="from the model's own files")


def serving_config(model: ServedModel, given: Mapping[str, Any]) -> ResolvedConfig:
    """Return the configuration of a server of `model`; `given` (dotted names) replace the settings that belong to it.

    Raises `ConfigError` with every problem at once, also for settings that a server does not have.
    """
    without = sorted(name for name in given if name.partition(".")[0] not in SECTIONS or name == "model.model_path")
    if without:
        raise ConfigError(
            f"{', '.join(without)}: a server has no such setting; it has those of model (but model_path), engine and "
            "gateway, families and deterministic"
        )
    settings = {"gateway.port": DEFAULT_PORT, **model.settings, **given, "model.model_path": str(model.folder)}
    if "model.max_model_len" not in settings:
        raise ConfigError(
            f"{model.folder / 'config.json'} does not say how long a context the model takes: give --max-model-len"
        )
    return resolve(None, settings, {"train_dataset": {"path": "-"}})


def _own_settings(folder: Path) -> dict[str, Any]:
    """Return the settings in a model's own files: the length of its context, and how it should be sampled."""
    config, generation = _read(folder / "config.json"), _read(folder / "generation_config.json")
    length = config.get("max_position_embeddings", (config.get("text_config") or {}).get("max_position_embeddings"))
    settings = {} if length is None else {"model.max_model_len": min(length, MOST_TOKENS)}
    if generation.get("do_sample"):
        settings |= {f"model.{name}": generation[name] for name in _SAMPLING if generation.get(name) is not None}
    return settings


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    return content if isinstance(content, dict) else {}
