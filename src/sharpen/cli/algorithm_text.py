"""The text of `sharpen algorithms`: every algorithm with its parts, formulas, defaults and source.

In: the presets. Out: a description of each, as wide as the screen; or only their names.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import IO, Any

from sharpen.cli.arguments import say
from sharpen.config.doors import names
from sharpen.learning.algorithm.advantages import ADVANTAGES
from sharpen.learning.algorithm.aggregation import AGGREGATIONS
from sharpen.learning.algorithm.behaviour import CORRECTIONS
from sharpen.learning.algorithm.distill import FORMULAS, Distill
from sharpen.learning.algorithm.kl import ESTIMATORS
from sharpen.learning.algorithm.losses import POLICY_LOSSES
from sharpen.learning.algorithm.presets import PRESETS, Algorithm, algorithm_named
from sharpen.learning.algorithm.resolve import as_trained
from sharpen.learning.algorithm.supervised import SUPERVISED, SupervisedAlgorithm
from sharpen.screen import fitted, text_width

LABEL = 18
"""Columns of a label."""


def print_algorithms(*, names_only: bool, out: IO[str] | None = None) -> None:
    """Print all presets, and the components that a run's `loss` section can select."""
    out = out or sys.stdout
    if names_only:
        for name in (*names("algorithms", PRESETS), *SUPERVISED):
            say(name, file=out)
        return
    wrap = partial(_wrapped, text_width(out))
    for algorithm in map(algorithm_named, names("algorithms", PRESETS)):
        say("\n".join((*map(wrap, describe(as_trained(algorithm))), "")), file=out)
    for supervised in SUPERVISED.values():
        say("\n".join((*map(wrap, describe_supervised(supervised)), "")), file=out)
    for setting, kind, ours in (
        ("advantage", "advantages", ADVANTAGES),
        ("policy_loss", "policy_losses", POLICY_LOSSES),
        ("kl", "kls", {"none": None, **ESTIMATORS}),
        ("aggregation", "aggregations", AGGREGATIONS),
    ):
        say(wrap(_labelled(f"loss.{setting}", ", ".join(names(kind, ours)))), file=out)
    for name, correction in CORRECTIONS.items():
        say(wrap(_labelled("loss.behaviour", f"{name}: {correction.formula}")), file=out)


def algorithms_json() -> dict[str, dict[str, str]]:
    """Return the parts of each algorithm by name: what stands behind each label of its description."""
    descriptions = {
        **{name: describe(as_trained(algorithm_named(name))) for name in names("algorithms", PRESETS)},
        **{name: describe_supervised(algorithm) for name, algorithm in SUPERVISED.items()},
    }
    return {name: dict(map(_part, list(lines)[1:])) for name, lines in descriptions.items()}


def _part(text: str) -> tuple[str, str]:
    """Take a described part apart again, into its label and its text."""
    return text[:LABEL].strip(), text[LABEL:]


def describe_supervised(algorithm: SupervisedAlgorithm) -> Iterator[str]:
    """Yield the lines of an algorithm that learns without rollouts."""
    arguments = ", ".join(f"{name} {value}" for name, value in algorithm.pair_loss_args.items())
    yield algorithm.name
    yield _labelled("  learns from", algorithm.data)
    yield _labelled("  loss", algorithm.formula + (f" ({arguments})" if arguments else ""))
    yield _labelled("  terms", "mean over pairs" if algorithm.pair_loss else algorithm.aggregation)
    yield _labelled("  source", algorithm.source)


def describe(algorithm: Algorithm) -> Iterator[str]:
    """Yield the lines of an algorithm."""
    advantage, loss = algorithm.of_advantage, algorithm.of_policy_loss
    yield algorithm.name
    yield _labelled(
        "  advantage",
        f"{algorithm.advantage}: {advantage.formula}{_arguments(advantage.configured, algorithm.advantage_args)}",
    )
    yield _labelled(
        "  policy loss",
        f"{algorithm.policy_loss}: {loss.formula}{_arguments(loss.configured, algorithm.policy_loss_args)}",
    )
    kl = f"KL {algorithm.kl} x {algorithm.kl_coef:g} in the {algorithm.kl_in}" if algorithm.needs_reference else "no KL"
    entropy = f"entropy bonus x {algorithm.entropy_coef:g}" if algorithm.needs_entropy else "no entropy term"
    action = f"replaced (up to {algorithm.max_refill:g} x the batch)" if algorithm.max_refill else "dropped"
    threshold = "" if algorithm.std_threshold is None else f", groups with std <= {algorithm.std_threshold:g} {action}"
    yield _labelled("  terms", f"{kl}, {entropy}, {algorithm.aggregation}{threshold}")
    if algorithm.expert is not None:
        yield _labelled("  expert", f"{algorithm.expert.formula} (mu {algorithm.expert.mu:g})")
    if algorithm.distill is not None:
        yield _labelled("  distillation", _distillation(algorithm.distill))
    if algorithm.behaviour != "none":
        bounds = {"behaviour_low": algorithm.behaviour_low, "behaviour_high": algorithm.behaviour_high}
        shown = ", ".join(f"{name} {value:g}" for name, value in bounds.items() if value is not None)
        formula = CORRECTIONS[algorithm.behaviour].formula
        yield _labelled("  behaviour", f"{algorithm.behaviour}: {formula}{shown and f' ({shown})'}")
    if algorithm.sequence_mask is not None:
        yield _labelled("  sequence mask", f"A < 0 left out of calls with mean -log ρ > {algorithm.sequence_mask:g}")
    if algorithm.echo is not None:
        yield _labelled("  echo", f"{algorithm.echo:g} times the mean -log π of what the environment answered")
    yield _labelled("  source", algorithm.source)


def _distillation(distill: Distill) -> str:
    mixture = f", β {distill.beta:g}" if distill.divergence == "js" else ""
    return f"{distill.divergence}: {FORMULAS[distill.divergence]} (coef {distill.coef:g}{mixture})"


def _arguments(function: Any, configured: Mapping[str, Any]) -> str:
    """Format the keyword parameters with their effective values, e.g. ` (clip_low 0.2, clip_high 0.28)`."""
    parameters = inspect.signature(function).parameters.values()
    values = {p.name: configured.get(p.name, p.default) for p in parameters if p.kind == p.KEYWORD_ONLY}
    shown = ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)
    return f" ({shown})" if shown else ""


def _labelled(label: str, text: str) -> str:
    return f"{label:<{LABEL}}{text}"


def _wrapped(width: int, line: str) -> str:
    return "\n".join(fitted(line, width, hanging=LABEL))
