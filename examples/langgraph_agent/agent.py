"""A LangGraph ReAct agent with a calculator, and the two functions that tune it.

Role: what an owner brings. `build_agent` is the agent as LangGraph's users write it: a `ChatOpenAI`, a tool, a graph.
It knows nothing of training; the model it calls is whatever `base_url` serves. `run_agent` (the workflow) lets it work
on one task through the rollout's own URL and key; the quickstart's judge compares numbers.
In: a task `{"question": ..., "answer": "... #### 42"}` and a model object (`base_url`, `api_key`, `name`).
Out: a `WorkflowOutput` with the agent's last text.
"""

import json
from typing import Any

import httpx
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import SecretStr
from quickstart.agent import SYSTEM
from quickstart.agent import calculator as work_out

from sharpen import WorkflowOutput

MAX_STEPS = 6
"""Nodes that run at most: three calls of the model with a round of tools after each."""


@tool
def calculator(expression: str) -> str:
    """Work out an expression."""
    return str(work_out(json.dumps({"expression": expression})))


def build_agent(model: ChatOpenAI) -> Any:
    """The ReAct graph: the model calls tools until it answers."""
    with_tools = model.bind_tools([calculator])

    async def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await with_tools.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([calculator]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    return graph.compile()


async def run_agent(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """The workflow: one run of the agent on one task; an agent that never answers has an empty response."""
    messages = [("system", SYSTEM), ("user", task["question"])]
    async with httpx.AsyncClient(timeout=None) as http_client:  # else LangChain keeps one open for the whole process
        llm = ChatOpenAI(
            model=model.name,
            base_url=model.base_url,
            api_key=SecretStr(model.api_key),
            max_retries=0,
            http_async_client=http_client,
        )
        try:
            state = await build_agent(llm).ainvoke({"messages": messages}, {"recursion_limit": MAX_STEPS})
        except GraphRecursionError:
            return WorkflowOutput(response="", metrics={"answered": 0.0})
    return WorkflowOutput(response=state["messages"][-1].text, metrics={"answered": 1.0})
