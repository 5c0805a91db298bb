"""The taking game: moves, whole games by script, the games of both files, and a step of training by each line."""

import pytest
from lines import different
from scripted_models import rows_of

PLAIN, FROZEN = different("examples/two_players/main.py")


@pytest.mark.parametrize(
    ("reply", "sticks", "taken"),
    [
        ("2", 9, 2),
        ("I take 1, no: 3", 3, 3),
        ("4", 9, None),
        ("3", 2, None),
        ("0", 9, None),
        ("two", 9, None),
        ("", 1, None),
    ],
)
def test_moves_are_read_from_replies(reply, sticks, taken):
    from two_players.game import read_move

    assert read_move(reply, sticks) == taken


@pytest.mark.parametrize(
    ("seat", "mine", "theirs", "reward"),
    [
        ("first", ["1", "3"], ["1"], 1.0),
        ("second", ["2", "1"], ["1", "1"], 1.0),
        ("second", ["2"], ["1", "2"], -1.0),
        ("first", ["nine"], [], -1.0),
        ("first", ["1"], ["5"], 1.0),
    ],
)
def test_whole_games_from_either_seat(scripted, play, seat, mine, theirs, reward):
    """Of five sticks. Red when the two sit in each other's place."""
    from two_players.game import run_agent

    model, rival = scripted(*mine), scripted(*theirs)
    model.named = {"rival": rival}.__getitem__
    output = play(run_agent, models=[model, rival], task={"sticks": 5, "seat": seat, "game": 0}, model=model)
    assert output.reward == reward
    assert output.metrics["broke_rules"] == (mine == ["nine"])
    assert not model.replies
    assert not rival.replies


def test_held_out_games_begin_with_other_heaps(tmp_path):
    from two_players.make_data import write_games

    folder = write_games(tmp_path)
    train, test = (rows_of(folder / f"{split}.jsonl") for split in ("train", "test"))
    assert not {row["sticks"] for row in train} & {row["sticks"] for row in test}
    assert len(test) == 96
    assert {row["seat"] for row in train} == {row["seat"] for row in test} == {"first", "second"}


@pytest.mark.parametrize("line", [PLAIN, FROZEN])
def test_two_steps_of_training(short, tmp_path, line):
    """The model is taught little: that a number is to be said."""
    from two_players.main import main
    from two_players.make_model import make_model

    from sharpen.learning.experience.reading import read_groups

    make_model(tmp_path / "data" / "model", lessons=30)
    result = main([*line, *short, "--max-model-len=128"])
    assert result.steps == 2
    calls = [
        call for group in read_groups(result.run_dir / "run.db") for rollout in group.rollouts for call in rollout.calls
    ]
    assert {(call.agent, str(call.status)) for call in calls} == {("", "used"), ("rival", "left_out")}
