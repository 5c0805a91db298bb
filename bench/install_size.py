"""What an installation without extras takes on the disk, and which of it the first run of a newcomer imports.

In: the environment that runs this, and `pyproject.toml`. Out: a table: for each dependency the megabytes (10^6 bytes,
without bytecode) of its own and those that only it brings with it, and whether `sharpen init` and a step of
`sharpen run` import it, here on the quickstart's model; the sum.

    .venv/bin/python bench/install_size.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions, packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from report import table

ROOT = Path(__file__).parent.parent
RUN = """
import sys
from sharpen.cli.main import main
commands = [["init", "first", "--model", sys.argv[1]], ["run", "--config", "first/run.yaml", *sys.argv[2:]]]
assert [main(command) for command in commands] == [0, 0]
print("imported", *{name.partition(".")[0] for name in sys.modules})
"""
SMALL = ["train_dataset.total_steps=1", "algorithm.batch_size=2", "algorithm.group_size=2", "model.max_tokens=8"]
SMALL += ["model.max_model_len=256"]


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def brought(roots: Iterable[str], here: dict[str, Distribution]) -> set[str]:
    """Return these packages and what they need, as far as it is installed: without extras, for this machine."""
    found: set[str] = set()
    todo = list(roots)
    while todo:
        name = todo.pop()
        if name in here and name not in found:
            found.add(name)
            needed = [Requirement(line) for line in here[name].requires or []]
            todo += [plain(one.name) for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def megabytes(package: Distribution) -> float:
    places = [Path(str(file.locate())) for file in package.files or [] if file.suffix != ".pyc"]
    return sum(place.stat().st_size for place in places if place.exists()) / 1e6


def imported() -> set[str]:
    """Return the packages that the first run of a newcomer imports."""
    settings = [word for one in SMALL for word in ("--set", one)]
    model = ROOT / "examples" / "quickstart" / "model"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", RUN, str(model), *settings]
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True
        )
    if done.returncode != 0:
        sys.exit(done.stdout + done.stderr)
    modules = done.stdout.splitlines()[-1].split()[1:]
    owners = packages_distributions()
    return {plain(owner) for module in modules for owner in owners.get(module, [])}


def main() -> None:
    here = {plain(one.metadata["Name"]): one for one in distributions()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [plain(Requirement(line).name) for line in project["dependencies"]]
    size = {name: megabytes(here[name]) for name in brought(names, here)}
    seen = imported()
    rows = []
    for name in names:
        others = brought([one for one in names if one != name], here)
        alone = sum(size[one] for one in brought([name], here) - others)
        rows.append((name, round(size[name]), round(alone), "imported" if name in seen else "later"))
    rows.sort(key=lambda row: (-row[2], -row[1]))
    print(table(["dependency", "MB", "MB only by it", "first run"], rows))
    print(f"{len(size)} packages, {sum(size.values()):,.0f} MB")


if __name__ == "__main__":
    main()
