"""The example that is one file runs where it is copied to, with nothing beside it."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

import pytest

from sharpen.cli.starter.tiny_model import make_tiny_model

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "single_file" / "train.py"


def test_the_file_alone_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(SCRIPT, tmp_path)
    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "model", steps=0)
    result = runpy.run_path(str(tmp_path / "train.py"))["main"]("model", steps=1)
    assert result.verdict.kind in ("better", "not_shown", "worse")
    assert (Path(result.model_dir) / "model.safetensors").is_file()
    assert "judge/gave_a_number" in capsys.readouterr().out
    assert "sys.path" not in SCRIPT.read_text()
