"""The agent: a LangGraph graph of one node. Put yours in its place."""

from typing import Any

import httpx
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from pydantic import SecretStr

from sharpen import WorkflowOutput

SYSTEM = "Answer with the number."


def build_agent(llm: ChatOpenAI) -> Any:
    """The agent itself. It knows nothing of training; tools go into `llm.bind_tools` and a `ToolNode`."""

    async def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await llm.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("answer", answer)
    graph.add_edge(START, "answer")
    return graph.compile()


async def run_agent(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """The workflow: run the agent on one task, with the URL and the key that record its calls."""
    async with httpx.AsyncClient(timeout=None) as http_client:  # else LangChain keeps one open for the whole process
        llm = ChatOpenAI(
            model=model.name,
            base_url=model.base_url,
            api_key=SecretStr(model.api_key),
            max_retries=0,
            http_async_client=http_client,
        )
        state = await build_agent(llm).ainvoke({"messages": [("system", SYSTEM), ("user", task["question"])]})
    return WorkflowOutput(response=state["messages"][-1].text)
