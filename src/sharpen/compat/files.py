"""Configuration files in our layout or Trinity-RFT's, told apart by their sections.

In: the path of a YAML file. Out: a `ConfigFile`, which `config.load.resolve` makes a run's configuration of.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from sharpen.compat.trinity.yaml.conversion import convert, own_keys
from sharpen.compat.trinity.yaml.table import RULES
from sharpen.config.former import current_file
from sharpen.config.load import ConfigFile, point_beside, read_yaml
from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError

_THEIRS = {key.partition(".")[0] for key in RULES} | {"stages"}
_OURS = set(RunConfig.model_fields)
"""The sections of either layout; some are in both."""


def load_config(path: str | Path, *, has_ray: bool | None = None) -> ConfigFile:
    """Read a configuration file. Relative paths of datasets, models and code files that exist beside it point there.

    `has_ray` says whether Trinity-RFT's `cluster` can be had; None: where Ray is installed.

    Raises `ConfigError` as `read_yaml`, for a file that mixes both layouts, and for what cannot be honoured.
    """
    path = Path(path)
    content = current_file(read_yaml(path))
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
        here = find_spec("ray") is not None
        file = convert(content, path.name, environment=os.environ, has_ray=here if has_ray is None else has_ray)
    else:
        file = ConfigFile(settings=content, name=path.name)
    point_beside(file.settings, path.parent)
    return file
