"""The shape of the package: which room imports which, no circles, a light import, short functions.

A room is a folder, or a file at the top of the package. Imports inside functions and under `TYPE_CHECKING` count.
"""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import sharpen

ROOT = Path(sharpen.__file__).parent
LONGEST = 60
"""Lines of a function, its signature and docstring included."""
GROUND = {"types", "errors", "files", "interrupts", "host_memory", "config"}
"""Rooms that every other may import."""
IMPORTS: Mapping[str, set[str]] = {
    "tasks": set(),
    "config": {"tasks"},
    "algorithm": set(),
    "token_masks": set(),
    "blockwise": set(),
    "families": set(),
    "transcript": set(),
    "screen": set(),
    "inference": {"token_masks", "blockwise", "families"},
    "monitor": {"families", "screen"},
    "starter": set(),
    "rollout": {"transcript", "screen"},
    "sync": set(),
    "experience": {"algorithm"},
    "sandbox": set(),
    "gateway": {"inference", "sandbox"},
    "exchange": {"rollout", "experience"},
    "operators": set(),
    "trainer": {"algorithm", "token_masks", "blockwise", "families"},
    "compat": {"tasks", "algorithm", "rollout", "operators", "gateway"},
    "recipe": {"algorithm", "sync", "experience"},
    "execution": {
        "algorithm",
        "families",
        "inference",
        "rollout",
        "sandbox",
        "gateway",
        "trainer",
        "compat",
        "recipe",
    },
    "plan": {"algorithm", "inference", "families", "trainer", "recipe"},
    "decide": {"tasks", "algorithm", "monitor", "rollout", "operators", "trainer", "compat", "recipe", "execution"},
    "supervised": {"tasks", "algorithm", "families", "inference", "experience", "operators", "gateway", "execution"},
    "certificate": {"token_masks", "tasks", "algorithm", "sync", "experience", "trainer", "execution", "supervised"},
    "doctor": {"starter", "trainer", "recipe", "execution", "certificate"},
    "diagnose": {"algorithm", "monitor", "rollout", "experience", "recipe", "certificate"},
    "run": {
        "tasks",
        "algorithm",
        "monitor",
        "rollout",
        "sync",
        "experience",
        "exchange",
        "operators",
        "trainer",
        "compat",
        "recipe",
        "execution",
        "plan",
        "decide",
        "supervised",
        "certificate",
        "diagnose",
    },
    "several": {"monitor"},
    "view": {"monitor", "rollout", "experience", "certificate", "diagnose", "transcript"},
    "report": {"families", "monitor", "experience", "rollout", "trainer", "transcript", "view"},
    "rescore": {"rollout", "transcript"},
    "trials": {"monitor", "rollout"},
    "model_selection": {"tasks", "monitor", "rollout", "recipe", "execution", "decide", "trials"},
    "prompt_tune": {"tasks", "monitor", "rollout", "compat", "recipe", "execution", "decide", "trials"},
    "serve": {
        "tasks",
        "algorithm",
        "inference",
        "rollout",
        "experience",
        "exchange",
        "gateway",
        "trainer",
        "recipe",
        "execution",
        "decide",
        "run",
    },
    "record": {"transcript", "experience", "rollout", "gateway", "execution", "run", "serve"},
    "tuning": {"algorithm", "monitor", "rollout", "compat", "decide", "run", "report"},
    "cli": {
        "families",
        "starter",
        "several",
        "rescore",
        "doctor",
        "report",
        "algorithm",
        "monitor",
        "rollout",
        "experience",
        "trainer",
        "compat",
        "recipe",
        "exchange",
        "execution",
        "plan",
        "certificate",
        "diagnose",
        "decide",
        "run",
        "serve",
        "record",
        "tuning",
        "gateway",
        "transcript",
        "screen",
        "view",
    },
    "__main__": {"cli"},
}
"""What each room imports beside the ground, from the ground up: a room imports only what stands above it here."""


@functools.cache
def imports() -> dict[str, set[str]]:
    """The modules of the package that each file imports, by paths in the package."""
    return {path: set(_imported(path)) for path in map(str, _files()) if path != "__init__.py"}


def _files() -> Iterator[Path]:
    return (path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def _imported(path: str) -> Iterator[str]:
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            found = _file(name.split("."))
            if found is not None and found != path:
                yield found


def _file(parts: list[str]) -> str | None:
    """The file of the longest beginning of a dotted name that is a module of ours; none for the package's face."""
    if parts[0] != "sharpen":
        return None
    for length in range(len(parts), 1, -1):
        place = "/".join(parts[1:length])
        for file in (f"{place}.py", f"{place}/__init__.py"):
            if (ROOT / file).is_file():
                return file
    return None


def room(path: str) -> str:
    return Path(path).parts[0].removesuffix(".py")


def test_rooms_import_what_the_table_says_and_nothing_else():
    """Red for an import that is not in the table, and for a line of the table that nothing needs any more."""
    found: dict[str, set[str]] = {}
    for path, names in imports().items():
        found.setdefault(room(path), set()).update(map(room, names))
    for name, others in found.items():
        assert others - GROUND - {name} == IMPORTS.get(name, set()) - GROUND, name


def test_no_room_imports_one_above_it():
    order = [*IMPORTS]
    wrong = [(a, b) for a, others in IMPORTS.items() for b in others if order.index(b) >= order.index(a)]
    assert not wrong


def test_no_files_import_each_other_in_a_circle():
    """Files are taken away whose imports are gone, until none is left."""
    left = {path: set(names) for path, names in imports().items()}
    while free := [path for path, names in left.items() if not names & left.keys()]:
        for path in free:
            del left[path]
    assert not left, left


def test_functions_are_short():
    long = [
        (path, node.name, node.end_lineno - node.lineno + 1)
        for path in map(str, _files())
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.end_lineno is not None and node.end_lineno - node.lineno >= LONGEST
    ]
    assert not long


def test_import_is_light():
    """`import sharpen` loads neither torch nor transformers nor pydantic, and few modules at all (30; pydantic alone
    would be over a hundred), so that it takes far less than 0.2 s: counted, since seconds are the machine's."""
    code = (
        "import sys; before = set(sys.modules); import sharpen\n"
        "heavy = {'torch', 'transformers', 'datasets', 'openai', 'pydantic', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\nprint(*set(sys.modules) - before)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert len(loaded) <= 60, sorted(loaded)


def test_public_names_stay_what_they_are_whatever_is_imported_before():
    """A submodule of the same name would replace the function as soon as it is imported."""
    code = "import sharpen.tuning, sharpen.cli.main\nfrom sharpen import tune\nassert callable(tune), tune"
    subprocess.run([sys.executable, "-c", code], check=True)
    names = set(sharpen.__all__) & {path.stem for path in ROOT.iterdir()}
    assert not names
