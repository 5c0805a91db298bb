"""Trinity's further workflows by name, with hand-computed rewards: maths, tool calls, rubrics, sudoku."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from trinity_serving import MakePlace

from sharpen.compat.trinity import REWARD_FUNCTIONS, WORKFLOWS, MathDAPORewardFn, RewardFn
from sharpen.compat.trinity.workflows.maths import answer_said
from sharpen.compat.trinity.workflows.rubric import rating_in
from sharpen.compat.trinity.workflows.sudoku import is_valid, made_board
from sharpen.compat.trinity.workflows.tool_calls import expected_calls, makes_calls
from sharpen.config.functions import import_function
from sharpen.errors import ConfigError, DatasetError
from sharpen.types import Outcome

GSM8K = {"question": "How many?", "answer": "6 * 7 = <<6*7=42>>42\n#### 42"}
KEYS = {"prompt_key": "question", "response_key": "answer"}


def test_every_built_in_name_leads_to_a_class():
    for registry in (WORKFLOWS, REWARD_FUNCTIONS):
        for name in registry.names():
            if name in registry.built_in:
                assert isinstance(import_function(registry.built_in[name]), type), name


# Evaluation and reward models


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"first \boxed{1}, the answer is 2, so \boxed{3}", "3"),
        ("The final answer is: 12 apples.", "12 apples"),
        ("答案是：7", "7"),
        ("I think the answer is 5.", "5"),
        ("6 times 7 makes 1,042", "1042"),
        ("from -3 to -4.5 degrees", "-4.5"),
        ("no idea", None),
    ],
)
def test_what_a_solution_says(text: str, answer: str | None):
    assert answer_said(text) == answer


@pytest.mark.parametrize("workflow", ["math_eval_workflow", "async_math_eval_workflow"])
@pytest.mark.parametrize(("says", "reward"), [("6 times 7 is 42", 1.0), ("41", 0.0), ("dunno", 0.0)])
def test_evaluation_of_mathematics(make_place: MakePlace, workflow: str, says: str, reward: float):
    rollout = make_place(says).one(workflow, GSM8K, taskset=KEYS)
    assert (rollout.reward, rollout.metrics, rollout.error) == (reward, {"accuracy": reward}, None)
    (call,) = rollout.calls
    assert (call.sampling.temperature, call.sampling.top_p) == (0.6, 0.8)
    assert "\\boxed{}" in call.messages[1]["content"]


class Preference(RewardFn):
    """A reward model's shape: the experience, the messages, the truth."""

    def __call__(self, response: Any, messages: Any, ground_truth: Any) -> dict[str, float]:
        return {"helpful": float("yes" in response.response_text), "messages": float(len(messages))}


@pytest.mark.parametrize("workflow", ["math_rm_workflow", "async_math_rm_workflow"])
def test_a_reward_model_sees_messages_and_experience(make_place: MakePlace, workflow: str):
    taskset = {**KEYS, "reward_fn": f"{__name__}:Preference", "system_prompt": "Be kind."}
    rollout = make_place("yes").one(workflow, GSM8K, taskset=taskset)
    assert (rollout.reward, rollout.metrics) == (3.0, {"helpful": 1.0, "messages": 2.0})
    with pytest.raises(ConfigError, match=r"MathRMWorkflow needs a reward function of your own: set task_args\.rewa"):
        make_place("yes").run(workflow, GSM8K, taskset=KEYS)


@pytest.mark.parametrize(
    ("said", "reward"), [("It is 6 * 7, so \\boxed{42}", 1.0), ("42", 1.0), ("the answer is $41$", 0.0), ("none", 0.0)]
)
def test_rm_gallerys_comparison_of_answers(make_place: MakePlace, said: str, reward: float):
    """The scores of rm-gallery 0.1.7 for the same answers."""
    taskset = {**KEYS, "reward_fn": "rm_gallery_reward", "reward_fn_args": {"reward_name": "math_verify_reward"}}
    rollout = make_place(said).one("math_rm_workflow", GSM8K, taskset=taskset)
    assert (rollout.reward, rollout.metrics) == (reward, {"math_verify": reward})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"reward_name": "safety_listwise_reward"}, "reward_name is 'safety_listwise_reward': of rm-gallery's rewards"),
        ({}, "reward_name is ''"),
        ({"reward_name": "math_verify_reward", "timeout_score": 0.5}, "timeout_score is 0.5"),
        ({"reward_name": "math_verify_reward", "judge": 1}, "does not take task_args.reward_fn_args"),
    ],
)
def test_other_rewards_of_rm_gallery_are_refused_before_anything_runs(
    make_place: MakePlace, arguments: dict[str, Any], words: str
):
    place = make_place("42")
    with pytest.raises(ConfigError) as error:
        place.run(
            "math_rm_workflow", GSM8K, taskset={**KEYS, "reward_fn": "rm_gallery_reward", "reward_fn_args": arguments}
        )
    assert words in str(error.value)
    assert place.engine.prompts == []


