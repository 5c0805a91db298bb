"""A teacher behind an OpenAI-compatible endpoint: it scores the sampled tokens of rollouts, before they train.

In: the groups of a step. Out: the same groups, each trainable call of which has the teacher's logprobs of its tokens
(`Call.taught_S`). A rollout that the teacher did not score has failed (`Outcome.INFRASTRUCTURE`), and trains nothing.

Each request sends one sequence of token ids to `/completions`, for the logprobs of the prompt: as vLLM has them
(`prompt_logprobs`), or with `echo` and `logprobs`. Which of both, the first requests find out. Retries and time limits
are those of the openai package.

Shape suffixes: S sampled tokens of a call, T tokens of a sequence.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from sharpen.config.distill import DistillConfig
from sharpen.config.secrets import hide, hide_in_value
from sharpen.errors import ConfigError
from sharpen.gateway.render import Renderer
from sharpen.learning.experience.merge import merge
from sharpen.types import Call, FloatArray, Group, Outcome, Rollout

if TYPE_CHECKING:
    from openai import OpenAI

AT_ONCE = 32
"""Requests that are on their way at the same time."""
LOWEST = -9999.0
"""What servers write for a logprob of minus infinity, or anything below."""
COMPARED = 64
"""Ids of the vocabulary whose texts are compared at the start, where the model's context is no shorter."""

Form = Literal["prompt_logprobs", "echo"]
FORMS: Mapping[Form, Mapping[str, Any]] = {
    "prompt_logprobs": {"extra_body": {"prompt_logprobs": 0}},
    "echo": {"echo": True, "logprobs": 1},
}
"""What a request asks for, by the form of the answer."""


class _NoScoreError(Exception):
    """The endpoint gave no logprobs of these tokens; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taught:
    """The groups of a step with the teacher's logprobs, and what they cost."""

    groups: tuple[Group, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)


