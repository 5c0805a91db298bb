"""Merges the calls of a rollout into the sequences to train on.

In: a `Rollout`. Out: its `Experience`s, with advantages and weights still 0 (`draw` sets them). Calls along parent
links become one sequence. Its ids are those of the last call, since a child's prompt starts with its parent's prompt
and sampled ids. If a call has several children, the path forks; every trainable call carries loss in exactly one
sequence.

Shape suffixes: P prompt tokens of a call, S sampled tokens of a call, T tokens of a sequence.
"""

from __future__ import annotations

import numpy as np

from sharpen.errors import CallError, SamplingError
from sharpen.types import BoolArray, Call, Experience, Rollout, RouteArray


def merge(rollout: Rollout, *, needs_ratio: bool = True) -> list[Experience]:
    """Return the sequences of a rollout to train on, ordered by their last calls; none if no call is trainable.

    Calls that are not trainable, such as greedy or abandoned ones, can only be context. Raises `CallError` for a
    trainable call without exactly one finite logprob per sampled token, or a call whose prompt does not start with its
    parent's ids; if the algorithm `needs_ratio`, `SamplingError` for a trainable call sampled from a truncated
    distribution whose support is not recorded.
    """
    for call in rollout.calls:
        _check_call(rollout, call, needs_ratio)
    parents = {call.parent for call in rollout.calls}
    covered: set[int] = set()
    experiences = []
    for leaf in rollout.calls:
        if leaf.index in parents:
            continue
        path = _path(rollout, leaf)
        while path and (not path[-1].trainable or path[-1].index in covered):
            path.pop()  # do not compute a tail that carries no loss here
        if not path:
            continue
        loss_calls = [call for call in path if call.trainable and call.index not in covered]
        covered.update(call.index for call in loss_calls)
        experiences.append(_sequence(rollout, path[-1], loss_calls))
    return experiences


def has_ratios(rollout: Rollout) -> bool:
    """Whether the logprobs of all trainable calls of the rollout can be compared with a model's."""
    return all(call.has_ratio for call in rollout.calls if call.trainable)


def num_trainable_calls(rollout: Rollout) -> int:
    """Return the number of calls with loss."""
    return sum(call.trainable for call in rollout.calls)


def _path(rollout: Rollout, leaf: Call) -> list[Call]:
    """Return the calls from the first ancestor to `leaf`."""
    path = [leaf]
    while (parent := path[-1].parent) is not None:
        path.append(rollout.calls[parent])
    path.reverse()
    return path


def _sequence(rollout: Rollout, last: Call, loss_calls: list[Call]) -> Experience:
    """Make a sequence of the ids of `last`, with loss on the sampled tokens of `loss_calls` (which include `last`)."""
    ids_T = np.concatenate([last.prompt_ids_P, last.sampled_ids_S]).astype(np.int32, copy=False)
    num_tokens = len(ids_T)
    loss_mask_T = np.zeros(num_tokens, dtype=np.bool_)
    logprobs_T = np.zeros(num_tokens, dtype=np.float32)
    versions_T = np.full(num_tokens, -1, dtype=np.int32)
    calls_T = np.full(num_tokens, -1, dtype=np.int32)
    temperatures_T = np.ones(num_tokens, dtype=np.float32)
    for call in loss_calls:
        start = len(call.prompt_ids_P)
        sampled = slice(start, start + len(call.sampled_ids_S))
        loss_mask_T[sampled] = True
        logprobs_T[sampled] = call.logprobs_S
        versions_T[sampled] = call.versions_S
        calls_T[sampled] = call.index
        temperatures_T[sampled] = call.sampling.temperature
    return Experience(
        rollout_id=rollout.id,
        group_id=rollout.group_id,
        task_id=rollout.task_id,
        ids_T=ids_T,
        loss_mask_T=loss_mask_T,
        logprobs_T=logprobs_T,
        versions_T=versions_T,
        calls_T=calls_T,
        temperatures_T=temperatures_T,
        advantages_T=np.zeros(num_tokens, dtype=np.float32),
        weights_T=np.zeros(num_tokens, dtype=np.float32),
        truncated_calls=tuple(call.index for call in loss_calls if not call.has_ratio),
        supports={call.index: call.supports for call in loss_calls if call.supports is not None},
        constraints={call.index: call.constraint for call in loss_calls if call.constraint is not None},
        routes_NLK=_routes(loss_calls),
        pictures=last.pictures,
        shown_T=_shown(rollout, last, loss_calls),
    )


