"""The records that all stages share: frozen, slotted and keyword-only. Their numpy arrays are never modified.

The flow of data: `Task` -> `Rollout` (of `Call`s) -> `Group` -> `Experience`.

Array shape suffixes: P prompt tokens of a call, S sampled tokens of a call, R the same text in a teacher's tokens,
T tokens of a merged sequence, N computed tokens of a call or sequence, L layers with experts, K experts of a token.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sharpen.errors import ImageError

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
HalfArray = npt.NDArray[np.float16]
RouteArray = npt.NDArray[np.unsignedinteger[Any]]
"""The numbers of chosen experts: uint8 if a layer has at most 256, else uint16."""

Mode = Literal["greedy", "sampled"]
"""How a rollout is sampled: greedily regardless of its calls' parameters (evaluation, a baseline), or with them
(evaluation, training). Evaluations run in this order."""

FinishReason = Literal["stop", "length", "abort"]
"""Why an engine stopped: an end token or stop string, the token limit, or an abort."""


PROMPT_ROLE = "prompt"
"""The role of a recorded message that is a whole prompt. No chat message can have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One row of a dataset.

    `id` is the same in all runs (`<split>/<row number>`). `row` is what the workflow receives as `task`. `task_set` is
    the name of the evaluation set that the task belongs to; None in training.
    """

    id: str
    index: int
    row: Mapping[str, Any]
    task_set: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The sampling parameters of a call. `temperature` 0 is greedy; `top_p` 1, `top_k` 0 and `min_p` 0 do not
    truncate."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 1024
    stop: tuple[str, ...] = ()

    @property
    def full_support(self) -> bool:
        """Whether tokens are sampled from the whole distribution."""
        return not self.cuts

    @property
    def cuts(self) -> Mapping[str, float]:
        """What truncates the distribution, by name."""
        given: Mapping[str, tuple[float, float]] = {
            "top_p": (self.top_p, 1.0),
            "top_k": (self.top_k, 0),
            "min_p": (self.min_p, 0.0),
        }
        return {name: value for name, (value, whole) in given.items() if value != whole}


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """What the text of a response must match: tokens that lead to no such text have probability 0.

    `grammar` is a grammar in llguidance's Lark syntax, for the whole response up to its end token; it begins with
    `start:`. It does not depend on the engine, so that whoever scores the tokens later finds the same ones allowed.
    `origin` is the field of the request that asked for it, such as `response_format`.
    """

    grammar: str
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Supports:
    """The ids that each token of a response was drawn from, where `top_p`, `top_k` or `min_p` cut its distribution.

    `packed` has them one behind the other, `sizes_S` bytes each, as `engine.supports` packs and reads them.
    `vocab_size` is the number of the logits that they were cut from.
    """

    vocab_size: int
    sizes_S: IntArray
    packed: bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reread:
    """A call as a teacher with other tokens reads it (R tokens of the answer, after its own prompt). The text of the
    answer is divided where tokens of both models end: `chunks_S` has the number of each sampled token's chunk,
    `chunks_R` that of each of the teacher's. Both rise from 0, by at most 1. `has_special` is whether there are special
    tokens before the last one."""

    prompt_ids_P: IntArray
    answer_ids_R: IntArray
    chunks_S: IntArray
    chunks_R: IntArray
    has_special: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A span of the agent's own OpenTelemetry traces: both ids in hexadecimal, as trace viewers show them."""

    trace_id: str
    span_id: str


_FIRST_BYTES: Mapping[bytes, str] = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif"}


