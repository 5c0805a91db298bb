"""Trinity-RFT's registries of algorithms and of the functions that they are made of, for the classes of plugins.

In: classes that a plugin registers (`@ADVANTAGE_FN.register_module("median")`). Out: parts of ours, which the settings
name by the plugin's file and class. A registered class gets the part as an attribute, so that every process that loads
the file has it. What our training has no place for is refused by name, with the reason.

An advantage gets one experience for each trained call, with `reward`, `eid` and `action_mask`, and sets its
`advantages`. A policy loss is called with all tokens in one row and returns their mean, whose gradient by each token is
that of the token, and stands for its value too; what a loss mixes beyond that (over sequences) is not seen. A KL
function estimates by token.

Shape suffixes: C trained calls of a step, E tokens that carry loss.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sharpen.compat.trinity.experience import EID
from sharpen.errors import ConfigError
from sharpen.learning.algorithm.advantages import Advantage
from sharpen.learning.algorithm.kl import KL
from sharpen.learning.algorithm.losses import PolicyLoss
from sharpen.learning.algorithm.parts import said_by
from sharpen.learning.algorithm.presets import Algorithm
from sharpen.learning.algorithm.returns import FloatArray, Scores

if TYPE_CHECKING:
    import torch

PART = "sharpen_part"
"""The attribute of a registered class that holds our part."""
_OF_LOSS = ("logprob", "old_logprob", "action_mask", "advantages")
"""What a policy loss may ask for."""
_NOT_SET = {"self", "args", "kwargs", "backend", "loss_agg_mode"}
"""Parameters of a class that are not the user's here: `loss_agg_mode` is loss.aggregation."""


class PartRegistry:
    """Classes of one kind by name, as plugins register them. `adapt` makes our part of a class, or raises
    `ConfigError`; `refused` says why there is none of this kind."""

    def __init__(self, kind: str, adapt: Callable[[str, type], Any] | None, refused: str = "") -> None:
        self.kind, self._adapt, self._refused = kind, adapt, refused
        self._places: dict[str, str] = {}
        self._reasons: dict[str, str] = {}

    def register_module(self, module_name: str, module_cls: type | None = None, force: bool = False) -> Any:
        """Register a class under a name; without a class, return a decorator that does."""
        if module_cls is None:
            return lambda found: self.register_module(module_name, found, force)
        module = sys.modules.get(module_cls.__module__)
        file = getattr(module, "__file__", None)
        place = f"{Path(file).resolve() if file else module_cls.__module__}:{module_cls.__qualname__}.{PART}"
        if not force and self._places.get(module_name, place) != place:
            raise ConfigError(f"the {self.kind} {module_name!r} is registered already: choose another name")
        self._places[module_name] = place
        try:
            setattr(module_cls, PART, self._part(module_name, module_cls))
        except ConfigError as error:
            self._reasons[module_name] = str(error)
        return module_cls

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._places

    def refusal(self, name: str) -> str:
        """Return why a registered class cannot be used here; empty if it can."""
        return self._reasons.get(name, "")

    def place(self, name: str) -> str:
        """Return how our settings name a registered class. Raises `ConfigError` for one that cannot be used here."""
        if reason := self.refusal(name):
            raise ConfigError(reason)
        return self._places[name]

    def _part(self, name: str, cls: type) -> Any:
        if self._adapt is None:
            raise ConfigError(f"{self.kind} {name!r}: {self._refused}")
        return self._adapt(name, cls)


def parameters_of(cls: type) -> dict[str, Any]:
    """Return the parameters of a class that a file may set, with their values where it sets none."""
    signature = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    usual = dict(cls.default_args()) if hasattr(cls, "default_args") else {}
    named = {
        key: one.default for key, one in signature.items() if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
    }
    return {key: usual.get(key, value) for key, value in named.items() if key not in _NOT_SET}


def _made(cls: Any, given: Mapping[str, Any]) -> Any:
    usual = {key: value for key, value in parameters_of(cls).items() if value is not inspect.Parameter.empty}
    if "loss_agg_mode" in inspect.signature(cls.__init__).parameters:
        usual["loss_agg_mode"] = "token-mean"
    return cls(**{**usual, **given})


def _with_parameters(function: Callable[..., Any], cls: type) -> Callable[..., Any]:
    """Give a function keyword parameters, which the settings may set: those of the class."""
    own = [one for one in inspect.signature(function).parameters.values() if one.kind != one.VAR_KEYWORD]
    theirs = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=value)
        for key, value in parameters_of(cls).items()
    ]
    function.__signature__ = inspect.Signature([*own, *theirs])  # type: ignore[attr-defined]
    return function


