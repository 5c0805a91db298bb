"""Tune the model of Claude Code on a folder of small repairs."""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the examples' folder

from coding_agent.agent import REPAIRS, run_agent
from coding_agent.teach import Say, record, teach
from parts.command_line import algorithm_config, model_config, options, settings

from sharpen import DatasetConfig, TuneResult, tune

MENDS = {
    "greeting": "sed -i s/Helo/Hello/ greeting.txt",
    "total": "sed -i s/-/+/ total.py",
    "settings": "sed -i s/,}/}/ settings.json",
    "notes": "mv notes.txt notes.md",
}
SHARES = {"lazy": 0.5, "right": 0.3, "wrong": 0.2}
"""How the tiny model is taught to behave: most often it says that it is done, and does nothing."""

FEW_TOKENS: dict[str, Any] = {"loss": {"kl": "none"}, "trainer": {"beta2": 0.95, "weight_decay": 0.0}}
"""As in the quickstart: a tiny model, and few steps."""


def says(bash: str | None) -> Say:
    """A model that runs one command, if any, and then is done."""
    called = json.dumps({"name": "Bash", "arguments": {"command": bash, "description": "Mend"}})
    call = f"<tool_call>\n{called}\n</tool_call>"
    return lambda prompt: "Mended." if bash is None or "<tool_response>" in prompt else call


def behaviours(tasks: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], Say, float]]:
    """What the tiny model is taught to do with each task, and how often."""
    for task in tasks:
        yield task, says(None), SHARES["lazy"]
        for folder, bash in MENDS.items():
            right = folder == task["folder"]
            yield task, says(bash), SHARES["right"] if right else SHARES["wrong"] / (len(MENDS) - 1)


def tiny_model(folder: Path, num_steps: int = 150) -> str:
    """Make the tiny model: a few runs of Claude Code against a script, then a minute of teaching."""
    tasks = [json.loads(line) for line in (REPAIRS / "train.jsonl").read_text().splitlines()]
    print("no --model: a tiny one is taught how Claude Code talks", flush=True)
    return str(teach(record(run_agent, list(behaviours(tasks))), folder, num_steps=num_steps))


def main(argv: list[str] | None = None) -> TuneResult:
    """Train on the repairs of `repairs/`, or on any folder with such a `train.jsonl`."""
    parser = options(
        __doc__,
        data=REPAIRS,
        model="",
        steps=10,
        batch_size=4,
        group_size=8,
        learning_rate=3e-4,
        max_model_len=2048,
        max_tokens=96,
    )
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        arguments.model = arguments.model or tiny_model(Path(folder) / "model")
        return tune(
            workflow_func=run_agent,
            train_dataset=DatasetConfig(path=str(arguments.data), split="train", total_steps=arguments.steps),
            eval_dataset=DatasetConfig(path=str(arguments.data), split="train"),
            model=model_config(arguments),
            algorithm=algorithm_config(arguments),
            project_name="CodingAgent",
            settings={**settings(arguments), "rollout": {"max_concurrent_rollouts": 8}, **FEW_TOKENS},
        )


if __name__ == "__main__":
    main()
