"""What a step must train, computed from the recorded groups and the rules alone.

In: the groups of a step in order, those that train again, the `Rules`, and what is said of groups whose rewards are
within rounding of a bound. Out: for each call that must carry loss its update, advantage and weight. Who takes part,
over-long punishment, bounds, splitting into updates and aggregation are written here once more, after the documents
(`docs/use/sampling.md`, `docs/reference/algorithms.md`), not after the code.

Shape suffix: G members of a group.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sharpen.certificate.formulas import CallTerms, Member, spread
from sharpen.certificate.rules import Rules
from sharpen.types import MODEL_CAUSED, Call, Group, Outcome, Rollout

ROUNDING = 1e-9
"""Where a group's mean or deviation is this near to a bound, either side of it is right."""

TRAINED = "trained"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedCall:
    """A call that must carry loss: in which update (from 0), with which advantage, each token with which weight.
    `slack` is how far the advantage may be off by rounding."""

    rollout_id: str
    group_id: str
    call: Call
    update: int
    advantage: float
    weight: float
    slack: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """A step as it must be. `may` says what can become of each group by its rewards (one thing, or two within rounding
    of a bound), `taking_part` who of it takes part, by group id."""

    may: Mapping[str, tuple[str, ...]]
    taking_part: Mapping[str, tuple[Rollout, ...]]
    calls: Mapping[tuple[str, int], ExpectedCall]


def expect(groups: Sequence[Group], replayed: Sequence[Group], rules: Rules, said: Mapping[str, str]) -> Expectation:
    """The step. `said` is what became of each group, looked at only where its rewards allow both."""
    every = (*groups, *replayed)
    taking_part = {group.id: takes_part(group, rules) for group in every}
    members = {
        group.id: tuple(_member(rollout, group, rules) for rollout in taking_part[group.id])
        for group in every
        if not rules.formula.needs_reward or all(rollout.reward is not None for rollout in taking_part[group.id])
    }
    may = {
        group.id: _may(group, taking_part[group.id], members[group.id], rules) if group.id in members else ("small",)
        for group in every
    }
    train = {id_: (said[id_] if said.get(id_) in ways else ways[0]) == TRAINED for id_, ways in may.items()}
    updates = _updates([group.id for group in groups if train[group.id]], [group.id for group in replayed], rules)
    of_updates = {id_: members[id_] for id_ in updates}
    numbers = rules.formula.numbers(tuple(of_updates.values()), **rules.formula_arguments)
    largest = max((abs(member.reward) for one in of_updates.values() for member in one), default=0.0)
    slack = ROUNDING * max(1.0, largest if math.isfinite(largest) else 1.0)
    return Expectation(
        may=may, taking_part=taking_part, calls=_calls(taking_part, updates, of_updates, numbers, rules, slack)
    )


def carries_loss(call: Call) -> bool:
    """Whether a call trains: the agent used its answer, noise chose it, and there is one."""
    return call.status == "used" and call.sampling.temperature > 0.0 and call.sampled_ids_S.size > 0


def has_part(rollout: Rollout, rules: Rules) -> bool:
    """Whether a rollout ended in a way that has a score: well, or by the model's own doing with a reward for that; and
    whether any answer of the model reached its agent."""
    if rollout.outcome != Outcome.OK and rollout.outcome not in MODEL_CAUSED:
        return False
    scored = rollout.reward is not None or (rollout.outcome == Outcome.OK and not rules.formula.needs_reward)
    return scored and any(call.status in ("used", "left_out", "unused") for call in rollout.calls)


def takes_part(group: Group, rules: Rules) -> tuple[Rollout, ...]:
    """The rollouts of a group that count in its statistics."""
    return tuple(
        rollout
        for rollout in group.rollouts
        if has_part(rollout, rules) and not (rules.drop_truncated and _was_cut(rollout))
    )


def _was_cut(rollout: Rollout) -> bool:
    if rollout.outcome in (Outcome.CONTEXT_OVERFLOW, Outcome.TOKEN_LIMIT):
        return True
    return any(carries_loss(call) and call.finish_reason == "length" for call in rollout.calls)


def _punishment(call: Call, rules: Rules) -> float:
    """Soft over-long punishment: none up to `length - cache` tokens, all of it from `length` on."""
    if rules.overlong_cache is None or not carries_loss(call):
        return 0.0
    over = (call.sampled_ids_S.size - rules.overlong_length + rules.overlong_cache) / rules.overlong_cache
    return -rules.overlong_penalty * min(max(over, 0.0), 1.0)


def _member(rollout: Rollout, group: Group, rules: Rules) -> Member:
    """A rollout with its rewards as they count."""
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
                told=call.index in states,
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
        calls=tuple(calls),
    )


