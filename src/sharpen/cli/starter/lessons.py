"""Conversations that a tiny model is taught by, as ids that are cut where a server would cut them.

In: messages, and a tokenizer with a chat template that leaves as it was what it rendered once (`TEMPLATE` does). Out:
ids with a mark on those that the model is to say, and batches of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

TEMPLATE = Path(__file__).with_name("chat_template.jinja")
"""ChatML with Hermes tool calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """Token ids of one conversation, and which of them the model is to say."""

    ids: list[int]
    said: list[bool]


def encode(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: list[Any] | None) -> Lesson:
    """Return a conversation as ids: prompt, sampled turn, rest, sampled turn."""

    def render(upto: int, prompt: bool) -> str:
        text = tokenizer.apply_chat_template(messages[:upto], tools=tools, tokenize=False, add_generation_prompt=prompt)
        assert isinstance(text, str)
        return text

    ids: list[int] = []
    said: list[bool] = []
    rendered = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        for text, is_said in ((render(index, True), False), (render(index + 1, False).removesuffix("\n"), True)):
            assert text.startswith(rendered), "the chat template is not prefix-preserving"
            piece = tokenizer.encode(text.removeprefix(rendered), add_special_tokens=False)
            ids += piece
            said += [is_said] * len(piece)
            rendered = text
    return Lesson(ids=ids, said=said)


def collate(lessons: Sequence[Lesson], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and targets [B, T], padded on the right: the target of a place is the next id if the model is to say
    it, else -100."""
    import torch

    width = max(len(lesson.ids) for lesson in lessons)
    ids_BT = torch.full((len(lessons), width), pad)
    targets_BT = torch.full((len(lessons), width), -100)
    for row, lesson in enumerate(lessons):
        ids_BT[row, : len(lesson.ids)] = torch.tensor(lesson.ids)
        said = [token if is_said else -100 for token, is_said in zip(lesson.ids, lesson.said, strict=True)]
        targets_BT[row, : len(said) - 1] = torch.tensor(said[1:])
    return ids_BT, targets_BT
