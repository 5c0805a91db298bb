"""The loop on one page, in small: it trains the quickstart's model, by the stages that `tune()` uses."""

import re
import runpy
import sys
from pathlib import Path

import pytest
from lines import different

from sharpen.learning.trainer.checkpoint import load

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def page(monkeypatch):
    """The names of the page."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "quickstart"))  # and as it was, afterwards
    yield runpy.run_path(str(EXAMPLES / "one_file" / "loop.py"))
    del sys.modules["agent"]


@pytest.mark.parametrize("line", different("examples/one_file/loop.py"), ids=" ".join)
def test_it_trains_the_agent_upwards(line, page, tmp_path, capsys, monkeypatch):
    """Red without `engine.load`, where the agent goes on with the weights that it began with."""
    small = ["--steps=3", "--held-out=64", f"--out={tmp_path / 'model'}"]
    monkeypatch.setattr(sys, "argv", ["loop.py", *line, *small])
    page["main"]()
    printed = capsys.readouterr().out
    before, after = re.findall(r"^(?:before|after): +(\S+) of 64 held-out tasks$", printed, re.M)
    assert float(after) > float(before) + 0.1
    gaps = re.findall(r"gap (\S+)$", printed, re.M)
    assert len(gaps) == 3
    assert all(0 < float(gap) < 1e-4 for gap in gaps), "the trainer's logprobs are the engine's"
    assert load(tmp_path / "model").state["version"] == 3
