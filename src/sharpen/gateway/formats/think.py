"""Reasoning between two tags: `<think>` and `</think>` in Qwen's, DeepSeek's, GLM's and Kimi's models.

Source: the chat templates of Qwen/Qwen3-0.6B, deepseek-ai/DeepSeek-R1 and zai-org/GLM-4.5-Air.
"""

from __future__ import annotations

from sharpen.gateway.formats.format import ReasoningFormat

OPEN, CLOSE = "<think>", "</think>"


def between(text: str, opens: str, closes: str, *, opened: bool) -> tuple[str, str]:
    """Return the reasoning between two tags, and the rest, both without the newlines beside the tags.

    The text has to begin with the first tag, unless it was `opened` before; else everything is content.
    """
    begins = text.lstrip().startswith(opens)
    if not opened and not begins:
        return "", text
    head, _, tail = text.partition(closes)
    reasoning = head.lstrip().removeprefix(opens) if begins else head
    return reasoning.strip("\n"), tail.lstrip("\n")


QWEN3 = ReasoningFormat(
    name="qwen3",
    parse=lambda text, opened: between(text, OPEN, CLOSE, opened=opened),
    opens=(OPEN,),
    closes=(CLOSE,),
    marks=((OPEN,), (CLOSE,)),
    vllm="qwen3",
)
DEEPSEEK_R1 = ReasoningFormat(
    name="deepseek_r1",
    # The opening tag may be missing: the closing one is enough.
    parse=lambda text, opened: between(text, OPEN, CLOSE, opened=opened or CLOSE in text),
    opens=(OPEN,),
    closes=(CLOSE,),
    marks=((CLOSE, "<｜Assistant｜>"),),
    vllm="deepseek_r1",
)
