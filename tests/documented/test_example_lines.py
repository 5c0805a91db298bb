"""Each line on an example's page runs, in small: a model that is not here is exchanged for a tiny one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lines import EXAMPLES, ROOT, lines_of, run

pytestmark = pytest.mark.documented
TINY = ROOT / "examples" / "quickstart" / "model"
NOT_HERE = re.compile(r"--(?:lm|judge|judge-url|judge-key-env) \S+")
"""Models of others, that judge or propose; the example's stand-in takes their place."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples' data, a folder each."""
    return tmp_path_factory.mktemp("data")


def small(script: str, line: str, data: Path) -> str:
    """The options of a documented line, and then those that make it small."""
    tiny = data / "taught" if "count_shapes" in script else TINY  # a model that sees, made by the line before
    line = re.sub(r"Qwen/\S+", str(tiny), NOT_HERE.sub("", line)).replace("path/to/gsm8k", str(TINY.parent / "data"))
    return f"{line} {EXAMPLES[script]}".replace("DATA", str(data))


@pytest.mark.parametrize(("script", "line"), [(script, line) for script in EXAMPLES for line in lines_of(script)])
def test_it_runs_in_small(script: str, line: str, folders: Path, tmp_path: Path) -> None:
    """To the last line that it prints."""
    printed = run(script, small(script, line, folders / Path(script).parent.name), tmp_path)
    if "one_file" in script:
        assert re.search(r"^after: +\S+ of 4 held-out tasks$", printed, re.MULTILINE)
    else:
        assert "\nrun directory: " in printed