def _shown(call: Call) -> str:
    """What the environment showed before a call: the messages behind the model's last one, without what differs by
    accident (ids of tool calls) and what the owner says (system prompts). A prefilled answer is no message."""
    messages = list(call.messages)
    while messages and messages[-1].get("role") == "assistant":
        messages.pop()
    said = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
    last = said[-1] if said else -1
    asked = {
        one.get("id"): (one.get("function") or {}).get("name")
        for one in (messages[last].get("tool_calls") or () if said else ())
    }
    seen = [
        (message.get("role"), asked.get(message.get("tool_call_id")), _text(message.get("content")))
        for message in messages[last + 1 :]
        if message.get("role") not in ("system", "developer")
    ]
    return json.dumps(seen, sort_keys=True, default=repr)


def _text(content: Any) -> Any:
    """A content of text parts as the text that it is."""
    if isinstance(content, list | tuple) and all(
        isinstance(part, Mapping) and part.get("type") == "text" for part in content
    ):
        return "".join(str(part.get("text", "")) for part in content)
    return content


def _may(group: Group, rollouts: Sequence[Rollout], members: Sequence[Member], rules: Rules) -> tuple[str, ...]:
    """What may become of a group: one thing, or two where its rewards are within rounding of a bound."""
    if len(members) < (2 if rules.formula.group_relative else 1):
        return ("small",)
    if rules.formula.baseline and math.isnan(members[0].baseline):
        return ("small",)
    ways: list[str] = []
    if len(members) > 1 and rules.std_threshold is not None:
        unpunished = replace(rules, overlong_cache=None)
        recorded = [_member(rollout, group, unpunished) for rollout in rollouts]
        excess = spread(recorded, rules.advantage, rules.arguments) - rules.std_threshold
        if excess < -ROUNDING or (excess <= 0.0 and rules.std_threshold == 0.0):
            return ("flat",)
        ways += ["flat"] if excess <= ROUNDING else []
    recorded_G = np.array([rollout.reward for rollout in rollouts if rollout.reward is not None], np.float64)
    if not len(recorded_G):
        return (*ways, TRAINED)
    mean = float(recorded_G.mean())
    low = -math.inf if rules.reward_low is None else rules.reward_low - mean
    high = -math.inf if rules.reward_high is None else mean - rules.reward_high
    ways += ["filtered"] if max(low, high) > -ROUNDING else []
    ways += [TRAINED] if max(low, high) < ROUNDING else []
    return tuple(ways)


def _updates(fresh: Sequence[str], replayed: Sequence[str], rules: Rules) -> dict[str, int]:
    """The update that each training group is in. Groups that train again stand evenly among the fresh ones, of which
    one is first; the line is cut into as many parts as there are minibatches, of sizes that differ by one at most,
    the longer ones behind."""
    line = [(place / len(fresh), 0, place, id_) for place, id_ in enumerate(fresh)]
    line += [((place + 0.5) / len(replayed), 1, place, id_) for place, id_ in enumerate(replayed)]
    ordered = [id_ for *_, id_ in sorted(line)]
    parts = max(min(rules.num_minibatches, len(ordered)), 1)
    starts = [len(ordered) * part // parts for part in range(1, parts)]
    return {id_: sum(place >= start for start in starts) for place, id_ in enumerate(ordered)}


def _calls(
    taking_part: Mapping[str, Sequence[Rollout]],
    updates: Mapping[str, int],
    members: Mapping[str, Sequence[Member]],
    numbers: Mapping[tuple[str, int], float],
    rules: Rules,
    slack: float,
) -> dict[tuple[str, int], ExpectedCall]:
    """Every call that must train. Its weight comes from counts over its whole update."""
    tokens: dict[int, int] = {}
    answers: dict[int, int] = {}
    rollouts: dict[int, int] = {}
    for id_, update in updates.items():
        for member in members[id_]:
            length = sum(call.num_tokens for call in member.calls)
            tokens[update] = tokens.get(update, 0) + length
            answers[update] = answers.get(update, 0) + len(member.calls)
            rollouts[update] = rollouts.get(update, 0) + (length > 0)
    found = {}
    for id_, update in updates.items():
        for rollout, member in zip(taking_part[id_], members[id_], strict=True):
            of_rollout = sum(call.num_tokens for call in member.calls)
            for trained in member.calls:
                shares = {
                    "token-mean": tokens[update],
                    "sequence-mean-token-mean": answers[update] * trained.num_tokens,
                    "sequence-mean-token-sum": answers[update],
                    "rollout-mean": rollouts[update] * of_rollout,
                    "constant-length": rollouts[update] * (rules.constant_length or 0),
                }
                found[rollout.id, trained.index] = ExpectedCall(
                    rollout_id=rollout.id,
                    group_id=id_,
                    call=rollout.calls[trained.index],
                    update=update,
                    advantage=numbers[rollout.id, trained.index],
                    weight=1.0 / shares[rules.aggregation],
                    slack=slack,
                )
    return found