# DAPO


@pytest.mark.parametrize(
    ("response", "accuracy"),
    [
        ("<think>\\boxed{1}</think> so \\boxed{42}", 1.0),
        ("<think>\\boxed{42}</think> so 41", -1.0),
        ("42", 1.0),
        ("\\boxed{41}", -1.0),
        ("", -1.0),
    ],
)
def test_dapo_scores_what_follows_the_thinking(response: str, accuracy: float):
    assert MathDAPORewardFn()(response=response, truth="42") == {"accuracy": accuracy, "format_score": 0.0}


def test_dapo_punishes_answers_near_the_limit():
    reward = MathDAPORewardFn(
        enable_overlong_penalty=True, penalty_factor=0.5, max_response_length=100, cache_length=20
    )
    penalties = [(79, 0.0), (80, 0.0), (90, -0.25), (100, -0.5), (101, -0.5), (300, -0.5)]
    for length, penalty in penalties:
        found = reward(response="42", truth="42", response_token=list(range(length)))
        assert found == {"accuracy": 1.0, "format_score": penalty}
    assert reward(response="42", truth="42", response_token=None)["format_score"] == 0.0


def test_dapo_needs_its_numbers_and_tokens():
    with pytest.raises(ConfigError, match=r"reward_fn_args\.penalty_factor, max_response_length and cache_length"):
        MathDAPORewardFn(enable_overlong_penalty=True, penalty_factor=1.0)
    with pytest.raises(ConfigError, match=r"max_response_length is 10, which must be greater than cache_length \(10\)"):
        MathDAPORewardFn(True, 1.0, 10, 10)
    with pytest.raises(ConfigError, match="counts tokens, which this workflow does not pass: use math_boxed_workflow"):
        MathDAPORewardFn(True, 1.0, 10, 5)(response="42", truth="42")


def test_dapo_counts_the_tokens_of_a_boxed_workflow(make_place: MakePlace):
    place = make_place("It is \\boxed{42}.")
    penalty = {"enable_overlong_penalty": True, "penalty_factor": 1.0, "max_response_length": 10, "cache_length": 8}
    taskset = {**KEYS, "reward_fn": "math_dapo_reward", "reward_fn_args": penalty}
    rollout = place.one("math_boxed_workflow", GSM8K, taskset=taskset)
    num_tokens = len(rollout.calls[0].sampled_ids_S)
    assert num_tokens > 10
    assert (rollout.reward, rollout.metrics) == (0.0, {"accuracy": 1.0, "format_score": -1.0})
    plain = place.one("math_boxed_workflow", GSM8K, taskset={**KEYS, "reward_fn": f"{__name__}:Plain"})
    assert (plain.reward, plain.error) == (1.0, None)


class Plain(RewardFn):
    """Takes the answer and the truth alone."""

    def __call__(self, response: str, truth: str) -> dict[str, float]:
        return {"plain": 1.0}


# Tool calls

ADD = {"name": "add", "arguments": {"a": 1, "b": 2}}
NOW = {"name": "now", "arguments": {}}
THOUGHT = "<think>Easy.</think>\n"


def written(*calls: dict[str, Any]) -> str:
    return f"<tool_call>{json.dumps(calls)}</tool_call>"


