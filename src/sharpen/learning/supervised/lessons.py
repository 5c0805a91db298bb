"""Turns rows into token sequences, exactly as the model would see and write them in an agent.

In: a `Conversation`, `Text` or `Pair`. Out: a `Lesson` of `Experience`s. Each trained turn of a conversation becomes
the `Call` that would have produced it: the gateway's renderer makes its prompt with the model's chat template, and its
"sampled" ids are the turn as the template writes it, including the end token. The gateway's history decides whether a
later turn extends an earlier one, and `experience.merge` makes the sequences, as for a rollout.

Shape suffixes: P prompt tokens of a turn, S tokens of the turn, T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sharpen.config.run import SupervisedConfig
from sharpen.errors import DatasetError, ImageError
from sharpen.gateway.history import History, Prompt
from sharpen.gateway.images import Album, ImageReader, with_references
from sharpen.gateway.memory import Memory
from sharpen.gateway.protocols.chat import check_message, check_recorded
from sharpen.gateway.render import Renderer
from sharpen.gateway.requests import ApiError, render_message
from sharpen.learning.experience.merge import merge
from sharpen.learning.supervised.rows import Conversation, Data, Pair, Text, read_row
from sharpen.types import Call, CallStatus, Experience, IntArray, Outcome, Rollout, Sampling, Task

CHOSEN, REJECTED = 1.0, -1.0
"""Advantages of the two sides of a pair; all other rows have advantage 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """A row as sequences. `sources` has, for each sequence, the calls that it was made from (none for texts).

    `num_tokens` is the length of the longest sequence; if it does not fit the model, `too_long` is set and there are no
    sequences. `experiences` have advantages, but no weights yet.
    """

    id: str
    experiences: tuple[Experience, ...]
    sources: tuple[tuple[Call, ...], ...]
    num_tokens: int
    too_long: bool = False


@dataclass(slots=True, kw_only=True)
class Tutor:
    """Makes lessons of rows for one model. `end_ids` are the tokens that end its answers; `renderer` may be None if all
    rows are texts. `album` reads the images of rows as the gateway reads those of requests."""

    tokenizer: Any
    renderer: Renderer | None
    end_ids: frozenset[int]
    max_model_len: int
    data: Data
    fields: SupervisedConfig
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    album: Album = field(default_factory=Album)

    def lesson(self, task: Task, lesson_id: str | None = None) -> Lesson:
        """Make the lesson of a row. `lesson_id` replaces the row's id if a batch contains the row twice.

        Raises `DatasetError` for a row that cannot be trained on, or one that is too long with
        `supervised.too_long: refuse`.
        """
        name = lesson_id or task.id
        content = read_row(task, self.data, self.fields)
        if isinstance(content, Text):
            experiences = tuple(self._pieces(content, name, task))
            longest = max((len(experience.ids_T) for experience in experiences), default=0)
            return Lesson(
                id=name, experiences=experiences, sources=((),) * len(experiences), num_tokens=longest, too_long=False
            )
        sides = {1.0: content} if isinstance(content, Conversation) else _sides(content)
        sequences: list[Experience] = []
        sources: list[tuple[Call, ...]] = []
        for advantage, conversation in sides.items():
            calls = self.calls(conversation, task)
            for experience in merge(_rollout(name, task, calls)):
                sequences.append(_with_advantage(experience, advantage))
                sources.append(calls)
        longest = max(len(experience.ids_T) for experience in sequences)
        if longest <= self.max_model_len:
            return Lesson(id=name, experiences=tuple(sequences), sources=tuple(sources), num_tokens=longest)
        if self.fields.too_long == "refuse":
            raise DatasetError(
                f"row {task.id} has {longest} tokens, but model.max_model_len is {self.max_model_len}: raise it, or "
                "set supervised.too_long: drop"
            )
        return Lesson(id=name, experiences=(), sources=(), num_tokens=longest, too_long=True)

    def calls(self, conversation: Conversation, task: Task) -> tuple[Call, ...]:
        """Return the trained turns of a conversation as calls of an agent."""
        assert self.renderer is not None, "conversations need a chat template"
        history, calls, memory = History(), list[Call](), Memory()
        images = ImageReader(self.album, memory)
        try:
            messages = [_recorded(message, at, images) for at, message in enumerate(conversation.messages)]
            conversation = replace(conversation, messages=tuple(messages))
            rendered = [render_message(message) for message in messages]
            for at, message in enumerate(rendered):
                if message["role"] != "assistant" or at < conversation.first:
                    continue
                text = self.renderer.render(rendered[:at], conversation.tools, self.template_kwargs)
                prompt = history.prompt(self.renderer, rendered[:at], text, self.album.sight(rendered[:at], memory))
                ids_S = self._answer(conversation, rendered, at, prompt, task)
                answer = self.renderer.decode(prompt.ids_P, ids_S.tolist())
                history.add(len(calls), rendered[:at], message, prompt, ids_S, answer)
                calls.append(_call(len(calls), prompt, ids_S, conversation, at))
        except (ApiError, ImageError) as error:
            raise DatasetError(f"row {task.id}: {error}{_remedy(error)}") from error
        return tuple(calls)

    def _answer(
        self, conversation: Conversation, rendered: list[dict[str, Any]], at: int, prompt: Prompt, task: Task
    ) -> IntArray:
        """Return the ids of a turn: the text that the template writes after the prompt, up to the last end token."""
        assert self.renderer is not None
        text = self.renderer.render(rendered[: at + 1], conversation.tools, self.template_kwargs, closed=True)
        if not text.startswith(prompt.text):
            raise DatasetError(
                f"row {task.id}: the chat template writes the answer of message {at} differently after the fact than "
                f"in a prompt that asks for it (which ends with {prompt.text[-40:]!r}), so the model would be trained "
                "on text that it never has to write; use a model with another chat template"
            )
        ids_S = self.renderer.encode_after(int(prompt.ids_P[-1]), text[len(prompt.text) :])
        ends = np.flatnonzero(np.isin(ids_S, list(self.end_ids)))
        if not len(ends):
            raise DatasetError(
                f"row {task.id}: the chat template does not end message {at} with an end token of the model "
                f"({sorted(self.end_ids)}), so the model would learn never to stop: add the token that ends a turn to "
                "eos_token_id in the model's generation_config.json"
            )
        return ids_S[: ends[-1] + 1]

    def _pieces(self, text: Text, name: str, task: Task) -> list[Experience]:
        """Split a text with its end token into pieces that fit the model. Each piece starts with the last token of the
        one before, so that every token of the text but the first is predicted once."""
        ids = [int(token) for token in self.tokenizer(text.text)["input_ids"]]
        end = self.tokenizer.eos_token_id
        if end is not None and (not ids or ids[-1] != end):
            ids.append(int(end))
        starts = range(0, max(len(ids) - 1, 0), self.max_model_len - 1)
        return [
            _piece(ids[start : start + self.max_model_len], name, task, number) for number, start in enumerate(starts)
        ]


