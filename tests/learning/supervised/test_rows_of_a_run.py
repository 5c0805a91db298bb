"""The rows of a run that learns from them: what operators do to them comes before their format is checked."""

import json
from pathlib import Path

import pytest

from sharpen import DatasetConfig, TunerModelConfig
from sharpen.config.run import RunConfig
from sharpen.errors import DatasetError
from sharpen.learning.algorithm.supervised import SUPERVISED
from sharpen.learning.supervised.data import read_data

ANNOTATE = """
from dataclasses import replace

def annotate(tasks):
    def annotated(task):
        short, long = sorted((task.row["answer1"], task.row["answer2"]), key=len)
        return replace(task, row={**task.row, "chosen": short, "rejected": long})
    return [annotated(task) for task in tasks if task.row["answer1"] != task.row["answer2"]]
"""


def config(folder: Path, **more) -> RunConfig:
    rows = [{"prompt": f"p{index}", "answer1": "a" * (index + 1), "answer2": "a" * 10} for index in range(10)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "own.py").write_text(ANNOTATE)
    return RunConfig(
        train_dataset=DatasetConfig(path=str(folder / "rows.jsonl")),
        model=TunerModelConfig(model_path="toy", max_model_len=64),
        supervised={"prompt_key": "prompt", "chosen_key": "chosen", "rejected_key": "rejected"},
        **more,
    )


def test_operators_may_make_the_fields_that_an_algorithm_reads(tmp_path: Path):
    own = {"task_operators": [{"name": f"{tmp_path / 'own.py'}:annotate"}]}
    data = read_data(config(tmp_path, sampling=own), SUPERVISED["dpo"], has_workflow=False)
    rows = [*data.training, *data.rows]
    assert len(rows) == 9  # one has two equal answers
    assert data.rows
    assert all(row.row["chosen"] == row.row["answer1"] for row in rows)
    assert data.messages[0].startswith("9 of 10 training tasks are left")
    with pytest.raises(DatasetError, match="chosen"):
        read_data(config(tmp_path), SUPERVISED["dpo"], has_workflow=False)
