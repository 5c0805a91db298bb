"""`sharpen algorithms` and `sharpen certify`."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

from sharpen.cli.algorithm_text import print_algorithms
from sharpen.cli.main import BAD_INPUT, main
from sharpen.learning.algorithm.presets import PRESETS
from sharpen.learning.algorithm.supervised import SUPERVISED
from sharpen.screen import PLAIN


def test_names_come_one_a_line(capsys):
    assert main(["algorithms", "--names"]) == 0
    assert capsys.readouterr().out.split("\n") == [*PRESETS, *SUPERVISED, ""]


def test_the_list_says_formula_source_and_defaults_and_fits_the_terminal():
    out = io.StringIO()
    print_algorithms(names_only=False, out=out)
    text = out.getvalue()
    assert max(len(line) for line in text.splitlines()) <= PLAIN
    gspo = text[text.index("\ngspo\n") : text.index("\ncispo\n")]
    for expected in ("clip_low 0.0003", "arXiv 2507.18071", "sequence-mean-token-mean", "KL k2 x 0.001"):
        assert expected in gspo, gspo


def test_a_reader_that_has_enough_ends_it_quietly():
    command = f"{sys.executable} -m sharpen.cli.main algorithms | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("grpo\n", "")


def test_certify_says_what_is_no_run_directory(tmp_path: Path, capsys):
    assert main(["certify", str(tmp_path)]) == BAD_INPUT
    assert "is not a run directory: it has no run.db" in capsys.readouterr().err
