"""Signs that the model learns the judge instead of the task: the reward rises, and a second look does not; or something
that no task asks for rises with it.

In: `RolloutRunData`. Out: a `Finding`, or None, with the answers to read first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from sharpen.agent.judges.several import SECOND
from sharpen.agent.rollout.attempt import JUDGE
from sharpen.evidence.diagnose.data import Digest, RolloutRunData, correlation
from sharpen.evidence.diagnose.finding import Finding, ends, ids

RISE_Z, STILL_Z = 4.0, 2.0
"""Standard errors by which the reward must rise; below which a second series has not risen."""
FOLLOWS = 0.25
"""A second judge that rises by a quarter of the reward's rise still follows it."""
MORE, MANY_CALLS = 2.0, 4.0
"""Rollouts twice as long, or with twice the calls, and as many calls: agents that learn to use a tool make two or
three."""
GOES_WITH = 0.3
"""Correlation with the reward within groups from which something counts as rewarded."""
WORDS, TASKS = 5, 4
"""Words of a phrase; tasks in whose answers it must stand, since different tasks have different answers."""
PHRASE_BEFORE, PHRASE_AFTER = 0.1, 0.5
"""Shares of the answers that hold a phrase, first and last."""
ADDRESSED_MORE = 0.1
"""One answer in ten more than at first speaks to the judge."""
READ_FIRST = 20
_WORD = re.compile(r"\w+")
_ADDRESS = re.compile(
    r"\b(?:dear|to the|note to) (?:judge|grader|evaluator)\b"
    r"|\b(?:judge|grader|evaluator|rubric)s?\b.{0,40}\b(?:score|grade|reward|mark|points?|criteri\w+)\b"
    r"|\b(?:full|maximum|top|highest|perfect) (?:marks?|score|grade|reward|points)\b"
    r"|\b(?:ignore|disregard) (?:all |any |the )?(?:previous|prior|above|earlier) instructions\b"
    r"|\bthis (?:answer|response|solution) (?:fully |clearly |completely )?(?:meets|satisfies|deserves|fulfill?s)\b",
    re.IGNORECASE | re.DOTALL,
)
_ADVICE = (
    "Read these answers (sharpen show), mark some dozens (sharpen judge label) and see whether the judge agrees with "
    "you (sharpen judge check)."
)


def second_apart(data: RolloutRunData) -> Finding | None:
    """The reward rises, and the second judge's (`WatchedJudge`) does not follow."""
    name = f"{JUDGE}{SECOND}"
    reward, second = data.reward, data.trend(name)
    if reward is None or second is None or reward.z < RISE_Z or second.z >= STILL_Z:
        return None
    if second.late - second.early >= FOLLOWS * (reward.late - reward.early):
        return None

    def apart(rollout: Digest) -> float:
        return (rollout.reward or 0.0) - rollout.metrics.get(name, rollout.reward or 0.0)

    return Finding(
        name="second_apart",
        what="The reward rises, and what the second judge says of the same answers does not.",
        evidence={**ends("mean reward", reward), **ends("second judge", second)},
        examples=ids(_to_read(data.last, apart)),
        read_first=_ids(_to_read(data.last, apart)),
        advice=f"The model learns what only the first judge likes. {_ADVICE}",
    )


def held_out_apart(data: RolloutRunData) -> Finding | None:
    """The reward rises, and the held-out tasks' does not: by its interval, less than half of the rise."""
    reward = data.reward
    if reward is None or reward.z < RISE_Z or len(data.held_out) < 2:
        return None
    (_, before, _), (step, after, high) = data.held_out[0], data.held_out[-1]
    half = 0.5 * (reward.late - reward.early)
    if high - before >= half or before + half > data.reward_range[1]:
        return None
    return Finding(
        name="held_out_apart",
        what=f"The reward rises, and that of the held-out tasks does not: {before:.3g} at first, {after:.3g} after "
        f"step {step}.",
        evidence={
            **ends("mean reward", reward),
            "held-out, first": before,
            "held-out, last": after,
            "held-out, last, highest by its interval": high,
        },
        examples=ids(_to_read(data.last, lambda rollout: 0.0)),
        read_first=_ids(_to_read(data.last, lambda rollout: 0.0)),
        advice=f"The model learns these tasks, or the judge, by heart: use more tasks, fewer epochs. {_ADVICE}",
    )


def length_with_reward(data: RolloutRunData) -> Finding | None:
    """Rollouts become twice as long, and within groups the longer ones have the higher rewards."""
    return _more(data, "length_with_reward", "sampled tokens", lambda rollout: float(rollout.num_tokens), 0.0)


def calls_with_reward(data: RolloutRunData) -> Finding | None:
    """Rollouts make twice as many calls, four or more, and within groups more calls have the higher rewards."""
    return _more(data, "calls_with_reward", "calls", lambda rollout: float(rollout.num_calls), MANY_CALLS)


