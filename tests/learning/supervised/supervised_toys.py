"""Supervised rows, and the tutor that makes lessons of them."""

from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from sharpen.config.run import SupervisedConfig
from sharpen.gateway.render import Renderer
from sharpen.learning.supervised.lessons import Tutor
from sharpen.types import Task

TOOL = {"type": "function", "function": {"name": "calculator", "description": "Work out.", "parameters": {}}}
SEEN = [
    {"role": "user", "content": "2+2?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "calculator", "arguments": '{"expression":"2+2"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "4"},
    {"role": "assistant", "content": "#### 4"},
]


def tutor(folder: Path, data: str = "conversations", *, max_model_len: int = 256, **fields) -> Tutor:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Tutor(
        tokenizer=tokenizer,
        renderer=None if data == "texts" else Renderer(tokenizer),
        end_ids=frozenset([tokenizer.eos_token_id]),
        max_model_len=max_model_len,
        data=data,  # type: ignore[arg-type]
        fields=SupervisedConfig(**fields),
    )


def task(index: int = 0, **row) -> Task:
    return Task(id=f"train/{index}", index=index, row=row)


def taught(one, lesson) -> list[str]:
    """Return the text of each run of loss tokens of each sequence."""
    runs = []
    for experience in lesson.experiences:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], experience.loss_mask_T.astype(int), [0]])))
        runs += [one.tokenizer.decode(experience.ids_T[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return runs


ROWS = [
    task(0, messages=SEEN),
    task(1, prompt="question", response="yes"),
    task(2, prompt="question", response="no no no no no"),
]
PAIRS = [
    task(index, prompt="question " * (index + 1), chosen="yes " * (index + 1), rejected=f"no {index}")
    for index in range(4)
]
