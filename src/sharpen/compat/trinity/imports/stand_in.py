"""The package `trinity` made of our names, where Trinity-RFT is not installed; and a few names of verl, which it needs.

In: a request to stand in. Out: finders in `sys.meta_path`, so that `from trinity.common.workflows import Workflow`
gives ours. A real Trinity-RFT that is installed is left alone, unless the request says otherwise; a folder `trinity`
that merely lies on the path (a clone of its repository) is not an installation. A real verl is left alone always.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType
from typing import Any

from sharpen.compat.trinity.imports.table import MODULES, modules_with
from sharpen.config.functions import load_file, prepare_others
from sharpen.errors import ConfigError, NotIncludedError

NAME, DISTRIBUTION, PLUGINS = "trinity", "trinity-rft", "trinity.plugins"
VERL = "verl"
OPTION = "--trinity-imports"


def stand_in(*, shadow: bool = False) -> bool:
    """Let `import trinity` give our names, from now on in this process; whether it does.

    With `shadow` also where Trinity-RFT is installed. Raises `ConfigError` if it has been imported already; without
    `shadow` it is then left alone too.
    """
    if stands_in():
        return True
    real = sys.modules.get(NAME)
    if not shadow and (real is not None or is_installed()):
        return False
    if real is not None:
        where = getattr(real, "__file__", None) or "elsewhere"
        raise ConfigError(
            f"the module {NAME!r} has been imported from {where} already: ours cannot stand in for it any more"
        )
    sys.meta_path.insert(0, Finder(NAME))
    sys.meta_path.append(Finder(VERL))  # the last to be asked
    prepare_others(f"{__name__}:{stand_in_always.__name__}")
    return True


def stand_in_always() -> None:
    """Let `import trinity` give our names in a process that loads code which another one has imported so."""
    stand_in(shadow=True)


def stands_in() -> bool:
    """Whether `import trinity` gives our names."""
    return any(isinstance(finder, Finder) for finder in sys.meta_path)


def is_installed() -> bool:
    """Whether Trinity-RFT is installed."""
    try:
        distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return False
    return True


def load_plugins(folder: Path) -> list[ModuleType]:
    """Load each Python file of a folder but those that begin with `__`, as Trinity-RFT does with its plugins: what they
    register is known then. Raises `ConfigError` for a folder that is not there, and a file that fails."""
    if not folder.is_dir():
        raise ConfigError(f"--plugin-dir {folder}: there is no such folder")
    if stands_in():  # other code may import them as trinity.plugins.<name>
        importlib.import_module(PLUGINS).__path__.append(str(folder))
    return [load_file(path, str(path)) for path in sorted(folder.glob("*.py")) if not path.name.startswith("__")]


class Finder(MetaPathFinder):
    """Finds `trinity` (or `verl`) and the modules below it."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec for what we have. Raises `NotIncludedError` for the package's other modules."""
        if name != self.package and not (
            name.startswith(f"{self.package}.") and isinstance(sys.modules.get(self.package), StandIn)
        ):
            return None
        if name in MODULES:
            return ModuleSpec(name, StandInLoader(), is_package=True)
        parent, _, stem = name.rpartition(".")
        for folder in (path or ()) if parent == PLUGINS else ():
            if (file := Path(folder, f"{stem}.py")).is_file():
                return ModuleSpec(name, PluginLoader(file))
        raise NotIncludedError(
            f"{_stands_in_for(name)}, and has no module {name!r}{_near(name, MODULES)}; {_real(name)}"
        )


class StandInLoader(Loader):
    """Makes a module whose names are imported from ours when they are first used."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty module."""
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is executed: names come when they are asked for."""


class PluginLoader(Loader):
    """Loads a plugin, once, whoever asks for it first."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The plugin, loaded."""
        module = load_file(self.file, str(self.file))
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It was loaded under a name of its own, which it keeps."""
        module.__spec__ = self._spec


class StandIn(ModuleType):
    """A module of Trinity-RFT with the names of it that exist here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        known = MODULES[self.__name__]
        if name in known:
            module, _, attribute = known[name].partition(":")
            value = getattr(importlib.import_module(module), attribute)
        elif f"{self.__name__}.{name}" in MODULES:
            value = importlib.import_module(f"{self.__name__}.{name}")
        else:
            raise NotIncludedError(_missing(self.__name__, name, known))
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        below = [key.rpartition(".")[2] for key in MODULES if key.rpartition(".")[0] == self.__name__]
        return sorted({*super().__dir__(), *MODULES[self.__name__], *below})


def _missing(module: str, name: str, known: Any) -> str:
    elsewhere = modules_with(name)
    hint = f"; it is in {elsewhere[0]}" if elsewhere else _near(name, known)
    return f"{_stands_in_for(module)}, and has no {name!r} of {module}{hint}; {_real(module)}"


def _stands_in_for(module: str) -> str:
    return f"sharpen stands in for {'Trinity-RFT' if module.partition('.')[0] == NAME else VERL}"


def _real(module: str) -> str:
    title, package = ("Trinity-RFT", DISTRIBUTION) if module.partition(".")[0] == NAME else (VERL, VERL)
    return f"code that needs it needs {title} itself (pip install {package})"


def _near(name: str, known: Any) -> str:
    near = get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
