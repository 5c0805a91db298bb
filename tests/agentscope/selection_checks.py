"""What model selection does with AgentScope's own models, of either line: tokens are read from their answers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from sharpen import DatasetConfig, select_model
from sharpen.beyond.model_selection import avg_token_consumption_judge

NUM_TASKS = 6


def check_tokens_decide(models: list[Any], workflow: Any, folder: Path, *, fewest: int, tokens: float) -> None:
    """The model at `fewest` is chosen, which used so many `tokens` a task."""
    rows = [{"question": f"{n} + 1?"} for n in range(NUM_TASKS)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen, figures = asyncio.run(
        select_model(
            workflow_func=workflow,
            judge_func=avg_token_consumption_judge,
            train_dataset=DatasetConfig(path=str(folder), split="train"),
            candidate_models=models,
        )
    )
    assert chosen is models[fewest]
    assert figures["token_consumed_avg"] == tokens == -figures["reward"]
    assert figures["num_tasks"] == NUM_TASKS
