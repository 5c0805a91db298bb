"""The loop on one page, in small: it trains the quickstart's model, by the stages that `tune()` uses."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from sharpen.trainer.checkpoint import load

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def page(monkeypatch):
    """The names of the page."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "quickstart"))  # and as it was, afterwards
    yield runpy.run_path(str(EXAMPLES / "one_file" / "loop.py"))
    del sys.modules["agent"]


def test_it_trains_the_agent_upwards(page, tmp_path, capsys):
    """Red without `engine.load`, where the agent goes on with the weights that it began with."""
    trainer = page["train"](str(EXAMPLES / "quickstart" / "model"), 4, num_held_out=64)
    printed = capsys.readouterr().out
    before, after = re.findall(r"^(?:before|after): +(\S+) of 64 held-out tasks$", printed, re.M)
    assert float(after) > float(before) + 0.1
    gaps = re.findall(r"gap (\S+)$", printed, re.M)
    assert len(gaps) == trainer.version == 4
    assert all(0 < float(gap) < 1e-4 for gap in gaps), "the trainer's logprobs are the engine's"
    trainer.save(tmp_path / "model", {})
    assert load(tmp_path / "model").state["version"] == 4