def _sides(pair: Pair) -> dict[float, Conversation]:
    return {CHOSEN: pair.chosen, REJECTED: pair.rejected}


def _rollout(name: str, task: Task, calls: tuple[Call, ...]) -> Rollout:
    return Rollout(
        id=name, group_id=name, task_id=task.id, index=0, attempt=0, calls=calls, outcome=Outcome.OK, reward=1.0
    )


def _call(index: int, prompt: Prompt, ids_S: IntArray, conversation: Conversation, at: int) -> Call:
    """Make a call of a turn. No engine sampled it, so its logprobs are 0 and its version is -1, which no policy has."""
    return Call(
        index=index,
        parent=prompt.parent,
        prompt_ids_P=prompt.ids_P,
        sampled_ids_S=ids_S,
        logprobs_S=np.zeros(len(ids_S), np.float32),
        versions_S=np.full(len(ids_S), -1, np.int32),
        sampling=Sampling(),
        finish_reason="stop",
        status=CallStatus.LEFT_OUT if at in conversation.unweighted else CallStatus.USED,
        messages=conversation.messages[:at],
        tools=conversation.tools,
        response=conversation.messages[at],
        pictures=prompt.pictures,
    )


def _with_advantage(experience: Experience, advantage: float) -> Experience:
    advantages_T = np.where(experience.loss_mask_T, np.float32(advantage), np.float32(0.0))
    return replace(experience, advantages_T=advantages_T)


def _piece(ids: list[int], name: str, task: Task, number: int) -> Experience:
    mask_T = np.ones(len(ids), np.bool_)
    mask_T[0] = False
    return Experience(
        rollout_id=name,
        group_id=name,
        task_id=task.id,
        ids_T=np.array(ids, np.int32),
        loss_mask_T=mask_T,
        logprobs_T=np.zeros(len(ids), np.float32),
        versions_T=np.full(len(ids), -1, np.int32),
        calls_T=np.where(mask_T, np.int32(number), np.int32(-1)),
        temperatures_T=np.ones(len(ids), np.float32),
        advantages_T=mask_T.astype(np.float32),
        weights_T=np.zeros(len(ids), np.float32),
    )


def _remedy(error: Exception) -> str:
    unseen = isinstance(error, ApiError) and error.code == "image_not_supported"
    return " Take the images out of the rows, or train a model that sees." if unseen else ""


def _recorded(given: Mapping[str, Any], position: int, images: ImageReader) -> dict[str, Any]:
    """Return a message as calls are recorded. Raises `ApiError`."""
    check_message(given, position)
    message = dict(with_references(given, position, images))
    check_recorded(message, position)
    return message
