"""Settings in the documentation are settings that a run accepts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pages import Block, blocks, inline_code

from sharpen.compat.files import load_config
from sharpen.config.explain import settings_of
from sharpen.config.load import resolve
from sharpen.config.run import RunConfig

REFERENCE = "reference/configuration.md"
LEAST = {
    "workflow": "agent.py:run_agent",
    "train_dataset": {"path": "tasks.jsonl"},
    "model": {"model_path": "Qwen/Qwen3-0.6B", "max_model_len": 4096},
}
"""What a run needs beside the settings that a page shows."""


def merged(tree: dict[str, Any], shown: dict[str, Any]) -> dict[str, Any]:
    both = dict(tree)
    for key, value in shown.items():
        both[key] = merged(both[key], value) if isinstance(value, dict) and isinstance(both.get(key), dict) else value
    return both


def test_each_setting_is_on_a_page_that_says_when_it_is_for() -> None:
    """Red when a setting is added of which nothing but the reference tells, or its page forgets it."""
    texts = [block.text for block in blocks() if REFERENCE not in block.page]
    texts += [text for page, text in inline_code() if REFERENCE not in page]
    told = set(re.findall(r"\w+", " ".join(texts)))
    assert [name for name in map(".".join, settings_of(RunConfig)) if name.split(".")[-1] not in {*told, "*"}] == []


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_each_block_of_settings_is_accepted(block: Block, tmp_path: Path) -> None:
    """Red when a setting is renamed, or when settings that a page shows together refuse each other."""
    shown = yaml.safe_load(block.text)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(merged(LEAST, shown)))
    resolve(load_config(tmp_path / "run.yaml", has_ray=True), {}, {})
