"""Rollouts with shared history trained as a tree against one sample for each call, on two CPU threads.

In: nothing (a Qwen3 model with random weights and token ids are made here). Out: a table and `bench/out/tree.json`:

- `computed_tokens`: tokens that go through the model with one sample per call, over those of the tree;
- `sharing`: tokens that the tree saves, over those that are saved if every distinct prefix is computed once;
- `step_time`: seconds of forward, backward and update with one sample per call, over those of the tree.

The work: 2 groups of 8 rollouts of 10 calls, as an agent with tools makes them: a system prompt of 200 tokens common
to all, a question of 40, then answers of 30 tokens and tool results of 40 in turns. Both sides train the same loss on
the same number of tokens with the same code; the other side's samples are packed without padding, so that it is at
its best (their first tokens are made to differ, so that not even equal beginnings are shared).

    python bench/tree.py [--repeats 5]
"""

from __future__ import annotations

import argparse
import copy
import itertools
import sys
from dataclasses import replace

import numpy as np
import torch
from report import finish
from trainer import compare, make_model, sharing_side

from sharpen.config.run import LossConfig
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.experience.draw import make_batch
from sharpen.learning.trainer.packing import Pack, pack
from sharpen.types import Call, CallStatus, Experience, Group, Outcome, Rollout, Sampling, Task

TARGETS = {"computed_tokens": 7.0, "sharing": 0.9, "step_time": 4.0}
GROUPS, ROLLOUTS = 2, 8
SYSTEM, QUESTION, ANSWER, RESULT = 200, 40, 30, 40
VOCABULARY, BUDGET = 512, 8192


def make_groups(num_calls: int, *, merged: bool) -> list[Group]:
    """The rollouts; without `merged` no call knows its parent, so that each becomes a sample of its own."""
    rng = np.random.default_rng(0)

    def ids(count: int) -> list[int]:
        drawn: list[int] = rng.integers(5, VOCABULARY, count).tolist()
        return drawn

    system, groups = ids(SYSTEM), []
    for number in range(GROUPS):
        group_id, prompt = f"g{number}", system + ids(QUESTION)
        rollouts = []
        for index in range(ROLLOUTS):
            history, calls = list(prompt), []
            for turn in range(num_calls):
                sampled = ids(ANSWER)
                calls.append(make_call(turn, history, sampled, merged=merged))
                history += sampled + ids(RESULT)
            rollouts.append(make_rollout(group_id, index, calls, reward=float(rng.random())))
        task = Task(id=group_id, index=number, row={})
        groups.append(Group(id=group_id, task=task, version=0, rollouts=tuple(rollouts)))
    return groups


def make_call(index: int, history: list[int], sampled: list[int], *, merged: bool) -> Call:
    """One call as the gateway records it."""
    return Call(
        index=index,
        parent=index - 1 if merged and index else None,
        prompt_ids_P=np.array(history, np.int32),
        sampled_ids_S=np.array(sampled, np.int32),
        logprobs_S=np.full(len(sampled), -6.0, np.float32),
        versions_S=np.zeros(len(sampled), np.int32),
        sampling=Sampling(),
        finish_reason="stop",
        status=CallStatus.USED,
        messages=({"role": "user", "content": str(index)},),
        tools=(),
        response={"role": "assistant", "content": ""},
    )


def make_rollout(group_id: str, index: int, calls: list[Call], reward: float) -> Rollout:
    """A scored rollout."""
    return Rollout(
        id=f"{group_id}/{index}",
        group_id=group_id,
        task_id=group_id,
        index=index,
        attempt=0,
        calls=tuple(calls),
        outcome=Outcome.OK,
        reward=reward,
    )


def experiences(num_calls: int, *, merged: bool) -> tuple[Experience, ...]:
    """The update's sequences with advantages and weights."""
    groups = make_groups(num_calls, merged=merged)
    return make_batch(groups, resolve("grpo", LossConfig(kl="none"), ROLLOUTS)).experiences


def told_apart(sequences: tuple[Experience, ...]) -> list[Experience]:
    """The sequences with a first token of their own each."""
    changed = []
    for number, sequence in enumerate(sequences):
        ids_T = sequence.ids_T.copy()
        ids_T[0] = number
        changed.append(replace(sequence, ids_T=ids_T))
    return changed


def ideal_tokens(sequences: tuple[Experience, ...]) -> int:
    """Distinct prefixes of all sequences: what a tree that shares everything computes."""
    rows = sorted(sequence.ids_T.tolist() for sequence in sequences)
    total = len(rows[0])
    for before, row in itertools.pairwise(rows):
        common = next(
            (n for n, (a, b) in enumerate(zip(before, row, strict=False)) if a != b), min(len(before), len(row))
        )
        total += len(row) - common
    return total


def computed(packs: list[Pack]) -> int:
    """Tokens that go through the model."""
    return sum(packed.num_computed_tokens for packed in packs)


def main() -> int:
    """Measure, print, write `bench/out/tree.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--calls", type=int, default=10, help="of a rollout")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    single, merged = (experiences(arguments.calls, merged=merged) for merged in (False, True))
    tree, apart = pack(merged, BUDGET), pack(told_apart(single), BUDGET)
    model = make_model(256, 6, 8)
    ours, other = compare(
        sharing_side(copy.deepcopy(model), tree), sharing_side(copy.deepcopy(model), apart), arguments.repeats
    )
    possible = computed(apart) - ideal_tokens(single)
    ratios = {
        "computed_tokens": computed(apart) / computed(tree),
        "sharing": (computed(apart) - computed(tree)) / possible,
        "step_time": other / ours,
    }
    return finish(
        "tree",
        header=("side", "computed tokens", "seconds"),
        rows=[("one sample per call", computed(apart), other), ("tree", computed(tree), ours)],
        ratios=ratios,
        at_least=TARGETS,
        extra={"repeats": arguments.repeats, "loss_tokens": sum(packed.num_trained_tokens for packed in tree)},
    )


if __name__ == "__main__":
    sys.exit(main())
