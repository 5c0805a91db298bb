"""Parts of an algorithm that the user brings, as far as the certificate needs them.

In: the name of a part in the settings. Out: what it says of itself, and its second formula. Its first formula is never
called here.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sharpen.config.doors import find_part, place_of_part
from sharpen.errors import CertificateError
from sharpen.evidence.certificate.formulas import Formula, Groups, PerCall

KINDS: Mapping[str, str] = {
    "advantage": "advantages",
    "policy_loss": "policy_losses",
    "kl": "kls",
    "aggregation": "aggregations",
}
"""The kind of each part of an algorithm, by its setting in `loss`."""
_SPREADS = {
    "reward_spread": "rewards",
    "metric_spread": "metrics",
    "return_spread": "episodes",
    "state_spread": "states",
    "step_spread": "returns",
    "call_spread": "calls",
}


def algorithm_of(name: str) -> Any:
    """Return the algorithm that the user brings, whose parts have names. Raises `ConfigError` if it is not found."""
    found = find_part("algorithms", name, {})
    place = place_of_part("algorithms", name)
    held = {part: f"{place}.{part}" for part in KINDS if not isinstance(getattr(found, part), str)}
    return replace(found, **held)


def formula_of(name: str) -> Formula:
    """Return an advantage that the user brings. Without a second formula its numbers are not known."""
    part = find_part("advantages", name, {})
    second = getattr(part, "second", None)
    return Formula(
        numbers=_numbers(name, second),
        group_relative=getattr(part, "group_relative", True),
        centred=getattr(part, "centred", False),
        baseline=getattr(part, "baseline", False),
        needs_reward=getattr(part, "needs_reward", True),
        compares=_SPREADS[getattr(getattr(part, "spread", None), "__name__", "reward_spread")],
        known=second is not None,
    )


def second_of(part: str, name: str) -> Callable[..., Any] | None:
    """Return the second formula of a part (`policy_loss`, `kl`, ...); None if it has none."""
    found: Callable[..., Any] | None = getattr(find_part(KINDS[part], name, {}), "second", None)
    return found


def narrowest_bound(name: str, arguments: Mapping[str, Any]) -> float:
    """Return the smallest bound on the ratio that a policy loss says it has, with these arguments; 0 if its ratio is a
    product."""
    part = find_part("policy_losses", name, {})
    if getattr(part, "product", False):
        return 0.0
    bounds: Sequence[str] = getattr(part, "bounds", ())
    parameters = inspect.signature(part.function).parameters if bounds else {}
    return min((float(arguments.get(one, parameters[one].default)) for one in bounds), default=math.inf)


def _numbers(name: str, second: Callable[..., Any] | None) -> Callable[..., PerCall]:
    def numbers(groups: Groups, **arguments: Any) -> PerCall:
        if second is None:
            return {}
        result: PerCall = {}
        try:
            for members, of_group in zip(groups, second(groups, **arguments), strict=True):
                for member, number in zip(members, of_group, strict=True):
                    several = number if isinstance(number, Sequence) else [number] * len(member.calls)
                    for call, one in zip(member.calls, several, strict=True):
                        result[member.rollout_id, call.index] = float(one)
        except Exception as error:  # the user's code runs
            raise CertificateError(f"the second formula of {name} fails: {type(error).__name__}: {error}") from error
        return result

    return numbers


def weights_of(name: str, calls: Sequence[tuple[int, int]]) -> Sequence[float] | None:
    """Return the weight of each token of the calls of an update, given as (number of the rollout, tokens); None without
    a second formula."""
    second = second_of("aggregation", name)
    if second is None:
        return None
    try:
        weights = [float(weight) for weight in second(calls)]
        if len(weights) != len(calls):
            raise ValueError(f"{len(weights)} weights of {len(calls)} calls")
    except Exception as error:  # the user's code runs
        raise CertificateError(f"the second formula of {name} fails: {type(error).__name__}: {error}") from error
    return weights
