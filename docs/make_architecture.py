"""Draws the rooms of the package, and counts: docs/understand/rooms.svg, the tables of docs/understand/architecture.md.

In: the imports of `src/sharpen`, also those inside functions and under `TYPE_CHECKING`, and the rooms' docstrings.
Out: the picture, and the page's generated part. A test compares the page with the code (`tests/test_structure.py`): its
words in full, its counts to a twentieth, so that a change of some lines needs no new drawing.

    python docs/make_architecture.py [--check]
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parent / "src" / "sharpen"
PAGE, PICTURE = HERE / "understand" / "architecture.md", HERE / "understand" / "rooms.svg"
BEGIN, END = "<!-- written by docs/make_architecture.py -->\n", "<!-- end -->\n"
BESIDE = {"types", "errors", "contracts", "files", "interrupts", "machine", "screen"}
"""Files below all rooms: they import nothing but each other."""
ABOVE = {"__init__", "__main__", "tuning", "testing"}
"""Above the rooms: the package's face, `python -m sharpen`, `tune()`, and the tests that every part passes."""

KINDS = {
    "a folder's map, with its public names": (("__init__.py",), "a reader enters there"),
    "one of many that a user has one of": (
        ("agent/environments/", "agent/agentscope/", "gateway/formats/", "gateway/protocols/", "serve/interchange/"),
        "an environment, a format, a protocol: whoever has it looks for it by name",
    ),
    "another project's names": (("compat/",), "a file for each part of theirs, named as there"),
    "a command": (("cli/",), "loads nothing of the others; and what `init` copies as it is"),
    "a check or a recomputation": (
        ("evidence/", "testing/"),
        "shares no code with what it checks, nor with another that would hide its fault",
    ),
}
"""Kinds of files, by their names or folders, and why each stays a file; the first that fits counts."""
IMPORTS = (ast.Import, ast.ImportFrom)
REST = ("a part of a stage", "a class or a few functions that one sentence says")


class Part(NamedTuple):
    """An import, a class or a function of a file: what an import names, with dots; how many lines it takes."""

    kind: type[ast.AST]
    names: tuple[str, ...]
    lines: int


@functools.cache
def parts() -> Mapping[str, tuple[Part, ...]]:
    """The imports, classes and functions of each file, by its path in the package. Read once: parsing takes seconds."""
    return {str(path.relative_to(ROOT)): tuple(_parts(path)) for path in sorted(ROOT.rglob("*.py"))}


def _parts(path: Path) -> Iterator[Part]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names = [node.name]
        else:
            continue
        yield Part(type(node), tuple(names), (node.end_lineno or 0) - node.lineno + 1)


@functools.cache
def imports() -> Mapping[str, frozenset[str]]:
    """The modules of the package that each file imports, as paths in the package; the face of the package has none."""
    return {path: frozenset(_imported(path)) for path in parts() if path != "__init__.py"}


def _imported(path: str) -> Iterator[str]:
    for part in parts()[path]:
        for name in part.names if part.kind in IMPORTS else ():
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
    """The room of a file: the folder at the top of the package, or the file itself where it lies there."""
    return Path(path).parts[0].removesuffix(".py")


@functools.cache
def arrows() -> Mapping[tuple[str, str], int]:
    """How many imports lead from one room to another, without the files below all and above all."""
    found = Counter((room(path), room(other)) for path, others in imports().items() for other in others)
    apart = BESIDE | ABOVE
    return {(a, b): count for (a, b), count in found.items() if a != b and a not in apart and b not in apart}


def rooms() -> list[str]:
    """The rooms by name."""
    return sorted(path.name for path in ROOT.iterdir() if (path / "__init__.py").is_file() and path.name not in ABOVE)


def floors() -> Mapping[str, int]:
    """The floor of each room, from 1: above every room that it imports. Raises `ValueError` if they go in a circle."""
    needs = {name: {b for a, b in arrows() if a == name} for name in rooms()}
    found: dict[str, int] = {}
    while len(found) < len(needs):
        ready = [name for name in needs if name not in found and needs[name] <= found.keys()]
        if not ready:
            raise ValueError(f"these rooms import each other in a circle: {sorted(needs.keys() - found.keys())}")
        found |= {name: 1 + max((found[other] for other in needs[name]), default=0) for name in ready}
    return found


