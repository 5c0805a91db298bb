"""What checks shares no code with what it checks: by imports, in the source and when it runs."""

import ast
import subprocess
import sys
from pathlib import Path

import sharpen

ROOT = Path(sharpen.__file__).parent
CHECKED = (
    "sharpen.learning.experience.draw",
    "sharpen.learning.experience.merge",
    "sharpen.learning.experience.draw",
    "sharpen.learning.experience.replay",
    "sharpen.learning.experience.alignment",
    "sharpen.learning.experience.reread",
    "sharpen.learning.experience.token_bytes",
    "sharpen.learning.algorithm.advantages",
    "sharpen.learning.algorithm.aggregation",
    "sharpen.learning.algorithm.gae",
    "sharpen.learning.algorithm.presets",
    "sharpen.learning.algorithm.resolve",
    "sharpen.learning.algorithm.returns",
    "sharpen.learning.algorithm.shaping",
    "sharpen.learning.trainer.credit",
    "sharpen.learning.trainer.reread",
)
"""What makes batches, advantages and weights."""
FOLDER = ROOT / "evidence" / "certificate"
FILES = [path for path in FOLDER.rglob("*.py") if path.stem != "rows"]
"""`rows` and `plain.rows` make the sequences of a dataset's rows again by the code that made them: they check the
dataset, and the run's order, losses and updates."""


def imported(path: Path) -> set[str]:
    """Every module that a file names in an import, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_the_certificate_imports_nothing_of_what_it_checks() -> None:
    """Red when `expectation` imports `token_weights`, or `certify` draws batches again."""
    for path in FILES:
        assert not imported(path) & set(CHECKED), path


def test_the_plain_loop_imports_nothing_of_the_trainer() -> None:
    """Neither losses, nor packing, nor what trains a family, nor the optimizer."""
    apart = ("rows.py", "retrain.py", "beside.py")
    for path in (*(FOLDER / "plain").glob("*.py"), FOLDER / "likeness.py", FOLDER / "probe_batch.py"):
        if path.name not in apart:
            parts = (
                "sharpen.learning.trainer",
                "sharpen.learning.algorithm",
                "sharpen.models",
                "sharpen.engine.supports",
                "sharpen.learning.experience.draw",
            )
            found = [name for name in imported(path) if name.startswith(parts)]
            assert not [name for name in found if not name.startswith("sharpen.models.files")], (
                path
            )  # where a folder is


def test_the_verdict_is_computed_again_by_other_code() -> None:
    """Red when it asks the evaluator, the verdict or its statistics."""
    for name in ("verdict", "evaluations", "intervals"):
        parts = ("sharpen.run", "sharpen.show.monitor", "sharpen.evidence.rescore", "sharpen.agent.rollout")
        assert not [
            one for one in imported(ROOT / "evidence" / "certificate" / f"{name}.py") if one.startswith(parts)
        ], name


def test_nor_does_what_it_imports() -> None:
    """In a process of its own, with every file of the folder loaded."""
    names = [f"sharpen.{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}" for path in FILES]
    names = [name.removesuffix(".__init__") for name in names]
    code = f"import sys, {', '.join(names)}\nfound = set({CHECKED!r}) & set(sys.modules)\nassert not found, found"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_plain_loop_can_be_read_at_once() -> None:
    """Whoever doubts the trainer reads what it is compared with."""
    assert len((FOLDER / "plain" / "update.py").read_text().splitlines()) <= 300
