"""Rows for supervised training, made of what was recorded.

In: the groups of a journal: of a recording, or of a run. Out: rows as `algorithm_type: sft` and `dpo` read them, each
with the id of its rollout.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sharpen.agent.rollout.choices import content_of
from sharpen.agent.transcript import content_text
from sharpen.learning.experience.images import with_data
from sharpen.types import PROMPT_ROLE, Call, CallStatus, Group, Rollout

Row = dict[str, Any]


MANY_REWARDS = 6
"""Of more different rewards only the range is said."""


def by_reward(counts: Mapping[float | None, int]) -> str:
    """Return how many there are of each reward, as words; None stands for those without one."""
    known = {reward: number for reward, number in counts.items() if reward is not None}
    words = [f"{number:,} of {reward:g}" for reward, number in sorted(known.items())]
    if len(words) > MANY_REWARDS:
        words = [f"{sum(known.values()):,} from {min(known):g} to {max(known):g}"]
    return ", ".join([*words, *([f"{counts[None]:,} without one"] if counts.get(None) else [])])


@dataclass(slots=True)
class LeftOut:
    """What no rows were made of: rollouts below the least reward, calls without messages (completions), calls whose
    answer did not reach the agent or was not used, tasks without two rollouts of different rewards, calls without token
    ids, rollouts whose text was dropped. `taught` counts, for those that were made, the answers of each reward: their
    own or their rollout's."""

    low: int = 0
    no_messages: int = 0
    not_used: int = 0
    no_pair: int = 0
    no_ids: int = 0
    trimmed: int = 0
    taught: Counter[float | None] = field(default_factory=Counter)

    def lines(self) -> Iterator[str]:
        """Yield a line for each kind."""
        for number, what in (
            (self.low, "rollouts without a reward, or with a lower one"),
            (self.no_messages, "calls that have a prompt and no messages"),
            (self.not_used, "calls whose answer did not reach the agent, or was not used"),
            (self.no_pair, "tasks without two rollouts of one beginning and different rewards"),
            (self.no_ids, "calls without token ids"),
            (self.trimmed, "rollouts whose text the run dropped (journal.keep_steps)"),
        ):
            if number:
                yield f"left out: {number} {what}"


