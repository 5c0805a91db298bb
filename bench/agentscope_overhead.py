"""What AgentScope itself costs: CPU time of its agent for each model call, beyond the plain SDK's call.

In: nothing; AgentScope is the one of the environment that runs this. Out: a table and
`bench/out/agentscope_overhead.json` with `overhead_ms` (CPU, per call), `construction_ms` (an agent with its tool, once
a rollout) and the wall time of a call. Nothing is judged: it is what users of AgentScope pay, with any trainer.

Each rollout asks twice (a tool call, then the answer), through the real gateway over an engine that answers from
memory. Beside it the same two requests are sent with the SDK. CPU time is that of the agent's thread
(`time.thread_time`); the gateway works on another one and costs both the same.

    .venv-agentscope1/bin/python bench/agentscope_overhead.py [--rollouts 200] [--repeats 5]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import agentscope
from gateway import Crowd, NullEngine, make_tokenizer, questions
from report import OUT, machine

from sharpen.agent.agentscope.console import silent_agents
from sharpen.agent.agentscope.model import present
from sharpen.gateway.gateway import Gateway

PROMPT = "You are a helpful math problem solving agent."
NUM_CALLS = 2
Ask = Callable[[Any, str], Awaitable[None]]


def calculator(expression: str) -> Any:
    """Work out an expression.

    Args:
        expression (str): What to work out.
    """
    if agentscope.__version__.startswith("2."):
        return "84"
    from agentscope.message import TextBlock
    from agentscope.tool import ToolResponse

    return ToolResponse(content=[TextBlock(type="text", text="84")])


def make_agent_1(model: Any) -> Any:
    """A `ReActAgent` of AgentScope 1 with one tool."""
    from agentscope.agent import ReActAgent
    from agentscope.formatter import OpenAIChatFormatter
    from agentscope.tool import Toolkit

    toolkit = Toolkit()
    toolkit.register_tool_function(calculator)
    return ReActAgent(
        name="friday", sys_prompt=PROMPT, model=model, formatter=OpenAIChatFormatter(), toolkit=toolkit, max_iters=4
    )


def make_agent_2(model: Any) -> Any:
    """An `Agent` of AgentScope 2 with one tool that it may use."""
    from agentscope.agent import Agent, InjectionConfig
    from agentscope.permission import PermissionContext, PermissionMode
    from agentscope.state import AgentState
    from agentscope.tool import FunctionTool, Toolkit

    return Agent(
        name="friday",
        system_prompt=PROMPT,
        model=model,
        toolkit=Toolkit(tools=[FunctionTool(calculator)]),
        state=AgentState(permission_context=PermissionContext(mode=PermissionMode.BYPASS)),
        injection_config=InjectionConfig(inject_runtime_state=False),
    )


class Bench:
    """A gateway over an engine that answers from memory, and what to send through it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.questions = questions()
        tokenizer = make_tokenizer(self.questions)
        self.gateway = Gateway(NullEngine(tokenizer, Crowd(1)), tokenizer, model_name="null", loop=self.loop)
        self.first = agentscope.__version__.startswith("1.")
        self.make_agent = make_agent_1 if self.first else make_agent_2
        self._requests: list[dict[str, Any]] = []

    async def by_agent(self, model: Any, question: str) -> None:
        """One reply of AgentScope's agent."""
        agent = self.make_agent(model)
        if self.first:
            from agentscope.message import Msg

            await agent.reply(Msg("user", question, "user"))
        else:
            from agentscope.message import UserMsg

            await agent.reply(UserMsg(name="user", content=question))

    async def construction(self, model: Any, question: str) -> None:
        """The agent and its toolkit, made and not used."""
        self.make_agent(model)

    async def by_sdk(self, model: Any, question: str) -> None:
        """The requests that the agent sent for the first question, as they were."""
        for request in self._requests:
            await model.client.chat.completions.create(model=model.name, **request)

    def learn_requests(self) -> None:
        """Let the agent reply once, and keep what it sent."""
        session = self.gateway.open("learn", noise_seed=0)
        asyncio.run(self.by_agent(present(session.model), self.questions[0]))
        calls = session.close()
        assert len(calls) == NUM_CALLS, f"the agent made {len(calls)} calls"
        self._requests = [{"messages": list(call.messages), "tools": list(call.tools)} for call in calls]

    def measure(self, ask: Ask, num_rollouts: int) -> tuple[float, float]:
        """(CPU ms of the agent's thread, wall ms) of one rollout; sessions are made before and closed after."""
        sessions = [self.gateway.open(f"g/{index}", noise_seed=index) for index in range(num_rollouts)]
        models = [present(session.model) for session in sessions]
        for model in models:
            _ = model.client

        async def run() -> tuple[float, float]:
            wall, cpu = time.perf_counter(), time.thread_time()
            for model in models:
                await ask(model, self.questions[0])
            return time.thread_time() - cpu, time.perf_counter() - wall

        gc.collect()
        cpu_s, wall_s = asyncio.run(run())
        for session in sessions:
            session.close()
        return 1000 * cpu_s / num_rollouts, 1000 * wall_s / num_rollouts


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    bench = Bench()
    with silent_agents():
        bench.learn_requests()
        found: dict[str, list[tuple[float, float]]] = {"agent": [], "sdk": [], "construction": []}
        for repeat in range(arguments.repeats + 1):  # the first warms up
            for name, ask in (("sdk", bench.by_sdk), ("agent", bench.by_agent), ("construction", bench.construction)):
                measured = bench.measure(ask, arguments.rollouts)
                if repeat > 0:
                    found[name].append(measured)
    cpu = {name: statistics.median(each[0] for each in rows) for name, rows in found.items()}
    wall = {name: statistics.median(each[1] for each in rows) for name, rows in found.items()}
    result = {
        "agentscope": agentscope.__version__,
        "overhead_ms": (cpu["agent"] - cpu["sdk"]) / NUM_CALLS,
        "construction_ms": cpu["construction"],
        "sdk_ms": cpu["sdk"] / NUM_CALLS,
        "agent_ms": cpu["agent"] / NUM_CALLS,
        "agent_wall_ms": wall["agent"] / NUM_CALLS,
        "sdk_wall_ms": wall["sdk"] / NUM_CALLS,
        "spread_agent_ms": [row[0] / NUM_CALLS for row in found["agent"]],
        "machine": machine(),
    }
    print(f"AgentScope {agentscope.__version__}, CPU ms of the agent's thread for each model call:")
    print(f"  plain SDK {result['sdk_ms']:.2f}, agent {result['agent_ms']:.2f}: overhead {result['overhead_ms']:.2f}")
    print(f"  of which making the agent and its toolkit, once a rollout: {result['construction_ms']:.2f}")
    print(f"  wall ms of a call: plain SDK {result['sdk_wall_ms']:.2f}, agent {result['agent_wall_ms']:.2f}")
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "agentscope_overhead.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
