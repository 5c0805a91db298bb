"""Tune a model to play a game of two against its own past; games against the original say whether it plays better."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the examples' folder

from parts.command_line import algorithm_config, model_config, options, settings
from two_players.game import RIVAL, run_agent
from two_players.make_data import write_games
from two_players.make_model import make_model

from sharpen import DatasetConfig, TuneResult, tune

HERE = Path(__file__).resolve().parent
OWN_MODEL = "taught here"


def main(argv: list[str] | None = None) -> TuneResult:
    """Write the games (and teach the model the rules, where none is named), then train."""
    parser = options(
        __doc__,
        data=HERE / "data",
        model=OWN_MODEL,
        steps=60,
        batch_size=8,
        group_size=8,
        learning_rate=2e-3,
        max_model_len=128,
        max_tokens=4,
        eval_tasks=96,
    )
    parser.add_argument(
        "--every", type=int, default=5, help="steps until the opponent is renewed; 0: it stays the original"
    )
    arguments = parser.parse_args(argv)
    data = str(write_games(arguments.data))
    if arguments.model == OWN_MODEL:
        arguments.model = str(make_model(arguments.data / "model"))
    rival = {"follow": "trained", "every": arguments.every} if arguments.every else {"follow": "original"}
    return tune(
        workflow_func=run_agent,
        train_dataset=DatasetConfig(path=data, split="train", total_steps=arguments.steps),
        eval_dataset=DatasetConfig(path=data, split="test"),
        model=model_config(arguments),
        algorithm=algorithm_config(arguments),
        project_name="TwoPlayers",
        settings={**settings(arguments), "trainer": {"lora": {"rank": 16}}, "policies": {RIVAL: rival}},
    )


if __name__ == "__main__":
    main()
