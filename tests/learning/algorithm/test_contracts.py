"""Our own parts keep the contracts that others' must keep, and the checks find what does not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sharpen.learning.algorithm.advantages import ADVANTAGES, Advantage
from sharpen.learning.algorithm.aggregation import AGGREGATIONS, TokenWeights
from sharpen.learning.algorithm.kl import ESTIMATORS, KL
from sharpen.learning.algorithm.losses import POLICY_LOSSES, PolicyLoss
from sharpen.learning.algorithm.presets import PRESETS
from sharpen.learning.algorithm.returns import Scores
from sharpen.testing import check_advantage, check_aggregation, check_algorithm, check_kl, check_policy_loss


@pytest.mark.parametrize("name", ADVANTAGES)
def test_our_advantages(name: str) -> None:
    check_advantage(name)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_our_policy_losses(name: str) -> None:
    check_policy_loss(name)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_our_kl_terms(name: str) -> None:
    check_kl(name)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_our_aggregations(name: str) -> None:
    check_aggregation(name, **({"length": 8} if name == "constant-length" else {}))


@pytest.mark.parametrize("name", PRESETS)
def test_our_algorithms(name: str) -> None:
    check_algorithm(name)


def test_the_advantage_on_the_page_of_extending() -> None:
    page = (Path(__file__).parents[3] / "docs" / "use" / "extending.md").read_text(encoding="utf-8")
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def above_median" in block]
    found: dict[str, Any] = {"np": np}
    exec(block, found)
    check_advantage(found["above_median"], scale=2.0)
    numbers = found["above_median"](Scores.of_rollouts([1.0, 2.0, 6.0, 0.0], [0, 0, 0, 1]), scale=2.0)
    assert numbers.tolist() == [-2.0, 0.0, 8.0, 0.0]


def changes_rewards(scores: Any) -> Any:
    scores.rewards_R[:] = scores.rewards_R - 1.0
    return scores.per_call(scores.rewards_R)


def other_each_time(scores: Any) -> Any:
    return np.random.default_rng().normal(size=len(scores.rollouts_C))


WRONG_ADVANTAGES: dict[str, Any] = {
    "changes what it is given": changes_rewards,
    "for the same": other_each_time,
    "returns the shape": lambda scores: scores.rewards_R[:1],
    "returns a list": lambda scores: scores.rewards_R.tolist(),
    "nan": lambda scores: scores.per_call(scores.rewards_R) / 0.0 * 0.0,
    "depends on the order": lambda scores: np.arange(len(scores.rollouts_C)) * 1.0,
    "says that it is centred": Advantage(
        function=lambda scores: scores.per_call(scores.rewards_R), formula="r", centred=True
    ),
    "its second formula differ": Advantage(
        function=lambda scores: scores.per_call(scores.rewards_R),
        formula="r",
        second=lambda groups: [[member.reward + 1.0 for member in members] for members in groups],
    ),
}


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:divide by zero")
@pytest.mark.parametrize("sentence", WRONG_ADVANTAGES)
def test_a_wrong_advantage_is_found(sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_advantage(WRONG_ADVANTAGES[sentence])


def _none(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor, dtype=torch.bool)


def upside_down(now: Any, old: Any, a: Any) -> Any:
    return a * (now - old), _none(now)


def silently_cut(now: Any, old: Any, a: Any) -> Any:
    return -a * (now - old).clamp(-0.2, 0.2), _none(now)


def of_all_tokens(now: Any, old: Any, a: Any) -> Any:
    return -a * now / len(now), _none(now)


def plain(now: Any, old: Any, a: Any) -> Any:
    return -a * now, _none(now)


WRONG_LOSSES: dict[str, Any] = {
    "the sign of minus the advantage": upside_down,
    "does not say that it is clipped": silently_cut,
    "depends on tokens of other calls": of_all_tokens,
    "gives clipped tokens a gradient": lambda now, old, a: (-a * now, ~_none(now)),
    "not torch.bool": lambda now, old, a: (-a * now, torch.zeros_like(now)),
    "in shape": lambda now, old, a: ((-a * now).sum(), _none(now)),
    "must return losses and what was clipped": lambda now, old, a: -a * now,
    "not finite": lambda now, old, a: (-a * torch.exp((now - old) * 99.0), _none(now)),
    "of its second formula differ": PolicyLoss(
        function=plain, formula="-A log π", second=lambda now, old, a: -2.0 * a * now
    ),
}


@pytest.mark.parametrize("sentence", WRONG_LOSSES)
def test_a_wrong_policy_loss_is_found(sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_policy_loss(WRONG_LOSSES[sentence])


@pytest.mark.parametrize(
    ("sentence", "part"),
    [
        ("where the policy is the reference", lambda now, ref, old: (now - ref) ** 2 + 1.0),
        ("depends on tokens of other calls", lambda now, ref, old: (now - ref) / len(now)),
        ("second formula differ", KL(function=lambda now, ref, old: now - ref, second=lambda now, ref, old: ref - now)),
    ],
)
def test_a_wrong_kl_term_is_found(sentence: str, part: Any) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_kl(part)


@pytest.mark.parametrize(
    ("sentence", "part"),
    [
        ("not positive", lambda rollouts, calls: np.zeros(len(calls))),
        ("weighs tokens of a call differently", lambda rollouts, calls: np.arange(1.0, len(calls) + 1)),
        ("how rollouts and calls are numbered", lambda rollouts, calls: 1.0 + calls),
        (
            "second formula differ",
            TokenWeights(
                function=lambda rollouts, calls: np.ones(len(calls)), second=lambda calls: [2.0 for _ in calls]
            ),
        ),
    ],
)
def test_a_wrong_aggregation_is_found(sentence: str, part: Any) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check_aggregation(part)
