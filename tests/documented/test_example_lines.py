"""Each example's script starts as its page says, and has every option of the page's lines. What the lines do is seen in
tests/examples, where each makes a run of two steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from lines import BY_HAND, EXAMPLES, documented, options_of, run

pytestmark = pytest.mark.documented
SCRIPTS = [*EXAMPLES, "examples/coding_agent/main.py"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_starts_and_has_the_options_of_its_lines(script: str, tmp_path: Path) -> None:
    helped = run(script, "--help", tmp_path, Path(sys.executable))
    for line in documented()[script]:
        assert [name for name, *_ in options_of(line) if f"  {name} " not in helped] == []


def test_all_others_need_an_environment_of_their_own() -> None:
    assert BY_HAND.keys() - SCRIPTS == {"examples/math_agent/main.py"}
