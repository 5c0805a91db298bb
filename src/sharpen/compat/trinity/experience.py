"""`Experience` as Trinity's users know it: one call of the rollout, before grouping, whose reward the user sets.

In: what a model answered, with its token-exact `Call` where our engine recorded one. Out: an object that workflows
score and return. What was recorded cannot be changed: training uses the record, never these copies.

Shape suffixes: T tokens of the call (prompt and sampled), R tokens after the prompt.
"""

from __future__ import annotations

import numbers
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from sharpen.errors import ConfigError
from sharpen.types import BoolArray, Call, FloatArray, IntArray

if TYPE_CHECKING:
    from torch import Tensor


# An experience that a workflow constructed: which recorded calls it claims to be.
#
# In: the tokens, prompt length, logprobs and mask that it was constructed with. Out: the indices of the recorded calls
# with exactly these tokens. Nothing of what was given is trained: the record is.
#
# Shape suffixes: T all tokens, R those after the prompt, P the prompt's, S the sampled ones of a call.


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What was given. `tokens_T` is None where an endpoint answered, whose answers have no tokens."""

    tokens_T: IntArray | None
    prompt_length: int
    logprobs_R: FloatArray | None
    mask_R: BoolArray | None
    response_text: str

    @classmethod
    def of(cls, tokens: Any, prompt_length: int, logprobs: Any, action_mask: Any, response_text: str) -> Self:
        """From tensors, arrays or lists."""
        return cls(
            tokens_T=None if tokens is None else np.asarray(tokens, np.int32).reshape(-1),
            prompt_length=int(prompt_length),
            logprobs_R=None if logprobs is None else np.asarray(logprobs, np.float32).reshape(-1),
            mask_R=None if action_mask is None else np.asarray(action_mask, np.bool_).reshape(-1),
            response_text=response_text,
        )

    def tensor(self) -> Tensor | None:
        """The tokens as a tensor."""
        if self.tokens_T is None:
            return None
        import torch

        return torch.from_numpy(self.tokens_T.copy())

    def calls(self, name: str, recorded: Mapping[int, Call], taken: Collection[int]) -> list[int]:
        """The indices of the calls that it stands for, in order: one whose prompt and answer are these tokens, and
        those before it in the same sequence from `prompt_length` on. Of equal ones, one that is not `taken` yet.

        Raises `ConfigError` where no call has these tokens, or what was given contradicts the record.
        """
        found = [index for index, call in recorded.items() if np.array_equal(_ids(call), self._tokens(name))]
        if not found:
            raise ConfigError(
                f"workflow {name} constructed an Experience of {len(self._tokens(name))} tokens, which are not those "
                "of any recorded call: construct it of exp.tokens as they are, or return exp itself with its reward set"
            )
        last = next((index for index in found if index not in taken), found[0])
        chain = [last]
        while (parent := recorded[chain[0]].parent) is not None:
            chain.insert(0, parent)
        within = [index for index in chain if len(recorded[index].prompt_ids_P) >= self.prompt_length]
        if not within or len(recorded[within[0]].prompt_ids_P) != self.prompt_length:
            begins = ", ".join(str(len(recorded[index].prompt_ids_P)) for index in chain)
            raise ConfigError(
                f"workflow {name} constructed an Experience with prompt_length {self.prompt_length}, but the answers "
                f"in its tokens begin at {begins}: pass prompt_length=exp.prompt_length"
            )
        self._check(name, [recorded[index] for index in within])
        return within

    def leaves_out(self) -> bool:
        """Whether its mask is all false: it counts, and is not trained."""
        return self.mask_R is not None and not self.mask_R.any()

    def _tokens(self, name: str) -> IntArray:
        if self.tokens_T is None:
            raise ConfigError(
                f"workflow {name} constructed an Experience without tokens: take those of model.chat() or "
                "model.extract_experience_from_history(), so that what was sampled is trained, and set their reward"
            )
        return self.tokens_T

    def _check(self, name: str, calls: list[Call]) -> None:
        """Raise `ConfigError` for a mask or logprobs that differ from the record, which would have no effect."""
        logprobs_R, mask_R = _recorded(calls)
        if self.mask_R is not None and self.mask_R.any() and not np.array_equal(self.mask_R, mask_R):
            raise ConfigError(
                f"workflow {name} constructed an Experience whose action_mask is a part of what was sampled: pass "
                "exp.action_mask, or all false to leave it out of training"
            )
        given = self.logprobs_R
        if given is not None and not (len(given) == len(mask_R) and np.allclose(given[mask_R], logprobs_R[mask_R])):
            raise ConfigError(
                f"workflow {name} constructed an Experience with logprobs other than the recorded ones: pass "
                "exp.logprobs; what was recorded is what is trained"
            )


def _ids(call: Call) -> IntArray:
    return np.concatenate([call.prompt_ids_P, call.sampled_ids_S])


def _recorded(calls: list[Call]) -> tuple[FloatArray, BoolArray]:
    """Logprobs and mask of the tokens after the first prompt."""
    start, end = len(calls[0].prompt_ids_P), len(_ids(calls[-1]))
    logprobs_R, mask_R = np.zeros(end - start, np.float32), np.zeros(end - start, np.bool_)
    for call in calls:
        span = slice(len(call.prompt_ids_P) - start, len(_ids(call)) - start)
        logprobs_R[span], mask_R[span] = call.logprobs_S, True
    return logprobs_R, mask_R


RECORDED = frozenset({"logprobs", "messages", "prompt_length", "prompt_text", "response_text", "tokens", "tools"})
"""Fields that come from the record."""
NOT_OURS = {
    "token_level_reward": "rewards belong to whole calls: set exp.reward",
    "advantages": "advantages are computed when a batch is drawn: set exp.reward",
    "returns": "returns are computed when a batch is drawn: set exp.reward",
    "truncate_status": "it is taken from how the call ended",
    "teacher_logprobs": "there is no teacher model",
    "chosen": "preferences are not trained",
    "rejected": "preferences are not trained",
}
"""Fields that Trinity's experiences have beside: here always None, and why they cannot be set."""


