"""The shape of the package: which stage may import which, no cycles, a light import, sizes of files."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import sharpen

ROOT = Path(sharpen.__file__).parent
STAGES = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
EVERYONE_MAY = {"types", "errors", "config"}
EDGES = {
    ("recipe", "algorithm"),  # what a run is, decided once
    ("recipe", "experience"),
    ("recipe", "sync"),
    ("gateway", "inference"),
    ("experience", "algorithm"),
    ("certificate", "experience"),  # run.db, and the tables that it reads and adds to
    ("trainer", "algorithm"),
    ("compat", "algorithm"),  # whether an algorithm uses the rewards that Trinity workflows give their calls
    ("compat", "gateway"),  # a conversation's messages are compared as the gateway's history compares them
    ("compat", "rollout"),  # which rollout a Trinity workflow belongs to
    ("plan", "recipe"),  # what is planned
    ("plan", "algorithm"),  # whether a run learns from rows
    ("plan", "trainer"),  # its own code is run without contents, to see what memory it takes
    ("plan", "inference"),  # how slots of KV grow; which models are not served
    ("config", "tasks"),  # DatasetConfig.preview() reads rows
}
COORDINATION = {
    "tuning",
    "forecast",
    "decide",
    "evaluate",
    "certify",
    "result",
    "__init__",
}
SEE_MANY = COORDINATION | {"run", "execution", "cli", "diagnose", "supervised"}


@functools.cache
def edges() -> set[tuple[str, str, str]]:
    found = set()
    for path in ROOT.rglob("*.py"):
        importer = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative import"
                names = [node.module or ""]
                if node.module == "sharpen":
                    names = [f"sharpen.{alias.name}" for alias in node.names]
            for name in names:
                parts = name.split(".")
                if parts[0] == "sharpen" and len(parts) > 1 and parts[1] != importer:
                    found.add((importer, parts[1], str(path.relative_to(ROOT))))
    return found


def test_stages_import_only_along_the_listed_edges():
    wrong = [
        edge
        for edge in edges()
        if edge[0] not in SEE_MANY and edge[1] not in EVERYONE_MAY and (edge[0], edge[1]) not in EDGES
    ]
    assert not wrong, wrong


def test_no_stage_knows_the_coordinator():
    assert not [edge for edge in edges() if edge[0] in STAGES - SEE_MANY and edge[1] in {"run", "tuning", "execution"}]


def test_import_is_light():
    """`import sharpen` loads neither torch nor transformers nor pydantic, and is fast (median of five, in its own
    process; of processor time, which says the same on a loaded machine).
    """
    code = (
        "import time; t = time.process_time(); import sharpen; s = time.process_time() - t\n"
        "import sys; heavy = {'torch', 'transformers', 'datasets', 'openai', 'pydantic', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\nprint(s)"
    )
    seconds = sorted(
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(5)
    )
    assert seconds[2] <= 0.2, seconds


def test_public_names_stay_what_they_are_whatever_is_imported_before():
    """A submodule of the same name would replace the function as soon as it is imported."""
    code = "import sharpen.tuning, sharpen.cli.main\nfrom sharpen import tune\nassert callable(tune), tune"
    subprocess.run([sys.executable, "-c", code], check=True)
    names = set(sharpen.__all__) & {path.stem for path in ROOT.iterdir()}
    assert not names
