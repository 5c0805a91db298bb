"""Stands for the workflow of Trinity-RFT's example `learn_to_ask`: what it imports, overrides and asks for, in ours."""

from __future__ import annotations

import re
from typing import List, Optional  # noqa: UP035 - as there

from trinity.common.experience import Experience
from trinity.common.models.model import ModelWrapper
from trinity.common.workflows.workflow import SimpleWorkflow, Task
from trinity.utils.log import get_logger

logger = get_logger(__name__)


class Learn2AskWorkflow(SimpleWorkflow):
    """A doctor asks on, or ends; an auxiliary model rates the question."""

    def __init__(
        self,
        *,
        task: Task,
        model: ModelWrapper,
        auxiliary_models: Optional[List[ModelWrapper]] = None,  # noqa: UP006, UP045 - as there
    ):
        self.train_mode = task.workflow_args.get("train_mode", "Ra+Rs")
        assert auxiliary_models is not None
        assert len(auxiliary_models) == 1
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)

    @property
    def resettable(self):
        return True

    def reset(self, task: Task):
        from examples.learn_to_ask.workflow.prompt_learn2ask import rollout_prompt_med

        self.system_prompt = rollout_prompt_med
        self.format_args, self.reply_prefix = task.format_args, task.format_args.reply_prefix
        self.raw_task, self.task_desc = task.raw_task, task.task_desc
        self.decision = self.raw_task.get("decision_truth", "continue")

    def set_repeat_times(self, repeat_times, run_id_base):
        self.repeat_times = repeat_times
        self.task.rollout_args.n = repeat_times
        self.run_id_base = run_id_base

    def format_messages(self):
        return [{"role": "system", "content": self.system_prompt}, *self.task_desc]

    def run(self) -> List[Experience]:  # noqa: UP006 - as there
        responses = self.model.chat(self.format_messages(), **self.rollout_args)
        for response in responses:
            response.reward = self.reward_fn(response.response_text)
        logger.info("rewards %s", [response.reward for response in responses])
        return responses

    def reward_fn(self, response):
        if self.decision != ("stop" if "<stop />" in response else "continue"):
            return 0.0
        scores = {"format_score": 1.0, "content_score": 1.0} if self.decision == "stop" else self.llm_reward(response)
        return 1 + 2 * float(scores.get("content_score", 0.0)) + float(scores.get("format_score", 0.0))

    def llm_reward(self, response):
        from examples.learn_to_ask.workflow.prompt_learn2ask import reward_prompt_med

        told = [*self.task_desc, {"role": "assistant", "content": response}]
        history = "\n".join(f"{message['role']}: {message['content']}" for message in told)
        system = {"role": "system", "content": reward_prompt_med.format(self.raw_task.get("info_truth"))}
        client = self.auxiliary_models[0]
        messages = [system, {"role": "user", "content": history}]
        completion = client.chat.completions.create(model=client.model_path, messages=messages, stream=False)
        return dict(re.findall(r"<(\w+)>(.*?)</\1>", completion.choices[0].message.content))
