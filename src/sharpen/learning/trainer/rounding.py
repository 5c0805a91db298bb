"""Measures how much bfloat16 rounds a model's logits on this machine, as the tolerance between engine and trainer.

In: a model before sharding, with the weights of its files, and an engine's continuations of some prompts with the same
weights. Out: `Rounding`: the mean gap between the trainer in bfloat16 and in float32 on those tokens, including the
prompts. The engine's logprobs do not enter, so that a wrong engine cannot widen the tolerance; they are compared with
the trainer's right away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sharpen.errors import ParityError
from sharpen.learning.trainer.packing import Pack, pack
from sharpen.learning.trainer.parity import OFF, LogprobGap, LogprobPairs, Tolerance, logit_gaps
from sharpen.learning.trainer.work import Part
from sharpen.types import Experience

if TYPE_CHECKING:
    from sharpen.learning.trainer.model import TrainedModel
    from sharpen.learning.trainer.team import Team

MIN_ROUNDING = 2.0**-9
"""Lower bound of the rounding: half a step of bfloat16 at 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """Mean gap in logits between bfloat16 and float32, over `num_tokens` places. `engine_gap` is the mean gap between
    engine and trainer, over `engine_tokens` sampled places. The dtypes are those in which each computes."""

    rounding: float
    num_tokens: int
    engine_gap: float
    engine_tokens: int
    trainer_dtype: str
    engine_dtype: str

    @property
    def line(self) -> str:
        """A line for the user."""
        return (
            f"rounding: bfloat16 moves this model's logits by {self.rounding:.3g}, engine and trainer are "
            f"{self.engine_gap:.3g} apart; tokens more than {OFF * self.rounding:.3g} apart are off"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON."""
        return asdict(self)


def measure(
    model: TrainedModel, probe: Sequence[Experience], *, engine_dtype: torch.dtype, max_tokens: int, team: Team
) -> Rounding | None:
    """Measure rounding, with the same result on every rank. Return None without a probe, or if engine and trainer both
    compute in float32.

    Raises `ParityError` if the engine's logprobs are not those of the trainer's model.
    """
    if not probe or torch.bfloat16 not in (model.compute_dtype, engine_dtype):
        return None
    parts = [Part(pack=one) for one in pack([_compare_all(experience) for experience in probe], max_tokens)]

    def score(part: Part) -> tuple[torch.Tensor, torch.Tensor]:
        with model.computing_in(torch.bfloat16):
            rounded_E = model.score(part.pack).logprobs_E.cpu()
        with model.computing_in(torch.float32):
            return rounded_E, model.score(part.pack).logprobs_E.cpu()

    with torch.no_grad():
        scores = team.map(parts, score, lambda: None)
    own = 0 if model.compute_dtype == torch.bfloat16 else 1
    rounding_J = np.concatenate([_gaps(part.pack, *both) for part, both in zip(parts, scores, strict=True)])
    rounding = max(MIN_ROUNDING, float(rounding_J.mean())) if len(rounding_J) else MIN_ROUNDING
    gap, engine_J = LogprobGap(0), []
    for part, both in zip(parts, scores, strict=True):
        gap.add(part.pack, both[own])
        sampled_E = part.pack.versions_E >= 0
        recorded_E = torch.from_numpy(part.pack.logprobs_E)
        engine_J.append(_gaps(part.pack, both[own], recorded_E, sampled_E))
    if not gap.num_tokens:
        versions = sorted({int(version) for part in parts for version in part.pack.versions_E if version >= 0})
        raise ParityError(
            f"the engine reported policy versions {versions} for the tokens of the probe, but before training the "
            "version is 0: nothing can be compared. The engine must report the version passed to `load`, and 0 before "
            "the first load"
        )
    gap.check(Tolerance.of(model.compute_dtype, rounding), at_start=True)
    engine = np.concatenate(engine_J)
    return Rounding(
        rounding=rounding,
        num_tokens=len(rounding_J),
        engine_gap=float(engine.mean()) if len(engine) else 0.0,
        engine_tokens=len(engine),
        trainer_dtype=str(model.compute_dtype).removeprefix("torch."),
        engine_dtype=str(engine_dtype).removeprefix("torch."),
    )


def _compare_all(probe: Experience) -> Experience:
    """Return the sequence with loss on every token but the first, including the prompt, so that all are compared."""
    mask_T = np.arange(len(probe.ids_T)) > 0
    temperature = float(probe.temperatures_T[probe.loss_mask_T].max(initial=0.0)) or 1.0
    return replace(
        probe,
        loss_mask_T=mask_T,
        calls_T=np.where(mask_T, 0, -1).astype(np.int32),
        temperatures_T=np.where(probe.loss_mask_T, probe.temperatures_T, np.float32(temperature)),
    )


def _gaps(pack: Pack, first_E: torch.Tensor, second_E: torch.Tensor, chosen_E: np.ndarray | None = None) -> np.ndarray:
    """Return the gap in logits between two sets of logprobs of a pack, place by place."""
    chosen = slice(None) if chosen_E is None else np.flatnonzero(chosen_E)
    places = pack.predict_E * (int(pack.targets_E.max()) + 1) + pack.targets_E
    return logit_gaps(
        LogprobPairs(
            now_K=first_E.double().numpy()[chosen],
            recorded_K=second_E.double().numpy()[chosen],
            temperatures_K=pack.temperatures_E[chosen].astype(np.float64),
            places_K=np.unique(places[chosen], return_inverse=True)[1],
        )
    )