@pytest.mark.parametrize(
    ("response", "right"),
    [
        (THOUGHT + written(ADD, NOW), True),
        (THOUGHT + written(NOW, ADD), True),
        (THOUGHT + written({"name": "add", "arguments": {"b": 2, "a": 1}}, NOW), True),
        (THOUGHT + written(ADD), False),
        (THOUGHT + written(ADD, ADD, NOW), False),
        (THOUGHT + written({"name": "add", "arguments": {"a": 1, "b": "2"}}, NOW), False),
        (THOUGHT + written({"name": "add"}, NOW), False),
        (written(ADD, NOW), False),
        (THOUGHT + THOUGHT + written(ADD, NOW), False),
        (written(ADD, NOW) + THOUGHT, False),
        (THOUGHT + "<tool_call>[oops</tool_call>", False),
        (THOUGHT + "<tool_call>5</tool_call>", False),
        (THOUGHT + "nothing to call", False),
        (THOUGHT + written(ADD) + written(ADD, NOW), True),
    ],
)
def test_exactly_the_expected_calls_are_right(response: str, right: bool):
    assert makes_calls(response, expected_calls(json.dumps([ADD, NOW]))) is right


def test_calls_in_other_forms_of_json():
    assert makes_calls(THOUGHT + f"<tool_call>{json.dumps(ADD)}</tool_call>", expected_calls(json.dumps([ADD])))
    assert makes_calls(THOUGHT + "<tool_call>[]</tool_call>", expected_calls("[]"))
    assert expected_calls(json.dumps(json.dumps([ADD]))) == [ADD]
    with pytest.raises(DatasetError, match="the task's 'answer' is 'now'"):
        expected_calls("now")


@pytest.mark.parametrize("name", ["tool_call_workflow", "toolcall_workflow"])
def test_a_conversation_with_tools(make_place: MakePlace, name: str):
    place = make_place(THOUGHT + written(ADD))
    schema = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    turns = [
        ("human", "1 + 2?"),
        ("function_call", NOW),
        ("observation", "noon"),
        ("gpt", "Let me see."),
        ("human", "?"),
    ]
    row = {
        "raw_system": "Be brief.\n",
        "tools": json.dumps([schema]),
        "conversations": [{"from": who, "value": said} for who, said in turns],
        "answer": json.dumps([ADD]),
    }
    rollout = place.one(name, row)
    assert (rollout.reward, rollout.error) == (1.0, None)
    messages = rollout.calls[0].messages
    assert [one["role"] for one in messages] == ["system", "user", "assistant", "tool", "assistant", "user"]
    assert messages[0]["content"].startswith("Be brief.\n")
    for part in (json.dumps(schema), "<think>", "</think>", "<tool_call>", "</tool_call>", '"name"', '"arguments"'):
        assert part in messages[0]["content"]
    assert messages[2]["content"] == json.dumps(NOW)
    with pytest.raises(DatasetError, match="a turn from 'robot'"):
        place.run(name, {**row, "conversations": [{"from": "robot", "value": ""}]})


# Rubrics

RUBRIC = {**GSM8K, "rubric": [{"description": "It is short.", "weight": 2}]}


def rated(reply: str) -> Any:
    return lambda prompt: reply if "<rubrics>" in prompt else "forty-two"


def test_a_judge_rates_by_rubrics(make_place: MakePlace):
    place = make_place(rated('```json\n{"rating": 7}\n``` since it is short'))
    rollout = place.one("rubric_judge_workflow", RUBRIC, taskset=KEYS)
    assert rollout.reward == pytest.approx(0.7)
    assert rollout.metrics == {"judge_success": 1.0}
    asked = next(prompt for prompt in place.engine.prompts if "<rubrics>" in prompt)
    for part in ("Rubric 1 (weight 2): It is short.", "How many?", "forty-two", '"rating"'):
        assert part in asked


def test_a_judgement_that_cannot_be_read_is_no_reward(make_place: MakePlace):
    rollout = make_place(rated("seven")).one("rubric_judge_workflow", RUBRIC, taskset=KEYS)
    assert (rollout.outcome, rollout.reward) == (Outcome.WORKFLOW_ERROR, None)
    assert "no JSON block with a rating: 'seven'" in str(rollout.error)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ("```\n{}\n```", "rating is None"),
        ('```json\n{"rating": 11}```', "rating is 11: it must be a number from 1 to 10"),
        ('```json\n{"rating": "7"}```', "rating is '7'"),
        ("```json\n[7]```", "no JSON object with a rating"),
        ("```json\nseven```", "no JSON object with a rating"),
    ],
)
def test_a_rating_is_a_number_from_1_to_10(reply: str, words: str):
    with pytest.raises(ValueError, match=words):
        rating_in(reply)
    assert rating_in('```\n{"rating": 1}\n``` and ```json {"rating": 9}```') == 1.0


