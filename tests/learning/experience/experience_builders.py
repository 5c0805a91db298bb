"""Records for the experience tests, made by hand or drawn by hypothesis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from sharpen.evidence.certificate.audit import audit
from sharpen.evidence.certificate.delivery import delivery
from sharpen.evidence.certificate.rules import Rules
from sharpen.learning.algorithm.presets import Algorithm
from sharpen.learning.experience.draw import Batch
from sharpen.types import Call, CallStatus, Check, Group, Outcome, Rollout, Sampling, Task


def make_call(
    index: int, prompt: Sequence[int], sampled: Sequence[int], parent: int | None = None, **changes: Any
) -> Call:
    """A trainable call; logprobs are -0.5, -1.0, ... and the version is the call's index."""
    values: dict[str, Any] = {
        "logprobs_S": np.array([-0.5 * (i + 1) for i in range(len(sampled))], dtype=np.float32),
        "versions_S": np.full(len(sampled), index, dtype=np.int32),
        "sampling": Sampling(),
        "finish_reason": "stop",
        "status": CallStatus.USED,
        "messages": ({"role": "user", "content": "hi"},),
        "tools": (),
        "response": {"role": "assistant", "content": "hello"},
    }
    values |= changes
    return Call(
        index=index,
        parent=parent,
        prompt_ids_P=np.array(prompt, dtype=np.int32),
        sampled_ids_S=np.array(sampled, dtype=np.int32),
        **values,
    )


def make_rollout(
    calls: Sequence[Call], reward: float | None = 1.0, group: str = "g", index: int = 0, **changes: Any
) -> Rollout:
    values: dict[str, Any] = {
        "id": f"{group}/{index}",
        "group_id": group,
        "task_id": f"task-{group}",
        "index": index,
        "attempt": 0,
        "calls": tuple(calls),
        "outcome": Outcome.OK if reward is not None else Outcome.TIMEOUT,
        "reward": reward,
    }
    return Rollout(**values | changes)


def make_group(rollouts: Sequence[Rollout], group: str = "g", **changes: Any) -> Group:
    task = Task(id=f"task-{group}", index=3, row={"question": "2+2?"})
    return Group(**{"id": group, "task": task, "version": 5, "rollouts": tuple(rollouts)} | changes)


def two_turns(reward: float | None = 1.0, group: str = "g", index: int = 0, merged: bool = True) -> Rollout:
    """Prompt 1 2 3, sampled 4 5, tool result 6 7, sampled 8: one sequence, or two if not `merged`."""
    first = make_call(0, [1, 2, 3], [4, 5])
    second = make_call(1, [1, 2, 3, 4, 5, 6, 7], [8], parent=0 if merged else None)
    return make_rollout([first, second], reward, group, index)


def rules_of(algorithm: Algorithm, group_size: int = 2, **changes: Any) -> Rules:
    """Make the certificate's rules for an algorithm without a configuration."""
    shaping = algorithm.shaping
    values: dict[str, Any] = {
        "advantage": algorithm.advantage,
        "arguments": algorithm.advantage_args,
        "aggregation": algorithm.aggregation,
        "constant_length": algorithm.constant_length,
        "std_threshold": algorithm.std_threshold,
        "drop_truncated": shaping.drop_truncated,
        "overlong_cache": shaping.cache,
        "overlong_length": shaping.max_length,
        "overlong_penalty": shaping.penalty,
        "length_penalty": shaping.length,
        "turns_penalty": shaping.turns,
        "reward_low": shaping.reward_low,
        "reward_high": shaping.reward_high,
        "group_size": group_size,
    }
    if (batch_size := changes.get("batch_size")) is not None:
        values["most_further"] = algorithm.most_further(batch_size)
    return Rules(**values | changes)


def audited(
    groups: Sequence[Group],
    batches: Sequence[Batch],
    algorithm: Algorithm,
    *,
    replayed: Sequence[Group] = (),
    options: Mapping[str, Any] | None = None,
    **rules: Any,
) -> dict[str, Check]:
    """Return the checks of a step by name. `rules` override rules, `options` override the audit's (by default, tokens
    of versions 0 and 1 may train). There are as many minibatches as batches."""
    delivered = delivery(batches, {group.id for group in replayed})
    rules = {"num_minibatches": max(len(batches), 1), "replayed_groups": len(replayed)} | rules
    values = {"replayed": replayed, **(options or {"version": 1, "max_staleness": 1})}
    return {check.name: check for check in audit(groups, delivered, rules_of(algorithm, **rules), **values)}


ids = st.lists(st.integers(0, 9), min_size=1, max_size=5)


@st.composite
def call_trees(draw: st.DrawFn, max_calls: int = 6) -> list[Call]:
    """Draw calls that continue earlier ones, fork from them, or start new sequences. A few are greedy or abandoned;
    most train, since forks of trained calls are the cases that could train a call twice."""
    calls: list[Call] = []
    for index in range(draw(st.integers(1, max_calls))):
        parent = draw(st.none() | st.integers(0, index - 1)) if index else None
        before: list[int] = []
        if parent is not None:
            before = [*calls[parent].prompt_ids_P.tolist(), *calls[parent].sampled_ids_S.tolist()]
        sampled = draw(st.lists(st.integers(0, 9), max_size=4))
        calls.append(
            make_call(
                index,
                before + draw(ids),
                sampled,
                parent,
                logprobs_S=np.array(
                    draw(st.lists(st.floats(-9, 0, width=32), min_size=len(sampled), max_size=len(sampled)))
                ),
                status=draw(st.sampled_from([CallStatus.USED] * 6 + list(CallStatus))),
                sampling=Sampling(temperature=draw(st.sampled_from([1.0, 0.5, 1.0, 0.5, 0.0]))),
            )
        )
    return calls


def unmerged(calls: Sequence[Call]) -> list[Call]:
    """Return the calls without parent links."""
    return [
        make_call(
            call.index,
            call.prompt_ids_P.tolist(),
            call.sampled_ids_S.tolist(),
            logprobs_S=call.logprobs_S,
            status=call.status,
            sampling=call.sampling,
        )
        for call in calls
    ]
