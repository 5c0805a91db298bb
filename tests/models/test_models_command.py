"""`sharpen models`: the table of families, and what one checkpoint can do here."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Lfm2Config, Qwen3Config, StableLmConfig, T5Config

from sharpen.cli.main import BAD_INPUT, main
from sharpen.models.pieces import HAS
from sharpen.models.support import row_of
from sharpen.models.table import FAMILIES

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_the_tables() -> None:
    page = runpy.run_path(str(DOCS / "make_models.py"))["page"]()
    assert (DOCS / "reference" / "models.md").read_text() == page, "run: python docs/make_models.py"


def test_every_family_is_listed(capsys) -> None:
    assert main(["models", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["family"] for row in rows] == [family.name for family in FAMILIES]
    assert main(["models"]) == 0
    printed = capsys.readouterr().out
    assert all(kind in printed for family in FAMILIES for kind in family.types)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_row_says_yes_only_if_nothing_is_missing(family) -> None:
    cells = row_of(family)
    for cell, part in ((cells[2], "engine"), (cells[3], "trainer"), (cells[6], "vllm")):
        missing = family.needs - HAS[part]
        has_class = part != "vllm" or (family.in_vllm and not family.not_on_cpu)
        assert (cell == "yes") == (not missing and has_class)
        assert cell == "no" or all(piece in cell for piece in missing)
    assert (cells[5] == "yes") == family.images


def test_the_list_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from sharpen.cli.main import main; main(['models']); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_one_checkpoint_by_its_configuration_alone(tmp_path, capsys) -> None:
    Qwen3Config().save_pretrained(tmp_path)
    assert main(["models", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "Qwen3 (model type 'qwen3')" in printed
    assert "trainer: yes" in printed


def test_one_that_cannot_be_trained_is_answered_no_with_the_reason(tmp_path, capsys) -> None:
    T5Config().save_pretrained(tmp_path)
    assert main(["models", str(tmp_path), "--json"]) == 1
    assert "encoder-decoder" in json.loads(capsys.readouterr().out)["missing"]["trainer"]


def test_a_family_without_a_row_says_so(tmp_path, capsys) -> None:
    StableLmConfig().save_pretrained(tmp_path)
    assert main(["models", str(tmp_path)]) == 0
    assert "not in the table" in capsys.readouterr().out


def test_kernels_that_are_not_installed_are_named(tmp_path, capsys) -> None:
    Lfm2Config(layer_types=["conv", "full_attention"], num_hidden_layers=2).save_pretrained(tmp_path)
    main(["models", str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)["kernels_not_installed"] == ["causal_conv1d"]


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "config.json"), ('{"model_type": "no_such_family"}', "no_such_family"), ("{", "cannot be read")],
)
def test_what_cannot_be_read_is_bad_input(tmp_path, capsys, content, says) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert main(["models", str(tmp_path)]) == BAD_INPUT
    assert says in capsys.readouterr().err
