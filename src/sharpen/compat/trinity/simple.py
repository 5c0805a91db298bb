"""Trinity's workflows of one call: ask the question, score the answer with a reward function. And those for maths.

In: a `Task` whose row holds question and truth, a reward function by its registered name. Out: one experience, with the
sum of the reward function's scores as reward and each score as a metric.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from sharpen.compat.trinity.experience import Experience
from sharpen.compat.trinity.model import ModelWrapper
from sharpen.compat.trinity.rewards import MathBoxedRewardFn, MathRewardFn, total
from sharpen.compat.trinity.task import FormatConfig, Task
from sharpen.compat.trinity.workflow import Workflow, each_alone
from sharpen.errors import ConfigError

TAGGED = (
    "Solve the user's problem. Think first, then answer: write your reasoning between <think> and </think>, and after "
    "it nothing but the answer between <answer> and </answer>."
)
BOXED = "Reason step by step, and put your final answer within \\boxed{}."
BOXED_AFTER_THINKING = (
    "Solve the problem. Write your reasoning between <think> and </think> first; then give the final answer, in closed "
    "form, within \\boxed{}."
)


class BaseSimpleWorkflow(Workflow):
    """What the simple workflows share. Subclasses may override `reset`, `format_messages`, `run` or `run_async`."""

    format_args: FormatConfig
    system_prompt: str | None
    reply_prefix: str | None
    reward_fn_args: dict[str, Any]
    raw_task: dict[str, Any]
    task_desc: Any
    truth: Any
    reward_fn: Any

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[ModelWrapper] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.reset(task)

    def reset(self, task: Task) -> None:
        """Read the task. Raises `ConfigError` without a reward function, `DatasetError` for a row without question."""
        self._read(task)
        if task.reward_fn is None:
            raise ConfigError(
                f"{type(self).__name__} scores answers with a reward function: set task_args.reward_fn, "
                "e.g. to math_boxed_reward"
            )
        self.reward_fn = task.reward_fn(**self.reward_fn_args)

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        """Ask for so many answers at once."""
        self.repeat_times = repeat_times
        self.task.rollout_args.n = repeat_times
        self.run_id_base = run_id_base

    @property
    def rollout_args(self) -> dict[str, Any]:
        """The task's sampling settings, as `model.chat` takes them."""
        return asdict(self.task.rollout_args)

    def format_messages(self) -> list[dict[str, Any]]:
        """The system prompt, the question, and the beginning of the answer, where they are given."""
        if self.task_desc is None:
            self.task_desc = self.raw_task[
                self.format_args.prompt_key
            ]  # a row names its fields where this one is missing
        messages = [{"role": "user", "content": self.task_desc}]
        if self.system_prompt:
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        if self.reply_prefix:
            messages.append({"role": "assistant", "content": self.reply_prefix})
        return messages

    def _read(self, task: Task) -> None:
        self.format_args = task.format_args
        self.system_prompt = task.format_args.system_prompt
        self.reply_prefix = task.format_args.reply_prefix
        self.reward_fn_args = task.reward_fn_args
        self.raw_task = task.raw_task
        self.task_desc = task.task_desc
        self.truth = task.truth

    def _further(self, experience: Experience) -> dict[str, Any]:
        """What the reward function gets beside answer and truth, if it takes it."""
        return {}

    def _score(self, experiences: list[Experience]) -> list[Experience]:
        for number, experience in enumerate(experiences):
            further = _taken(self.reward_fn, self._further(experience))
            scores = self.reward_fn(response=experience.response_text, truth=self.truth, **further)
            experience.reward = total(scores)
            experience.metrics.update(scores if isinstance(scores, Mapping) else {})
            experience.eid.run = number + self.run_id_base
        return experiences


class SimpleWorkflow(BaseSimpleWorkflow):
    """One question, one answer, scored by `task_args.reward_fn`."""

    can_reset = True
    can_repeat = True

    @each_alone
    def run(self) -> list[Experience]:
        """Ask and score."""
        return self._score(self.model.chat(self.format_messages(), **self.rollout_args))


class AsyncSimpleWorkflow(BaseSimpleWorkflow):
    """As `SimpleWorkflow`, asynchronous."""

    is_async = True

    @each_alone
    async def run_async(self) -> list[Experience]:
        """Ask and score."""
        return self._score(await self.model.chat_async(self.format_messages(), **self.rollout_args))


class MathWorkflow(SimpleWorkflow):
    """Answers in `<answer>` tags after thinking in `<think>` tags; `MathRewardFn` and a system prompt by default."""

    def reset(self, task: Task) -> None:
        """Read the task, with the defaults filled in."""
        if task.reward_fn is None:
            task.reward_fn = MathRewardFn
        if task.reward_fn is MathRewardFn and task.format_args.system_prompt is None:
            task.format_args.system_prompt = TAGGED
        super().reset(task)


