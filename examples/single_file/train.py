"""Agent, judge, tasks and training in one file: copy it, and put yours in their places.

python train.py                     # with a tiny model that is made on the spot; about a minute on 2 cores
python train.py Qwen/Qwen3-0.6B     # with a model of yours, a folder or a name on the hub
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from sharpen import (
    AlgorithmConfig,
    DatasetConfig,
    JudgeOutput,
    TuneResult,
    TunerModelConfig,
    WorkflowOutput,
    tune,
)
from sharpen.cli.starter.tasks import rows
from sharpen.cli.starter.tiny_model import make_tiny_model


async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """Run the agent on one task. `model.client` is an `openai.AsyncOpenAI`, whose calls are recorded."""
    messages = [
        {"role": "system", "content": "Answer with the number."},
        {"role": "user", "content": task["question"]},
    ]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages)
    return WorkflowOutput(response=reply.choices[0].message.content)


async def judge(task: dict[str, Any], response: str | None) -> JudgeOutput:
    """Reward 1 if the last number of the answer is the task's; a metric says whether there was one at all."""
    numbers = re.findall(r"-?\d+", response or "")
    return JudgeOutput(
        reward=1.0 if numbers[-1:] == [task["answer"]] else 0.0, metrics={"gave_a_number": float(bool(numbers))}
    )


def main(model_path: str | None = None, steps: int = 30) -> TuneResult:
    """Write the tasks, make a model if none is named, and train it."""
    tasks = Path("tasks")
    tasks.mkdir(exist_ok=True)
    for split, questions in rows().items():
        (tasks / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    return tune(
        workflow_func=workflow,
        judge_func=judge,
        train_dataset=DatasetConfig(path=str(tasks), split="train", total_steps=steps),
        eval_dataset=DatasetConfig(path=str(tasks), split="test"),
        model=TunerModelConfig(
            model_path=model_path or str(make_tiny_model(Path("tiny_model"))),
            max_model_len=256,  # tokens of a whole conversation; a real agent needs some thousands
            max_tokens=16,  # tokens of one answer
        ),
        algorithm=AlgorithmConfig(
            algorithm_type="multi_step_grpo",
            group_size=8,  # rollouts of one task, which are compared with each other
            batch_size=8,  # tasks of one step
            learning_rate=3e-4,  # 1e-6 for a model of billions of parameters
        ),
        experiment_name="single_file",
    )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
