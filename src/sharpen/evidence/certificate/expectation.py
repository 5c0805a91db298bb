"""Compute what a step must train, from the recorded groups and the rules alone.

In: the groups of a step in order, the replayed groups, the `Rules`, and the recorded status of each group (needed where
its rewards are within rounding of a bound). Out: for each call that must carry loss its update, advantage and weight.
Participation, over-long punishment, bounds, the split into updates and the aggregation are implemented here a second
time, from the documents (`docs/use/sampling.md`, `docs/reference/algorithms.md`), not from the code.

Shape suffix: G members of a group.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sharpen.config.run import AGGREGATIONS
from sharpen.evidence.certificate.brought import weights_of
from sharpen.evidence.certificate.formulas import CallTerms, Member, spread
from sharpen.evidence.certificate.rules import Rules
from sharpen.types import MODEL_CAUSED, Call, Group, Outcome, Rollout

ROUNDING = 1e-9
"""If a group's mean or deviation is this close to a bound, both sides of the bound are accepted."""

TRAINED = "trained"
"""The status of a group that trains; any other status is the reason why a group was left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedCall:
    """A call that must carry loss: its update (from 0), its advantage, and the weight of each of its tokens; None for
    what a part without a second formula determines. `slack` is how far the advantage may be off by rounding."""

    rollout_id: str
    group_id: str
    call: Call
    update: int
    advantage: float | None
    weight: float | None
    slack: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What a step must be. `allowed_statuses` holds, by group id, the statuses that a group's rewards allow (one, or
    two within rounding of a bound), `participants` the rollouts that count in its statistics, `rewards` those of each
    group that trains, after all punishments."""

    allowed_statuses: Mapping[str, tuple[str, ...]]
    participants: Mapping[str, tuple[Rollout, ...]]
    calls: Mapping[tuple[str, int], ExpectedCall]
    rewards: Mapping[str, Sequence[float]]


def expect(
    groups: Sequence[Group],
    replayed: Sequence[Group],
    rules: Rules,
    statuses: Mapping[str, str],
    baselines: Mapping[str, float] | None = None,
) -> Expectation:
    """Compute the step. `statuses` are the recorded ones, used only for groups whose rewards allow two. `baselines` are
    those of the groups' roles, by group id; 0 if not given."""
    both = (*groups, *replayed)
    rollouts = {group.id: participants(group, rules) for group in both}
    members = {
        group.id: _charged(
            [_member(rollout, group, rules) for rollout in rollouts[group.id]], rollouts[group.id], rules
        )
        for group in both
        if not rules.formula.needs_reward or all(rollout.reward is not None for rollout in rollouts[group.id])
    }
    allowed = {
        group.id: _allowed_statuses(group, rollouts[group.id], members[group.id], rules)
        if group.id in members
        else ("small",)
        for group in both
    }
    trains = {
        id_: (statuses[id_] if statuses.get(id_) in of_group else of_group[0]) == TRAINED
        for id_, of_group in allowed.items()
    }
    updates = _updates([group.id for group in groups if trains[group.id]], [group.id for group in replayed], rules)
    trained = {id_: members[id_] for id_ in updates}
    if rules.formula.by_role:
        known = baselines or {}
        trained = {
            id_: tuple(replace(member, baseline=known.get(id_, 0.0)) for member in of_group)
            for id_, of_group in trained.items()
        }
    numbers = rules.formula.numbers(tuple(trained.values()), **rules.formula_arguments)
    largest = max((abs(member.reward) for of_group in trained.values() for member in of_group), default=0.0)
    slack = ROUNDING * max(1.0, largest if math.isfinite(largest) else 1.0)
    return Expectation(
        allowed_statuses=allowed,
        participants=rollouts,
        calls=_calls(rollouts, updates, trained, numbers, rules, slack),
        rewards={id_: [member.reward for member in of_group] for id_, of_group in trained.items()},
    )


def carries_loss(call: Call) -> bool:
    """Return whether a call trains: the agent used its answer, it was sampled with noise, and it is not empty."""
    return call.status == "used" and call.sampling.temperature > 0.0 and call.sampled_ids_S.size > 0


def is_eligible(rollout: Rollout, rules: Rules) -> bool:
    """Return whether a rollout has a score (it ended well, or the model caused the failure and it got a reward), and
    any answer of the model reached its agent."""
    if rollout.outcome != Outcome.OK and rollout.outcome not in MODEL_CAUSED:
        return False
    scored = rollout.reward is not None or (rollout.outcome == Outcome.OK and not rules.formula.needs_reward)
    return scored and any(call.status in ("used", "left_out", "unused") for call in rollout.calls)


