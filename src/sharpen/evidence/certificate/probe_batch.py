"""The small batch of a gradient probe: as sequences for the trainer, and as calls for the plain loop.

In: which ids there are, and how long a prompt may be. Out: sequences of random ids that have what goes wrong most
easily: a prompt that several share, an answer that begins as another one does, two calls in one sequence, a prompt too
short to be shared, an answer of one token; advantages of both signs, two temperatures; recorded logprobs of which some
are far enough from the weights' own that their ratio is clipped. Rows have no ratios; pairs of answers have advantages
of 1 and -1.

Shape suffixes: T tokens of a sequence, S tokens of a call, N tokens of a sequence but the last, L layers with experts,
K experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from sharpen.evidence.certificate.plain.model import PlainSequence
from sharpen.types import Experience, Reread, RouteArray

Ids = npt.NDArray[np.int64]
Kind = Literal["rollouts", "rows", "pairs"]

_NEAR = (0.03, -0.02, 0.0, 0.01)
_FAR = tuple(0.35 + 0.01 * number for number in range(25))
"""Log ratios between the weights and the recorded logprobs, on both sides of the losses' clips (0.2 to 0.3) and well
away from them. The large ones differ, so that their order, which some losses depend on, is no matter of rounding."""

_CHUNKS = ((1, 1), (2, 1), (1, 3), (2, 2))
"""Tokens of the policy and of a teacher with others that spell the same."""

SHORTEST, LONGEST = 12, 130
"""Tokens of the long prompt: enough to be shared; more than a block of an attention kernel or a chunk of a recurrent
one. The middle one has `SHORTEST`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSequence:
    """A sequence of an owner (a rollout, a row, a pair): its ids, and for each call its tokens (start, stop), and what
    a teacher with other tokens reads."""

    owner: str
    group: str
    ids_T: Ids
    calls: tuple[tuple[int, int], ...]
    advantage: float
    temperature: float = 1.0
    teacher: str = ""
    rereads: Mapping[int, Reread] = field(default_factory=dict)


def probe_sequences(known: Ids, long: int, kind: Kind) -> list[ProbeSequence]:
    """Make the batch of ids among these; `long` is the length of its long prompt."""
    draw = np.random.default_rng(0)

    def some(count: int) -> Ids:
        return draw.choice(known, count)

    none, common = some(0), some(9)
    prompts = {"long": some(long), "middle": some(SHORTEST), "short": some(3)}
    made: list[tuple[str, Ids, Ids, Ids, float]] = [
        ("long", some(5), none, none, 1.0),
        ("long", some(7), none, none, -0.5),
        ("middle", np.concatenate([common, some(3)]), none, none, -0.75),
        ("middle", np.concatenate([common, some(5)]), none, none, 0.5),
        ("middle", some(4), some(3), some(6), -0.25),
        ("middle", some(3), none, none, 0.75),
        ("short", some(6), none, none, -1.0),
        ("short", some(1), none, none, 0.625),
    ]
    sequences = []
    for number, (prompt, first, between, second, advantage) in enumerate(made):
        start = len(prompts[prompt])
        calls = [(start, start + len(first))]
        ids_T = np.concatenate([prompts[prompt], first, between, second])
        if len(second):
            calls.append((len(ids_T) - len(second), len(ids_T)))
        owner, group = f"probe/{prompt}/{number}", f"probe/{prompt}"
        if kind == "pairs":
            owner, group, advantage = f"pair{number // 2}", f"pair{number // 2}", (-1.0) ** number
        elif kind == "rows":
            group, advantage = owner, 1.0
        sequences.append(
            ProbeSequence(
                owner=owner,
                group=group,
                ids_T=ids_T,
                calls=tuple(calls),
                advantage=advantage,
                temperature=0.75 if prompt == "short" and kind == "rollouts" else 1.0,
            )
        )
    return sequences


def with_readings(sequences: Sequence[ProbeSequence], num_ids: Mapping[str, int]) -> list[ProbeSequence]:
    """Return the sequences; those of teachers with other tokens, of which `num_ids` says how many each has, with
    readings of their calls: any ids, in chunks of one or more tokens of either."""
    draw = np.random.default_rng(1)
    return [replace(one, rereads=_readings(one, draw, num_ids.get(one.teacher, 0))) for one in sequences]


def _readings(one: ProbeSequence, draw: np.random.Generator, num_ids: int) -> dict[int, Reread]:
    found = {}
    for number, (start, stop) in enumerate(one.calls if num_ids else ()):
        chunks = [n for n in range(stop - start) for _ in range(_CHUNKS[n % len(_CHUNKS)][0])][: stop - start]
        chunks_R = [n for n in range(chunks[-1] + 1) for _ in range(_CHUNKS[n % len(_CHUNKS)][1])]
        found[number] = Reread(
            prompt_ids_P=draw.integers(num_ids, size=5 + number).astype(np.int32),
            answer_ids_R=draw.integers(num_ids, size=len(chunks_R)).astype(np.int32),
            chunks_S=np.array(chunks, np.int32),
            chunks_R=np.array(chunks_R, np.int32),
        )
    return found


def num_tokens(long: int) -> int:
    """Return how many tokens the plain loop computes for the batch, each call by itself."""
    sequences = probe_sequences(np.arange(2), long, "rollouts")
    return sum(stop for one in sequences for _, stop in one.calls)


