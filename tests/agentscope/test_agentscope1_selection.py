"""Model selection with real models and a real ReActAgent of AgentScope 1."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg, TextBlock
from agentscope.model import ChatModelBase, ChatResponse
from agentscope.model._model_usage import ChatUsage
from selection_checks import check_tokens_decide

import sharpen
from sharpen import WorkflowOutput


class Words(ChatModelBase):
    """Says some words, whole or word by word."""

    def __init__(self, name: str, words: list[str], *, stream: bool) -> None:
        super().__init__(name, stream)
        self.words = words

    def said(self, count: int) -> ChatResponse:
        text = " ".join(self.words[:count])
        return ChatResponse(content=[TextBlock(type="text", text=text)], usage=ChatUsage(10, count, 0.0))

    async def __call__(self, *_: Any, **__: Any) -> Any:
        async def chunks() -> AsyncIterator[ChatResponse]:
            for count in range(1, len(self.words) + 1):
                yield self.said(count)

        return chunks() if self.stream else self.said(len(self.words))


async def workflow(task: dict[str, Any], model: ChatModelBase) -> WorkflowOutput:
    assert isinstance(model, Words)
    agent = ReActAgent(name="friday", sys_prompt="Be brief.", model=model, formatter=OpenAIChatFormatter())
    return WorkflowOutput(response=await agent.reply(Msg("user", task["question"], "user")))


@pytest.mark.parametrize("stream", [False, True])
def test_the_model_of_fewest_tokens(stream: bool, tmp_path: Path) -> None:
    models = [Words("same", ["well", "that", "is", "1"], stream=stream), Words("same", ["1"], stream=stream)]
    check_tokens_decide(models, workflow, tmp_path, fewest=1, tokens=11.0)


def test_names_and_arguments_are_those_of_agentscope(agentscope_tuner: ModuleType) -> None:
    """Read from their source: importing it wants DSPy."""
    tuner = Path(next(iter(agentscope_tuner.__path__)))
    for module in ("prompt_tune", "model_selection"):
        ours = importlib.import_module(f"sharpen.beyond.{module}")
        (exported,) = [
            ast.literal_eval(node.value)
            for node in ast.walk(parsed(tuner / module / "__init__.py"))
            if isinstance(node, ast.Assign)
        ]
        assert set(exported) == set(ours.__all__)
    for place, function in (
        ("model_selection/_model_selection.py", sharpen.select_model),
        ("prompt_tune/_tune_prompt.py", sharpen.tune_prompt),
    ):
        (theirs,) = [
            node
            for node in ast.walk(parsed(tuner / place))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function.__name__
        ]
        names = [argument.arg for argument in theirs.args.kwonlyargs]
        assert list(inspect.signature(function).parameters)[: len(names)] == names
        assert inspect.iscoroutinefunction(function) == isinstance(theirs, ast.AsyncFunctionDef)
    (config,) = [node for node in parsed(tuner / "prompt_tune" / "_config.py").body if isinstance(node, ast.ClassDef)]
    fields = [node.target.id for node in config.body if isinstance(node, ast.AnnAssign)]  # type: ignore[union-attr]
    assert list(sharpen.PromptTuneConfig.model_fields)[: len(fields)] == fields


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))
