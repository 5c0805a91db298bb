"""Trinity's agent that searches the web: AgentScope's `ReActAgent` with the tools of a search service's MCP server.

In: a row with a question and its answer; the service that `workflow_args.search_client_type` names (its server is
started with `npx`); an auxiliary model that judges. Out: the experiences of the agent's calls, with reward 1 for an
answer that the judge finds correct, else 0.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping

from pydantic import BaseModel, Field

from sharpen.compat.trinity.experience import Experience
from sharpen.compat.trinity.model import ModelWrapper
from sharpen.compat.trinity.react import agentscope, react_agent, said, sampling_of, user_message
from sharpen.compat.trinity.task import Task
from sharpen.compat.trinity.workflow import Workflow
from sharpen.errors import ConfigError, UnusableAnswerError

SERVICES: Mapping[str, tuple[str, str]] = {
    "searxng": ("mcp-searxng", "SEARXNG_URL"),
    "tavily": ("tavily-mcp@latest", "TAVILY_API_KEY"),
}
"""The npm package of each service's MCP server, and the environment variable that it needs."""
SYSTEM = (
    "You find information on the web. Search thoroughly until you are sure of the answer to the user's question, and "
    "answer it exactly."
)
JUDGE = (
    "You judge whether a response to a question is correct, by the correct answer that is given; do not try to answer "
    "the question yourself. It is correct if both mean the same: small differences of form, and of numbers within "
    "their rounding, do not count. First explain in a sentence where they differ in meaning, if they do. Then end with "
    'a line "Correctness: YES" or "Correctness: NO".'
)
_VERDICT = re.compile(r"correctness[^\n]*?\b(yes|no)\b", re.IGNORECASE)


class FoundResult(BaseModel):
    """What the agent answers with."""

    result: str = Field(description="The answer to the user's question.")


class AgentScopeV1ReactSearchWorkflow(Workflow):
    """`workflow_args`: `max_turns` (10), `search_client_type` (`searxng`, `tavily`), `max_model_tokens` (24000; longer
    calls are not trained). Metrics: `react_turns`, `max_turns`."""

    is_async = True

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[ModelWrapper] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        row, arguments = task.raw_task, task.workflow_args
        self.query, self.truth = row[task.format_args.prompt_key], row[task.format_args.response_key]
        self.max_turns = int(arguments.get("max_turns", 10))
        self.max_model_tokens = int(arguments.get("max_model_tokens", 24000))
        self.service = str(arguments.get("search_client_type", "searxng"))
        _check_service(self.service)
        if not self.auxiliary_models:
            raise ConfigError(
                "AgentScopeV1ReactSearchWorkflow needs a judge: give an auxiliary model (auxiliary_models; in a "
                "Trinity-RFT file explorer.auxiliary_models)"
            )
        self.agent = react_agent(
            "Friday",
            SYSTEM,
            client=model.get_openai_async_client(),
            model_name=model.model_path,
            sampling=sampling_of(task),
            max_iters=self.max_turns,
        )

    async def run_async(self) -> list[Experience]:
        """Search, answer, be judged. Raises `UnusableAnswerError` if every call is too long to be trained."""
        reward = float(await self._is_correct(await self._answer()))
        turns = len(self.agent.memory.content) // 2
        experiences = self.model.extract_experience_from_history()
        for experience in experiences:
            experience.reward = reward
            experience.metrics |= {"react_turns": turns, "max_turns": self.max_turns}
        kept = [one for one in experiences if one.tokens is None or len(one.tokens) <= self.max_model_tokens]
        if experiences and not kept:
            raise UnusableAnswerError(
                f"each call has more than {self.max_model_tokens} tokens (workflow_args.max_model_tokens)"
            )
        return kept

    async def _answer(self) -> str:
        package, variable = SERVICES[self.service]
        client = agentscope("mcp", "StdIOStatefulClient")(
            name=f"{self.service}_mcp", command="npx", args=["-y", package], env={variable: os.environ[variable]}
        )
        await client.connect()
        try:
            await self.agent.toolkit.register_mcp_client(client)
            return said(await self.agent.reply(user_message(self.query), structured_model=FoundResult))
        finally:
            await client.close()

    async def _is_correct(self, answer: str) -> bool:
        """What the judge says. Raises `ValueError` if that cannot be read."""
        assert self.auxiliary_models
        judge = self.auxiliary_models[0]
        question = f"Question: {self.query}\nResponse: {answer}\nCorrect answer: {self.truth}"
        messages = [{"role": "system", "content": JUDGE}, {"role": "user", "content": question}]
        completion = await judge.chat.completions.create(model=judge.model_path, messages=messages)
        reply = completion.choices[0].message.content or ""
        found = _VERDICT.findall(reply)
        if not found:
            raise ValueError(f"the judge's reply has no line with 'Correctness: YES' or NO: {reply[-120:]!r}")
        return bool(found[-1].lower() == "yes")


def _check_service(name: str) -> None:
    """Raise `ConfigError` for a service that there is not, and where something is missing that it needs."""
    if name not in SERVICES:
        raise ConfigError(f"workflow_args.search_client_type is {name!r}: it must be one of {', '.join(SERVICES)}")
    package, variable = SERVICES[name]
    if not os.environ.get(variable):
        raise ConfigError(
            f"the environment variable {variable} is not set: the search service {name!r} "
            "(workflow_args.search_client_type) needs it"
        )
    if shutil.which("npx") is None:
        raise ConfigError(
            f"the search service {name!r} is the npm package {package}, which npx starts: install Node.js"
        )