def participants(group: Group, rules: Rules) -> tuple[Rollout, ...]:
    """Return the rollouts of a group that count in its statistics."""
    return tuple(
        rollout
        for rollout in group.rollouts
        if is_eligible(rollout, rules) and not (rules.drop_truncated and _was_cut(rollout))
    )


def _was_cut(rollout: Rollout) -> bool:
    if rollout.outcome in (Outcome.CONTEXT_OVERFLOW, Outcome.TOKEN_LIMIT):
        return True
    return any(carries_loss(call) and call.finish_reason == "length" for call in rollout.calls)


def _punishment(call: Call, rules: Rules) -> float:
    """Return the soft over-long punishment: 0 up to `length - cache` tokens, growing linearly to the full penalty at
    `length`."""
    if rules.overlong_cache is None or not carries_loss(call):
        return 0.0
    over = (call.sampled_ids_S.size - rules.overlong_length + rules.overlong_cache) / rules.overlong_cache
    return -rules.overlong_penalty * min(max(over, 0.0), 1.0)


def _member(rollout: Rollout, group: Group, rules: Rules) -> Member:
    """Return a rollout as a `Member`, with over-long punishment applied to its rewards."""
    punished = {call.index: _punishment(call, rules) for call in rollout.calls}
    reward = math.nan if rollout.reward is None else rollout.reward + min(punished.values(), default=0.0)
    trained = [call for call in rollout.calls if carries_loss(call)]
    steps = dict(rollout.step_rewards)
    if steps and rules.overlong_cache is not None:
        steps |= {call.index: steps.get(call.index, 0.0) + punished[call.index] for call in trained}
    bounds = [*(call.index for call in trained[1:]), math.inf][: len(trained)]
    calls, states = [], rollout.states
    for call, following in zip(trained, bounds, strict=True):
        between = math.fsum(value for index, value in steps.items() if call.index <= index < following)
        own = rollout.call_rewards.get(call.index)
        calls.append(
            CallTerms(
                index=call.index,
                num_tokens=call.sampled_ids_S.size,
                reward_after=between if steps else (reward if call is trained[-1] else 0.0),
                own_reward=reward if own is None else own + punished[call.index],
                state=states[call.index] if call.index in states else _shown(call),
                reported=call.index in states,
            )
        )
    greedy = group.baseline
    answered = greedy is not None and any(call.status in ("used", "left_out", "unused") for call in greedy.calls)
    return Member(
        rollout_id=rollout.id,
        group_id=group.id,
        reward=reward,
        episode=math.fsum(steps.values()) if steps else reward,
        baseline=math.nan if greedy is None or greedy.reward is None or not answered else greedy.reward,
        metrics=rollout.metrics,
        calls=tuple(calls),
    )


def _charged(members: Sequence[Member], rollouts: Sequence[Rollout], rules: Rules) -> tuple[Member, ...]:
    """Return the members of a group, charged for their tokens and calls as compared with the most that one has."""
    if not members or rules.length_penalty == rules.turns_penalty == 0.0:
        return tuple(members)
    price = max(0.0, math.fsum(one.reward for one in rollouts if one.reward is not None) / len(members))
    tokens = [sum(call.num_tokens for call in member.calls) for member in members]
    turns = [len(member.calls) for member in members]
    charged = []
    for member, of_tokens, of_turns in zip(members, tokens, turns, strict=True):
        by_tokens = rules.length_penalty * price * of_tokens / (max(tokens) or 1)
        by_turns = rules.turns_penalty * price * of_turns / (max(turns) or 1)
        charged.append(replace(member, reward=member.reward - by_tokens - by_turns))
    return tuple(charged)


def _shown(call: Call) -> str:
    """Return what the environment showed before a call: the messages after the model's last one, without accidental
    differences (ids of tool calls) and without system prompts. A prefilled answer does not count as a message."""
    messages = list(call.messages)
    while messages and messages[-1].get("role") == "assistant":
        messages.pop()
    answers = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
    last = answers[-1] if answers else -1
    tools = {
        tool_call.get("id"): (tool_call.get("function") or {}).get("name")
        for tool_call in (messages[last].get("tool_calls") or () if answers else ())
    }
    seen = [
        (message.get("role"), tools.get(message.get("tool_call_id")), _text(message.get("content")))
        for message in messages[last + 1 :]
        if message.get("role") not in ("system", "developer")
    ]
    return json.dumps(seen, sort_keys=True, default=repr)


def _text(content: Any) -> Any:
    """Join a content of text parts; return any other content unchanged."""
    if isinstance(content, list | tuple) and all(
        isinstance(part, Mapping) and part.get("type") == "text" for part in content
    ):
        return "".join(str(part.get("text", "")) for part in content)
    return content