def test_a_judge_behind_an_api_is_named_by_the_environment(make_place: MakePlace, monkeypatch):
    name = "rubric_judge_openai_workflow"
    with pytest.raises(ConfigError, match=r"workflow_args\.judge_model_name is missing"):
        make_place("yes").run(name, RUBRIC, taskset=KEYS)
    args = {"judge_model_name": "judge", "judge_api_base_url_env": "NO_SUCH_URL"}
    with pytest.raises(ConfigError, match="the environment variable NO_SUCH_URL is not set"):
        make_place("yes").run(name, RUBRIC, taskset=KEYS, workflow_args=args)


# Sudoku

SOLUTION = [[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 2, 1]]


def puzzle(*empty: tuple[int, int]) -> dict[str, Any]:
    board = [list(row) for row in SOLUTION]
    for row, column in empty:
        board[row][column] = 0
    return {"puzzle": board, "solution": SOLUTION}


@pytest.mark.parametrize(
    ("replies", "rewards"),
    [
        (["0 0 1\n0 1 2"], [1.0]),
        (["0 0 1", "0 1 2"], [0.0, 1.0]),
        (["0 0 2"], [-1.0]),  # 2 stands in the row
        (["1 1 4"], [-1.0]),  # not empty
        (["0 0 1", "0 0 1"], [0.0, -1.0]),
        (["row 0, column 0: 1"], [-1.0]),
        (["0 0 5"], [-1.0]),
        ([""], [-1.0]),
        (["0 0 1\n" * 6], [-1.0]),  # more than five moves
    ],
)
def test_a_sudoku_is_solved_step_by_step(make_place: MakePlace, replies: list[str], rewards: list[float]):
    left = list(replies)
    place = make_place(lambda prompt: left.pop(0))
    rollout = place.one("sudoku_workflow", puzzle((0, 0), (0, 1)))
    assert (list(rollout.call_rewards.values()), rollout.error) == (rewards, None)
    assert rollout.reward == rewards[-1]
    assert "0 0 3 4\n3 4 1 2" in place.engine.prompts[0]
    assert "Step 1 of 20" in place.engine.prompts[0]


def test_a_sudoku_ends_when_its_steps_have_run_out(make_place: MakePlace):
    cells = iter(range(81))

    def fills(prompt: str) -> str:
        cell = next(one for one in cells if board[one // 9][one % 9] == 0)
        return f"{cell // 9} {cell % 9} {solved[cell // 9][cell % 9]}"

    board, solved = made_board(random.Random("7"))
    rollout = make_place(fills).one("sudoku_workflow", {"puzzle": board, "solution": solved})
    assert list(rollout.call_rewards.values()) == [0.0] * 20


def test_a_board_is_made_for_the_task(make_place: MakePlace):
    for seed in range(20):
        board, solved = made_board(random.Random(seed))
        assert is_valid(board)
        assert is_valid(solved)
        assert sum(value == 0 for row in board for value in row) == 40
        assert all(
            shown in (0, true) for a, b in zip(board, solved, strict=True) for shown, true in zip(a, b, strict=True)
        )
        assert {value for row in solved for value in row} == set(range(1, 10))
    place = make_place("?")
    place.run("sudoku_workflow", {"prompt": "a"}, {"prompt": "b"}, group_size=2)
    first, second, third, fourth = place.engine.prompts
    assert len({first, second, third, fourth}) == 2  # one board for each task
    with pytest.raises(DatasetError, match="only one of the fields 'puzzle' and 'solution'"):
        place.run("sudoku_workflow", {"puzzle": board})


@pytest.mark.parametrize("cells", [((0, 0, 2),), ((1, 0, 1),), ((1, 1, 1),)])
def test_a_number_twice_breaks_a_rule(cells: Any):
    board = [[1, 0, 0, 2], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert is_valid(board)
    for row, column, value in cells:
        board[row][column] = value
    assert not is_valid(board)
