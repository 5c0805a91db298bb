"""Tries the parts of an algorithm: an advantage, a policy loss, a KL term, an aggregation, or all that one is made of.

In: a part as the settings name it, or itself. Out: nothing, or an `AssertionError`. What each must be is said in
`sharpen.learning.algorithm.parts`.

Shape suffixes: R rollouts, C calls, E tokens that carry loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from sharpen.evidence.certificate.formulas import CallTerms, Member
from sharpen.learning.algorithm.advantages import Advantage, advantage_named
from sharpen.learning.algorithm.aggregation import TokenWeights, aggregation_named
from sharpen.learning.algorithm.kl import KL, estimator, kl_named
from sharpen.learning.algorithm.losses import PolicyLoss, policy_loss_named
from sharpen.learning.algorithm.objective import policy_objective
from sharpen.learning.algorithm.parts import (
    AdvantageFunction,
    AggregationFunction,
    KLFunction,
    PolicyLossFunction,
)
from sharpen.learning.algorithm.presets import Algorithm, algorithm_named
from sharpen.learning.algorithm.returns import FloatArray, Scores, rewards_after_calls, rewards_of_calls

T = TypeVar("T")
Tensor = torch.Tensor
CLOSE = 1e-9
"""How far two ways to compute the same may be apart, as a share of the largest number."""


def check_advantage(part: str | Advantage | AdvantageFunction, /, **parameters: Any) -> None:
    """Raise `AssertionError` if an advantage does not keep the contract of `AdvantageFunction`, with these parameters.

    It gets steps of several groups with rewards of many kinds, also all equal, and rollouts of one to three calls. It
    must give one number for each call, change nothing that it gets, and not depend on the order of rollouts and groups.
    A second formula must give the same numbers, and `centred` must be true.
    """
    advantage, name = advantage_named(part), _name(part)
    given = parameters if advantage.configured is advantage.function else {}

    def numbers(scores: Scores) -> FloatArray:
        return advantage.function(scores, **given)

    for scores in _steps():
        found_C = _pure(numbers, scores, name)
        assert isinstance(found_C, np.ndarray), f"{name} returns a {type(found_C).__name__}, not an array"
        num = len(scores.rollouts_C)
        assert found_C.shape == (num,), f"{name} returns the shape {found_C.shape} for {num} calls, not ({num},)"
        assert np.isfinite(found_C).all(), f"{name} returns {found_C} for the rewards {scores.rewards_R}"
        order_R = np.random.default_rng(3).permutation(len(scores.rewards_R))
        shuffled, places_C = _reordered(scores, order_R)
        _same(numbers(shuffled), found_C[places_C], f"{name} depends on the order of rollouts and groups")
        if advantage.centred and not parameters.get("step_norm", False):
            firsts_R = found_C[np.searchsorted(scores.rollouts_C, np.arange(len(scores.rewards_R)))]
            sums = np.bincount(scores.groups_R, firsts_R)
            _same(
                sums, np.zeros(len(sums)), f"{name} says that it is centred, but a group's advantages do not add to 0"
            )
        if advantage.second is not None:
            _same(_second_numbers(advantage.second, scores, given), found_C, f"{name} and its second formula differ")
    _apart(name, advantage)


def check_policy_loss(part: str | PolicyLoss | PolicyLossFunction, /, **parameters: Any) -> None:
    """Raise `AssertionError` if a policy loss does not keep the contract of `PolicyLossFunction`.

    Where nothing has moved yet, the gradient must raise the probability of tokens with a positive advantage, lower that
    of those with a negative one, and leave the others; a clipped token has none, and one without a gradient is clipped.
    No token may depend on another one but within its call (`by_call`), so neither on padding. A second formula must
    give the same values and gradients.
    """
    loss, name = policy_loss_named(part), _name(part)
    given = parameters if loss.mask is None else {}

    def losses(now_E: Tensor, old_E: Tensor, advantages_E: Tensor, calls_E: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = loss.function(
            now_E, old_E, advantages_E, *((calls_E,) if loss.by_call else ()), **given
        )
        return found

    for now_E, old_E, advantages_E, calls_E in (*_tokens(0.3), *_tokens(2.0), *_tokens(30.0)):
        loss_E, clipped_E = _pure_tensors(losses, (now_E, old_E, advantages_E, calls_E), name)
        for what, tensor_E in (("the losses", loss_E), ("what was clipped", clipped_E)):
            assert tensor_E.shape == now_E.shape, f"{name} returns {what} in shape {tuple(tensor_E.shape)}, not (E,)"
        assert clipped_E.dtype == torch.bool, f"{name} says what was clipped in {clipped_E.dtype}, not torch.bool"
        gradient_E = _gradient(lambda now_E, *rest: losses(now_E, *rest)[0], now_E, old_E, advantages_E, calls_E)
        for what, tensor_E in (("a loss", loss_E), ("a gradient", gradient_E)):
            assert tensor_E.isfinite().all(), f"{name} gives {what} that is not finite for log ratios {now_E - old_E}"
        assert not gradient_E[clipped_E].any(), f"{name} gives clipped tokens a gradient"
        silent_E = (gradient_E == 0) & (advantages_E != 0) & ((now_E - old_E).abs() < 5.0)
        assert not (silent_E & ~clipped_E).any(), (
            f"{name} gives a token no gradient, and does not say that it is clipped"
        )
        _check_alone(name, losses, now_E, old_E, advantages_E, calls_E)
        if loss.second is not None:
            _same_by_call(name, losses, loss.second, given, now_E, old_E, advantages_E, calls_E)
    for now_E, _, advantages_E, calls_E in _tokens(0.3):
        gradient_E = _gradient(lambda now_E, *rest: losses(now_E, *rest)[0], now_E, now_E, advantages_E, calls_E)
        assert torch.equal(gradient_E.sign(), -advantages_E.sign()), (
            f"{name}: where nothing has moved, the gradient must have the sign of minus the advantage, and be 0 "
            f"where that is; advantages {advantages_E.tolist()} give {gradient_E.tolist()}"
        )
    _apart(name, loss)


def check_kl(part: str | KL | KLFunction, /) -> None:
    """Raise `AssertionError` if a KL term does not keep the contract of `KLFunction`. A second formula must give the
    same values and gradients."""
    found, name = kl_named(part), _name(part)

    def terms(now_E: Tensor, reference_E: Tensor, old_E: Tensor, calls_E: Tensor) -> tuple[Tensor, Tensor]:
        kl_E = estimator(part)(now_E, reference_E, old_E)
        return kl_E, torch.zeros_like(kl_E, dtype=torch.bool)

    for now_E, reference_E, _, calls_E in (*_tokens(0.3), *_tokens(30.0)):
        old_E = (now_E + reference_E) / 2
        kl_E, _ = _pure_tensors(terms, (now_E, reference_E, old_E, calls_E), name)
        assert kl_E.shape == now_E.shape, f"{name} returns the shape {tuple(kl_E.shape)}, not (E,)"
        gradient_E = _gradient(lambda now_E, *rest: terms(now_E, *rest)[0], now_E, reference_E, old_E, calls_E)
        for what, tensor_E in (("a value", kl_E), ("a gradient", gradient_E)):
            assert tensor_E.isfinite().all(), f"{name} gives {what} that is not finite for {now_E - reference_E}"
        none_E = estimator(part)(now_E, now_E, old_E)
        assert not none_E.any(), f"{name} is {none_E.tolist()} where the policy is the reference, not 0"
        _check_alone(name, terms, now_E, reference_E, old_E, calls_E)
        if found.second is not None:
            _same_by_call(name, terms, found.second, {}, now_E, reference_E, old_E, calls_E)
    _apart(name, found)


def check_aggregation(part: str | TokenWeights | AggregationFunction, /, **parameters: Any) -> None:
    """Raise `AssertionError` if an aggregation does not keep the contract of `AggregationFunction`. A second formula
    must give the same weights."""
    weights, name = aggregation_named(part), _name(part)
    for seed in range(4):
        chance = np.random.default_rng(seed)
        owners = np.sort(chance.integers(0, 4, 7))  # of seven calls
        sizes = chance.integers(1, 6, 7)
        calls_E, rollouts_E = np.repeat(np.arange(7), sizes), np.repeat(owners, sizes)

        def weigh(numbers: tuple[Any, Any]) -> FloatArray:
            return np.asarray(weights.function(*numbers, **parameters))

        found_E = _pure(weigh, (rollouts_E, calls_E), name)
        assert found_E.shape == calls_E.shape, f"{name} returns the shape {found_E.shape} for {len(calls_E)} tokens"
        assert (np.isfinite(found_E) & (found_E > 0)).all(), f"{name} returns {found_E}, not positive numbers"
        firsts = found_E[np.searchsorted(calls_E, np.arange(7))]
        _same(firsts[calls_E], found_E, f"{name} weighs tokens of a call differently")
        order_E = chance.permutation(len(calls_E))
        _same(weigh((rollouts_E[order_E], calls_E[order_E])), found_E[order_E], f"{name} depends on the tokens' order")
        _same(
            weigh((rollouts_E * 5 + 2, 90 - calls_E)), found_E, f"{name} depends on how rollouts and calls are numbered"
        )
        if weights.second is not None:
            again = weights.second(list(zip(owners.tolist(), sizes.tolist(), strict=True)))
            _same(np.asarray(again, np.float64), firsts, f"{name} and its second formula differ")
    _apart(name, weights)


def check_algorithm(algorithm: str | Algorithm, /) -> None:
    """Raise `AssertionError` if a part of an algorithm does not keep its contract, or if the loss of all together
    depends on how an update is split."""
    if isinstance(algorithm, str):
        algorithm = algorithm_named(algorithm)
    assert isinstance(algorithm, Algorithm), f"{algorithm!r} is a {type(algorithm).__name__}, not an Algorithm"
    check_advantage(algorithm.advantage, **algorithm.advantage_args)
    check_policy_loss(algorithm.policy_loss, **algorithm.policy_loss_args)
    if algorithm.kl != "none":
        check_kl(algorithm.kl)
    check_aggregation(algorithm.aggregation, **({"length": 8} if algorithm.aggregation == "constant-length" else {}))
    if algorithm.distill is not None:  # its loss also needs the teacher's distributions
        return
    (tokens,) = _tokens(0.3)
    calls_E = tokens[3]
    whole_E = _of_objective(algorithm, tokens, torch.ones_like(calls_E, dtype=torch.bool))
    parts_E = _of_objective(algorithm, tokens, calls_E < 2) + _of_objective(algorithm, tokens, calls_E >= 2)
    _same(parts_E.numpy(), whole_E.numpy(), f"the gradient of {algorithm.name} depends on how an update is split")


def _of_objective(algorithm: Algorithm, tokens: tuple[Tensor, ...], chosen_E: Tensor) -> Tensor:
    """The gradient of the loss of some tokens of an update, by the logprobs of all."""
    now_E, old_E, advantages_E, calls_E = tokens
    now_E = now_E.clone().requires_grad_()
    loss, _, _ = policy_objective(
        algorithm,
        now_E[chosen_E],
        old_E[chosen_E],
        advantages_E[chosen_E],
        torch.linspace(0.1, 1.0, len(now_E), dtype=now_E.dtype)[chosen_E],
        ref_logprobs_E=old_E[chosen_E] - 0.1,
        entropy_E=-now_E[chosen_E],
        calls_E=_numbered(calls_E[chosen_E]),
    )
    (gradient_E,) = torch.autograd.grad(loss, now_E)
    return gradient_E


def _name(part: Any) -> str:
    function = getattr(part, "function", part)
    return part if isinstance(part, str) else getattr(function, "__name__", repr(part))


def _apart(name: str, part: Any) -> None:
    assert part.second is not part.function, f"{name}: the second formula is the first one"


def _same(found: npt.NDArray[Any], expected: npt.NDArray[Any], sentence: str) -> None:
    most = CLOSE * max(1.0, float(np.abs(expected).max(initial=0.0)))
    same = found.shape == expected.shape and bool((np.abs(found - expected) <= most).all())
    assert same, f"{sentence}: {found} and {expected}"


def _steps() -> Iterator[Scores]:
    """Yield steps of three groups of six rollouts with rewards of many kinds; the last one has step rewards."""
    for seed, kind in enumerate(("right or wrong", "all equal", "any", "large", "step rewards")):
        chance = np.random.default_rng(seed)
        groups_R = np.repeat(np.arange(3), 6)
        rewards_R = {
            "right or wrong": chance.integers(0, 2, 18) * 1.0,
            "all equal": np.full(18, 0.3),
            "large": chance.normal(size=18) * 1e4,
        }.get(kind, chance.normal(size=18))
        scores = Scores.of_rollouts(rewards_R, groups_R, chance.integers(1, 4, 18))
        num = len(scores.rollouts_C)
        scores = replace(
            scores,
            num_tokens_C=chance.integers(1, 9, num),
            baselines_R=np.repeat(chance.normal(size=3), 6),
            states_C=chance.integers(0, 3, num),
        )
        if kind == "step rewards":
            steps_C = chance.normal(size=num)
            scores = replace(
                scores, step_rewards_C=steps_C, returns_R=np.bincount(scores.rollouts_C, steps_C, 18).astype(np.float64)
            )
        yield scores


def _reordered(scores: Scores, order_R: npt.NDArray[Any]) -> tuple[Scores, npt.NDArray[Any]]:
    """The same step with its rollouts in another order, and the places that its calls had before."""
    places_C = np.concatenate([np.flatnonzero(scores.rollouts_C == rollout) for rollout in order_R])
    new_R = np.argsort(order_R)
    taken: dict[str, Any] = {"rollouts_C": new_R[scores.rollouts_C[places_C]]}
    for one in fields(scores):
        value = getattr(scores, one.name)
        if one.name not in taken and value is not None:
            taken[one.name] = value[order_R if one.name.endswith("_R") else places_C]
    return replace(scores, **taken), places_C


def _second_numbers(second: Callable[..., Any], scores: Scores, parameters: dict[str, Any]) -> FloatArray:
    """What the second formula of an advantage says of each call."""
    after_C, own_C = rewards_after_calls(scores), rewards_of_calls(scores)
    members = []
    for rollout, reward in enumerate(scores.rewards_R.tolist()):
        calls = [
            CallTerms(
                index=number,
                num_tokens=int(scores.num_tokens_C[place]),
                reward_after=float(after_C[place]),
                own_reward=float(own_C[place]),
                state=str(scores.states_C[place]),
            )
            for number, place in enumerate(np.flatnonzero(scores.rollouts_C == rollout))
        ]
        members.append(
            Member(
                rollout_id=str(rollout),
                group_id=str(scores.groups_R[rollout]),
                reward=reward,
                episode=float(scores.returns_R[rollout]),
                baseline=float(scores.baselines_R[rollout]) if scores.baselines_R is not None else 0.0,
                calls=tuple(calls),
            )
        )
    groups = [members[start : start + 6] for start in range(0, len(members), 6)]
    numbers = second(groups, **parameters)
    result: list[float] = []
    for group, of_group in zip(groups, numbers, strict=True):
        for member, number in zip(group, of_group, strict=True):
            result += number if isinstance(number, Sequence) else [number] * len(member.calls)
    return np.array(result, np.float64)


def _pure(function: Callable[[T], FloatArray], given: T, name: str) -> FloatArray:
    """Call a function twice and return what it returns, once it gave the same and changed nothing."""
    arrays = given if isinstance(given, tuple) else tuple(getattr(given, one.name) for one in fields(given))  # type: ignore[arg-type]
    before = [None if array is None else array.copy() for array in arrays]
    found = function(given)
    kept = np.array(found, copy=True)
    again = function(given)
    for array, earlier in zip(arrays, before, strict=True):
        same = earlier is None or np.array_equal(array, earlier, equal_nan=True)
        assert same, f"{name} changes what it is given: {earlier} has become {array}"
    assert np.array_equal(kept, again, equal_nan=True), f"{name} returns {kept}, and {again} for the same"
    return found


def _pure_tensors(
    function: Callable[..., tuple[Tensor, Tensor]], given: tuple[Tensor, ...], name: str
) -> tuple[Tensor, Tensor]:
    before = [tensor.clone() for tensor in given]
    found = function(*given)
    assert isinstance(found, tuple) and len(found) == 2, f"{name} must return losses and what was clipped"  # noqa: PT018
    kept = found[0].clone()
    again = function(*given)
    for tensor, earlier in zip(given, before, strict=True):
        assert torch.equal(tensor, earlier), f"{name} changes what it is given: {earlier} has become {tensor}"
    assert torch.equal(kept, again[0]), f"{name} returns {kept}, and {again[0]} for the same"
    return found


def _tokens(apart: float) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield the tokens of four calls whose log ratios are up to `apart`: logprobs now and before, advantages, calls."""
    chance = torch.Generator().manual_seed(int(apart * 10))
    calls_E = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 3, 3])
    old_E = -5.0 * torch.rand(10, generator=chance, dtype=torch.float64) - 0.1
    now_E = old_E + apart * (2.0 * torch.rand(10, generator=chance, dtype=torch.float64) - 1.0)
    advantages_E = torch.tensor([1.5, 1.5, 1.5, -0.5, 0.0, 0.0, -2.0, -2.0, -2.0, -2.0], dtype=torch.float64)
    yield now_E, old_E, advantages_E, calls_E


