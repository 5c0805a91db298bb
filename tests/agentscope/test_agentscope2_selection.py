"""Model selection with real models and a real Agent of AgentScope 2."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from agentscope.agent import Agent
from agentscope.credential import OpenAICredential
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import TextBlock, UserMsg
from agentscope.model import ChatModelBase, ChatResponse
from agentscope.model._model_usage import ChatUsage
from selection_checks import check_tokens_decide

from sharpen import WorkflowOutput


class Words(ChatModelBase):
    """Says some words, whole or word by word."""

    def __init__(self, words: list[str], *, stream: bool) -> None:
        credential = OpenAICredential(api_key="none")
        super().__init__(credential, "same", ChatModelBase.Parameters(), stream=stream)
        self.words, self.formatter = words, OpenAIChatFormatter()

    def said(self, words: list[str], count: int, *, last: bool) -> ChatResponse:
        text = "".join(f"{word} " for word in words)
        return ChatResponse(content=[TextBlock(text=text)], is_last=last, usage=ChatUsage(10, count, 0.0))

    async def _call_api(self, *_: Any, **__: Any) -> Any:
        async def chunks() -> AsyncIterator[ChatResponse]:
            for count, word in enumerate(self.words, 1):
                yield self.said([word], count, last=False)
            yield self.said(self.words, len(self.words), last=True)

        return chunks() if self.stream else self.said(self.words, len(self.words), last=True)


async def workflow(task: dict[str, Any], model: ChatModelBase) -> WorkflowOutput:
    assert isinstance(model, Words)
    agent = Agent(name="friday", system_prompt="Be brief.", model=model)
    return WorkflowOutput(response=await agent.reply(UserMsg(name="user", content=task["question"])))


@pytest.mark.parametrize("stream", [False, True])
def test_the_model_of_fewest_tokens(stream: bool, tmp_path: Path) -> None:
    models = [Words(["well", "that", "is", "1"], stream=stream), Words(["1"], stream=stream)]
    check_tokens_decide(models, workflow, tmp_path, fewest=1, tokens=11.0)
