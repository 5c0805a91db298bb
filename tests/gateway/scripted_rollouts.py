"""Rollouts of real agents against a scripted model.

In: what the model samples, a workflow, tasks. Out: scored groups, and an engine that remembers what it sampled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from scripted import ScriptedEngine, ServingLoop

from sharpen.agent.agentscope.console import silent_agents
from sharpen.agent.agentscope.model import present
from sharpen.agent.rollout.attempt import UserFunctions
from sharpen.agent.rollout.models import RolloutModels
from sharpen.agent.rollout.runner import RolloutRunner
from sharpen.agent.rollout.user_loop import owner
from sharpen.config.run import RolloutConfig
from sharpen.contracts import GenerateRequest, Generation
from sharpen.gateway.gateway import Gateway
from sharpen.placement.sessions import attempt_runner
from sharpen.types import Group, Task

Script = Callable[[str], "str | Awaitable[str]"]
"""What the model samples, from the text of its prompt; it may wait for something first."""


class RememberingEngine(ScriptedEngine):
    """A scripted engine that keeps what it was asked and what it sampled, in the order in which it answered."""

    answered: list[tuple[GenerateRequest, Generation]]

    def __init__(self, tokenizer: Any, script: Script | str, *, max_model_len: int = 1 << 18) -> None:
        self.answered = []

        def answer(request: GenerateRequest) -> str | Awaitable[str]:
            return script if isinstance(script, str) else script(tokenizer.decode(request.prompt_ids))

        super().__init__(tokenizer, answer, max_model_len=max_model_len)

    async def generate(self, request: GenerateRequest) -> Generation:
        generation = await super().generate(request)
        self.answered.append((request, generation))
        return generation


class Rollouts:
    """Runs a workflow on tasks through runner, sessions and gateway. `engine` is scripted and remembers."""

    def __init__(self, gateway: Gateway, engine: RememberingEngine) -> None:
        self.gateway, self.engine = gateway, engine

    def open(self, rollout_id: str, noise_seed: int) -> RolloutModels:
        return RolloutModels(self.gateway.open(rollout_id, noise_seed), present=present)

    def run(
        self, workflow: Any, judge: Any = None, *, tasks: Any = ({},), group_size: int = 1, **settings: Any
    ) -> list[Group]:
        """`settings` are those of `rollout`."""
        rows = [Task(id=f"train/{i}", index=i, row=row) for i, row in enumerate(tasks)]
        with silent_agents(), self.runner(workflow, judge, group_size, **settings) as runner:
            return runner.run(rows, group_ids=[f"step-0/{task.id}" for task in rows])

    def runner(self, workflow: Any, judge: Any = None, group_size: int = 1, **settings: Any) -> RolloutRunner:
        config = RolloutConfig(**{"timeout_s": 600, "max_attempts": 1, **settings})
        attempts = attempt_runner(UserFunctions(workflow, judge), config)
        return RolloutRunner(attempts, self.open, config, group_size, 0)


def rollouts_of(
    tokenizer: Any, serving: ServingLoop, script: Script | str, *, max_model_len: int = 1 << 18, **options: Any
) -> Rollouts:
    """Rollouts against this script; `options` are those of the gateway. Close `.gateway` at the end."""
    engine = RememberingEngine(tokenizer, script, max_model_len=max_model_len)
    options = {"who_calls": owner.get, **options}
    return Rollouts(Gateway(engine, tokenizer, model_name="toy", loop=serving.loop, **options), engine)