def direct() -> list[tuple[str, str]]:
    """The arrows without those that follow from others: `a` over `b` over `c` says that `a` may know `c`."""
    needs = {name: {b for a, b in arrows() if a == name} for name in rooms()}
    below: dict[str, set[str]] = {}
    for name in sorted(needs, key=lambda one: floors()[one]):
        below[name] = needs[name].union(*(below[other] for other in needs[name]))
    return [(a, b) for a, b in sorted(arrows()) if not any(b in below[other] for other in needs[a])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Files and lines of a room."""

    files: int
    lines: int


def sizes() -> Mapping[str, Size]:
    """The size of each room."""
    found = {}
    for name in rooms():
        texts = [path.read_text(encoding="utf-8") for path in (ROOT / name).rglob("*.py")]
        found[name] = Size(files=len(texts), lines=sum(text.count("\n") for text in texts))
    return found


def said(name: str) -> tuple[str, str]:
    """What a room says of itself: its first sentence, and what goes in and out and what it must not know."""
    text = ast.get_docstring(ast.parse((ROOT / name / "__init__.py").read_text(encoding="utf-8"))) or ""
    first, _, rest = text.partition("\n\n")
    return " ".join(first.split()), " ".join(rest.partition("\n\n")[0].split())


def folders() -> list[Path]:
    """The folders that have a map: the rooms and all below them, but for the migrations, which alembic reads."""
    inits = (path for path in sorted(ROOT.rglob("__init__.py")) if "migrations" not in path.parts)
    return [path.parent for path in inits if path.parent != ROOT]


def held(folder: Path) -> set[str]:
    """What lies in a folder, as its map names it: modules by name, subfolders with a slash, other files in full."""
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    parts = (path.relative_to(folder).parts for path in files)
    return {f"{first}/" if rest else first.removesuffix(".py") for first, *rest in parts} - {"__init__"}


def map_of(folder: Path) -> list[tuple[str, str]]:
    """The map of a folder, which ends the docstring of its `__init__`: names in reading order, each with its line."""
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    return re.findall(r"^- `(.+?)`: (.+)$", text.rpartition("\n\n")[2], re.MULTILINE)


def table() -> str:
    """The rooms from the ground up, with what each says of itself."""
    height, size = floors(), sizes()
    lines = ["| floor | room | | files | lines |", "|---|---|---|---|---|"]
    for name in sorted(height, key=lambda one: (height[one], one)):
        first, rest = said(name)
        lines.append(f"| {height[name]} | `{name}/` | {first} {rest} | {size[name].files} | {size[name].lines:,} |")
    return "\n".join([*lines, ""])


def counts() -> str:
    """The numbers that the house is kept by."""
    paths = [ROOT / path for path in [*imports(), "__init__.py"]]
    lengths = {path: path.read_text(encoding="utf-8").count("\n") for path in paths}
    found = [part for listed in parts().values() for part in listed]
    rows = {
        "names at the top of the package": len([p for p in ROOT.iterdir() if not p.name.startswith("__pycache__")]),
        "rooms": len(rooms()),
        "floors": max(floors().values()),
        "imports from a room to one above it, or in a circle": 0,
        "files": len(paths),
        "files under 60 lines": sum(count < 60 for count in lengths.values()),
        "lines of the longest file": max(lengths.values()),
        "lines": sum(lengths.values()),
        "of these, of imports": sum(part.lines for part in found if part.kind in IMPORTS),
        "classes": sum(part.kind is ast.ClassDef for part in found),
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value:,} |" for name, value in rows.items()), ""])


def kinds() -> str:
    """What the files are, how many of each kind, how long one of them is in the middle, and why it stays a file."""
    lengths: dict[str, list[int]] = {name: [] for name in [*KINDS, REST[0]]}
    for path in ROOT.rglob("*.py"):
        place = str(path.relative_to(ROOT))
        fits = (name for name, (parts, _) in KINDS.items() if place.startswith(parts) or path.name in parts)
        lengths[next(fits, REST[0])].append(path.read_text(encoding="utf-8").count("\n"))
    why = {name: reason for name, (_, reason) in KINDS.items()} | dict([REST])
    rows = [f"| {name} | {len(found)} | {median(found):.0f} | {why[name]} |" for name, found in lengths.items()]
    return "\n".join(
        ["| a file is | files | lines of the middle one | it stays one because |", "|---|---|---|---|", *rows, ""]
    )


def draw(path: Path) -> None:
    """Draw the rooms on their floors, as wide as their lines, with the arrows that do not follow from others."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "rooms", "svg.fonttype": "none", "font.family": "sans-serif"}
    from matplotlib import pyplot as plt
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    height, size = floors(), sizes()
    by_floor: dict[int, list[str]] = {}
    for name in sorted(height):
        by_floor.setdefault(height[name], []).append(name)
    widths = {name: 1.1 + size[name].lines / 9000 for name in height}
    figure, axes = plt.subplots(figsize=(9, 8.4))
    places: dict[str, tuple[float, float]] = {}
    for floor, names in by_floor.items():
        gap = 1.1
        x = -(sum(widths[name] for name in names) + gap * (len(names) - 1)) / 2
        for name in names:
            places[name] = (x + widths[name] / 2, float(floor))
            x += widths[name] + gap
    for a, b in direct():
        (ax, ay), (bx, by) = places[a], places[b]
        bend = 0.0 if ay - by == 1 else (0.18 if ax + bx >= 0 else -0.18)
        axes.add_patch(
            FancyArrowPatch(
                (ax, ay - 0.24), (bx, by + 0.24), arrowstyle="-|>", mutation_scale=9, color="#7a8699",
                lw=1.1, connectionstyle=f"arc3,rad={bend}", zorder=1,
            )
        )  # fmt: skip
    for name, (x, y) in places.items():
        box = FancyBboxPatch(
            (x - widths[name] / 2, y - 0.22), widths[name], 0.44, boxstyle="round,pad=0.02,rounding_size=0.09",
            facecolor="#eef3fb", edgecolor="#33507a", lw=1.1, zorder=2,
        )  # fmt: skip
        axes.add_patch(box)
        axes.text(x, y + 0.05, name, ha="center", va="center", fontsize=10.5, color="#14233b", zorder=3)
        axes.text(x, y - 0.12, f"{size[name].lines:,}", ha="center", va="center", fontsize=7, color="#5a6b85", zorder=3)
    below = ", ".join(sorted(BESIDE))
    axes.text(0, 0.25, f"below all: {below}", ha="center", va="center", fontsize=8, color="#5a6b85")
    axes.set_xlim(-5.2, 5.2)
    axes.set_ylim(0, max(by_floor) + 0.5)
    axes.axis("off")
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None, "Creator": None}, transparent=False)
    plt.close(figure)


def page(old: str) -> str:
    """The page with its generated part made anew. Raises `ValueError` if its marks are gone."""
    before, mark, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"{PAGE} has no part between {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n{_generated()}\n{END}{after}"


@functools.cache
def _generated() -> str:
    return f"{table()}\n{counts()}\n{kinds()}"


def is_current(text: str) -> bool:
    """Whether a page says what the code is: the same words, and each count within a twentieth of its own."""
    said, true = _words_and_counts(text), _words_and_counts(page(text))
    return said[0] == true[0] and all(abs(a - b) <= b / 20 for a, b in zip(said[1], true[1], strict=True))


def _words_and_counts(text: str) -> tuple[str, list[int]]:
    """A text with a mark for each number, and the numbers."""
    numbers = re.compile(r"\d[\d,]*")
    return numbers.sub("#", text), [int(found.replace(",", "")) for found in numbers.findall(text)]


def main() -> int:
    """Write the picture and the page, or say with --check whether the page is up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if the page is not up to date")
    check = parser.parse_args().check
    old = PAGE.read_text(encoding="utf-8")
    if check:
        return int(not is_current(old))
    PAGE.write_text(page(old), encoding="utf-8")
    draw(PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
