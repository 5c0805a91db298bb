"""Calls by OpenEnv's capture contract (`TrainingTrace` of openenv 0.10): token in, token out.

In: the groups of a journal. Out: a document for each rollout; a turn for each call that reached the agent, whose loss
mask, over prompt and answer, is 1 where the call is trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from sharpen.learning.experience.images import with_data
from sharpen.serve.record.rows import LeftOut
from sharpen.types import Call, Group, Rollout


def documents(groups: Iterable[Group], left_out: LeftOut) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a name and a document for each rollout that has calls with token ids and their logprobs."""
    for group in groups:
        for rollout in group.rollouts:
            turns = [_turn(group, rollout, call) for call in rollout.calls if _is_known(call, left_out)]
            if turns:
                yield rollout.id, {"schema_version": 1, "turns": turns}


def _is_known(call: Call, left_out: LeftOut) -> bool:
    if not call.delivered:
        left_out.not_used += 1
    elif not len(call.sampled_ids_S) or bool((call.logprobs_S != call.logprobs_S).any()):  # NaN: not said
        left_out.no_ids += 1
    else:
        return True
    return False


def _turn(group: Group, rollout: Rollout, call: Call) -> dict[str, Any]:
    prompt_P, sampled_S, sampling = call.prompt_ids_P.tolist(), call.sampled_ids_S.tolist(), call.sampling
    return {
        "node_id": f"{rollout.id}/{call.index}",
        "prompt_token_ids": prompt_P,
        "completion_token_ids": sampled_S,
        "per_token_logps": call.logprobs_S.tolist(),
        "loss_mask": [0] * len(prompt_P) + [int(call.trainable)] * len(sampled_S),
        "request": {"messages": [with_data(one, call) for one in call.messages], "tools": list(call.tools)},
        "response": {"choices": [{"message": dict(call.response), "finish_reason": call.finish_reason}]},
        "metadata": {
            "index": call.index,
            "parent": call.parent,
            "model": call.model,
            "agent": call.agent,
            "rollout": rollout.id,
            "group": group.id,
            "task_id": group.task.id,
            "reward": rollout.reward,
            "policy_versions": call.versions_S.tolist(),
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "min_p": sampling.min_p,
                "max_tokens": sampling.max_tokens,
            },
        },
    }