def _gradient(function: Callable[..., Tensor], now_E: Tensor, *rest: Tensor) -> Tensor:
    now_E = now_E.clone().requires_grad_()
    total = function(now_E, *rest).sum()
    if not total.requires_grad:
        return torch.zeros_like(now_E)
    (gradient_E,) = torch.autograd.grad(total, now_E)
    return gradient_E


def _numbered(calls_E: Tensor) -> Tensor:
    """Number calls from 0 without gaps."""
    known = {call: number for number, call in enumerate(dict.fromkeys(calls_E.tolist()))}
    return torch.tensor([known[call] for call in calls_E.tolist()])


def _check_alone(name: str, losses: Callable[..., tuple[Tensor, Tensor]], *tokens: Tensor) -> None:
    """A call by itself, and one beside others in another order, must have the losses and gradients that it has here."""
    whole_E, _ = losses(*tokens)
    gradient_E = _gradient(lambda now_E, *rest: losses(now_E, *rest)[0], *tokens)
    calls_E = tokens[3]
    for chosen_E in (*(torch.nonzero(calls_E == call).flatten() for call in range(4)), torch.arange(10).flip(0)):
        part = [tensor[chosen_E] for tensor in tokens]
        part[3] = _numbered(part[3])
        sentence = f"{name}: the {{}} of a token depends on tokens of other calls, or on their order"
        _same(losses(*part)[0].numpy(), whole_E[chosen_E].numpy(), sentence.format("loss"))
        found_E = _gradient(lambda now_E, *rest: losses(now_E, *rest)[0], *part)
        _same(found_E.numpy(), gradient_E[chosen_E].numpy(), sentence.format("gradient"))


def _same_by_call(
    name: str,
    losses: Callable[..., tuple[Tensor, Tensor]],
    second: Callable[..., Tensor],
    parameters: dict[str, Any],
    *tokens: Tensor,
) -> None:
    gradient_E = _gradient(lambda now_E, *rest: losses(now_E, *rest)[0], *tokens)
    value_E, _ = losses(*tokens)
    for call in range(4):
        chosen_E = tokens[3] == call
        part = [tensor[chosen_E] for tensor in tokens[:3]]
        found_S = _gradient(lambda *given: second(*given, **parameters), *part)
        _same(
            found_S.numpy(), gradient_E[chosen_E].numpy(), f"the gradients of {name} and of its second formula differ"
        )
        again_S = second(*part, **parameters)
        _same(again_S.numpy(), value_E[chosen_E].numpy(), f"the values of {name} and of its second formula differ")
