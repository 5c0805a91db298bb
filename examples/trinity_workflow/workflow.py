"""A Trinity-RFT `Workflow`: the quickstart's ReAct agent, asked through Trinity's model wrapper, scored call by call.

Role: what an owner of a Trinity workflow brings; only the import line names Sharpen.
In: a `Task` with a row in GSM8K's layout, a `ModelWrapper`. Out: an `Experience` for each call, with its reward.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the examples' folder

from quickstart.agent import last_number, solve

from sharpen.compat.trinity import WORKFLOWS, Experience, ModelWrapper, Task, Workflow


@WORKFLOWS.register_module("calculator_workflow")
class CalculatorWorkflow(Workflow):
    """Solves one word problem with a calculator; the last number of the answer counts."""

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[ModelWrapper] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.question = str(task.task_desc)
        self.truth = last_number(task.truth)
        self.guess_cost = float(task.workflow_args.get("guess_cost", 0.0))

    async def run_async(self) -> list[Experience]:
        """Run the agent, then turn what it asked the model into experiences with a reward."""
        client = self.model.get_openai_async_client()
        answer = await solve(client, self.model.model_name, self.question)
        experiences = self.model.extract_experience_from_history()
        correct = last_number(answer) == self.truth
        guessed = len(experiences) == 1
        for experience in experiences:
            experience.reward = float(correct) - self.guess_cost * guessed
        experiences[-1].metrics = {"accuracy": float(correct), "guessed": float(guessed)}
        return experiences