@dataclass(slots=True, kw_only=True)
class Talk:
    """One conversation of a rollout, up to the answer of its last call. `sampled` are the calls whose answers it has,
    by message number; those at `taught` are good, too, and not in a conversation before."""

    messages: list[dict[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    sampled: dict[int, Call] = field(default_factory=dict)
    taught: set[int] = field(default_factory=set)

    def weighed(self, answers: Container[int]) -> list[dict[str, Any]]:
        """Return the messages, in which all answers but these are context."""
        return [
            message if message.get("role") != "assistant" or number in answers else {**message, "weight": 0}
            for number, message in enumerate(self.messages)
        ]


def sft_rows(groups: Iterable[Group], min_reward: float | None, left_out: LeftOut) -> Iterator[Row]:
    """Yield a row for each conversation. Answers that were not sampled there (examples in a prompt, another model's),
    and those that an earlier row has, get weight 0; with a least reward, so do calls that have rewards of their own and
    do not reach it."""
    for rollout in _rollouts(groups):
        if min_reward is not None and (rollout.reward is None or rollout.reward < min_reward):
            left_out.low += 1
            continue
        for talk in talks(rollout, left_out, min_reward):
            if talk.taught:
                yield {"messages": talk.weighed(talk.taught), **_about(rollout, talk)}


def dpo_rows(groups: Iterable[Group], left_out: LeftOut) -> Iterator[Row]:
    """Yield pairs of rollouts of one task: the best with the worst, the second best with the second worst, while their
    rewards differ and their conversations begin with the same prompt. Of a rollout it is the last conversation."""
    by_task: dict[str, list[tuple[float, Rollout, Talk]]] = {}
    for rollout in _rollouts(groups):
        found = list(talks(rollout, left_out, None))
        if rollout.reward is None or not found:
            left_out.low += rollout.reward is None
            continue
        by_task.setdefault(rollout.task_id, []).append((rollout.reward, rollout, found[-1]))
    for members in by_task.values():
        members.sort(key=lambda one: one[0], reverse=True)
        pairs = 0
        for better, worse in zip(members, reversed(members), strict=True):
            if better[0] <= worse[0]:
                break
            if _prompt(better[2]) == _prompt(worse[2]):
                pairs += 1
                yield _pair(better, worse)
        left_out.no_pair += not pairs


def talks(rollout: Rollout, left_out: LeftOut, min_reward: float | None) -> Iterator[Talk]:
    """Yield the conversations of a rollout: of each call whose answer no later call goes on from, with all before."""
    calls = []
    left_out.trimmed += rollout.trimmed
    for call in () if rollout.trimmed else rollout.calls:
        if call.status != CallStatus.USED:
            left_out.not_used += 1
        elif not call.messages or call.messages[0].get("role") == PROMPT_ROLE:
            left_out.no_messages += 1
        else:
            calls.append(call)
    given: set[int] = set()
    for last in calls:
        chain = [call for call in calls if _goes_on(call, last)]
        if any(_goes_on(last, later) for later in calls if later.index > last.index):
            continue
        messages = [with_data(message, last) for message in (*last.messages, last.response)]
        talk = Talk(messages=messages, tools=last.tools)
        for call in (*chain, last):
            place = len(call.messages)
            talk.messages[place] = dict(call.response)
            talk.sampled[place] = call
            if call.index not in given and _is_good(rollout, call, min_reward):
                talk.taught.add(place)
                left_out.taught[rollout.call_rewards.get(call.index, rollout.reward)] += 1
            given.add(call.index)
        yield talk


def _goes_on(call: Call, later: Call) -> bool:
    """Whether a later call's messages are a call's, its answer, and more."""
    place = len(call.messages)
    return (
        call.index < later.index
        and len(later.messages) > place
        and later.messages[place].get("role") == "assistant"
        and content_of(later.messages[place]) == content_of(call.response)
        and list(later.messages[:place]) == list(call.messages)
    )


def _is_good(rollout: Rollout, call: Call, min_reward: float | None) -> bool:
    if min_reward is None or not rollout.call_rewards:
        return True
    reward = rollout.call_rewards.get(call.index)
    return reward is not None and reward >= min_reward


def _pair(better: tuple[float, Rollout, Talk], worse: tuple[float, Rollout, Talk]) -> Row:
    about = _about(better[1], better[2])
    rejected = {"rejected_rollout": worse[1].id, "rejected_reward": worse[0]}
    sides = {"chosen": better[2].weighed(better[2].sampled), "rejected": worse[2].weighed(worse[2].sampled)}
    return {**sides, **about, **rejected}


def _about(rollout: Rollout, talk: Talk) -> Row:
    about = {"rollout": rollout.id, "task_id": rollout.task_id, "reward": rollout.reward}
    return {**about, "tools": json.dumps(list(talk.tools)) if talk.tools else None}


def _prompt(talk: Talk) -> tuple[Any, ...]:
    """What a conversation has before its first answer, and its tools."""
    return talk.messages[: min(talk.sampled)], list(talk.tools)


def _rollouts(groups: Iterable[Group]) -> Iterator[Rollout]:
    return (rollout for group in groups for rollout in group.rollouts if rollout.scored)


# Every rollout of a journal as a row for `datasets`: what was said, what it was worth, what people think of it.
#
# In: groups, thumbs and notes by rollout id. Out: a row with plain columns for each conversation of a rollout; a JSON
# Lines or a Parquet file.


@dataclass(frozen=True, slots=True, kw_only=True)
class Opinion:
    """What somebody thinks of a rollout: `up`, `down` or empty, and a text."""

    thumb: str = ""
    text: str = ""


def rollout_rows(groups: Iterable[Group], opinions: Mapping[str, Opinion], left_out: LeftOut) -> Iterator[Row]:
    """Yield a row for each conversation of each rollout, also of those that failed. `images` are the data URLs of its
    images, in order; in a message's text `[image_url]` stands for each. `task` is the task's row and `metrics` what was
    measured, both as JSON."""
    for group in groups:
        task = json.dumps(group.task.row, ensure_ascii=False, default=str)
        for rollout in group.rollouts:
            opinion = opinions.get(rollout.id, Opinion())
            for talk in talks(rollout, left_out, None):
                yield {
                    "messages": [_plain(message) for message in talk.messages],
                    "images": [url for message in talk.messages for url in _images(message)],
                    "tools": json.dumps(list(talk.tools), ensure_ascii=False) if talk.tools else None,
                    "rollout": rollout.id,
                    "group": group.id,
                    "task_id": group.task.id,
                    "task": task,
                    "reward": rollout.reward,
                    "outcome": rollout.outcome.value,
                    "metrics": json.dumps(dict(rollout.metrics), ensure_ascii=False),
                    "thumb": opinion.thumb,
                    "note": opinion.text,
                }


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write Parquet if the name ends so, else JSON Lines. Raises `OSError`, `FileExistsError` among them."""
    if path.suffix != ".parquet":
        with path.open("x", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
        return
    import pyarrow
    import pyarrow.parquet

    with path.open("xb") as file:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)


def _images(message: Mapping[str, Any]) -> Iterator[str]:
    content = message.get("content")
    for part in content if isinstance(content, list | tuple) else ():
        source = part.get("image_url") if isinstance(part, Mapping) else None
        if isinstance(source, Mapping) and str(source.get("url", "")).startswith("data:"):
            yield source["url"]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with the same fields as every other, so that it fits a table: content as text, tool calls as
    JSON."""
    calls = message.get("tool_calls")
    return {
        "role": str(message.get("role")),
        "content": content_text(message.get("content")),
        "reasoning_content": message.get("reasoning_content"),
        "tool_calls": json.dumps(calls, ensure_ascii=False) if calls else None,
        "tool_call_id": message.get("tool_call_id"),
        "name": message.get("name"),
    }
