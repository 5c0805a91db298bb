"""DAPO's reward for mathematics: right or wrong as 1 and -1, and a penalty for answers that come near the token limit.

In: the answer's text and its tokens, the truth. Out: `{"accuracy": .., "format_score": ..}`. Source: DAPO,
https://arxiv.org/abs/2503.14476, sections 2.3 and 2.4.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from sharpen.compat.trinity.equality import equal, require_math_verify, says
from sharpen.compat.trinity.rewards import RewardFn, last_boxed, truth_in
from sharpen.errors import ConfigError

NOT_PASSED: Sized = ()
"""The default of `response_token`: the workflow passes none. Known by identity."""


class MathDAPORewardFn(RewardFn):
    """`accuracy` is 1 if what follows the thinking (its last box, else all of it) equals the truth, else -1.

    With `enable_overlong_penalty`, `format_score` is 0 up to `max_response_length - cache_length` tokens, falls to
    `-penalty_factor` at `max_response_length`, and stays there; else it is 0. Raises `ConfigError` for a penalty whose
    numbers are missing, and without math-verify.
    """

    def __init__(
        self,
        enable_overlong_penalty: bool | None = None,
        penalty_factor: float | None = None,
        max_response_length: int | None = None,
        cache_length: int | None = None,
    ) -> None:
        require_math_verify()
        self.penalty: tuple[float, int, int] | None = None
        if not enable_overlong_penalty:
            return
        if penalty_factor is None or max_response_length is None or cache_length is None:
            raise ConfigError(
                "math_dapo_reward with enable_overlong_penalty needs reward_fn_args.penalty_factor, "
                "max_response_length and cache_length"
            )
        if max_response_length <= cache_length:
            raise ConfigError(
                f"math_dapo_reward: reward_fn_args.max_response_length is {max_response_length}, which must be greater "
                f"than cache_length ({cache_length})"
            )
        self.penalty = (penalty_factor, max_response_length, cache_length)

    def __call__(
        self, response: str | None = None, truth: Any = None, response_token: Sized | None = NOT_PASSED, **_: Any
    ) -> dict[str, float]:
        """The scores. `response_token` are the answer's tokens; None where nobody counted them (an endpoint): no
        penalty."""
        after = (response or "").rpartition("</think>")[2]
        boxed, expected = last_boxed(after), truth_in(truth)
        right = equal(after, expected) if not boxed else says(boxed, expected)
        return {"accuracy": 1.0 if right else -1.0, "format_score": self._overlong(response_token)}

    def _overlong(self, response_token: Sized | None) -> float:
        if self.penalty is None or response_token is None:
            return 0.0
        if response_token is NOT_PASSED:
            raise ConfigError(
                "math_dapo_reward's overlong penalty counts tokens, which this workflow does not pass: use "
                "math_boxed_workflow (or async_math_boxed_workflow)"
            )
        factor, longest, cache = self.penalty
        over = len(response_token) - (longest - cache)
        if over <= 0:
            return 0.0
        return -factor * min(over / cache, 1.0) if cache else -factor
