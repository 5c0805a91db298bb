"""The shape of the package: rooms on floors, no circles, a light import, short functions.

A room is a folder at the top of the package. Imports inside functions and under `TYPE_CHECKING` count.
"""

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import sharpen

ROOT = Path(sharpen.__file__).parent
DOCS = Path(__file__).parents[1] / "docs"
HOUSE = runpy.run_path(str(DOCS / "make_architecture.py"))
LONGEST = 60
"""Lines of a function, its signature and docstring included."""
LONGEST_FILE = 600
ROOMS = (
    {"config"},
    {"agent", "models"},
    {"engine", "gateway"},
    {"learning"},
    {"compat", "evidence", "placement"},
    {"show"},
    {"run"},
    {"beyond", "serve"},
    {"cli"},
)
"""The rooms by floor, from the ground up: a room imports only what is on a floor below its own."""
WHOLE = {
    "learning/recipe.py",  # decides what a run is, by rules across sections
    "learning/supervised/data.py",  # reads all datasets of a run, also for the certificate
    "placement/cluster/placement.py",  # counts the actors of all roles
    "placement/cluster/worker.py",  # hides the secrets of all settings, in a process of its own
    "placement/exchange/announcement.py",  # compares the settings of two processes
}
"""Files below `run` that take the whole configuration, with why. All others take the sections that they read, or the
`Job` that `run` made of it. (`compat` makes the configuration, `evidence` reads that of a recorded run.)"""


def imports() -> dict[str, frozenset[str]]:
    return HOUSE["imports"]()


def test_rooms_are_on_their_floors_and_import_only_what_is_below():
    assert [{name for name, floor in HOUSE["floors"]().items() if floor == number} for number in range(1, 10)] == [
        *ROOMS
    ]
    height = {name: floor for floor, names in enumerate(ROOMS) for name in names}
    wrong = [(a, b) for a, b in HOUSE["arrows"]() if height[a] <= height[b]]
    assert not wrong


def test_the_files_below_all_rooms_import_nothing_but_each_other():
    below = HOUSE["BESIDE"]
    wrong = {
        (path, other)
        for path, others in imports().items()
        if HOUSE["room"](path) in below
        for other in others
        if HOUSE["room"](other) not in below
    }
    assert not wrong
    at_the_top = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert at_the_top == below | HOUSE["ABOVE"] | set(HOUSE["rooms"]())


def test_the_page_is_drawn_from_the_code():
    page = (DOCS / "understand" / "architecture.md").read_text(encoding="utf-8")
    assert HOUSE["is_current"](page), "run: python docs/make_architecture.py"
    lines = HOUSE["sizes"]()["agent"].lines

    def saying(count: float) -> str:
        return re.sub(r"(\| `agent/` \|.*\| )[\d,]+( \|\n)", rf"\g<1>{round(count):,}\2", page)

    assert HOUSE["is_current"](saying(lines * 1.04))
    assert not HOUSE["is_current"](saying(lines * 1.06))
    assert not HOUSE["is_current"](page.replace("| 9 | `cli/`", "| 8 | `cli/`"))
    assert not HOUSE["is_current"](page.replace("all of them", "some").replace("It must not know", "It may know"))


def test_each_room_says_what_it_must_not_know():
    for name in HOUSE["rooms"]():
        first, rest = HOUSE["said"](name)
        assert first.endswith("."), name
        assert rest.startswith("In: "), name
        assert "Out: " in rest, name
        assert name == "cli" or "It must not " in rest, name


def test_the_map_of_each_folder_names_what_lies_in_it():
    """Both ways: a file without a line, a line without a file; nothing is named twice."""
    for folder in HOUSE["folders"]():
        lines, held = HOUSE["map_of"](folder), HOUSE["held"](folder)
        names = [name for name, _ in lines]
        place = folder.relative_to(ROOT) / "__init__.py"
        assert not held - set(names), f"a line in the docstring of {place} for each of {sorted(held - set(names))}"
        assert not set(names) - held, f"{place} names what is not there: {sorted(set(names) - held)}"
        assert len(names) == len(held), f"{place} names something twice: {names}"
        assert not [line for _, line in lines if line.endswith(".")], f"{place}: a full stop in the map"


def test_no_files_import_each_other_in_a_circle():
    """Files are taken away whose imports are gone, until none is left."""
    left = {path: set(names) for path, names in imports().items()}
    while free := [path for path, names in left.items() if not names & left.keys()]:
        for path in free:
            del left[path]
    assert not left, left


def test_rooms_below_run_take_the_settings_that_they_read_and_not_all():
    rooms = {"agent", "models", "engine", "gateway", "learning", "placement", "show"}
    naming = {
        path
        for path in imports()
        if HOUSE["room"](path) in rooms
        and any(name.endswith(".RunConfig") for part in HOUSE["parts"]()[path] for name in part.names)
    }
    assert naming == WHOLE


def test_files_are_no_longer_than_a_reader_takes_in():
    lines = {path.relative_to(ROOT): path.read_text(encoding="utf-8").count("\n") for path in ROOT.rglob("*.py")}
    assert {str(path): count for path, count in lines.items() if count > LONGEST_FILE} == {}


def test_functions_are_short():
    long = [
        (path, *part.names, part.lines)
        for path, parts in HOUSE["parts"]().items()
        for part in parts
        if part.kind in (ast.FunctionDef, ast.AsyncFunctionDef) and part.lines > LONGEST
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
