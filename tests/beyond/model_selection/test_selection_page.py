"""The program of docs/use/model-selection.md runs as it is printed, on toy models."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[3] / "docs" / "use" / "model-selection.md").read_text(encoding="utf-8")


def test_the_program(toy_model_dir: Path, toy_dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    replaced = {
        '"my_dataset"': repr(str(toy_dataset)),
        '"Qwen/Qwen3-0.6B"': repr(str(toy_model_dir)),
        '"checkpoints/Sharpen/mine/latest"': repr(str(toy_model_dir)),
        "max_model_len=4096, max_tokens=512": "max_model_len=64, max_tokens=4",
    }
    for old, new in replaced.items():
        assert old in code
        code = code.replace(old, new)
    exec(compile(code, "model-selection.md", "exec"), {"__name__": "__main__"})
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith(f"{toy_model_dir} {{'reward': 0.0, 'num_tasks': 10.0")
    assert any("not shown to be better" in line for line in said)