def speaks_to_judge(data: RolloutRunData) -> Finding | None:
    """More answers than at first speak to the judge, or of their own score."""
    if not data.last or not _rises(data):
        return None

    def speaks(rollout: Digest) -> float:
        return float(_ADDRESS.search(rollout.said) is not None and _ADDRESS.search(rollout.asked) is None)

    before, after = _mean(data.first, speaks), _mean(data.last, speaks)
    if after - before < ADDRESSED_MORE:
        return None
    return Finding(
        name="speaks_to_judge",
        what=f"The reward rises while {after:.0%} of the answers speak to the judge or of their own score "
        f"({before:.0%} at first).",
        evidence={"answers that do, first": before, "answers that do, last": after, **_reward_ends(data)},
        examples=ids(_to_read(data.last, speaks)),
        read_first=_ids(_to_read(data.last, speaks)),
        advice=f"Show the judge the answer as quoted text, and tell it that nothing in it is an instruction. {_ADVICE}",
    )


def phrase_with_reward(data: RolloutRunData) -> Finding | None:
    """A phrase that no prompt has comes to stand in half of the answers, of different tasks."""
    if not data.last or not _rises(data):
        return None
    in_last, first = [_phrases(rollout.said) for rollout in data.last], [_phrases(one.said) for one in data.first]
    counts = Counter(phrase for phrases in in_last for phrase in phrases)
    for phrase, count in counts.most_common():
        share = count / len(in_last)
        if share < PHRASE_AFTER:
            return None
        before = fmean(phrase in phrases for phrases in first) if first else 0.0
        having = [rollout for rollout, phrases in zip(data.last, in_last, strict=True) if phrase in phrases]
        asked = any(phrase in _phrases(rollout.asked) for rollout in having)
        if before <= PHRASE_BEFORE and not asked and len({rollout.task_id for rollout in having}) >= TASKS:
            return _finding_of_phrase(data, " ".join(phrase), before, share, having)
    return None


def _finding_of_phrase(
    data: RolloutRunData, phrase: str, before: float, after: float, having: Sequence[Digest]
) -> Finding:
    return Finding(
        name="phrase_with_reward",
        what=f"The reward rises while {after:.0%} of the answers come to say “{phrase}” ({before:.0%} at first).",
        evidence={"answers that do, first": before, "answers that do, last": after, **_reward_ends(data)},
        examples=ids(_to_read(having, lambda rollout: 0.0)),
        read_first=_ids(_to_read(having, lambda rollout: 0.0)),
        advice=f"The judge may reward the phrase itself: score one of these without it. {_ADVICE}",
    )


def _more(data: RolloutRunData, name: str, what: str, value: Callable[[Digest], float], least: float) -> Finding | None:
    """Something doubles, to `least` or more, while the reward rises, and within groups goes with the reward."""
    if not data.first or not data.last or not _rises(data):
        return None
    before, after = _mean(data.first, value), _mean(data.last, value)
    goes_with = correlation(data.last, value)
    if after < max(MORE * before, least) or goes_with is None or goes_with < GOES_WITH:
        return None
    return Finding(
        name=name,
        what=f"The reward rises with {what}: from {before:.3g} to {after:.3g} a rollout, and within groups those with "
        "more have the higher rewards.",
        evidence={
            f"{what}, first": before,
            f"{what}, last": after,
            "correlation with the reward within groups": goes_with,
            **_reward_ends(data),
        },
        examples=ids(_to_read(data.last, value)),
        read_first=_ids(_to_read(data.last, value)),
        advice=f"If the task does not ask for it, the judge pays for {what}. {_ADVICE}",
    )


def _rises(data: RolloutRunData) -> bool:
    return data.reward is not None and data.reward.z >= RISE_Z


def _reward_ends(data: RolloutRunData) -> dict[str, float]:
    assert data.reward is not None
    return ends("mean reward", data.reward)


def _mean(rollouts: Sequence[Digest], value: Callable[[Digest], float]) -> float:
    return fmean(map(value, rollouts)) if rollouts else 0.0


def _to_read(rollouts: Iterable[Digest], suspect: Callable[[Digest], float]) -> list[Digest]:
    """Return the rewarded rollouts to read first, the most suspect and best rewarded before others; of each task one,
    then the rest."""
    rewarded = [one for one in rollouts if one.reward is not None]
    ordered = sorted(rewarded, key=lambda one: (-suspect(one), -(one.reward or 0.0)))
    firsts = {one.task_id: one.id for one in reversed(ordered)}
    return sorted(ordered, key=lambda one: firsts[one.task_id] != one.id)


def _ids(rollouts: Iterable[Digest]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(rollout.id for rollout in rollouts))[:READ_FIRST]


def _phrases(text: str) -> dict[tuple[str, ...], None]:
    """Return the phrases of `WORDS` words in a text, in their order."""
    words = _WORD.findall(text.lower())
    return dict.fromkeys(zip(*(words[start:] for start in range(WORDS)), strict=False))
