"""What becomes of recorded rewards before advantages: over-long shaping, and which groups and rollouts are filtered.

In: the scored rollouts of a group as they were recorded. Out: those that take part, with the rewards that advantages
are computed from. The records themselves stay as they are, so that all of it can be recomputed from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from sharpen.config.run import SamplingConfig
from sharpen.errors import ConfigError
from sharpen.types import Call, Outcome, Rollout

_CUT = frozenset({Outcome.CONTEXT_OVERFLOW, Outcome.TOKEN_LIMIT})


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """The part of an algorithm that looks at recorded rewards and lengths; by default it changes nothing.

    A call of more than `max_length - cache` sampled tokens is punished, by up to `penalty` from `max_length` tokens on
    (`cache` None: no punishment). `drop_truncated` leaves out rollouts that a token limit cut. Groups whose mean reward
    is outside `[reward_low, reward_high]` are left out.
    """

    max_length: int = 0
    cache: int | None = None
    penalty: float = 1.0
    drop_truncated: bool = False
    reward_low: float | None = None
    reward_high: float | None = None

    @classmethod
    def of(cls, sampling: SamplingConfig, max_tokens: int | None) -> Shaping:
        """From a run's settings; `max_tokens` is the model's limit for one answer.

        Raises `ConfigError` for lengths that make no sense together.
        """
        cache, given = sampling.overlong_cache, sampling.overlong_length
        if cache is None and given is not None:
            raise ConfigError("sampling.overlong_length has no effect: set sampling.overlong_cache too")
        max_length = given or max_tokens or 0
        if cache is not None and cache > max_length:
            raise ConfigError(
                f"sampling.overlong_cache is {cache}, but the longest answer is {max_length} tokens "
                f"({'sampling.overlong_length' if given else 'model.max_tokens'}): set a smaller one"
            )
        if cache is not None and max_tokens is not None and max_length - cache >= max_tokens:
            raise ConfigError(
                f"over-long shaping begins above {max_length - cache} tokens, but model.max_tokens is {max_tokens}: "
                "set a smaller sampling.overlong_length or a larger sampling.overlong_cache"
            )
        return cls(
            max_length=max_length,
            cache=cache,
            penalty=sampling.overlong_penalty,
            drop_truncated=sampling.overlong_filter,
            reward_low=sampling.reward_low,
            reward_high=sampling.reward_high,
        )

    def taking_part(self, rollouts: Sequence[Rollout]) -> tuple[Rollout, ...]:
        """The scored rollouts of a group that take part, with their recorded rewards: those in which the agent received
        an answer of the model, and that no token limit cut, if such ones are dropped."""
        answered = (rollout for rollout in rollouts if rollout.scored and rollout.answered)
        return tuple(rollout for rollout in answered if not (self.drop_truncated and was_cut(rollout)))

    def shaped(self, rollout: Rollout) -> Rollout:
        """A scored rollout with the rewards to train on: its own is punished for its longest trained call, rewards of
        calls and of steps each for their call."""
        if self.cache is None or rollout.reward is None:
            return rollout
        of_calls = {call.index: self._punishment(call) for call in rollout.calls}
        steps = {**dict.fromkeys(of_calls, 0.0), **rollout.step_rewards} if rollout.step_rewards else {}
        return replace(
            rollout,
            reward=rollout.reward + min(of_calls.values(), default=0.0),
            call_rewards={index: reward + of_calls.get(index, 0.0) for index, reward in rollout.call_rewards.items()},
            step_rewards={index: reward + of_calls.get(index, 0.0) for index, reward in steps.items()},
        )

    def keeps(self, rewards: Sequence[float]) -> bool:
        """Whether a group with these recorded rewards has its mean within the bounds."""
        if not rewards:
            return True
        mean = fmean(rewards)
        above = self.reward_low is None or mean >= self.reward_low
        return above and (self.reward_high is None or mean <= self.reward_high)

    def _punishment(self, call: Call) -> float:
        if not call.trainable or self.cache is None:
            return 0.0
        return self.penalty * length_penalty(len(call.sampled_ids_S), max_length=self.max_length, cache=self.cache)


def length_penalty(num_tokens: int, *, max_length: int, cache: int) -> float:
    """0 up to `max_length - cache` tokens, then falling linearly to -1 at `max_length`, and -1 beyond.

    Source: soft over-long punishment, DAPO, arXiv 2503.14476, equation 13.
    """
    over = num_tokens - (max_length - cache)
    if over <= 0:
        return 0.0
    return -min(1.0, over / cache) if cache else -1.0


def was_cut(rollout: Rollout) -> bool:
    """Whether a token limit ended the rollout, or one of its trained calls."""
    return rollout.outcome in _CUT or any(call.trainable and call.finish_reason == "length" for call in rollout.calls)
