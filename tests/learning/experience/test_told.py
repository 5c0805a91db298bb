"""What a teacher is told: the text, the prompt's ids around it, and that the recorded ids follow it."""

from dataclasses import replace

import pytest

from sharpen.errors import DatasetError
from sharpen.gateway.render import Renderer
from sharpen.learning.experience.told import Told, check_told, filled
from sharpen.models.configuration import load_tokenizer
from sharpen.types import Task

CONTEXT = "{prompt}\n\nThe answer is {answer}, {{so}} {metrics.right}."


def test_the_text_by_hand() -> None:
    """Values of the row as they are, others as JSON, metrics as numbers; what is in braces there stays."""
    found = filled(CONTEXT, "What {is} it?", {"answer": "{4}"}, {"judge/right": 0.5})
    assert found == "What {is} it?\n\nThe answer is {4}, {so} 0.5."
    assert filled("{prompt} {parts}", "?", {"parts": [1, "a"]}, {}) == '? [1, "a"]'


def test_a_task_without_what_the_teacher_is_told_is_refused() -> None:
    task = Task(id="train/3", index=3, row={"question": "?"})
    with pytest.raises(DatasetError, match=r"\{answer\}, but task train/3 has None there \(it has question\)"):
        check_told(task, CONTEXT)
    check_told(replace(task, row={"answer": 4}), CONTEXT)


def test_the_last_message_alone_is_replaced(toy_model_dir) -> None:
    """The question stands twice in the prompt; its last place changes, all else is the same text."""
    renderer = Renderer(load_tokenizer(toy_model_dir))
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": "2+2?"},
    ]
    text = renderer.render(messages, [], {})
    told = Told(context=CONTEXT, renderer=renderer)
    found = told.prompt_with(renderer.encode(text), "2+2?", "2+2? It is 4.")
    assert found is not None
    messages[-1] = {"role": "user", "content": "2+2? It is 4."}
    assert renderer.spell(found.tolist()) == renderer.render(messages, [], {})
    assert told.prompt_with(renderer.encode(text), "3+3?", "x") is None
