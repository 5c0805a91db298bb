"""Tune an agent on Gymnasium's FrozenLake: several turns, the reward from the workflow."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the examples' folder

from frozen_lake.agent import run_agent
from frozen_lake.make_data import write_lakes
from frozen_lake.make_model import make_model
from parts.command_line import algorithm_config, model_config, options, settings

from sharpen import DatasetConfig, TuneResult, tune

HERE = Path(__file__).resolve().parent
OWN_MODEL = "random"


def main(argv: list[str] | None = None) -> TuneResult:
    """Write the maps (and the model, where none is named), then train."""
    parser = options(
        __doc__,
        data=HERE / "data",
        model=OWN_MODEL,
        steps=60,
        batch_size=8,
        group_size=8,
        learning_rate=2e-3,
        max_tokens=4,
    )
    parser.add_argument("--size", type=int, default=4, help="rows and columns of the maps (default %(default)s)")
    parser.add_argument("--slippery", action="store_true", help="moves may slip to the side")
    arguments = parser.parse_args(argv)
    name = f"{arguments.size}x{arguments.size}{'-slippery' if arguments.slippery else ''}"
    if arguments.model == OWN_MODEL:
        arguments.model = str(make_model(arguments.data / OWN_MODEL))
    data = str(write_lakes(arguments.data / name, size=arguments.size, slippery=arguments.slippery))
    return tune(
        workflow_func=run_agent,
        train_dataset=DatasetConfig(path=data, split="train", total_steps=arguments.steps),
        eval_dataset=DatasetConfig(path=data, split="test"),
        model=model_config(arguments),
        algorithm=algorithm_config(arguments),
        project_name="FrozenLake",
        settings=settings(arguments),
    )


if __name__ == "__main__":
    main()
