"""An evening on a laptop: a small real model learns to solve word problems with a calculator, without a GPU.

Role: a complete program. In: a model (a folder or a name on the hub), and how many hours there are. Out: a run
directory under `checkpoints/Laptop/`. Only what the work is about is set here: the run chooses compute type,
micro-batches, cache and the copy of the frozen weights by what is free, and says first how long a step computes.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the examples' folder

from parts.command_line import algorithm_config, model_config, options, settings
from quickstart.agent import TOOLS, calculator, judge

from sharpen import DatasetConfig, TuneResult, WorkflowOutput, tune

QUICKSTART = Path(__file__).resolve().parents[1] / "quickstart"
SYSTEM = "Solve the problem. Use the calculator for every computation. End with #### and the number."
MAX_CALLS = 4


async def run_agent(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """The workflow: the model may use the calculator until it answers, and does not think at length before."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["question"]}]
    for _ in range(MAX_CALLS):
        reply = await model.client.chat.completions.create(
            model=model.name,
            messages=messages,
            tools=TOOLS,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            return WorkflowOutput(response=message.content)
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            content = calculator(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return WorkflowOutput(response=None)


def main(argv: list[str] | None = None) -> TuneResult:
    """Train adapters until the time is over, and show on held-out tasks what it brought."""
    parser = options(
        __doc__,
        data=QUICKSTART / "data",
        model="Qwen/Qwen3-0.6B",
        steps=1000,
        batch_size=4,
        group_size=8,
        learning_rate=1e-4,
        max_tokens=160,
    )
    parser.add_argument("--hours", type=float, default=3.0, help="no step begins later (default %(default)s)")
    arguments = parser.parse_args(argv)
    return tune(
        workflow_func=run_agent,
        judge_func=judge,
        train_dataset=DatasetConfig(path=str(arguments.data), split="train", total_steps=arguments.steps),
        eval_dataset=DatasetConfig(path=str(arguments.data), split="test"),
        model=model_config(arguments),
        algorithm=algorithm_config(arguments),
        project_name="Laptop",
        settings={
            **settings(arguments),
            "time_limit_s": arguments.hours * 3600,
            "trainer": {"lora": {"rank": 16}},
        },
    )


if __name__ == "__main__":
    main()
