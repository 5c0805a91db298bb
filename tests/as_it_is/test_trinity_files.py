"""Trinity-RFT's own example files, as they are: each does what the table of `docs/use/trinity-yaml.md` says of it.

After a change for the better: `.venv-agentscope1/bin/python tests/as_it_is/trinity_table.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from trinity_table import BEGIN, END, FILES, FOLDER, PAGE, Row, measure, toy_model, written

pytestmark = pytest.mark.as_it_is
LISTED = {found[1]: line for line in written().splitlines() if (found := re.match(r"\| `([^`]+)`", line))}
LINES = {file: str(Row(file=file, loads=True, runs=True)) for file in FILES} | LISTED
"""What the page says of each file: it lists those that do not run unchanged."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, write_toy_model: Callable[..., Path]) -> Path:
    return toy_model(write_toy_model, tmp_path_factory.mktemp("model") / "toy")


@pytest.mark.parametrize("file", FILES)
def test_a_file_does_what_the_page_says(
    file: str, model: Path, tmp_path: Path, write_toy_model: Callable[..., Path]
) -> None:
    assert str(measure(file, model, tmp_path, write_toy_model)) == LINES[file]


def test_the_page_counts_the_files() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert (text.count(BEGIN), text.count(END)) == (1, 1)
    assert sorted(LINES) == FILES
    loads, runs = (sum(line.split("|")[column].strip() == "yes" for line in LINES.values()) for column in (2, 3))
    assert f"Of {len(FILES)} files, {loads} load and {runs} run unchanged: all but" in text


def test_each_file_says_where_its_facts_come_from() -> None:
    for file in FILES:
        first = (FOLDER / file).read_text(encoding="utf-8").partition("\n")[0]
        assert re.fullmatch(rf"# Facts of examples/{file} of Trinity-RFT \(.*, commit [0-9a-f]+, [\d-]+\)", first)