class AsyncMathWorkflow(AsyncSimpleWorkflow, MathWorkflow):
    """As `MathWorkflow`, asynchronous."""


class MathBoxedWorkflow(SimpleWorkflow):
    """Answers within `\\boxed{}`. `workflow_args`: `with_think` (the answer must think in tags), `format_score_coef`,
    `use_base` (the prompt is plain text, for a model that knows no chat template).

    An answer that was cut at its token limit is scored, but not trained.
    """

    def reset(self, task: Task) -> None:
        """Read the task and `workflow_args`."""
        self._read(task)
        self.use_base = bool(task.workflow_args.get("use_base", False))
        self.with_think = bool(task.workflow_args.get("with_think", False))
        self.format_score_coef = float(task.workflow_args.get("format_score_coef", 0.1))
        if self.system_prompt is None:
            self.system_prompt = BOXED_AFTER_THINKING if self.with_think else BOXED
        self.reward_fn = (task.reward_fn or MathBoxedRewardFn)(**self.reward_fn_args)

    def format_prompt(self) -> str:
        """The prompt of `use_base`: the messages, each under its role's name, up to where the answer begins."""
        said = self.format_messages()
        opened = said.pop()["content"] if said[-1]["role"] == "assistant" else ""
        names = {"system": "System:", "user": "User:\n"}
        return "".join(f"{names[one['role']]}{one['content']}\n" for one in said) + f"Assistant:\n{opened}"

    @each_alone
    def run(self) -> list[Experience]:
        """Ask and score."""
        if self.use_base:
            return self._boxed(self.model.generate([self.format_prompt()], **self.rollout_args))
        return self._boxed(self.model.chat(self.format_messages(), **self.rollout_args))

    def _further(self, experience: Experience) -> dict[str, Any]:
        tokens = experience.tokens
        return {
            "with_think": self.with_think,
            "format_score_coef": self.format_score_coef,
            "response_token": None if tokens is None else tokens[experience.prompt_length :],
            "info": experience.info,
        }

    def _boxed(self, experiences: list[Experience]) -> list[Experience]:
        for experience in self._score(experiences):
            if experience.truncate_status is not None:
                experience.leave_out()
        return experiences


class AsyncMathBoxedWorkflow(MathBoxedWorkflow):
    """As `MathBoxedWorkflow`, asynchronous."""

    is_async = True

    @each_alone
    async def run_async(self) -> list[Experience]:
        """Ask and score."""
        if self.use_base:
            return self._boxed(await self.model.generate_async([self.format_prompt()], **self.rollout_args))
        return self._boxed(await self.model.chat_async(self.format_messages(), **self.rollout_args))


def _taken(reward_fn: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments that a reward function takes."""
    try:
        parameters = inspect.signature(reward_fn).parameters.values()
    except ValueError:  # nothing can be read of it: all of them, as in Trinity-RFT
        return arguments
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
        return arguments
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in arguments.items() if name in names}


# Trinity's workflows of distillation: ask the question; what the teacher says of the answer, the trainer finds out.
#
# In: a `Task` whose row holds the question (and a truth). Out: one experience. Its reward is no part of what is learnt:
# 0, or whether the answer is right, to be looked at and evaluated.


class OnPolicyDistillWorkflow(BaseSimpleWorkflow):
    """One question, one answer. Subclasses may override `compute_reward`."""

    is_async = True
    can_reset = True
    can_repeat = True

    def reset(self, task: Task) -> None:
        """Read the task. Raises `ConfigError` for a temperature of the teacher's other than 1."""
        self._read(task)
        if (temperature := task.workflow_args.get("temperature", 1.0)) != 1.0:
            raise ConfigError(f"workflow_args.temperature is {temperature}: the teacher is compared with at 1 here")

    def compute_reward(self, response: Experience) -> float:
        """The answer's reward, which teaches nothing."""
        return 0.0

    @each_alone
    async def run_async(self) -> list[Experience]:
        """Ask."""
        experiences = await self.model.chat_async(self.format_messages(), **self.rollout_args)
        for number, experience in enumerate(experiences):
            experience.reward = self.compute_reward(experience)
            experience.eid.run = number + self.run_id_base
        return experiences


class OnPolicyDistillMathWorkflow(OnPolicyDistillWorkflow):
    """Questions whose answer comes in a box; the reward is whether it is right."""

    def format_messages(self) -> list[dict[str, Any]]:
        """The question, and how to answer it."""
        system = {"role": "system", "content": self.system_prompt or "You are a helpful assistant."}
        return [system, {"role": "user", "content": f"{self.task_desc}\n{BOXED}"}]

    def compute_reward(self, response: Experience) -> float:
        """1 for a right answer, else 0."""
        scores = MathBoxedRewardFn()(response=response.response_text, truth=self.truth)
        response.metrics["accuracy"] = scores["accuracy"]
        return float(scores["accuracy"] > 0)
