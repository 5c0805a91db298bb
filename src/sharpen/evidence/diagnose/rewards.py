"""Causes in the rewards: no differences within groups, or rewards of a scale that training cannot use.

In: `RolloutRunData`. Out: a `Finding`, or None.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev

from sharpen.evidence.diagnose.data import Digest, RolloutRunData, by_group, correlation, flat_rewards
from sharpen.evidence.diagnose.finding import Finding, ends, ids
from sharpen.evidence.diagnose.series import early_mean, late_mean

FLAT_SHARE = 0.8
"""With four of five groups without spread, the step's gradient comes from a fifth of its rollouts."""
HUGE_REWARD = 100.0
"""Limit if advantages keep the rewards' scale: the gradient is clipped in every step, and KL terms no longer count."""
HUGE_NORMALIZED_REWARD = 1e6
"""Limit if they do not: beyond it, differences of order 1 are lost in 32 bits."""
APART_Z = 4.0
"""Standard errors by which a part of the reward must rise or fall over the run."""
GOES_WITH = 0.2
"""Correlation with the reward within groups from which a metric counts as part of it."""
TINY_SPREAD = 0.01
"""Limit if advantages keep the rewards' scale: KL terms, entropy terms and weight decay outweigh smaller
differences."""


def all_wrong(data: RolloutRunData) -> Finding | None:
    """From the first groups to the last, nearly all rollouts have the least reward."""
    least, most = data.reward_range
    if least > 0.0 and most == least:
        return None
    shares = [_share_at(part, least) for part in (data.first, data.last)]
    if not shares or min(shares) < FLAT_SHARE:
        return None
    return Finding(
        name="all_wrong",
        what=f"In {shares[1]:.0%} of the groups every rollout has the least reward ({least:g}), so there is no signal.",
        evidence={
            "groups all wrong, first": shares[0],
            "groups all wrong, last": shares[1],
            "greatest reward seen": most,
        },
        examples=_examples(data.last, least),
        advice=(
            "Read one of these rollouts (sharpen show) and score it by hand: if it is right, the judge is wrong. "
            "Otherwise begin with easier tasks or a better prompt, give partial rewards, or raise algorithm.group_size."
        ),
    )


def all_right(data: RolloutRunData) -> Finding | None:
    """From the first groups to the last, nearly all rollouts have the greatest reward."""
    least, most = data.reward_range
    if most == least and most < 1.0:
        return None
    shares = [_share_at(part, most) for part in (data.first, data.last)]
    if not shares or min(shares) < FLAT_SHARE:
        return None
    return Finding(
        name="all_right",
        what=f"In {shares[1]:.0%} of the groups every rollout has the greatest reward ({most:g}), from the beginning.",
        evidence={
            "groups all right, first": shares[0],
            "groups all right, last": shares[1],
            "least reward seen": least,
        },
        examples=_examples(data.last, most),
        advice=(
            "The tasks are too easy for this model, or the judge accepts anything: show it a wrong answer. Use harder "
            "tasks."
        ),
    )


def zero_variance(data: RolloutRunData) -> Finding | None:
    """Most groups have equal rewards, though the tasks are not solved."""
    late, early = late_mean(data.flat_shares), early_mean(data.flat_shares)
    flat = [(group_id, reward) for group_id, reward in flat_rewards(data.last) if reward is not None]
    if late is None or early is None or late < FLAT_SHARE or not data.stalled:
        return None
    least, most = data.reward_range
    same = fmean([reward == least for _, reward in flat]) if flat else 0.0
    best = fmean([reward == most for _, reward in flat]) if flat else 0.0
    return Finding(
        name="zero_variance",
        what=f"In {late:.0%} of the groups all rollouts have the same reward, so their advantages are 0.",
        evidence={
            "groups without spread, first steps": early,
            "groups without spread, last steps": late,
            "of them at the least reward": same,
            "of them at the greatest reward": best,
        },
        examples=ids(members[0] for members in by_group(data.last).values() if _is_flat(members)),
        advice=(
            "Use tasks that the model solves sometimes, raise algorithm.group_size or model.temperature, or give "
            "rewards with more than two values."
        ),
    )