class TeacherEndpoint:
    """Asks the teacher. `form` is how its answers hold the logprobs of a prompt."""

    def __init__(self, client: OpenAI, model: str, where: str, form: Form) -> None:
        self.form = form
        self._client, self._model, self._where = client, model, where

    @classmethod
    def open(cls, config: DistillConfig, folder: Path, max_tokens: int) -> Self:
        """Connect to the teacher of the model in `folder`, and compare the texts of up to `max_tokens` - 1 ids. Raises
        `ConfigError` if it does not answer, gives no logprobs of prompts, or has other tokens."""
        from openai import OpenAI

        from sharpen.models.configuration import load_tokenizer

        assert config.teacher_url is not None and config.teacher_model is not None, "see `DistillConfig`"  # noqa: PT018
        where = f"the teacher {config.teacher_model!r} at {hide_in_value(config.teacher_url)}"
        client = OpenAI(base_url=config.teacher_url, api_key=_key(config))
        tokenizer, refused = load_tokenizer(folder), list[str]()
        renderer = Renderer(tokenizer)
        ids = _spread(tokenizer, min(COMPARED, max_tokens - 1))
        for form in FORMS:
            one = cls(client, config.teacher_model, where, form)
            try:
                texts = one._ask(ids)[1]
            except _NoScoreError as error:
                refused.append(f"{form}: {error}")
                continue
            _compare(ids, texts, renderer, where)
            return one
        raise ConfigError(
            f"{where} gives no logprobs of a prompt's own tokens, which a teacher must (distill.teacher_url; vLLM and "
            f"`sharpen serve` do). {'; '.join(refused)}"
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def logprobs(self, ids: Sequence[int]) -> FloatArray:
        """Return the logprobs of all ids but the first. Raises `_NoScoreError`."""
        return self._ask(ids)[0]

    def teach(self, groups: Sequence[Group]) -> Taught:
        """Score the rollouts that take part, all at once."""
        began = time.perf_counter()
        every = [one for group in groups for part in group.with_side for one in part.scored]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            scored = dict(zip((one.id for one in every), pool.map(self._rollout, every), strict=True))
        tokens = sum(count for _, count in scored.values())
        failed = sum(one.outcome == Outcome.INFRASTRUCTURE for one, _ in scored.values())

        def with_scores(group: Group) -> Group:
            rollouts = tuple(scored[one.id][0] if one.id in scored else one for one in group.rollouts)
            return replace(group, rollouts=rollouts, side=tuple(map(with_scores, group.side)))

        return Taught(
            groups=tuple(map(with_scores, groups)),
            metrics={
                "teacher/tokens": float(tokens),
                "teacher/failed": float(failed),
                "time/teacher_s": time.perf_counter() - began,
            },
        )

    def _rollout(self, rollout: Rollout) -> tuple[Rollout, int]:
        """Return a rollout with the teacher's logprobs, or as failed; and how many tokens the teacher read."""
        found: dict[int, FloatArray] = {}
        tokens = 0
        try:
            for call in rollout.calls:
                _check_call(call)
            for sequence in merge(rollout, needs_ratio=False):
                logprobs_T = np.append(np.float32(0.0), self.logprobs(sequence.ids_T.tolist()))
                tokens += len(logprobs_T)
                for index in {int(one) for one in sequence.calls_T if one >= 0}:
                    found[index] = logprobs_T[sequence.calls_T == index].astype(np.float32)
                    _check_scores(index, found[index])
        except _NoScoreError as error:
            why = f"no score of {self._where}: {error}"
            return replace(rollout, outcome=Outcome.INFRASTRUCTURE, reward=None, error=why), tokens
        calls = tuple(replace(one, taught_S=found.get(one.index)) for one in rollout.calls)
        return replace(rollout, calls=calls), tokens

    def _ask(self, ids: Sequence[int]) -> tuple[FloatArray, list[str | None]]:
        """Return the logprobs of all ids but the first, and their texts as the teacher has them."""
        from openai import OpenAIError

        create: Any = self._client.completions.create  # whose overloads know no form of ours

        try:
            answer = create(
                model=self._model, prompt=list(ids), max_tokens=1, temperature=1.0, **FORMS[self.form]
            ).to_dict()
        except OpenAIError as error:
            raise _NoScoreError(hide(f"{type(error).__name__}: {error}").splitlines()[0]) from error
        try:
            return (_of_vllm if self.form == "prompt_logprobs" else _of_echo)(answer["choices"][0], ids)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise _NoScoreError(
                f"the answer has no {self.form} of the {len(ids)} ids ({type(error).__name__}: {error})"
            ) from error


def _of_vllm(choice: Mapping[str, Any], ids: Sequence[int]) -> tuple[FloatArray, list[str | None]]:
    """Read `prompt_logprobs`: for each id but the first, logprobs by id, its own among them."""
    own = [at[str(id_)] for at, id_ in zip(choice["prompt_logprobs"][1:], ids[1:], strict=True)]
    return np.array([one["logprob"] for one in own], np.float32), [one.get("decoded_token") for one in own]


def _of_echo(choice: Mapping[str, Any], ids: Sequence[int]) -> tuple[FloatArray, list[str | None]]:
    """Read `logprobs` of an echoed prompt, behind which are those of what was sampled."""
    logprobs, texts = choice["logprobs"]["token_logprobs"], choice["logprobs"]["tokens"]
    if not len(ids) <= len(logprobs) <= len(ids) + 1 or len(texts) != len(logprobs):
        raise ValueError(f"{len(logprobs)} logprobs and {len(texts)} tokens for a prompt of {len(ids)} and 1 sampled")
    return np.array([float(one) for one in logprobs[1 : len(ids)]], np.float32), texts[1 : len(ids)]


def _check_call(call: Call) -> None:
    """Raise `_NoScoreError` for a call whose tokens were drawn from a distribution that the endpoint does not score."""
    if not call.trainable:
        return
    cases = {
        f"at temperature {call.sampling.temperature:g}": call.sampling.temperature != 1.0,
        f"with {' and '.join(call.sampling.cuts)}": not call.sampling.full_support,
        "under a constraint": call.constraint is not None,
        "after images": bool(call.pictures),
    }
    if wrong := [how for how, applies in cases.items() if applies]:
        raise _NoScoreError(
            f"call {call.index} was sampled {', '.join(wrong)}, and an endpoint scores text at temperature 1 among all "
            "tokens; leave that out of the agent's calls, or take distill.teacher_path"
        )


def _check_scores(index: int, logprobs_S: FloatArray) -> None:
    if not (np.isfinite(logprobs_S) & (logprobs_S > LOWEST) & (logprobs_S <= 1e-3)).all():
        worst = next(one for one in logprobs_S.tolist() if not (math.isfinite(one) and LOWEST < one <= 1e-3))
        raise _NoScoreError(f"{worst} as logprob of a token of call {index}")


def _key(config: DistillConfig) -> str:
    """Return the endpoint's key, from the environment. Raises `ConfigError` if it is not set."""
    if config.teacher_api_key_env is None:
        return "none"  # the openai package requires one
    if not (key := os.environ.get(config.teacher_api_key_env)):
        raise ConfigError(
            f"distill.teacher_api_key_env names the environment variable {config.teacher_api_key_env}, which is not set"
        )
    return key


def _spread(tokenizer: Any, count: int) -> list[int]:
    """Return ids from the whole vocabulary with the special ones, as many as `count`."""
    special = sorted(set(tokenizer.all_special_ids))[: count // 4]
    every = sorted(set(tokenizer.get_vocab().values()))
    even = [every[at] for at in np.linspace(0, len(every) - 1, count - len(special)).astype(int)]
    return [*even, *special]


def _compare(ids: Sequence[int], texts: Sequence[str | None], renderer: Renderer, where: str) -> None:
    """Raise `ConfigError` at the first id whose text differs. Parts of characters have no text of their own."""
    compared = 0
    for id_, its in zip(ids[1:], texts, strict=True):
        own = renderer.token_bytes(id_)[0]
        if its is None or "\N{REPLACEMENT CHARACTER}" in own + its or not own.strip():
            continue
        compared += 1
        if own.strip() != its.strip():
            raise ConfigError(
                f"{where} has other tokens than the model: id {id_} is {own!r} in the model and {its!r} there; take a "
                "teacher with the same tokenizer"
            )
    if not compared:
        raise ConfigError(f"{where} does not say which texts its ids have: its tokens cannot be compared")
