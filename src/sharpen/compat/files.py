"""Configuration files in our layout or Trinity-RFT's, told apart by their sections.

In: the path of a YAML file. Out: a `ConfigFile`, which `config.load.resolve` makes a run's configuration of.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sharpen.compat.trinity.imports.stand_in import stand_in
from sharpen.compat.trinity.yaml.conversion import convert, own_keys
from sharpen.compat.trinity.yaml.interpolation import interpolate
from sharpen.compat.trinity.yaml.stages import stage_names
from sharpen.compat.trinity.yaml.table import RULES
from sharpen.config.explain import InvalidConfigError
from sharpen.config.load import ConfigFile, point_beside, read_yaml
from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError

_THEIRS = {key.partition(".")[0] for key in RULES} | {"stages"}
_OURS = set(RunConfig.model_fields)
"""The sections of either layout; some are in both."""
_OTHERS: Mapping[str, set[str]] = {
    "a configuration of verl's trainer, which trainer.trainer_config_path named in earlier versions": {
        "actor_rollout_ref",
        "trainer",
    },
    "a recipe of Data-Juicer's, which an operator of data_processor names": {"process", "project_name"},
}
"""Files that lie beside Trinity-RFT's, by what tells them."""


def load_config(path: str | Path, *, stage: str | None = None, has_ray: bool | None = None) -> ConfigFile:
    """Read a configuration file of one run, or one stage of a file with several. Relative paths of datasets, models and
    code files that exist beside it point there.

    `has_ray` says whether Trinity-RFT's `cluster` can be had; None: where Ray is installed.

    Raises `ConfigError` as `read_yaml`, for a file that mixes both layouts, and for what cannot be honoured.
    """
    path = Path(path)
    found = load_stages(path, stage=stage, has_ray=has_ray)
    if len(found) > 1:
        names = ", ".join(stage_names(read_yaml(path), path.name))
        raise ConfigError(
            f"{path} has the stages {names}: `sharpen run` runs them one after the other; elsewhere choose one "
            "(--stage NAME)"
        )
    return found[0]


def load_stages(path: str | Path, *, stage: str | None = None, has_ray: bool | None = None) -> list[ConfigFile]:
    """Read a configuration file as the runs that it asks for: one, or each of the `stages` of Trinity-RFT's layout in
    their order; only the one named `stage`, if that is given. Raises as `load_config`."""
    path = Path(path)
    content = read_yaml(path)
    names = stage_names(content, path.name)
    if stage is not None and stage not in names:
        raise ConfigError(f"{path} has no stage {stage!r} (it has {', '.join(names) or 'none'})")
    if len(names) < 2:
        return [_load(content, path, path.name, has_ray)]
    return [
        _load({**content, "stages": [section]}, path, f"{path.name}, stage {name}", has_ray)
        for name, section in zip(names, content["stages"], strict=True)
        if stage in (None, name)
    ]


def _load(content: Mapping[str, Any], path: Path, name: str, has_ray: bool | None) -> ConfigFile:
    for kind, sections in _OTHERS.items():
        if sections <= content.keys():
            raise ConfigError(f"{path} is {kind}: give the Trinity-RFT file that names it")
    theirs = sorted((_THEIRS - _OURS) & content.keys())
    ours = sorted((_OURS - _THEIRS) & content.keys())
    if not theirs and not ours:
        theirs, ours = own_keys(content)
    if theirs and ours:
        raise ConfigError(
            f"{path} mixes two layouts: {', '.join(theirs)} of Trinity-RFT's, {', '.join(ours)} of our own; "
            "keep to one of them"
        )
    if theirs:
        stand_in()  # the code that such a file names imports Trinity-RFT
        here = find_spec("ray") is not None
        content = _with_trainer_file(content, path.parent)
        file = convert(content, name, environment=os.environ, has_ray=here if has_ray is None else has_ray)
    else:
        file = ConfigFile(settings=dict(content), name=name)
    point_beside(file.settings, path.parent)
    return file


def _with_trainer_file(content: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """Put the file that `trainer.trainer_config_path` names, as earlier versions of Trinity-RFT did, in the place of
    `trainer.trainer_config`. One that does not exist is left to the conversion, which refuses it."""
    trainer = content.get("trainer")
    named = trainer.get("trainer_config_path") if isinstance(trainer, Mapping) else None
    if not isinstance(named, str) or not isinstance(trainer, Mapping) or trainer.get("trainer_config"):
        return content
    found = next((path for path in (Path(named), folder / named, folder / Path(named).name) if path.is_file()), None)
    if found is None:
        return content
    inner, problems = interpolate(read_yaml(found), os.environ)
    if problems:
        raise InvalidConfigError.of(str(found), list(problems.values()))
    return {**content, "trainer": {**trainer, "trainer_config": inner}}
