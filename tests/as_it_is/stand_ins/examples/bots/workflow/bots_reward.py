"""Stands for the score of Trinity-RFT's example `bots`: what it imports and calls, in ours."""

from trinity.common.rewards.eval_utils import remove_right_units
from trinity.common.rewards.naive_dapo_score import grade_answer, match_answer
from trinity.common.rewards.qwen25_eval import fix_fracs
from verl.utils.py_functional import timeout_limit
from verl.utils.reward_score.prime_math.grader import math_equal


@timeout_limit(seconds=10.0)
def normalized(answer):
    return fix_fracs(remove_right_units(answer))


def compute_score_bots(solution_str, ground_truth):
    _, answer = match_answer(str(solution_str))
    right, _ = grade_answer(answer, str(ground_truth))
    return float(right or math_equal(normalized(answer), str(ground_truth)))
