"""The calls of a policy, reread by a teacher with other tokens.

In: the groups of a step. Out: the same groups, in which calls that the teacher cannot read train nothing
(`CallStatus.LEFT_OUT`), so that no weight counts them; and, once batches are drawn, a `Reread` for each other call. The
teacher's prompt is written by its own chat template from the recorded messages, where there are messages. The answer is
the text of the sampled ids, byte by byte, in the teacher's tokens; both models' end tokens stand for each other.

What the policy can write must not leave a call out where that can be helped: without a teacher such an answer costs
nothing, and the policy would learn to give it. So special tokens within an answer are text to the teacher, and bytes
that are none are U+FFFD: it finds both unlikely.

Shape suffixes: S sampled tokens of a call, R tokens of the teacher.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from sharpen.errors import ConfigError, ModelError, TrainingError
from sharpen.gateway.render import Renderer
from sharpen.gateway.requests import ApiError, render_message, text_of
from sharpen.learning.algorithm.distill import Distill
from sharpen.learning.experience.alignment import UNREADABLE, chunks, spelled
from sharpen.learning.experience.draw import Batch
from sharpen.learning.experience.token_bytes import TokenBytes
from sharpen.models.configuration import load_tokenizer, read_config
from sharpen.models.pieces import text_config
from sharpen.types import PROMPT_ROLE, Call, CallStatus, Experience, Group, IntArray, Reread, Rollout

OPENED = "<think>"
"""What a chat template writes where the answer begins inside reasoning. If the policy's did, so does the teacher's
prompt."""
_TAIL = 64
"""Ids at the end of a prompt that are looked at."""


class Policy:
    """The tokens of the trained model, whose answers are read."""

    def __init__(self, folder: Path) -> None:
        """Raises `ModelError` if its answers cannot be spelled byte by byte."""
        from sharpen.engine.families import end_ids_of

        tokenizer = load_tokenizer(folder)
        self.tokens, self.end_ids = TokenBytes(tokenizer), end_ids_of(folder)
        self._renderer = Renderer(tokenizer)

    def end_of_prompt(self, call: Call) -> str:
        """Return the text with which the prompt of a call ends."""
        return self._renderer.spell(call.prompt_ids_P[-_TAIL:].tolist())

    def has_special(self, call: Call) -> bool:
        """Whether an answer has special tokens before its last one."""
        return not self.tokens.special_ids.isdisjoint(call.sampled_ids_S[:-1].tolist())

    def answer(self, call: Call) -> tuple[str, IntArray, bool] | str:
        """Return the text of the sampled ids, where each of them ends in it, and whether an end token followed; or why
        there is none."""
        ids = call.sampled_ids_S.tolist()
        ended = call.finish_reason == "stop" and ids[-1] in self.end_ids
        pieces = self.tokens.of(ids[:-1] if ended else ids)
        if pieces is None:
            return "a token without text"
        text, ends_S = spelled(pieces)
        if not ended and text.endswith(UNREADABLE):
            return "an answer that was cut off within a character"
        return text, ends_S, ended


class Reader:
    """A teacher's tokenizer and chat template. `kwargs` are the run's template arguments, `max_tokens` is what the
    teacher can read."""

    def __init__(self, policy: Policy, folder: Path, kwargs: Mapping[str, Any]) -> None:
        """Raises `ModelError` for a teacher without a chat template, an end token, or texts byte by byte."""
        from sharpen.engine.families import end_ids_of

        tokenizer = load_tokenizer(folder)
        self._policy, self._kwargs = policy, kwargs
        self._tokens, self._renderer = TokenBytes(tokenizer), Renderer(tokenizer)
        self._plain = copy.deepcopy(tokenizer.backend_tokenizer)
        self._plain.no_truncation()
        self._plain.no_padding()
        self._plain.encode_special_tokens = True  # an answer may spell one, which is then text
        self._text_end: int | None = tokenizer.eos_token_id
        self._turn_end = self._end_of_turn(self._tokens.special_ids | end_ids_of(folder))
        self._max_tokens = getattr(text_config(read_config(folder)), "max_position_embeddings", None)

    def read(self, call: Call) -> Reread | str:
        """Return a call as the teacher reads it, or in a few words what in it cannot be read."""
        if why := _unreadable(call):
            return why
        answer, prompt = self._policy.answer(call), self._prompt(call)
        if isinstance(prompt, str) or isinstance(answer, str):
            return prompt if isinstance(prompt, str) else str(answer)
        text, ends_S, ended = answer
        if (found := self._encoded(text)) is None:
            return "a text that the teacher's tokenizer changes"
        ids, ends_R = found
        chunks_S, chunks_R = chunks(ends_S, ends_R)
        if ended:
            end = self._text_end if _is_raw(call) else self._turn_end
            if end is None:
                return "the end of a text, for which the teacher has no token"
            ids, last = [*ids, end], [len(np.unique(chunks_S))]
            chunks_S, chunks_R = (np.append(one, last).astype(np.int32) for one in (chunks_S, chunks_R))
        if not len(prompt):
            return "a prompt of no tokens for the teacher"
        if self._max_tokens is not None and len(prompt) + len(ids) > self._max_tokens:
            return f"more than the {self._max_tokens} tokens that the teacher reads"
        return Reread(
            prompt_ids_P=prompt,
            answer_ids_R=np.array(ids, np.int32),
            chunks_S=chunks_S,
            chunks_R=chunks_R,
            has_special=self._policy.has_special(call),
        )

    def _prompt(self, call: Call) -> IntArray | str:
        """Return the ids of the teacher's prompt, or why there is none."""
        if _is_raw(call):
            if not self._policy.tokens.special_ids.isdisjoint(call.prompt_ids_P[1:].tolist()):
                return "a prompt with special tokens that no messages were given for"
            return self._renderer.encode_raw(str(call.messages[0]["content"]))
        before, last = self._policy.end_of_prompt(call), call.messages[-1]
        rendered = [render_message(message) for message in call.messages]
        said = text_of(rendered[-1]["content"]) if last.get("role") == "assistant" else ""
        goes_on = bool(said) and before.rstrip().endswith(said.rstrip()[-_TAIL // 2 :])
        try:
            text = self._renderer.render(rendered, call.tools, self._kwargs, continue_final=goes_on)
        except ApiError:
            return "messages that the teacher's chat template refuses"
        if before.rstrip().endswith(OPENED) and not text.rstrip().endswith(OPENED):
            text += before[before.rindex(OPENED) :]
        return self._renderer.encode(text)

    def _encoded(self, text: str) -> tuple[list[int], IntArray] | None:
        """Return the ids of exactly this text behind a prompt, and where each ends in it; None if the tokenizer has
        none. Some tokenizers put a space before a text, but not after a line's end."""
        for ids in self._ways(text):
            pieces = self._tokens.of(ids)
            if pieces is not None and (found := spelled(pieces))[0] == text:
                return ids, found[1]
        return None

    def _ways(self, text: str) -> Iterator[list[int]]:
        yield self._ids(text)
        yield self._ids(f"\n{text}")[len(self._ids("\n")) :]

    def _ids(self, text: str) -> list[int]:
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def _end_of_turn(self, ends: frozenset[int]) -> int:
        """Return the token with which the teacher's chat template ends an answer, else that which ends a text."""
        said = "Yes."
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}]
        try:
            after = self._renderer.render(messages, (), self._kwargs, closed=True).rpartition(said)[2]
        except ApiError:
            after = ""
        found = next((int(id_) for id_ in self._renderer.encode(after) if int(id_) in ends), self._text_end)
        if found is None:
            raise ModelError("neither its chat template nor its tokenizer has a token that ends an answer")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The groups of a step without the calls that their teachers cannot read, metrics, and a note for the user."""

    groups: tuple[Group, ...]
    metrics: Mapping[str, float]
    note: str


@dataclass(slots=True)
class Rereading:
    """The readers of a run's teachers that have other tokens, by name. `reread` holds what they made of the calls of
    the present step, by rollout and call. `max_share` of a step's calls may be left out."""

    readers: Mapping[str, Reader]
    distill: Distill
    max_share: float = 0.5
    reread: dict[tuple[str, int], Reread] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        distill: Distill | None,
        folder: Path,
        teachers: Mapping[str, Path],
        thinking: bool | None,
        max_share: float = 0.5,
    ) -> Rereading | None:
        """Make the readers of these teachers, by the names of their settings, for the model in `folder`; None if there
        are none. Raises `ConfigError` if a tokenizer is of no use for it."""
        if distill is None or not teachers:
            return None
        kwargs = {} if thinking is None else {"enable_thinking": thinking}
        whose = f"the model in {folder}"
        try:
            policy, readers = Policy(folder), dict[str, Reader]()
            for name, teacher in teachers.items():
                whose = f"the teacher in {teacher}"
                readers[name] = Reader(policy, teacher, kwargs)
        except ModelError as error:
            raise ConfigError(
                f"{whose} cannot be compared with a model of other tokens: {error}; choose a teacher with the model's "
                "tokenizer"
            ) from error
        return cls(readers, distill, max_share)

    def place(self, groups: Sequence[Group]) -> Placed:
        """Read the calls that would train. Raises `TrainingError` if too many of them cannot be read, or have special
        tokens within their answers: these are the model's markup, which no teacher should take away."""
        began, left = time.perf_counter(), Counter[str]()
        self.reread.clear()

        def placed(group: Group) -> Group:
            reader = self.readers.get(self.distill.teacher_of(group.task))
            side = tuple(map(placed, group.side))
            if reader is None:
                return replace(group, side=side)
            read = [self._read(reader, one, left) if one.scored else one for one in group.rollouts]
            return replace(group, rollouts=tuple(read), side=side)

        found = tuple(map(placed, groups))
        reasons = ", ".join(f"{reason} ({count})" for reason, count in left.most_common())
        total, special = left.total() + len(self.reread), sum(one.has_special for one in self.reread.values())
        if left.total() > self.max_share * total:
            raise TrainingError(
                f"a teacher with other tokens cannot read {left.total()} of the {total} calls of this step "
                f"(rollout.max_excluded_share is {self.max_share:g}): {reasons}. Let the agent make calls without "
                "that, or choose a teacher with the model's tokens"
            )
        if special > self.max_share * total:
            raise TrainingError(
                f"{special} of the {total} answers of this step have special tokens within (rollout.max_excluded_share "
                f"is {self.max_share:g}), which are the model's own markup: a teacher with other tokens would take it "
                "away. Choose a teacher with the model's tokens"
            )
        sampled = sum(len(one.chunks_S) for one in self.reread.values())
        metrics = {
            "teacher/tokens": float(sum(len(one.answer_ids_R) for one in self.reread.values())),
            "teacher/tokens_per_chunk": sampled / max(1, sum(_num_chunks(one) for one in self.reread.values())),
            "teacher/calls_left_out": float(left.total()),
            "teacher/calls_with_special": float(special),
            "time/reread_s": time.perf_counter() - began,
        }
        return Placed(groups=found, metrics=metrics, note=f"calls without a teacher: {reasons}" if left else "")

    def join(self, batches: Sequence[Batch]) -> tuple[Batch, ...]:
        """Return the batches of the groups that were placed, with what the teachers read."""
        return tuple(replace(batch, experiences=tuple(map(self._joined, batch.experiences))) for batch in batches)

    def _joined(self, one: Experience) -> Experience:
        if one.teacher not in self.readers:
            return one
        calls = dict.fromkeys(one.calls_T[one.loss_mask_T].tolist())
        return replace(one, rereads={call: self.reread[one.rollout_id, call] for call in calls})

    def _read(self, reader: Reader, rollout: Rollout, left: Counter[str]) -> Rollout:
        calls = []
        for call in rollout.calls:
            read = reader.read(call) if call.trainable else None
            if isinstance(read, Reread):
                self.reread[rollout.id, call.index] = read
            elif read is not None:
                left[read] += 1
                call = replace(call, status=CallStatus.LEFT_OUT)
            calls.append(call)
        return replace(rollout, calls=tuple(calls))


def _unreadable(call: Call) -> str:
    """Say what in a call has no meaning in other tokens; empty if nothing has."""
    cases = {
        "images": bool(call.pictures),
        "a constraint": call.constraint is not None,
        f"{' and '.join(call.sampling.cuts)}": not call.sampling.full_support,
        "no messages": not call.messages,
    }
    return next((reason for reason, applies in cases.items() if applies), "")


def _is_raw(call: Call) -> bool:
    """Whether the prompt was given as it is."""
    return call.messages[0].get("role") == PROMPT_ROLE


def _num_chunks(one: Reread) -> int:
    return int(one.chunks_S[-1]) + 1