MAX_PICTURE_BYTES = 1 << 30
"""Of the file of a recorded image: as much as `gateway.max_body_mb` may let a request send."""


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Picture:
    """An image file as the agent sent it: its `content`, or the `path` of a recorded one, which is read when its `data`
    are needed. Two with the same content are equal."""

    sha256: str
    content: bytes | None = field(default=None, compare=False, repr=False)
    path: Path | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, content: bytes) -> Picture:
        """Return the picture with this content."""
        return cls(sha256=hashlib.sha256(content).hexdigest(), content=content)

    @property
    def data(self) -> bytes:
        """The bytes of the file. Raises `ImageError` if a recorded one is missing, or is no longer what it was."""
        if self.content is not None:
            return self.content
        assert self.path is not None
        try:
            if self.path.exists() and not self.path.is_file():
                raise ImageError(f"the image {self.path} of a recorded call is no file")
            with self.path.open("rb") as file:
                too_large = os.fstat(file.fileno()).st_size > MAX_PICTURE_BYTES
                content = b"" if too_large else file.read(MAX_PICTURE_BYTES)
        except OSError as error:
            raise ImageError(f"the image {self.path} of a recorded call cannot be read: {error.strerror}") from error
        if too_large:
            limit = f"{MAX_PICTURE_BYTES >> 20} MiB, more than any request may send"
            raise ImageError(f"the image {self.path} of a recorded call is too large: more than {limit}")
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise ImageError(f"the image {self.path} of a recorded call has been changed: its hash is another")
        return content

    @property
    def media_type(self) -> str:
        """What kind of file it is, by its first bytes: one of the four formats that are read, or nothing known."""
        data = self.data
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return "image/webp"
        found = [kind for start, kind in _FIRST_BYTES.items() if data.startswith(start)]
        return found[0] if found else "application/octet-stream"

    @property
    def data_url(self) -> str:
        """The picture as a data URL."""
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode()}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel with the content: another machine has no such path."""
        return _whole_picture, (self.sha256, self.data)


def _whole_picture(sha256: str, content: bytes) -> Picture:
    return Picture(sha256=sha256, content=content)


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureSpan:
    """The tokens of a prompt that stand for a picture: those of positions `start` .. `stop` - 1.

    The first and the last of them are image tokens; some models have other tokens between (ends of rows). Where another
    server's calls are recorded, both numbers are 0: it does not say which tokens they are.
    """

    picture: Picture
    start: int
    length: int

    @property
    def stop(self) -> int:
        """The position after the last token."""
        return self.start + self.length


class CallStatus(StrEnum):
    """What happened to a call's response."""

    USED = "used"  # the response was delivered to the agent
    LEFT_OUT = "left_out"  # delivered, but left out by the workflow, or as no text for the teacher: never trained
    UNUSED = "unused"  # delivered as one of several choices (`n` > 1), but the agent used another: never trained
    ABANDONED = "abandoned"  # cancelled, timed out, retried by the client, or undelivered: never trained
    FOREIGN = "foreign"  # made by another rollout's code and refused: never trained, and both rollouts fail


