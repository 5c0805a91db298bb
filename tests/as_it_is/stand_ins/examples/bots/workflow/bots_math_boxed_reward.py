"""Stands for the reward function of Trinity-RFT's example `bots`: what it imports and returns, in ours."""

from examples.bots.workflow.bots_reward import compute_score_bots
from trinity.common.rewards.eval_utils import validate_think_pattern
from trinity.common.rewards.reward_fn import RewardFn


class BOTSMathBoxedRewardFn(RewardFn):
    """Whether the answer is right, and thinks as it should."""

    def __init__(self, **kwargs) -> None:
        pass

    def __call__(self, response, truth=None, with_think=False, format_score_coef=0.1, **kwargs):
        untidy = with_think and not validate_think_pattern(response)
        return {
            "accuracy": compute_score_bots(response, truth),
            "format_score": -format_score_coef if untidy else 0.0,
        }