def _allowed_statuses(
    group: Group, rollouts: Sequence[Rollout], members: Sequence[Member], rules: Rules
) -> tuple[str, ...]:
    """Return the statuses that a group may have: one, or two where its rewards are within rounding of a bound."""
    if len(members) < (2 if rules.formula.group_relative else 1):
        return ("small",)
    if rules.formula.baseline and math.isnan(members[0].baseline):
        return ("small",)
    allowed: list[str] = []
    if len(members) > 1 and rules.std_threshold is not None:
        unpunished = replace(rules, overlong_cache=None)
        recorded = [_member(rollout, group, unpunished) for rollout in rollouts]
        excess = spread(recorded, rules.formula, rules.arguments) - rules.std_threshold
        if excess < -ROUNDING or (excess <= 0.0 and rules.std_threshold == 0.0):
            return ("flat",)
        allowed += ["flat"] if excess <= ROUNDING else []
    recorded_G = np.array([rollout.reward for rollout in rollouts if rollout.reward is not None], np.float64)
    if not len(recorded_G):
        return (*allowed, TRAINED)
    mean = float(recorded_G.mean())
    low = -math.inf if rules.reward_low is None else rules.reward_low - mean
    high = -math.inf if rules.reward_high is None else mean - rules.reward_high
    allowed += ["filtered"] if max(low, high) > -ROUNDING else []
    allowed += [TRAINED] if max(low, high) < ROUNDING else []
    return tuple(allowed)


def _updates(fresh: Sequence[str], replayed: Sequence[str], rules: Rules) -> dict[str, int]:
    """Return the update of each training group. Replayed groups are spread evenly among the fresh ones, beginning with
    a fresh one; the resulting order is cut into one part for each minibatch, with sizes that differ by at most one,
    larger parts last."""
    line = [(place / len(fresh), 0, place, id_) for place, id_ in enumerate(fresh)]
    line += [((place + 0.5) / len(replayed), 1, place, id_) for place, id_ in enumerate(replayed)]
    ordered = [id_ for *_, id_ in sorted(line)]
    parts = max(min(rules.num_minibatches, len(ordered)), 1)
    starts = [len(ordered) * part // parts for part in range(1, parts)]
    return {id_: sum(place >= start for start in starts) for place, id_ in enumerate(ordered)}


def _calls(
    participants: Mapping[str, Sequence[Rollout]],
    updates: Mapping[str, int],
    members: Mapping[str, Sequence[Member]],
    numbers: Mapping[tuple[str, int], float],
    rules: Rules,
    slack: float,
) -> dict[tuple[str, int], ExpectedCall]:
    """Return every call that must train. Its weight is computed from counts over its whole update."""
    tokens: dict[int, int] = {}
    answers: dict[int, int] = {}
    rollouts: dict[int, int] = {}
    for id_, update in updates.items():
        for member in members[id_]:
            length = sum(call.num_tokens for call in member.calls)
            tokens[update] = tokens.get(update, 0) + length
            answers[update] = answers.get(update, 0) + len(member.calls)
            rollouts[update] = rollouts.get(update, 0) + (length > 0)
    calls = {}
    theirs = {} if rules.aggregation in AGGREGATIONS else _weights_brought(updates, members, rules.aggregation)
    for id_, update in updates.items():
        for rollout, member in zip(participants[id_], members[id_], strict=True):
            of_rollout = sum(call.num_tokens for call in member.calls)
            for trained in member.calls:
                shares = {
                    "token-mean": tokens[update],
                    "sequence-mean-token-mean": answers[update] * trained.num_tokens,
                    "sequence-mean-token-sum": answers[update],
                    "rollout-mean": rollouts[update] * of_rollout,
                    "constant-length": rollouts[update] * (rules.constant_length or 0),
                }
                calls[rollout.id, trained.index] = ExpectedCall(
                    rollout_id=rollout.id,
                    group_id=id_,
                    call=rollout.calls[trained.index],
                    update=update,
                    advantage=numbers[rollout.id, trained.index] if rules.formula.known else None,
                    weight=1.0 / shares[rules.aggregation]
                    if rules.aggregation in shares
                    else theirs[rollout.id, trained.index],
                    slack=slack,
                )
    return calls


def _weights_brought(
    updates: Mapping[str, int], members: Mapping[str, Sequence[Member]], aggregation: str
) -> dict[tuple[str, int], float | None]:
    """Return the weight of the tokens of each call by the second formula of an aggregation that the user brings; None
    without one."""
    weights: dict[tuple[str, int], float | None] = {}
    for update in set(updates.values()):
        rollouts = [member for id_, one in updates.items() if one == update for member in members[id_]]
        calls = [(number, call) for number, member in enumerate(rollouts) for call in member.calls]
        found = weights_of(aggregation, [(number, call.num_tokens) for number, call in calls])
        for place, (number, call) in enumerate(calls):
            weights[rollouts[number].rollout_id, call.index] = None if found is None else found[place]
    return weights
