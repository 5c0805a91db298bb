"""Tune a model on a generator of reasoning-gym: tasks, workflow and judge are the environment's.

Role: a complete program. In: a generator, a model (none: a tiny one is made on the spot). Out: a run directory under
`checkpoints/Reasoning/`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the examples' folder

from parts.command_line import algorithm_config, model_config, options, settings

from sharpen import EnvironmentConfig, TuneResult, tune
from sharpen.cli.starter.questions import EASY, PROMPT, questions_of
from sharpen.cli.starter.tiny_model import make_tiny_model

MODEL = Path("tiny_model")


def environment(generator: str, *, real: bool) -> EnvironmentConfig:
    """The generator: as it is for a real model, sums of two digits for the tiny one."""
    if real:
        return EnvironmentConfig(type="reasoning-gym", id=generator)
    return EnvironmentConfig(
        type="reasoning-gym",
        id=generator,
        args=EASY.get(generator, {}),
        system_prompt=PROMPT,
        train_tasks=140,
        held_out_tasks=60,  # none of these trains
    )


def main(argv: list[str] | None = None) -> TuneResult:
    """Train, and show on held-out tasks what it brought."""
    parser = options(
        __doc__,
        data=None,
        model=str(MODEL),
        steps=80,
        batch_size=8,
        group_size=8,
        learning_rate=3e-4,
        max_model_len=512,
        max_tokens=16,
    )
    parser.add_argument("--generator", default="chain_sum", help="a generator's name (default %(default)s)")
    arguments = parser.parse_args(argv)
    tasks = environment(arguments.generator, real=arguments.model != str(MODEL))
    if arguments.model == str(MODEL) and not MODEL.exists():
        make_tiny_model(MODEL, questions=questions_of(tasks))
    return tune(
        environment=tasks,
        model=model_config(arguments),
        algorithm=algorithm_config(arguments),
        project_name="Reasoning",
        settings={**settings(arguments), "train_dataset.total_steps": arguments.steps},
    )


if __name__ == "__main__":
    main()
