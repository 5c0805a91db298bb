"""Reasoning between two tags: `<think>` and `</think>` in Qwen's and DeepSeek's models.

Source: the chat templates of Qwen/Qwen3-0.6B and deepseek-ai/DeepSeek-R1.
"""

from __future__ import annotations

from sharpen.gateway.formats.format import ReasoningFormat

OPEN, CLOSE = "<think>", "</think>"


def _deepseek_r1(text: str, opened: bool) -> tuple[str, str]:
    """The opening tag may be missing; without any tag, and if the prompt did not open the reasoning, everything is
    content."""
    head, tag, tail = text.partition(CLOSE)
    if not tag and not opened and not text.lstrip().startswith(OPEN):
        return "", text
    reasoning = head.lstrip().removeprefix(OPEN) if head.lstrip().startswith(OPEN) else head
    return reasoning.strip("\n"), tail.lstrip("\n")


def _qwen3(text: str, opened: bool) -> tuple[str, str]:
    """As in `deepseek_r1`, but the text or the prompt must open the reasoning."""
    if not opened and not text.lstrip().startswith(OPEN):
        return "", text
    return _deepseek_r1(text, opened)


DEEPSEEK_R1 = ReasoningFormat(name="deepseek_r1", parse=_deepseek_r1, opens=(OPEN,), closes=(CLOSE,))
QWEN3 = ReasoningFormat(name="qwen3", parse=_qwen3, opens=(OPEN,), closes=(CLOSE,))
