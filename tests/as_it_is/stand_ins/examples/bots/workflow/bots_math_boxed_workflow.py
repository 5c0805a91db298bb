"""Stands for the workflows of Trinity-RFT's example `bots`: what they import, override and write, in ours."""

import fcntl
import json
import os

from examples.bots.workflow.bots_math_boxed_reward import BOTSMathBoxedRewardFn
from trinity.common.experience import Experience
from trinity.common.workflows.customized_math_workflows import MathBoxedWorkflow, Task


class BOTSMathBoxedWorkflow(MathBoxedWorkflow):
    """Rows whose question is a list of messages, and whose truth is within another field."""

    def reset(self, task: Task):
        super().reset(task)
        self.reward_fn = BOTSMathBoxedRewardFn(**self.reward_fn_args)
        self.task_desc = nested_query(self.format_args.prompt_key, self.raw_task)
        self.truth = nested_query(self.format_args.response_key, self.raw_task)
        assert self.truth is not None

    def format_messages(self):
        return self.task_desc


class BOTSRefEvalCollectMathBoxedWorkflow(BOTSMathBoxedWorkflow):
    """The rewards of all answers to a task become a line of a file."""

    def run(self) -> list[Experience]:
        responses = super().run()
        entry = {
            "model_version": self.model.model_version,
            "rewards": [response.reward for response in responses],
            "question": self.task_desc,
            "truth": self.truth,
        }
        path = os.environ.get("BOTS_REF_EVAL_LOG_FILE", "./bots_ref_eval_log.jsonl")
        with open(path, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps(entry) + "\n")
        return responses


def nested_query(query_key, query_obj):
    for key in query_key.split("."):
        query_obj = query_obj.get(key) if isinstance(query_obj, dict) else None
    return query_obj
