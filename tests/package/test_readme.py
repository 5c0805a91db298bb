"""The script on README's front page runs as it is printed, on a toy model and dataset."""

import ast
import re
import runpy
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def test_the_chinese_front_page_has_the_same_script() -> None:
    """Its words are its own; what Python sees is the same."""
    chinese = README.parent / "docs" / "start" / "zh.md"
    trees = []
    for page in (README, chinese):
        (code,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        tree = ast.parse(code)
        trees.append(
            [ast.dump(node) for node in ast.walk(tree) if isinstance(node, ast.Call | ast.Import | ast.ImportFrom)]
        )
    assert trees[0] == trees[1]


def test_the_script_of_the_front_page_runs(
    tmp_path: Path,
    toy_model_dir: Path,
    toy_dataset: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 12
    replaced = {
        '"my_dataset"': repr(str(toy_dataset)),
        '"Qwen/Qwen3-0.6B"': repr(str(toy_model_dir)),
        "max_model_len=4096, max_tokens=512": "max_model_len=64, max_tokens=4",
        "tune(agent, ": "tune(agent, settings={'algorithm.batch_size': 18}, ",
    }
    for old, new in replaced.items():
        assert old in code
        code = code.replace(old, new)
    (tmp_path / "script.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    runpy.run_path("script.py", run_name="__main__")
    last = capsys.readouterr().out.splitlines()[-1]
    (run_dir,) = (tmp_path / "checkpoints" / "Sharpen").iterdir()
    assert run_dir.name.startswith("Experiment-")
    assert (run_dir / "global_step_2" / "model.safetensors").exists()
    assert last.startswith("none: 4 held-out tasks")  # too few for a verdict
    assert last.endswith(str(toy_model_dir))
