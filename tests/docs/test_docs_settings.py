"""Settings in the documentation are settings that a run accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pages import Block, blocks

from sharpen.compat.files import load_config
from sharpen.config.load import resolve

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


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_each_block_of_settings_is_accepted(block: Block, tmp_path: Path) -> None:
    """Red when a setting is renamed, or when settings that a page shows together refuse each other."""
    shown = yaml.safe_load(block.text)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(merged(LEAST, shown)))
    resolve(load_config(tmp_path / "run.yaml", has_ray=True), {}, {})