_DELIVERED = frozenset({CallStatus.USED, CallStatus.LEFT_OUT, CallStatus.UNUSED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request of the agent and one choice of its response, with exactly the tokens that the engine processed.

    `sampled_ids_S` includes a sampled end token. `logprobs_S` are of the distribution sampled from (after temperature
    and truncation, among the tokens that the `constraint` allows); `versions_S` is the policy version that computed
    each token. `request` is the index of the first choice of the same request if it asked for several (`n` > 1).
    `parent` is the index of the rollout's earlier call whose `prompt_ids_P + sampled_ids_S` this call's prompt starts
    with, if any. `agent` is the name of the agent that made the call (`model.named`), and `model` that of the model it
    asked for, if that is not the served one's. `span` is the span of the agent's own traces that it was made in, if it
    has any. If no chat template rendered the prompt, `messages` is one message with its text, of the role
    `PROMPT_ROLE`. `started` is when its sampling began, in seconds since 1970 (None: unknown). `routes_NLK` are the
    experts that the engine chose for each token but the last (N = P + S - 1) in each layer of a mixture of experts;
    None for a dense model. `pictures` are the images in the prompt, in their order. `seeded` calls asked for noise of a
    seed of their own, which other calls of the rollout may have too. `supports` are the ids that the tokens of a
    truncated distribution were drawn from; None if nothing was cut, or the engine did not say what was left.
    `taught_S` are a teacher's logprobs of the sampled tokens, if it is behind an endpoint (`distill.teacher_url`).
    """

    index: int
    parent: int | None
    prompt_ids_P: IntArray
    sampled_ids_S: IntArray
    logprobs_S: FloatArray
    versions_S: IntArray
    sampling: Sampling
    finish_reason: FinishReason
    status: CallStatus
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    response: Mapping[str, Any]
    seconds: float = 0.0
    started: float | None = None
    request: int | None = None
    constraint: Constraint | None = None
    agent: str = ""
    model: str = ""
    span: Span | None = None
    routes_NLK: RouteArray | None = None
    pictures: tuple[PictureSpan, ...] = ()
    seeded: bool = False
    supports: Supports | None = None
    taught_S: FloatArray | None = None

    @property
    def has_ratio(self) -> bool:
        """Whether the logprobs can be compared with a model's: nothing was cut off the distribution, or it is known
        what was left of it."""
        return self.sampling.full_support or self.supports is not None

    @property
    def delivered(self) -> bool:
        """Whether the agent received the response, used or not."""
        return self.status in _DELIVERED

    @property
    def trainable(self) -> bool:
        """Whether the call may be trained: sampled (not greedy) and used by the agent."""
        return self.status == CallStatus.USED and self.sampling.temperature > 0 and len(self.sampled_ids_S) > 0


class Outcome(StrEnum):
    """How a rollout ended, by cause.

    `OK` has a reward (a wrong answer is OK with a low reward). The model itself caused the outcomes `MODEL_CAUSED`:
    they are not retried. `FILTERED` ended well and has a reward, but an operator dropped it. All others are, as far as
    is known, failures of something else: they are retried, then excluded, and never get a reward.
    """

    OK = "ok"
    # caused by the model
    CONTEXT_OVERFLOW = "context_overflow"
    TOKEN_LIMIT = "token_limit"
    CALL_LIMIT = "call_limit"
    UNUSABLE_ANSWER = "unusable_answer"
    # caused by something else
    WORKFLOW_ERROR = "workflow_error"
    JUDGE_ERROR = "judge_error"
    TIMEOUT = "timeout"
    BLOCKED_LOOP = "blocked_loop"
    INFRASTRUCTURE = "infrastructure"
    CANCELLED = "cancelled"
    # taken out of training afterwards
    FILTERED = "filtered"


MODEL_CAUSED = frozenset({Outcome.CONTEXT_OVERFLOW, Outcome.TOKEN_LIMIT, Outcome.CALL_LIMIT, Outcome.UNUSABLE_ANSWER})


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEntropies:
    """The entropy (float16, in nats) of the distribution that each trained token of a call was predicted from, at the
    call's temperature, under the trainer's weights of the first update that trained it; `places_S` are the tokens'
    positions in their sequence. Sums over these tokens, not rounded: `entropy`; `varentropy`, the variance of -logprob
    in the token's distribution (nats squared); `cumulative`, the probability of smaller ids and half its own one.

    `log_ratios_S` (float16) are those in the step's last update on the token: its log probability under the trainer's
    weights before that update, minus the one that the policy loss compares with. That is the recorded one, or with a
    `behaviour` weight that of the weights before the step's first update. A token of a truncated distribution whose
    support is not recorded has none (NaN). `clipped_S` says whether the policy loss gave the token no gradient in that
    update because of a bound: its own clip, or one that left the token out (`behaviour: masked`, `m2po`, `clipb`,
    `clipv`). An advantage of 0 alone is no clip. Terms for KL and entropy are not looked at."""

    rollout_id: str
    call: int
    places_S: IntArray
    entropies_S: HalfArray
    log_ratios_S: HalfArray
    clipped_S: BoolArray
    entropy: float
    varentropy: float
    cumulative: float


def metric_named(metrics: Mapping[str, float], name: str) -> float | None:
    """Return a metric of a rollout by its own name, or under the name of who measured it (`judge/right`); None if there
    is none."""
    return next((metrics[one] for one in (name, f"judge/{name}", f"workflow/{name}") if one in metrics), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One run of the workflow on one task.

    `id` is `<group id>/<index>`; `attempt` counts retries from 0. `reward` is set if the outcome is OK, or if the model
    caused the failure and the user set a `failure_reward`. It is also None if the workflow gave none, which only
    algorithms without rewards allow (`Algorithm.needs_reward`). It is one number, counted once for all calls.

    If the user gave them: `step_rewards` are rewards of single steps, by the index of the call that earned them; only
    these are summed. `call_rewards` are what the workflow set on each of its calls, of which `reward` is the last; they
    are never summed. `states` identifies the environment's state in which each call was made.

    `error` is one line: type, message, place; `traceback` has the lines of user code and libraries that led to it, if
    an exception did. `started` is in seconds since 1970 (None: unknown). `unrecorded_answers` counts answers that are
    not in `calls` (of an endpoint that is evaluated); None if unknown because the attempt's process died. `trimmed`
    says that the journal has dropped its text (`journal.keep_steps`): its calls have no messages, and empty responses.
    """

    id: str
    group_id: str
    task_id: str
    index: int
    attempt: int
    calls: tuple[Call, ...]
    outcome: Outcome
    reward: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    call_rewards: Mapping[int, float] = field(default_factory=dict)
    step_rewards: Mapping[int, float] = field(default_factory=dict)
    states: Mapping[int, str] = field(default_factory=dict)
    error: str | None = None
    traceback: str | None = None
    seconds: float = 0.0
    started: float | None = None
    unrecorded_answers: int | None = 0
    trimmed: bool = False

    @property
    def answers(self) -> tuple[Call, ...]:
        """The recorded calls whose response the agent received."""
        return tuple(call for call in self.calls if call.delivered)

    @property
    def num_answers(self) -> int | None:
        """How many answers of the model the agent received; None if unknown."""
        return None if self.unrecorded_answers is None else len(self.answers) + self.unrecorded_answers

    @property
    def scored(self) -> bool:
        """Whether this rollout takes part: it has a reward, or its outcome is OK and none is needed; and no operator
        dropped it."""
        return self.outcome == Outcome.OK or (self.reward is not None and self.outcome != Outcome.FILTERED)

    @property
    def answered(self) -> bool:
        """Whether the agent received an answer of the model. Without one the reward says nothing about the model."""
        return self.num_answers != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The rollouts of one task that were started together: the unit over which advantages are computed.

    `id` begins with the step that the group was drawn for (`id_of_group`), and a rollout's id with that of its group.
    `version` is the policy version served at the start; each token has its own. `rollouts` has the last attempt of each
    rollout, scored or not; `attempts` has the earlier, failed attempts, for the record only. `baseline` is an
    additional greedy rollout, if the algorithm compares with one: its reward is used for that only.

    A workflow may answer further questions on the way that are trained too (as a judge of its own answers). These
    rollouts are groups of their own, which are `side` of the task's until they are drawn into a batch; each of them is
    `beside` the group of this id.
    """

    id: str
    task: Task
    version: int
    rollouts: tuple[Rollout, ...]
    attempts: tuple[Rollout, ...] = ()
    baseline: Rollout | None = None
    side: tuple[Group, ...] = ()
    beside: str | None = None

    @property
    def with_side(self) -> tuple[Group, ...]:
        """This group and those at its side, one after the other."""
        return (replace(self, side=()), *self.side) if self.side else (self,)

    @property
    def scored(self) -> tuple[Rollout, ...]:
        """The rollouts that take part."""
        return tuple(rollout for rollout in self.rollouts if rollout.scored)

    @property
    def with_baseline(self) -> tuple[Rollout, ...]:
        """The rollouts, followed by the baseline if there is one."""
        return self.rollouts if self.baseline is None else (*self.rollouts, self.baseline)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """A trainable token sequence made from one or more calls of a rollout.

    A call whose prompt starts with an earlier call's ids continues its sequence; any other call starts a new one.
    Every array has length T. Only tokens with `loss_mask_T` carry loss; elsewhere `logprobs_T` and `weights_T` are 0,
    `versions_T` and `calls_T` are -1, `temperatures_T` is 1.

    A two-call rollout (tool call, then answer), u = user or template, s = sampled::

        ids_T        <|im_start|>user 2+2? .. <tool_call>{..}</tool_call> <|im_end|> \\n<tool_response>4 .. 4 <|im_end|>
                     u           u    u    u  s          s   s            s          u  u              u u  s s
        loss_mask_T  0           0    0    0  1          1   1            1          0  0              0 0  1 1
        calls_T     -1          -1   -1   -1  0          0   0            0         -1 -1             -1 -1 1 1

    `supports` are those of each call whose distribution was cut, by index: its tokens are scored among the ids
    that they were drawn from. `truncated_calls` are such calls without: nothing may be compared with their logprobs.
    `constraints` has the constraint of each call that was sampled with one, by index: its tokens are scored among the
    allowed ones. `routes_NLK` are the experts that the engine chose for all tokens but the last (N = T - 1), as
    recorded by the first call that computed each; None for a dense model. `pictures` are the images of the sequence, in
    their order. `shown_T` are the tokens that the environment put between two calls, the template's among them, images
    not (None: nobody asks); each is in one sequence of its rollout. `teacher` is the name of the one that scores the
    sequence, if there are several (`distill.teachers`). With `distill.context` it reads the ids `told_P` in place of
    the first `num_untold`, which are the first call's prompt. `taught_T` are the logprobs that a teacher behind an
    endpoint gave the tokens with loss, 0 elsewhere. `rereads` has each call with loss, by index, as a teacher with
    other tokens reads it.

    `advantages_T` and `weights_T` are filled when a batch is drawn. The loss of a batch is
    `sum(weights_T * per_token_loss_T)`: the weights already include the aggregation mode and the normalization over the
    whole update, so that a split into micro-batches cannot change the gradient.
    """

    rollout_id: str
    group_id: str
    task_id: str
    ids_T: IntArray
    loss_mask_T: BoolArray
    logprobs_T: FloatArray
    versions_T: IntArray
    calls_T: IntArray
    temperatures_T: FloatArray
    advantages_T: FloatArray
    weights_T: FloatArray
    truncated_calls: tuple[int, ...] = ()
    supports: Mapping[int, Supports] = field(default_factory=dict)
    constraints: Mapping[int, Constraint] = field(default_factory=dict)
    routes_NLK: RouteArray | None = None
    pictures: tuple[PictureSpan, ...] = ()
    teacher: str = ""
    told_P: IntArray | None = None
    num_untold: int = 0
    shown_T: BoolArray | None = None
    taught_T: FloatArray | None = None
    rereads: Mapping[int, Reread] = field(default_factory=dict)

    @property
    def truncated_T(self) -> BoolArray:
        """Whether each token was sampled from a truncated distribution of unknown support."""
        return np.isin(self.calls_T, self.truncated_calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One invariant of the run certificate in one step: how many items were checked, how many broke it, and the first
    of these, named by rollout, call and token."""

    name: str
    checked: int
    broken: int
    first: str | None = None


_STEP_OF_ID = re.compile(r"step(?P<form>[_-])(?P<number>\d+)(?=/|$)")


def id_of_group(step: int, name: str) -> str:
    """Return the id of a group that is drawn for training `step`, which counts from 1: `step_10/train/7`. In an
    asynchronous run its rollouts are made while earlier steps train; replayed, it trains again under the same id."""
    return f"step_{step}/{name}"


def step_of_group(id_: str) -> int | None:
    """Return the step that the group, or the rollout, of this id was drawn for; None for another id. Ids of earlier
    versions count the steps before: `step-9/train/7` was drawn for step 10."""
    found = _STEP_OF_ID.match(id_)
    return None if found is None else int(found["number"]) + (found["form"] == "-")


def noise_name(id_: str) -> str:
    """Return the name under which a rollout's noise is drawn: its id in earlier versions, whose runs go on with it."""
    found = _STEP_OF_ID.match(id_)
    return id_ if found is None or found["form"] == "-" else f"step-{int(found['number']) - 1}{id_[found.end() :]}"
