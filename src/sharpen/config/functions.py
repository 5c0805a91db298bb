"""Imports the user's workflow and judge, which YAML names.

In: `package.module:function` or `path/file.py:function`. Out: the function, or a `ConfigError` that says what is wrong;
the variables of `rollout.env_vars` in its environment.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from sharpen.errors import ConfigError

FILE_MODULE = "sharpen_user_"
"""Prefix of the names of modules loaded from a file."""
PREPARED = "SHARPEN_PREPARATIONS"
"""The environment variable by which processes know what the one that started them prepared before it imported the
user's code: a JSON list of calls, each a function as `package.module:function` and the texts that it is given."""
_prepared: list[list[str]] = []
"""The calls that were made in this process."""
_state = SimpleNamespace(reading_runs=False)


def import_function(name: str) -> Callable[..., Any]:
    """Import the function `name`. Its code can import from the current folder, or from the file's own folder.

    Raises `ConfigError` for a wrong form, a missing file or module, code that fails when imported, and a missing
    function (with the nearest name).
    """
    value = import_object(name)
    if not callable(value):
        raise ConfigError(f"{name} is a {type(value).__name__}, not a function")
    return value  # type: ignore[no-any-return]


def import_object(name: str) -> Any:
    """Import anything that has a name, also an attribute of it (`module:object.attribute`). Raises `ConfigError` as
    `import_function` does."""
    place, attributes = place_of(name)
    value: Any = load_file(Path(place), name) if place.endswith(".py") else _load_module(place, name)
    for attribute in attributes.split("."):
        found = getattr(value, attribute, None)
        if found is None:
            known = [key for key, item in vars(value).items() if callable(item)] if hasattr(value, "__dict__") else []
            near = get_close_matches(attribute, known, n=1)
            raise ConfigError(f"{place} has no {attributes!r}{f'; did you mean {near[0]!r}?' if near else ''}")
        value = found
    return value


def prepare_others(function: str, *arguments: str) -> None:
    """Have a function, which this process has called, called in each that it starts from now on, before they import
    the user's code or read a model. They may be given it several times."""
    if (call := [function, *arguments]) not in (known := _calls()):
        os.environ[PREPARED] = json.dumps([*known, call])
    _prepared.append(call)


def prepare() -> None:
    """Call what the process that started this one had called before it imported the user's code."""
    for call in _calls():
        if call not in _prepared:
            _prepared.append(call)
            import_function(call[0])(*call[1:])


def _calls() -> list[list[str]]:
    calls: list[list[str]] = json.loads(os.environ.get(PREPARED, "[]"))
    return calls


def place_of(name: str) -> tuple[str, str]:
    """Return the module or file, and the function in it. Raises `ConfigError` for a wrong form."""
    place, colon, function = name.rpartition(":")
    if not colon or not place or not all(part.isidentifier() for part in function.split(".")):
        raise ConfigError(f"a function is named 'package.module:function' or 'path/file.py:function', got {name!r}")
    return place, function


def load_file(path: Path, name: str) -> ModuleType:
    """Load a Python file, once. `name` is what asked for it. Raises `ConfigError` if it is missing or fails."""
    if not path.is_file():
        raise ConfigError(f"{name}: there is no file {path}")
    path = path.resolve()
    module_name = _module_of_file(path)
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    _make_importable(path.parent)
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's code may raise anything, and may end with sys.exit
        del sys.modules[module_name]
        raise ConfigError(f"{path} fails when it is imported: {type(error).__name__}: {error}") from error
    return module


def load_place(place: str) -> ModuleType:
    """Load a file or a module. Raises `ConfigError` as `import_function` does."""
    return load_file(Path(place), place) if place.endswith(".py") else _load_module(place, place)


@contextmanager
def variables(wanted: Mapping[str, str]) -> Iterator[None]:
    """Set the variables of `rollout.env_vars`, and restore the former ones at the end of the block."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def reading_runs() -> Iterator[None]:
    """Mark what is done within as reading run directories, which may be a stranger's."""
    before, _state.reading_runs = _state.reading_runs, True
    try:
        yield
    finally:
        _state.reading_runs = before


def may_load(name: str) -> bool:
    """Return whether the code behind `name`, which settings have, may run: not while runs are read, unless this process
    has loaded it already."""
    if not _state.reading_runs or ":" not in name:
        return True
    place, _ = place_of(name)
    return (_module_of_file(Path(place).resolve()) if place.endswith(".py") else place) in sys.modules


def _module_of_file(path: Path) -> str:
    return f"{FILE_MODULE}{path.stem}_{zlib.crc32(str(path).encode()):08x}"


def _load_module(place: str, name: str) -> ModuleType:
    _make_importable(Path.cwd())
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(f"{error.name}.")):
            raise ConfigError(f"{name}: there is no module {error.name!r} (looked in {Path.cwd()} too)") from error
        raise ConfigError(f"module {place} fails when it is imported: {error}") from error
    except (Exception, SystemExit) as error:  # the user's code may raise anything, and may end with sys.exit
        raise ConfigError(f"module {place} fails when it is imported: {type(error).__name__}: {error}") from error


def _make_importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
