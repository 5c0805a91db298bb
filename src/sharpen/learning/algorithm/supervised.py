"""The supervised algorithms, which learn from rows instead of rollouts: their losses, defaults and sources.

In: a name and the run's `loss` settings. Out: a `SupervisedAlgorithm`. Losses are pure functions of logprobs.

Shape suffixes: E tokens that carry loss, N pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from sharpen.config.public import AlgorithmConfig
from sharpen.config.run import AGGREGATIONS, KLS, Aggregation, KLEstimator, LossConfig
from sharpen.errors import ConfigError

if TYPE_CHECKING:
    import torch


def cross_entropy(logprobs_E: torch.Tensor, weights_E: torch.Tensor) -> torch.Tensor:
    """Return `-Σ w log π`, a scalar."""
    return -(weights_E * logprobs_E).sum()


def margins(
    logprobs_E: torch.Tensor, reference_E: torch.Tensor, sides_E: torch.Tensor, pairs_E: torch.Tensor, num_pairs: int
) -> torch.Tensor:
    """Return for each pair the better answer's log ratio to the reference minus that of the worse one, shape N.

    `sides_E` is 1 for tokens of the better answer and -1 for the others; `pairs_E` is the number of each token's pair.
    All tokens of a pair must be passed in one call.
    """
    return logprobs_E.new_zeros(num_pairs).index_add(0, pairs_E, sides_E * (logprobs_E - reference_E))


def dpo(margins_N: torch.Tensor, *, beta: float = 0.1, label_smoothing: float = 0.0) -> torch.Tensor:
    """Return `-(1 - ε) log sigmoid(β m) - ε log sigmoid(-β m)` for each pair's margin m, shape N; ε is
    `label_smoothing`, the assumed share of pairs whose answers are in the wrong order.

    Sources: DPO, arXiv 2305.18290, equation 7; with ε, conservative DPO: E. Mitchell, "A note on DPO with noisy
    preferences", 2023.
    """
    import torch.nn.functional as F

    kept_N, flipped_N = F.softplus(-beta * margins_N), F.softplus(beta * margins_N)
    return (1.0 - label_smoothing) * kept_N + label_smoothing * flipped_N


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedAlgorithm:
    """A supervised algorithm. `data` is the kind of its rows. `pair_loss` computes the loss of a pair from its margin;
    if it is None, each token has its own loss, weighted by `aggregation` (an answer counts as a call, a row as a
    rollout). Algorithms of pairs may add a KL term: `kl_coef` times the mean of the estimator `kl` over all tokens of
    both answers of all pairs."""

    name: str
    data: Literal["conversations", "texts", "pairs"]
    formula: str
    source: str
    aggregation: Aggregation = "token-mean"
    constant_length: int | None = None
    pair_loss: Callable[..., torch.Tensor] | None = None
    pair_loss_args: Mapping[str, float] = field(default_factory=dict)
    kl: KLEstimator = "none"
    kl_coef: float = 0.0

    @property
    def needs_reference(self) -> bool:
        """Whether the loss uses logprobs of the model before training."""
        return self.pair_loss is not None


_ALGORITHMS = (
    SupervisedAlgorithm(
        name="sft",
        data="conversations",
        formula="-log π of the assistant's tokens, their end token included",
        source="Supervised fine-tuning: InstructGPT, arXiv 2203.02155, section 3.",
    ),
    SupervisedAlgorithm(
        name="cpt",
        data="texts",
        formula="-log π of every token",
        source="Continued pre-training: 'Don't stop pretraining', arXiv 2004.10964, section 3.",
    ),
    SupervisedAlgorithm(
        name="dpo",
        data="pairs",
        formula="-log sigmoid(β (log ρ(chosen) - log ρ(rejected))), ρ the ratio to the model before training",
        source="DPO, arXiv 2305.18290, equation 7; β 0.1 as in its appendix B; mean over pairs; no KL term besides.",
        aggregation="rollout-mean",
        pair_loss=dpo,
        pair_loss_args={"beta": 0.1, "label_smoothing": 0.0},
    ),
)

SUPERVISED: dict[str, SupervisedAlgorithm] = {algorithm.name: algorithm for algorithm in _ALGORITHMS}
"""Supervised algorithms by their names in the configuration."""


def learns_from_rows(chosen: AlgorithmConfig) -> bool:
    """Whether the algorithm learns from rows, not from rollouts."""
    return chosen.algorithm_type in SUPERVISED


def resolve_supervised(name: str, loss: LossConfig) -> SupervisedAlgorithm:
    """Apply the `loss` settings to the named algorithm. Raises `ConfigError` for settings without effect."""
    algorithm = SUPERVISED[name]
    given: dict[str, Any] = {
        key: value for key, value in loss.model_dump(exclude_none=True).items() if value not in ({}, "none")
    }
    if algorithm.pair_loss is not None:
        arguments = given.pop("policy_loss_args", {})
        if unknown := sorted(arguments.keys() - algorithm.pair_loss_args.keys()):
            raise ConfigError(
                f"loss.policy_loss_args.{unknown[0]} has no effect in {name!r}: its loss takes "
                f"{', '.join(algorithm.pair_loss_args)}"
            )
        if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in arguments.values()):
            raise ConfigError(f"loss.policy_loss_args is {arguments}: all values must be numbers")
        if not 0 <= (share := arguments.get("label_smoothing", 0)) < 0.5:
            raise ConfigError(f"loss.policy_loss_args.label_smoothing is {share}: it must be at least 0 and below 0.5")
        algorithm = replace(algorithm, pair_loss_args={**algorithm.pair_loss_args, **arguments})
        _check_kl(name, loss)
        allowed: tuple[str, ...] = ("kl", "kl_coef")
    else:
        allowed = ("aggregation", "constant_length")
    if unused := sorted(given.keys() - set(allowed)):
        raise ConfigError(f"loss.{unused[0]} has no effect in {name!r}: leave it out")
    algorithm = replace(algorithm, **given)
    for setting, ours in (("aggregation", AGGREGATIONS), ("kl", KLS)):
        if (chosen := getattr(algorithm, setting)) not in ours:
            raise ConfigError(f"loss.{setting} is {chosen!r}, but {name!r}, which learns from rows, has only ours")
    if algorithm.kl_coef == 0:
        algorithm = replace(algorithm, kl="none")
    if (algorithm.aggregation == "constant-length") != (algorithm.constant_length is not None):
        raise ConfigError(
            "loss.aggregation 'constant-length' and loss.constant_length go together: set both or neither"
        )
    return algorithm


def _check_kl(name: str, loss: LossConfig) -> None:
    """Raise `ConfigError` if a KL term of pairs lacks a part, or if its estimator needs what rows do not have."""
    if (loss.kl_coef is None) if loss.kl not in (None, "none") else loss.kl_coef:
        raise ConfigError(
            f"loss.kl is {loss.kl or 'none'!r} and loss.kl_coef {loss.kl_coef or 0:g}: a KL term of {name!r} needs an "
            "estimator and a coefficient: set both or neither"
        )
    if loss.kl == "corrected_k3":
        raise ConfigError(
            f"loss.kl is 'corrected_k3', which corrects for the policy that sampled, but {name!r} learns from rows: "
            "use 'k3'"
        )
