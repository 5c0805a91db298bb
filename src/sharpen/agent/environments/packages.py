"""Imports the packages of environments, none of which Sharpen needs by itself.

In: the type of an environment, the name of a module. Out: the module, or a `ConfigError` that says how to install it.
"""

from __future__ import annotations

import importlib
from typing import Any

from sharpen.errors import ConfigError

REQUIREMENTS = {
    "reasoning-gym": "reasoning-gym>=0.1.25",
    "gymnasium": "gymnasium>=1.4",
    "textarena": "textarena>=0.7.4",
    "verifiers": "verifiers>=0.4",
    "openenv": "openenv>=0.10",
}
"""What each type needs, as pip takes it."""


def import_package(type_: str, module: str) -> Any:
    """Return a module that environments of a type need. Raises `ConfigError` if it is missing or does not load."""
    install = f"pip install '{REQUIREMENTS[type_]}'"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module:
            raise ConfigError(f"environment.type is {type_!r}, whose package is not installed: {install}") from error
        raise ConfigError(
            f"environment.type is {type_!r}, whose package needs {error.name!r}, which is missing: {install}"
        ) from error
    except Exception as error:  # the package's code runs
        raise ConfigError(
            f"environment.type is {type_!r}, but {module} fails when it is imported: {error!r}"
        ) from error