def _shown(rollout: Rollout, last: Call, loss_calls: list[Call]) -> BoolArray:
    """Return which tokens of a sequence came between a call with loss and the call before it: a tool's or a user's
    answer. Images have no text that could be predicted."""
    shown_T = np.zeros(len(last.prompt_ids_P) + len(last.sampled_ids_S), dtype=np.bool_)
    for call in loss_calls:
        if call.parent is not None:
            parent = rollout.calls[call.parent]
            shown_T[len(parent.prompt_ids_P) + len(parent.sampled_ids_S) : len(call.prompt_ids_P)] = True
    for span in last.pictures:
        shown_T[span.start : span.stop] = False
    return shown_T


def _routes(loss_calls: list[Call]) -> RouteArray | None:
    """Return the experts of a sequence's tokens but the last. Those of a token are what the first call with loss that
    computed it recorded, since later calls may have computed it again, with newer weights."""
    recorded = [call.routes_NLK for call in loss_calls if call.routes_NLK is not None]
    if len(recorded) < len(loss_calls):
        return None
    starts = [0, *(len(routes_NLK) for routes_NLK in recorded)]
    parts = [routes_NLK[start:] for start, routes_NLK in zip(starts, recorded, strict=False)]
    joined: RouteArray = np.concatenate(parts)
    return joined


def _check_call(rollout: Rollout, call: Call, needs_ratio: bool) -> None:
    where = f"call {call.index} of rollout {rollout.id}"
    assert rollout.calls[call.index] is call, f"{where}: calls must be stored in the order of their indices"
    if call.parent is not None:
        _check_parent(where, rollout.calls[call.parent], call)
    if not call.trainable:
        return
    num_sampled = len(call.sampled_ids_S)
    if call.routes_NLK is not None and len(call.routes_NLK) != len(call.prompt_ids_P) + num_sampled - 1:
        raise CallError(
            f"{where} has {len(call.prompt_ids_P) + num_sampled} tokens, but experts for {len(call.routes_NLK)}; the "
            "engine must return those of every token but the last"
        )
    if len(call.logprobs_S) != num_sampled or len(call.versions_S) != num_sampled:
        raise CallError(
            f"{where} has {num_sampled} sampled tokens, but {len(call.logprobs_S)} logprobs and {len(call.versions_S)} "
            "versions: it cannot be trained on"
        )
    finite_S = np.isfinite(call.logprobs_S)
    if not finite_S.all():
        first = int(np.argmin(finite_S))
        raise CallError(
            f"{where}: the logprob of sampled token {first} is {call.logprobs_S[first]}; the engine must return a "
            "finite one for every sampled token"
        )
    if needs_ratio and not call.has_ratio:
        wrong = ", ".join(f"{name}={value:g}" for name, value in call.sampling.cuts.items())
        raise SamplingError(
            f"{where} was sampled with {wrong}, and the engine did not record which tokens that left: they have no "
            "probability ratio to the model's. Use the embedded engine, which records them, sample with top_p=1, "
            "top_k=0 and min_p=0, or with temperature 0 if the call should only be context, or train with an "
            "algorithm without a ratio (raft)"
        )


def _check_parent(where: str, parent: Call, call: Call) -> None:
    if parent.index >= call.index:
        raise CallError(f"{where} names call {parent.index} as its parent, which is not earlier")
    num_prompt = len(parent.prompt_ids_P)
    num_before = num_prompt + len(parent.sampled_ids_S)
    prompt_ids_P = call.prompt_ids_P
    if not (
        len(prompt_ids_P) >= num_before
        and np.array_equal(prompt_ids_P[:num_prompt], parent.prompt_ids_P)
        and np.array_equal(prompt_ids_P[num_prompt:num_before], parent.sampled_ids_S)
    ):
        raise CallError(
            f"{where} names call {parent.index} as its parent, but its prompt does not start with that call's prompt "
            "and sampled ids"
        )
    if parent.pictures != tuple(span for span in call.pictures if span.start < num_before):
        raise CallError(f"{where} names call {parent.index} as its parent, but does not start with that call's images")
