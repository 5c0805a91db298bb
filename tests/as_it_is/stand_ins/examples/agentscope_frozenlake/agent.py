"""Stands for the agent of Trinity-RFT's example `agentscope_frozenlake`: AgentScope's, one reply for a step."""

import re

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg
from agentscope.model import OpenAIChatModel
from examples.agentscope_frozenlake.utils import SYSTEM_PROMPT


class FrozenLakeAgent:
    """Says where to go next."""

    def __init__(self, model: OpenAIChatModel, max_steps: int = 20):
        self.max_steps = max_steps
        self.agent = ReActAgent(
            name="frozenlake_agent", sys_prompt=SYSTEM_PROMPT, model=model, formatter=OpenAIChatFormatter(), max_iters=2
        )

    async def step(self, current_observation: str) -> str:
        answer = await self.agent.reply(Msg("user", f"The lake:\n{current_observation}\nYour step?", role="user"))
        text = answer.content if isinstance(answer.content, str) else answer.content[0].get("text")
        found = re.findall(r"```(.*?)```", text, re.DOTALL)
        return found[-1].strip().lower() if found else "still"