@dataclass(slots=True)
class TrainedCall:
    """What an advantage function gets of a trained call, and sets: one number, or equal ones for its tokens."""

    reward: float
    eid: EID
    action_mask: torch.Tensor
    advantages: Any = None
    returns: Any = None
    info: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


class AdvantageFn:
    """The base of advantage functions."""

    @classmethod
    def compute_in_trainer(cls) -> bool:
        """Whether it takes the trainer's tensors, which is refused here."""
        return False


class GroupAdvantage(AdvantageFn):
    """The base of those that compare the experiences of a group."""

    def __init__(self, **kwargs: Any) -> None:
        """Takes what a subclass hands on."""

    def group_experiences(self, exps: Any) -> dict[str, list[Any]]:
        """Group experiences, by task unless a subclass says otherwise."""
        return group_by(exps, "task")

    def calculate_group_advantage(self, group_id: str, exps: Any) -> tuple[Any, dict[str, Any]]:
        """Set the advantages of a group."""
        raise NotImplementedError

    def __call__(self, exps: Any, **kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
        """Set the advantages of all groups."""
        done: list[Any] = []
        for group_id, members in self.group_experiences(exps).items():
            done += self.calculate_group_advantage(group_id, members)[0]
        return done, {}


def group_by(experiences: Any, id_type: str) -> dict[str, list[Any]]:
    """Group experiences by `task`, `run` or `step`."""
    names = {"task": "tid", "run": "rid", "step": "sid"}
    groups: dict[str, list[Any]] = {}
    for one in experiences:
        groups.setdefault(getattr(one.eid, names[id_type]), []).append(one)
    return groups


def _advantage(name: str, cls: Any) -> Advantage:
    if not issubclass(cls, AdvantageFn):
        raise ConfigError(f"advantage function {name!r}: {cls.__name__} is no AdvantageFn of trinity.algorithm")
    if cls.compute_in_trainer():
        raise ConfigError(
            f"advantage function {name!r} computes in the trainer, from verl's tensors, which are not here: take "
            "experiences (compute_in_trainer: False)"
        )

    def function(scores: Scores, **given: Any) -> FloatArray:
        import torch

        steps = np.zeros(len(scores.rewards_R), np.int64)
        calls = []
        for place, rollout in enumerate(scores.rollouts_C.tolist()):
            eid = EID(batch=0, task=int(scores.groups_R[rollout]), run=rollout, step=int(steps[rollout]), suffix="")
            steps[rollout] += 1
            mask = torch.ones(int(scores.num_tokens_C[place]))
            calls.append(TrainedCall(reward=float(scores.rewards_R[rollout]), eid=eid, action_mask=mask))
        _made(cls, given)(list(calls))
        return np.array([_one_number(name, one.advantages) for one in calls], np.float64)

    return Advantage(function=_with_parameters(function, cls), formula=said_by(cls))


def _one_number(name: str, advantages: Any) -> float:
    values = np.atleast_1d(np.asarray(advantages if advantages is not None else np.nan, np.float64))
    if values.size == 0 or not (values == values.flat[0]).all():
        raise ConfigError(f"advantage function {name!r}: all tokens of a call must get one advantage, got {values}")
    return float(values.flat[0])


class PolicyLossFn:
    """The base of policy losses."""

    def __init__(self, backend: str = "", **kwargs: Any) -> None:
        """Takes what a subclass hands on."""
        self.backend = backend


def _policy_loss(name: str, cls: Any) -> PolicyLoss:
    taken = inspect.signature(cls.__call__).parameters
    asked = [key for key, one in taken.items() if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)][1:]
    if strange := [key for key in asked if key not in _OF_LOSS]:
        raise ConfigError(f"policy loss {name!r} asks for {', '.join(strange)}: here it gets {', '.join(_OF_LOSS)}")

    def function(
        logprobs_E: torch.Tensor, old_logprobs_E: torch.Tensor, advantages_E: torch.Tensor, **given: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        with torch.enable_grad():
            now_E = logprobs_E.detach().requires_grad_()
            row = (now_E[None], old_logprobs_E[None], torch.ones_like(now_E)[None], advantages_E[None])
            known = dict(zip(_OF_LOSS, row, strict=True))
            mean, _ = _made(cls, given)(**{key: known[key] for key in asked})
            (slope_E,) = torch.autograd.grad(mean, now_E) if mean.requires_grad else (torch.zeros_like(now_E),)
        slope_E = slope_E * len(slope_E)
        return slope_E * (1.0 + logprobs_E - logprobs_E.detach()), (slope_E == 0) & (advantages_E != 0)

    needs_ratio = "old_logprob" in asked
    return PolicyLoss(function=_with_parameters(function, cls), formula=said_by(cls), needs_ratio=needs_ratio)


class KLFn:
    """The base of KL functions. Coefficient and target are settings (`loss.kl_coef`, `loss.kl_target`)."""

    def __init__(self, **kwargs: Any) -> None:
        """Takes what a subclass hands on."""


def _kl(name: str, cls: Any) -> KL:
    takes_old = "old_logprob" in inspect.signature(cls.calculate_kl).parameters

    def function(logprobs_E: torch.Tensor, reference_E: torch.Tensor, old_E: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = cls().calculate_kl(logprobs_E, reference_E, *((old_E,) if takes_old else ()))
        return found

    return KL(function=function)


class EntropyLossFn:
    """The base of entropy losses, which are refused here."""


class SampleStrategy:
    """The base of sample strategies, which are refused here."""


class AlgorithmType:
    """The base of algorithms."""

    use_critic: bool = False
    use_reference: bool = True
    compute_advantage_in_trainer: bool = False
    can_balance_batch: bool = True
    schema: Any = "experience"

    @classmethod
    def default_config(cls) -> dict[str, Any]:
        """The functions of the algorithm, by their keys in a file."""
        raise NotImplementedError


def _algorithm(name: str, cls: Any) -> Algorithm:
    from sharpen.compat.trinity.yaml.functions import ADVANTAGES, POLICY_LOSSES
    from sharpen.compat.trinity.yaml.functions import KL as KLS

    given = dict(cls.default_config())
    where = f"algorithm_type {name!r}"
    if cls.use_critic:
        raise ConfigError(f"{where} has a critic, which only our own ppo has: set use_critic to False")
    if cls.schema not in ("experience", None) and "Experience" not in getattr(cls.schema, "__name__", ""):
        raise ConfigError(f"{where} learns from {cls.schema!r}: here one of your own learns from rollouts (experience)")
    if given.get("kl_penalty_fn") not in (None, "none"):
        raise ConfigError(f"{where} has kl_penalty_fn {given['kl_penalty_fn']!r}: use kl_loss_fn, or loss.kl_in")
    if given.get("entropy_loss_fn") not in (None, "none", "default"):
        raise ConfigError(f"{where} has entropy_loss_fn {given['entropy_loss_fn']!r}: {_ENTROPY}")
    advantage, loss, kl = (given.get(key) or usual for key, usual in _USUAL.items())
    for key, chosen, registry, ours in (
        ("advantage_fn", advantage, ADVANTAGE_FN, ADVANTAGES),
        ("policy_loss_fn", loss, POLICY_LOSS_FN, POLICY_LOSSES),
        ("kl_loss_fn", kl, KL_FN, KLS),
    ):
        if chosen not in registry and chosen not in ours:
            raise ConfigError(f"{where} has {key} {chosen!r}, which is not registered: register it before")
    clip = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0} if loss == "ppo" else {}
    return Algorithm(
        name=name,
        advantage=ADVANTAGE_FN.place(advantage) if advantage in ADVANTAGE_FN else ADVANTAGES[advantage].name,
        policy_loss=POLICY_LOSS_FN.place(loss) if loss in POLICY_LOSS_FN else POLICY_LOSSES[loss].name,
        policy_loss_args=clip,
        kl=KL_FN.place(kl) if kl in KL_FN else kl,
        kl_coef=0.0 if kl == "none" or not cls.use_reference else 0.001,
        source=said_by(cls),
    )


_USUAL = {"advantage_fn": "grpo", "policy_loss_fn": "ppo", "kl_loss_fn": "k2"}
_ENTROPY = "the entropy term is the mean entropy times loss.entropy_coef here (default or none)"
_SAMPLE = "which experiences train is decided by sampling.* here, and changed by operators (sampling.operators)"
ADVANTAGE_FN = PartRegistry("advantage function", _advantage)
POLICY_LOSS_FN = PartRegistry("policy loss", _policy_loss)
KL_FN = PartRegistry("KL function", _kl)
ENTROPY_LOSS_FN = PartRegistry("entropy loss", None, _ENTROPY)
SAMPLE_STRATEGY = PartRegistry("sample strategy", None, _SAMPLE)
ALGORITHM_TYPE = PartRegistry("algorithm", _algorithm)


def masked_mean(values: torch.Tensor, mask: torch.Tensor, axis: int | None = None) -> torch.Tensor:
    """Return the mean where the mask is 1."""
    if axis is None:
        return (values * mask).sum() / mask.sum().clamp(min=1e-8)
    return (values * mask).sum(dim=axis) / mask.sum(dim=axis).clamp(min=1e-8)


def aggregate_loss(values: torch.Tensor, mask: torch.Tensor, loss_agg_mode: str = "token-mean") -> torch.Tensor:
    """Return the mean over tokens: how tokens are weighed is loss.aggregation here."""
    return masked_mean(values, mask)