@dataclass(slots=True)
class EID:
    """Where an experience belongs. `run` and `step` are the user's to set; here a rollout is one run."""

    batch: int | str = ""
    task: int | str = ""
    run: int = 0
    step: int = 0
    suffix: str = field(default_factory=lambda: uuid.uuid4().hex[:6])

    @property
    def tid(self) -> str:
        """All experiences of one task."""
        return f"{self.batch}/{self.task}"

    @property
    def rid(self) -> str:
        """All experiences of one run."""
        return f"{self.tid}/{self.run}"

    @property
    def sid(self) -> str:
        """All experiences of one step of a task, over its runs."""
        return f"{self.tid}/{self.step}"

    @property
    def uid(self) -> str:
        """This experience alone."""
        return f"{self.rid}/{self.step}/{self.suffix}"

    def __str__(self) -> str:
        return self.uid


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer of a model: what was asked, what it said. `call` is None where no engine of ours recorded it."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    response: Mapping[str, Any]
    finish_reason: str
    call: Call | None = None
    prompt_text: Callable[[], str | None] = lambda: None

    @property
    def text(self) -> str:
        """What the assistant message says."""
        return str(self.response.get("content") or "")


class Experience:
    """One answer of the model (or all its answers in one conversation), to be scored and returned by a workflow.

    `reward`, `metrics`, `info` and `eid` are the user's. `tokens` (int32, T), `logprobs` (float32, R) and `action_mask`
    (bool, R: sampled tokens) are tensors made from the record, None where an endpoint answered; `prompt_length` counts
    the tokens before the first sampled one. Of a conversation they show the last call's token sequence, and
    `response_text` is its last answer.

    `model.chat()` and `model.extract_experience_from_history()` give them. One that a workflow constructs, of the
    tokens of one of those, is a `claim` until it is returned: it then stands for the recorded calls with these tokens.
    """

    __slots__ = ("_answers", "_claim", "_left_out", "_origin", "_reward", "_tensors", "eid", "info", "metrics")

    _answers: tuple[Answer, ...]
    _claim: Claim | None
    _origin: object
    _reward: float | None
    _left_out: bool
    _tensors: dict[str, Tensor]
    eid: EID
    info: dict[str, Any]
    metrics: dict[str, Any]

    def __init__(
        self,
        eid: EID | None = None,
        tokens: Any = None,
        prompt_length: int = 1,
        logprobs: Any = None,
        *,
        reward: Any = None,
        info: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        action_mask: Any = None,
        **others: Any,
    ) -> None:
        self._answers, self._origin, self._reward, self._left_out, self._tensors = (), None, None, False, {}
        for name, value in others.items():
            if name in NOT_OURS and name != "truncate_status" and value is not None:
                raise ConfigError(f"Experience({name}=...): {NOT_OURS[name]}")
            if name not in NOT_OURS and name not in RECORDED:
                raise ConfigError(f"an Experience has no field {name!r}: keep what is yours in exp.info")
        self._claim = Claim.of(tokens, prompt_length, logprobs, action_mask, str(others.get("response_text") or ""))
        self.eid = eid if eid is not None else EID()
        self.info, self.metrics = dict(info or {}), dict(metrics or {})
        self.reward = reward

    @classmethod
    def of(cls, answers: Sequence[Answer], origin: object) -> Experience:
        """The experience of these answers (at least one, in order), which the model `origin` gave."""
        self = object.__new__(cls)
        self._answers = tuple(answers)
        self._origin = origin
        self._reward = None
        self._left_out = False
        self._tensors = {}
        self._claim = None
        self.eid, self.info, self.metrics = EID(), {}, {}
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name in RECORDED:
            raise ConfigError(f"exp.{name} was recorded and cannot be set: the tokens trained are the tokens sampled")
        if name in NOT_OURS:
            raise ConfigError(f"exp.{name} cannot be set: {NOT_OURS[name]}")
        if name not in Experience.__slots__ and not hasattr(Experience, name):
            raise ConfigError(f"an Experience has no field {name!r}: keep what is yours in exp.info")
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name in NOT_OURS:
            return None
        raise AttributeError(f"an Experience has no field {name!r}")

    def __repr__(self) -> str:
        return f"Experience(reward={self.reward}, response_text={self.response_text!r})"

    @property
    def reward(self) -> float | None:
        """The reward of this call; None until it is set. A number: anything else is a `ConfigError`."""
        return self._reward

    @reward.setter
    def reward(self, value: Any) -> None:
        if value is not None and not is_number(value):
            scalar = value.item() if getattr(value, "shape", None) == () else None
            if scalar is None or not is_number(scalar):
                hint = " (the sum of a dict of scores is sum(scores.values()))" if isinstance(value, Mapping) else ""
                raise ConfigError(f"exp.reward must be a number, got {value!r} ({type(value).__name__}){hint}")
            value = scalar
        self._reward = None if value is None else float(value)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """What was asked, and the answer."""
        if not self._answers:
            return []
        last = self._answers[-1]
        return [dict(message) for message in (*last.messages, last.response)]

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools offered with it."""
        return [dict(tool) for tool in self._answers[-1].tools] if self._answers else []

    @property
    def response_text(self) -> str:
        """The answer: the whole sampled text for `model.chat()`, the message's content for OpenAI clients."""
        return self._claim.response_text if self._claim is not None else self._answers[-1].text

    @property
    def prompt_text(self) -> str | None:
        """The prompt as the chat template rendered it; None where an endpoint answered."""
        return self._answers[0].prompt_text() if self._answers else None

    @property
    def truncate_status(self) -> str | None:
        """`response_truncated` if an answer stopped at its token limit."""
        return "response_truncated" if any(answer.finish_reason == "length" for answer in self._answers) else None

    @property
    def tokens(self) -> Tensor | None:
        """Prompt and sampled tokens, T."""
        return self._tensor("tokens") if self._claim is None else self._claim.tensor()

    @property
    def logprobs(self) -> Tensor | None:
        """Logprob of each sampled token, R; 0 for what was not sampled."""
        return self._tensor("logprobs")

    @property
    def action_mask(self) -> Tensor | None:
        """Which tokens after the prompt were sampled, R. Set to all false, it leaves the experience out of training."""
        mask = self._tensor("action_mask")
        return mask & False if self._left_out and mask is not None else mask

    @action_mask.setter
    def action_mask(self, value: Any) -> None:
        sampled = self._arrays()["action_mask"] if self.calls else np.zeros(0, np.bool_)
        given = np.asarray(value, dtype=np.bool_)
        if given.any() and not np.array_equal(given, sampled):
            raise ConfigError(
                "exp.action_mask cannot be set to a part of the call: all false leaves the call out of training, "
                "and what was sampled is trained otherwise"
            )
        self._left_out = not given.any()

    @property
    def prompt_length(self) -> int:
        """Tokens before the first sampled one; 0 where an endpoint answered."""
        if self._claim is not None:
            return self._claim.prompt_length
        return len(self._chain()[0].prompt_ids_P) if self.calls else 0

    # What follows is for the adapter, not for workflows.

    @property
    def claim(self) -> Claim | None:
        """Which recorded calls it claims to be, of a constructed one."""
        return self._claim

    @property
    def answers(self) -> tuple[Answer, ...]:
        """The answers that it stands for."""
        return self._answers

    @property
    def calls(self) -> tuple[Call, ...]:
        """The recorded calls that it stands for; empty where an endpoint answered."""
        return tuple(answer.call for answer in self._answers if answer.call is not None)

    @property
    def left_out(self) -> bool:
        """Whether the workflow masked it out."""
        return self._left_out

    def leave_out(self) -> None:
        """Do not train it; its reward counts all the same."""
        self._left_out = True

    def came_from(self, model: object) -> bool:
        """Whether this very model, of this very rollout, answered."""
        return self._origin is model

    def check(self) -> None:
        """Raise `ConfigError` if a tensor was changed in place: that would have had no effect."""
        arrays = self._arrays() if self._tensors else {}
        for name, tensor in self._tensors.items():
            if not np.array_equal(tensor.numpy(), arrays[name]):
                raise ConfigError(
                    f"exp.{name} was changed in place: it was recorded, and the record is what is trained"
                )

    def _tensor(self, name: str) -> Tensor | None:
        if not self.calls:
            return None
        if name not in self._tensors:
            import torch

            self._tensors[name] = torch.from_numpy(self._arrays()[name].copy())
        return self._tensors[name]

    def _chain(self) -> list[Call]:
        """Those of the calls that are in the last one's token sequence, in order (a fork leaves earlier ones out)."""
        calls = {call.index: call for call in self.calls}
        last = self.calls[-1]
        ids_T = np.concatenate([last.prompt_ids_P, last.sampled_ids_S])
        found = []
        for call in calls.values():
            end = len(call.prompt_ids_P) + len(call.sampled_ids_S)
            if np.array_equal(ids_T[:end], np.concatenate([call.prompt_ids_P, call.sampled_ids_S])):
                found.append(call)
        return found

    def _arrays(self) -> dict[str, IntArray | FloatArray | BoolArray]:
        chain = self._chain()
        start = len(chain[0].prompt_ids_P)
        tokens_T = np.concatenate([chain[-1].prompt_ids_P, chain[-1].sampled_ids_S])
        logprobs_R = np.zeros(len(tokens_T) - start, np.float32)
        mask_R = np.zeros(len(tokens_T) - start, np.bool_)
        for call in chain:
            at = len(call.prompt_ids_P) - start
            span = slice(at, at + len(call.sampled_ids_S))
            logprobs_R[span] = call.logprobs_S
            mask_R[span] = True
        return {"tokens": tokens_T, "logprobs": logprobs_R, "action_mask": mask_R}


def is_number(value: object) -> bool:
    """Whether a value is a number (booleans included) and no text, list or mapping."""
    return isinstance(value, numbers.Real)
