"""`rm_gallery_reward`: a reward of the package rm-gallery by its name, as far as it can be had without that package.

In: `reward_fn_args.reward_name`, the experience and the row's truth. Out: the score under the name that it has there.
rm-gallery itself (0.1.7, the last one) needs transformers below 5 and openai below 2, so it cannot be installed beside
Sharpen; its `math_verify_reward` is a comparison by math-verify, which can.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sharpen.compat.trinity.equality import require_math_verify, says
from sharpen.compat.trinity.experience import Experience
from sharpen.compat.trinity.rewards import RewardFn, truth_in
from sharpen.errors import ConfigError

MATH_VERIFY = "math_verify_reward"


class RMGalleryFn(RewardFn):
    """The reward of that name, for `math_rm_workflow`. Only `math_verify_reward` is there: `math_verify` is 1 if the
    answer that math-verify reads in the text equals the truth, else 0 (also where it takes too long).
    """

    def __init__(self, reward_name: str = "", timeout_score: float = 0.0) -> None:
        if reward_name != MATH_VERIFY:
            raise ConfigError(
                f"reward_fn_args.reward_name is {reward_name!r}: of rm-gallery's rewards only {MATH_VERIFY!r} is "
                "included, since the package cannot be installed beside Sharpen (it needs transformers below 5); name "
                "a reward function of your own (task_args.reward_fn: package.module:Class)"
            )
        if timeout_score:
            raise ConfigError(f"reward_fn_args.timeout_score is {timeout_score!r}: what takes too long counts 0")
        require_math_verify()

    def __call__(
        self, experience: Experience | None = None, messages: Sequence[Any] = (), ground_truth: Any = None, **_: Any
    ) -> dict[str, float]:
        """The score."""
        text = "" if experience is None else experience.response_text
        return {"math_verify": float(says(text, truth_in(ground_truth)))}
