"""Reward shaping for over-long answers, long rollouts and many turns, and the filters for groups and rollouts, applied
before advantages.

In: the recorded scored rollouts of a group. Out: those that take part, with the rewards that advantages are computed
from. The records do not change, so everything can be recomputed from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from sharpen.config.run import SamplingConfig
from sharpen.errors import ConfigError
from sharpen.types import Call, Outcome, Rollout

_TRUNCATED = frozenset({Outcome.CONTEXT_OVERFLOW, Outcome.TOKEN_LIMIT})


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """The settings that filter rollouts and shape rewards; by default, nothing changes.

    A call with more than `max_length - cache` sampled tokens is penalized, by `penalty` at `max_length` tokens and
    beyond (`cache` None: no penalty). `length` and `turns` are the shares of a group's mean reward that the rollout
    with the most tokens or calls loses. `drop_truncated` leaves out rollouts that hit a token limit. Groups whose mean
    reward is outside `[reward_low, reward_high]` are left out.
    """

    max_length: int = 0
    cache: int | None = None
    penalty: float = 1.0
    length: float = 0.0
    turns: float = 0.0
    drop_truncated: bool = False
    reward_low: float | None = None
    reward_high: float | None = None

    @classmethod
    def of(cls, sampling: SamplingConfig, max_tokens: int | None) -> Shaping:
        """Read the settings of a run; `max_tokens` is the model's limit for one answer.

        Raises `ConfigError` for lengths that contradict each other.
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
                f"over-long shaping starts above {max_length - cache} tokens, but model.max_tokens is {max_tokens}: "
                "set a smaller sampling.overlong_length or a larger sampling.overlong_cache"
            )
        return cls(
            max_length=max_length,
            cache=cache,
            penalty=sampling.overlong_penalty,
            length=sampling.length_penalty or 0.0,
            turns=sampling.turns_penalty or 0.0,
            drop_truncated=sampling.overlong_filter,
            reward_low=sampling.reward_low,
            reward_high=sampling.reward_high,
        )

    def taking_part(self, rollouts: Sequence[Rollout]) -> tuple[Rollout, ...]:
        """Return the scored rollouts that take part, with their recorded rewards: those in which the agent received an
        answer of the model and, with `drop_truncated`, that did not hit a token limit."""
        answered = (rollout for rollout in rollouts if rollout.scored and rollout.answered)
        return tuple(rollout for rollout in answered if not (self.drop_truncated and was_truncated(rollout)))

    def shaped_group(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return a group's rollouts that take part with their shaped rewards (see `shaped`). Each reward loses the
        group's mean recorded reward, or nothing if that is below 0, times `length n / max n + turns c / max c`, with
        the rollout's n sampled tokens in c trained calls.

        Source: `LinearLengthPenalty` of prime-rl (559b447), without its term for input tokens.
        """
        shaped = [self.shaped(rollout) for rollout in rollouts]
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        if not (self.length or self.turns) or not rewards:
            return shaped
        trained = [[len(call.sampled_ids_S) for call in rollout.calls if call.trainable] for rollout in rollouts]
        most_tokens, most_calls = max(1, *map(sum, trained)), max(1, *map(len, trained))
        mean = max(fmean(rewards), 0.0)
        return [
            rollout
            if rollout.reward is None
            else replace(
                rollout,
                reward=rollout.reward
                - mean * (self.length * sum(calls) / most_tokens + self.turns * len(calls) / most_calls),
            )
            for rollout, calls in zip(shaped, trained, strict=True)
        ]

    def shaped(self, rollout: Rollout) -> Rollout:
        """Return a scored rollout with its shaped rewards. The rollout's reward gets the penalty of its longest trained
        call; rewards of calls and steps get that of their own call."""
        if self.cache is None or rollout.reward is None:
            return rollout
        penalties = {call.index: self._penalty(call) for call in rollout.calls}
        steps = {**dict.fromkeys(penalties, 0.0), **rollout.step_rewards} if rollout.step_rewards else {}
        return replace(
            rollout,
            reward=rollout.reward + min(penalties.values(), default=0.0),
            call_rewards={index: reward + penalties.get(index, 0.0) for index, reward in rollout.call_rewards.items()},
            step_rewards={index: reward + penalties.get(index, 0.0) for index, reward in steps.items()},
        )

    def keeps(self, rewards: Sequence[float]) -> bool:
        """Whether the mean of a group's recorded rewards is within the bounds."""
        if not rewards:
            return True
        mean = fmean(rewards)
        above = self.reward_low is None or mean >= self.reward_low
        return above and (self.reward_high is None or mean <= self.reward_high)

    def _penalty(self, call: Call) -> float:
        if not call.trainable or self.cache is None:
            return 0.0
        return self.penalty * length_penalty(len(call.sampled_ids_S), max_length=self.max_length, cache=self.cache)


def length_penalty(num_tokens: int, *, max_length: int, cache: int) -> float:
    """Return 0 up to `max_length - cache` tokens, then a value falling linearly to -1 at `max_length`, and -1 beyond.

    Source: soft over-long punishment, DAPO, arXiv 2503.14476, equation 13.
    """
    over = num_tokens - (max_length - cache)
    if over <= 0:
        return 0.0
    return -min(1.0, over / cache) if cache else -1.0


def was_truncated(rollout: Rollout) -> bool:
    """Whether a token limit ended the rollout or one of its trained calls."""
    length = any(call.trainable and call.finish_reason == "length" for call in rollout.calls)
    return length or rollout.outcome in _TRUNCATED
