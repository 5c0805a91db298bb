"""Tune a model on a folder of Harbor's tasks: it runs commands in a session of each, and the task's tests score it.

Role: a complete program. In: a folder of tasks, where they run, a model (none: a tiny one is made on the spot). Out: a
run directory under `checkpoints/TaskFolder/`.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the examples' folder

from coding_agent.teach import Say, record, teach
from parts.command_line import algorithm_config, model_config, options, settings

from sharpen import DatasetConfig, EnvironmentConfig, TuneResult, tune
from sharpen.agent.environments.harbor import Harbor

TASKS = Path(__file__).resolve().parent / "tasks"
SHARES = {"lazy": 0.5, "right": 0.3, "wrong": 0.2}
"""How the tiny model is taught to behave: most often it says that it is done, and does nothing."""
FEW_TOKENS: dict[str, Any] = {"loss": {"kl": "none"}, "trainer": {"beta2": 0.95, "weight_decay": 0.0}}
"""As in the quickstart: a tiny model, and few steps."""


def says(command: str | None) -> Say:
    """A model that runs one command, if any, and then is done."""
    call = json.dumps({"name": "bash", "arguments": {"command": command}})
    called = f"<tool_call>\n{call}\n</tool_call>"
    return lambda prompt: "Done." if command is None or "<tool_response>" in prompt else called


def behaviours(tasks: list[dict[str, Any]], folder: Path) -> Iterator[tuple[dict[str, Any], Say, float]]:
    """What the tiny model is taught to do with each task, and how often: what solves one is wrong for the others."""
    solutions = {}
    for task in tasks:
        solve = folder / task["name"].rpartition("/")[2] / "solution" / "solve.sh"
        solutions[task["name"]] = solve.read_text().partition("\n")[2].strip()
    for task in tasks:
        yield task, says(None), SHARES["lazy"]
        for name, command in solutions.items():
            right = name == task["name"]
            yield task, says(command), SHARES["right"] if right else SHARES["wrong"] / (len(tasks) - 1)


def tiny_model(environment: EnvironmentConfig, folder: Path, num_steps: int = 150) -> str:
    """Make the tiny model: its conversations are recorded, each in a session of its task, and learnt by heart."""
    harbor = Harbor(environment)
    tasks = [dict(row) for split in ("train", "test") for row in harbor.tasks(split)]
    print("no --model: a tiny one is taught to call the tool", flush=True)
    taught = list(behaviours(tasks, Path(environment.id or "")))
    return str(teach(record(harbor.workflow, taught), folder, num_steps=num_steps))


def main(argv: list[str] | None = None) -> TuneResult:
    """Train on the tasks of a folder."""
    parser = options(
        __doc__,
        data=TASKS,
        model="",
        steps=10,
        batch_size=4,
        group_size=8,
        learning_rate=3e-4,
        max_model_len=1024,
        max_tokens=96,
    )
    parser.add_argument("--sandbox", default="root", help="docker, podman or root (default %(default)s)")
    arguments = parser.parse_args(argv)
    environment = EnvironmentConfig(type="harbor", id=str(arguments.data), args={"sandbox": arguments.sandbox})
    with tempfile.TemporaryDirectory() as folder:
        arguments.model = arguments.model or tiny_model(environment, Path(folder) / "model")
        return tune(
            environment=environment,
            train_dataset=DatasetConfig(path="environment", split="train", total_steps=arguments.steps),
            eval_dataset=DatasetConfig(path="environment", split="train"),
            model=model_config(arguments),
            algorithm=algorithm_config(arguments),
            project_name="TaskFolder",
            settings={**settings(arguments), "rollout": {"max_concurrent_rollouts": 8}, **FEW_TOKENS},
        )


if __name__ == "__main__":
    main()
