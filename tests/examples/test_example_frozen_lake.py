"""The frozen lake: reading moves, playing whole games by script, the maps, and two steps of training."""

import pytest
from lines import different
from scripted_models import rows_of

TASK = {"map": ["SFFF", "FHFH", "FFFH", "HFFG"], "slippery": False, "seed": 1, "max_turns": 8}
PLAIN, LARGER = different("examples/frozen_lake/main.py")
WAY = ("down", "down", "right", "right", "down", "right")


@pytest.mark.parametrize(
    ("reply", "move"),
    [
        ("left", 0),
        ("DOWN", 1),
        ("I could go left, but there is a hole: right.", 2),
        ("<think>down?</think>\nUp!", 3),
        ("", None),
        ("upwards, leftover", None),
        ("2", None),
    ],
)
def test_moves_are_read_from_replies(reply, move):
    from frozen_lake.agent import read_move

    assert read_move(reply) == move


def test_a_game_to_the_goal(scripted, play):
    from frozen_lake.agent import run_agent

    model = scripted(*WAY)
    output = play(run_agent, models=[model], task=TASK, model=model)
    assert output.reward == 1.0
    assert output.metrics == {"reached": True, "fell": False, "turns": 6, "no_moves": 0}
    first, last = model.requests[0], model.requests[-1]
    assert [message["role"] for message in first] == ["system", "user"]
    assert first[1]["content"] == "PFFF\nFHFH\nFFFH\nHFFG"
    assert last[: len(first)] == first
    assert model.seen == ["SFFF\nFHFH\nFFFH\nHFPG"]


def test_a_hole_ends_the_game(scripted, play):
    from frozen_lake.agent import run_agent

    model = scripted("down", "right")
    output = play(run_agent, models=[model], task=TASK, model=model)
    assert output.reward == 0.0
    assert output.metrics == {"reached": False, "fell": True, "turns": 2, "no_moves": 0}


def test_replies_that_are_no_moves_cost_a_turn_and_reward(scripted, play):
    from frozen_lake.agent import NO_MOVE, run_agent

    model = scripted("hello", *WAY, "never asked")
    output = play(run_agent, models=[model], task=TASK, model=model)
    assert output.reward == pytest.approx(1.0 - 0.2 / 7)
    assert model.requests[1][-1] == {"role": "user", "content": NO_MOVE}
    model = scripted(*["hello"] * 8)
    output = play(run_agent, models=[model], task=TASK, model=model)
    assert output.reward == pytest.approx(-0.2)
    assert output.metrics["turns"] == 8


def test_coming_nearer_is_worth_something(scripted, play):
    from frozen_lake.agent import run_agent

    model = scripted("down", "down", *["hello"] * 6)
    output = play(run_agent, models=[model], task=TASK, model=model)
    assert output.reward == pytest.approx(0.3 * 2 / 6 - 0.2 * 6 / 8)


def test_ice_slips_the_same_way_for_the_same_seed(scripted, play):
    from frozen_lake.agent import run_agent

    def seen(seed):
        model = scripted(*["right"] * 8)
        play(run_agent, models=[model], task={**TASK, "slippery": True, "seed": seed}, model=model)
        return [message["content"] for message in model.requests[-1][1:]]

    games = [seen(seed) for seed in (1, 1, 2, 3, 4)]
    assert games[0] == games[1]
    assert len({tuple(game) for game in games}) > 1


@pytest.mark.parametrize("slippery", [False, True])
def test_maps_are_distinct_solvable_and_repeatable(tmp_path, slippery):

    from frozen_lake.make_data import NUM_TEST, NUM_TRAIN, shortest_way, write_lakes

    folder = write_lakes(tmp_path / "a", slippery=slippery)
    rows = {split: rows_of(folder / f"{split}.jsonl") for split in ("train", "test")}
    assert [len(rows["train"]), len(rows["test"])] == [NUM_TRAIN, NUM_TEST]
    maps = ["".join(row["map"]) for split in rows.values() for row in split]
    assert len(set(maps)) == len(maps)
    assert all(row["max_turns"] >= 2 * shortest_way(row["map"]) >= 12 for row in rows["train"])
    again = write_lakes(tmp_path / "b", slippery=slippery)
    assert (again / "train.jsonl").read_bytes() == (folder / "train.jsonl").read_bytes()


def test_shortest_way():
    from frozen_lake.make_data import distinct_lakes, shortest_way

    assert shortest_way(TASK["map"]) == 6
    with pytest.raises(ValueError, match="no way to the goal"):
        shortest_way(["SH", "HG"])
    with pytest.raises(ValueError, match="size is 3"):
        next(distinct_lakes(3, False, 0))


def test_the_random_model_has_a_word_for_everything_it_needs():
    from frozen_lake.agent import opening
    from frozen_lake.make_model import make_tokenizer

    tokenizer = make_tokenizer()
    ids = tokenizer.apply_chat_template(opening(TASK, 0), add_generation_prompt=True)["input_ids"]
    text = tokenizer.decode(ids)
    assert text.endswith("user\nPFFF\nFHFH\nFFFH\nHFFG<|im_end|>\n<|im_start|>assistant\n")
    assert text.count("left") == text.count("up") == 1
    for word in ("left", "down", "right", "up"):
        assert len(tokenizer.encode(word)) == 1


def test_two_steps_of_training(short, check_run):
    from frozen_lake.main import main

    rollouts = check_run(main([*PLAIN, *short]))
    assert all(len(rollout.calls) == rollout.metrics["turns"] for rollout in rollouts)
    assert any(rollout.metrics["no_moves"] < rollout.metrics["turns"] for rollout in rollouts), "some said a move"


def test_a_step_on_larger_maps_whose_longest_game_fits(tmp_path):
    """Break: less than 6144 tokens on the page, and games that end neither at the goal nor in a hole are too long. The
    step is of smaller maps: games of sixty turns take their time."""
    from frozen_lake.agent import draw, opening
    from frozen_lake.main import main
    from frozen_lake.make_data import write_lakes
    from frozen_lake.make_model import make_tokenizer

    small = ["--steps=1", "--batch-size=1", "--group-size=2", "--eval-tasks=1", "--size=4"]
    result = main([*LARGER, *small, f"--data={tmp_path / 'data'}", f"--out={tmp_path / 'runs'}"])
    assert result.steps == 1
    folder = write_lakes(tmp_path / "larger", size=int(LARGER[LARGER.index("--size") + 1]), slippery=True)
    task = max(rows_of(folder / "train.jsonl") + rows_of(folder / "test.jsonl"), key=lambda task: task["max_turns"])
    turn = [{"role": "assistant", "content": "up up up up"}, {"role": "user", "content": draw(task["map"], 0)}]
    ids = make_tokenizer().apply_chat_template([*opening(task, 0), *turn * task["max_turns"]])["input_ids"]
    assert len(ids) <= int(LARGER[LARGER.index("--max-model-len") + 1])
