"""Trinity's workflow with a judge that rates each answer by rubrics: an auxiliary model, or one behind an API.

In: a row with a question and a `rubric` (a list of `description` and `weight`). Out: one experience whose reward is the
judge's rating, 1 to 10, divided by 10. A judgement that cannot be read fails the rollout: it is no reward of 0.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

from sharpen.compat.trinity.experience import Experience, is_number
from sharpen.compat.trinity.model import ModelWrapper
from sharpen.compat.trinity.simple import BaseSimpleWorkflow
from sharpen.compat.trinity.task import Task
from sharpen.compat.trinity.workflow import each_alone
from sharpen.errors import ConfigError

THINK_AND_ANSWER = "Answer the user's question: think it through first, then give your answer."
JUDGE = (
    "You rate answers. You are given a prompt, a response to it, and a list of rubrics with their weights. Rate how "
    "well the response meets the rubrics taken together, with a whole number from 1 (it misses them) to 10 (it meets "
    'all of them). Begin your reply with a JSON object in a code block, whose only key is "rating":\n'
    '```json\n{"rating": 7}\n```'
)
_BLOCK = re.compile(r"```(?:json)?(.*?)```", re.DOTALL)


class RubricJudgeWorkflow(BaseSimpleWorkflow):
    """One question, one answer, rated by the first auxiliary model. The metric `judge_success` counts judgements."""

    can_reset = True
    can_repeat = True

    def reset(self, task: Task) -> None:
        """Read the task; the judge takes the reward function's place."""
        self._read(task)
        if self.system_prompt is None:
            self.system_prompt = THINK_AND_ANSWER
        self.rubric = list(self.raw_task.get("rubric") or [])

    @each_alone
    def run(self) -> list[Experience]:
        """Ask and have it rated."""
        judge = self._judge()
        experiences = self.model.chat(self.format_messages(), **self.rollout_args)
        for number, experience in enumerate(experiences):
            experience.reward = self.rate(experience.response_text, judge) / 10
            experience.metrics["judge_success"] = 1.0
            experience.eid.run = number + self.run_id_base
        return experiences

    def rate(self, response: str, judge: Any) -> float:
        """The judge's rating, 1 to 10. Raises `ValueError` if it gave none."""
        messages = [{"role": "system", "content": JUDGE}, {"role": "user", "content": self._question(response)}]
        completion = judge.chat.completions.create(model=judge.model_path, messages=messages, temperature=0.0)
        return rating_in(completion.choices[0].message.content or "")

    def _judge(self) -> Any:
        if not self.auxiliary_models:
            raise ConfigError(
                f"{type(self).__name__} needs a judge: give an auxiliary model (auxiliary_models; in a Trinity-RFT "
                "file explorer.auxiliary_models), or use rubric_judge_openai_workflow"
            )
        return self.auxiliary_models[0]

    def _question(self, response: str) -> str:
        rubrics = [
            f"Rubric {number} (weight {item['weight']}): {item['description']}"
            for number, item in enumerate(self.rubric, 1)
        ]
        listed = "\n".join(rubrics) or "None are given: rate the response as a whole."
        return (
            f"<prompt>\n{self.task_desc}\n</prompt>\n<response>\n{response}\n</response>\n"
            f"<rubrics>\n{listed}\n</rubrics>\nYour rating:"
        )


class RubricJudgeWorkflowWithAPI(RubricJudgeWorkflow):
    """As `RubricJudgeWorkflow`, with a judge behind an OpenAI-compatible API.

    `workflow_args`: `judge_model_name`; `judge_api_base_url_env` and `judge_api_key_env` name the environment variables
    with its URL and key (`OPENAI_BASE_URL`, `OPENAI_API_KEY`).
    """

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[ModelWrapper] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        import openai

        arguments = task.workflow_args
        name, url = arguments.get("judge_model_name"), arguments.get("judge_api_base_url_env", "OPENAI_BASE_URL")
        key = arguments.get("judge_api_key_env", "OPENAI_API_KEY")
        if not name:
            raise ConfigError("workflow_args.judge_model_name is missing: what the judge's endpoint calls the model")
        if not os.environ.get(url):
            raise ConfigError(f"the environment variable {url} is not set: it holds the URL of the judge's endpoint")
        client: Any = openai.OpenAI(base_url=os.environ[url], api_key=os.environ.get(key) or "none")
        client.model_path = name
        self._client = client

    def _judge(self) -> Any:
        return self._client


def rating_in(text: str) -> float:
    """The rating in a judge's reply: in its first code block, a JSON object. Raises `ValueError` without one from 1 to
    10."""
    block = _BLOCK.search(text)
    if block is None:
        raise ValueError(f"the judge's reply has no JSON block with a rating: {text[:120]!r}")
    try:
        rating = json.loads(block.group(1)).get("rating")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"the judge's reply holds no JSON object with a rating: {block.group(1)[:120]!r}") from error
    if not is_number(rating) or not 1 <= rating <= 10:
        raise ValueError(f"the judge's rating is {rating!r}: it must be a number from 1 to 10")
    return float(rating)
