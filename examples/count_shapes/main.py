"""Tune an agent that looks at pictures: it counts shapes, and learns to say what it sees."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the examples' folder

from count_shapes.agent import judge, run_agent
from count_shapes.make_data import write_pictures
from count_shapes.make_model import make_model
from parts.command_line import algorithm_config, model_config, options, settings

from sharpen import DatasetConfig, TuneResult, tune

HERE = Path(__file__).resolve().parent
OWN_MODEL = "taught"


def main(argv: list[str] | None = None) -> TuneResult:
    """Draw the pictures (and make the model, where none is named), then train."""
    parser = options(
        __doc__,
        data=HERE / "data",
        model=OWN_MODEL,
        steps=20,
        batch_size=8,
        group_size=8,
        learning_rate=1e-3,
        max_model_len=256,
        max_tokens=4,
    )
    arguments = parser.parse_args(argv)
    if arguments.model == OWN_MODEL:
        arguments.model = str(make_model(arguments.data / OWN_MODEL))
    data = str(write_pictures(arguments.data))
    return tune(
        workflow_func=run_agent,
        judge_func=judge,
        train_dataset=DatasetConfig(path=data, split="train", total_steps=arguments.steps),
        eval_dataset=DatasetConfig(path=data, split="test"),
        model=model_config(arguments),
        algorithm=algorithm_config(arguments),
        project_name="CountShapes",
        settings=settings(arguments),
    )


if __name__ == "__main__":
    main()