def reward_scale(data: RolloutRunData) -> Finding | None:
    """Rewards are huge, or their spread is tiny and the advantages keep it."""
    scored = [rollout for rollout in (*data.first, *data.last) if rollout.reward is not None]
    if not scored:
        return None
    largest = max(scored, key=lambda rollout: abs(rollout.reward or 0.0))
    limit = HUGE_NORMALIZED_REWARD if data.scale_free else HUGE_REWARD
    name = data.config.algorithm.algorithm_type
    if abs(largest.reward or 0.0) >= limit:
        scaling = "" if data.scale_free else f", and {name} keeps their scale in the advantages"
        return Finding(
            name="reward_scale",
            what=f"Rewards are as large as {largest.reward:g}{scaling}.",
            evidence={"largest reward": float(largest.reward or 0.0), "limit": limit},
            examples=ids(sorted(scored, key=lambda rollout: -abs(rollout.reward or 0.0))),
            advice="Scale rewards to about 0 to 1 in the judge"
            + ("." if data.scale_free else ", or divide by the group's deviation (loss.std_normalize: true)."),
        )
    spreads = {group_id: _spread(members) for group_id, members in by_group(data.last).items()}
    spread = [value for value in spreads.values() if value > 0.0]
    if data.scale_free or not spread or fmean(spread) >= TINY_SPREAD:
        return None
    return Finding(
        name="reward_scale",
        what=f"Rewards of a group differ by only {fmean(spread):.2g}, and {name} does not divide by their deviation.",
        evidence={"mean deviation within groups": fmean(spread), "limit": TINY_SPREAD},
        examples=ids(rollout for rollout in data.last if spreads[rollout.group_id] > 0.0),
        advice="Scale rewards to about 0 to 1 in the judge, or set loss.std_normalize: true.",
    )


def parts_apart(data: RolloutRunData) -> Finding | None:
    """Of the metrics that correlate with the reward, one rises while another falls."""
    trends = {name: trend for name in _parts(data) if (trend := data.trend(name)) is not None}
    risen = [name for name, trend in trends.items() if trend.z >= APART_Z]
    fallen = [name for name, trend in trends.items() if trend.z <= -APART_Z]
    if not risen or not fallen:
        return None
    up, down = max(risen, key=lambda name: trends[name].z), min(fallen, key=lambda name: trends[name].z)
    evidence: dict[str, float] = {}
    for name in (up, down):
        evidence |= ends(name, trends[name])
    traded = [
        rollout
        for rollout in data.last
        if rollout.metrics.get(up, 0.0) >= trends[up].late and rollout.metrics.get(down, 0.0) <= trends[down].late
    ]
    return Finding(
        name="parts_apart",
        what=f"{up} rises while {down} falls: both raise the reward, and the model trades one for the other.",
        evidence=evidence,
        examples=ids(traded or data.last),
        advice=(
            f"Read some of these (sharpen show). If {down} is what you want, its weight is too small compared with "
            f"{up}: raise it, or reward {up} only together with {down}."
        ),
    )


def _parts(data: RolloutRunData) -> list[str]:
    """Return the metrics that correlate with the reward within groups, over the rollouts that have both."""
    rollouts = [
        rollout
        for rollout in {rollout.id: rollout for rollout in (*data.first, *data.last)}.values()
        if rollout.reward is not None
    ]
    names = []
    for name in sorted({name for rollout in rollouts for name in rollout.metrics}):
        having = [rollout for rollout in rollouts if name in rollout.metrics]

        def value(rollout: Digest, name: str = name) -> float:
            return rollout.metrics[name]

        found = correlation(having, value)
        if found is not None and found >= GOES_WITH:
            names.append(name)
    return names


def _share_at(rollouts: Sequence[Digest], value: float) -> float:
    """Return the share of the groups whose rewards are all `value`."""
    rewards = flat_rewards(rollouts)
    return fmean([reward == value for _, reward in rewards]) if rewards else 0.0


def _examples(rollouts: Sequence[Digest], value: float) -> tuple[str, ...]:
    """Return one rollout of each group whose rewards are all `value`."""
    groups = [group_id for group_id, reward in flat_rewards(rollouts) if reward == value]
    return ids(by_group(rollouts)[group_id][0] for group_id in groups[:3])


def _is_flat(members: Sequence[Digest]) -> bool:
    return len(members) > 1 and len({rollout.reward for rollout in members if rollout.reward is not None}) == 1


def _spread(members: Sequence[Digest]) -> float:
    rewards = [rollout.reward for rollout in members if rollout.reward is not None]
    return pstdev(rewards) if len(rewards) > 1 else 0.0