def plain_sequences(sequences: Sequence[ProbeSequence], kind: Kind) -> list[PlainSequence]:
    """Return the calls, each as a sequence of its own, with no logprobs recorded yet."""
    found = []
    for one in sequences:
        for number, (start, stop) in enumerate(one.calls):
            weight = 1.0 / _tokens_of_owner(one.owner, sequences) / _num_owners(sequences)
            weight *= 1.0 if kind == "pairs" else 1.0 + 0.5 * number
            call = PlainSequence(
                owner=one.owner,
                group=one.group,
                ids_T=torch.from_numpy(one.ids_T[:stop]),
                places_S=torch.arange(start, stop),
                recorded_S=torch.zeros(stop - start),
                weights_S=torch.full((stop - start,), float(np.float32(weight)), dtype=torch.float64),
                advantage=one.advantage,
                temperature=one.temperature,
                teacher=one.teacher,
            )
            if number in one.rereads:
                call = _with_reading(call, one.rereads[number])
            between = torch.arange(one.calls[number - 1][1] if number else start, start)
            found.append(replace(call, shown=call.beginning(between)) if len(between) else call)
    return found


def _with_reading(call: PlainSequence, read: Reread) -> PlainSequence:
    start, count = len(read.prompt_ids_P), len(read.answer_ids_R)
    own, its = read.chunks_S.tolist(), read.chunks_R.tolist()
    stretches = [
        tuple(slice(side.index(chunk), side.index(chunk) + side.count(chunk)) for side in (own, its))
        for chunk in sorted({*own})
    ]
    of_teacher = PlainSequence(
        owner=call.owner,
        ids_T=torch.from_numpy(np.concatenate([read.prompt_ids_P, read.answer_ids_R]).astype(np.int64)),
        places_S=torch.arange(start, start + count),
        recorded_S=torch.zeros(count),
        weights_S=torch.zeros(count),
        temperature=call.temperature,
    )
    return replace(call, read=of_teacher, stretches=tuple((first, second) for first, second in stretches))


def recorded(calls: Sequence[PlainSequence], logprobs: Sequence[torch.Tensor]) -> list[PlainSequence]:
    """Return the calls with recorded logprobs: those given (S of each), less the log ratios of `_NEAR` and `_FAR`."""
    ratios = _log_ratios()
    return [
        replace(one, recorded_S=(of_one.double() - torch.tensor([next(ratios) for _ in of_one])).float())
        for one, of_one in zip(calls, logprobs, strict=True)
    ]


def with_routes(
    sequences: Sequence[ProbeSequence], calls: Sequence[PlainSequence], routes: Sequence[RouteArray | None]
) -> list[PlainSequence]:
    """Return the calls with the experts (N, L, K) of their sequences; as they are if there are none. Nothing is
    predicted from the last token of a call, so that its experts are any."""
    if not routes:
        return [*calls]
    of_calls = [one for sequence, one in zip(sequences, routes, strict=True) for _ in sequence.calls]
    return [_with_experts(one, own) for one, own in zip(calls, of_calls, strict=True)]


def _with_experts(one: PlainSequence, routes_NLK: RouteArray | None) -> PlainSequence:
    call = replace(one, routes_TLK=_routes(one, routes_NLK))
    return call if one.shown is None else replace(call, shown=call.beginning(one.shown.places_S))


def _routes(one: PlainSequence, routes_NLK: RouteArray | None) -> torch.Tensor | None:
    if routes_NLK is None:
        return None
    own_NLK = torch.from_numpy(routes_NLK[: len(one.ids_T) - 1].astype(np.int64))
    return torch.cat([own_NLK, own_NLK[-1:]])


def experiences(
    sequences: Sequence[ProbeSequence], calls: Sequence[PlainSequence], routes: Sequence[RouteArray | None] = ()
) -> list[Experience]:
    """Return what the trainer gets of the sequences, with logprobs and weights of their calls and with their experts,
    as of policy version 0."""
    rest, experts = iter(calls), iter(routes)
    return [
        replace(_experience(one, [next(rest) for _ in one.calls]), routes_NLK=next(experts, None)) for one in sequences
    ]


def _experience(one: ProbeSequence, calls: Sequence[PlainSequence]) -> Experience:
    count = len(one.ids_T)
    mask_T, calls_T = np.zeros(count, np.bool_), np.full(count, -1, np.int32)
    shown_T = np.zeros(count, np.bool_)
    shown_T[one.calls[0][0] : one.calls[-1][1]] = True
    logprobs_T, weights_T = np.zeros(count, np.float32), np.zeros(count, np.float32)
    for number, ((start, stop), call) in enumerate(zip(one.calls, calls, strict=True)):
        mask_T[start:stop], calls_T[start:stop] = True, number
        logprobs_T[start:stop], weights_T[start:stop] = call.recorded_S.numpy(), call.weights_S.numpy()
    return Experience(
        rollout_id=one.owner,
        group_id=one.group,
        task_id=one.group,
        ids_T=one.ids_T.astype(np.int32),
        loss_mask_T=mask_T,
        logprobs_T=logprobs_T,
        versions_T=np.where(mask_T, 0, -1).astype(np.int32),
        calls_T=calls_T,
        temperatures_T=np.where(mask_T, one.temperature, 1.0).astype(np.float32),
        advantages_T=np.where(mask_T, one.advantage, 0.0).astype(np.float32),
        weights_T=weights_T,
        teacher=one.teacher,
        shown_T=shown_T & ~mask_T,
        rereads=one.rereads,
    )


def _log_ratios() -> Iterator[float]:
    """Yield small and large log ratios in turn, of both signs."""
    number = 0
    while True:
        yield _NEAR[number % len(_NEAR)]
        yield (-1.0) ** number * _FAR[number % len(_FAR)]
        number += 1


def _num_owners(sequences: Sequence[ProbeSequence]) -> int:
    return len({one.owner for one in sequences})


def _tokens_of_owner(owner: str, sequences: Sequence[ProbeSequence]) -> int:
    return sum(stop - start for one in sequences if one.owner == owner for start, stop in one.calls)
