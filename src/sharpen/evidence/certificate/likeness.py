"""Whether weights after a step are those that the plain loop makes, but for rounding.

In: the state that the trainer reached, and the same steps made twice by the plain loop: in the precision of the run,
and in a higher one. How far these two are apart is how much this model, these numbers and this machine round; the
trainer may be a small multiple of that away from the second. Out: a `Likeness`.

Distances are Euclidean norms over a tensor: they see one wrong weight where rounding is small, and do not depend on
which of many weights rounding moved.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from sharpen.evidence.certificate.plain.optimizers import KINDS, MUON, State

FACTOR = 8.0
"""How many times further than the two precisions are apart from each other the trainer's result may be from the higher
one. After one update honest moments were seen at up to 2."""

TWINS = 3
"""How often rounding is measured, each time at weights that are a rounding away; the largest counts. A single
measurement may come out small by chance: an honest step once had second moments 8.3 times as far away as it said."""

SEVERAL = 4.0
"""Factor on `FACTOR` after several updates: the later ones carry the rounding of the first on, in one direction."""

TURNED = 4.0
"""The factor for matrices that Muon moves, after one update and after several: their rounding, to bfloat16, is measured
larger than it is (`plain.optimizers`)."""

_USUAL = 0.75
"""The share of tensors of a kind whose rounding, relative to their length, is at most the usual one, which every tensor
may have: of a tensor that one large number makes up, a single measurement may come out small by chance."""

_PART = 2**22
"""Numbers that are compared at a time."""

_ULP = 2.0**-23
"""A step of float32 at 1, in which weights and moments are stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A tensor: how far it is from the repeated one, and how far it may be, relative to the length of its change (of a
    moment: to its length)."""

    name: str
    distance: float
    bound: float

    @property
    def share(self) -> float:
        """The distance, in bounds; infinite if it is no number."""
        if not math.isfinite(self.distance):
            return math.inf
        return self.distance / self.bound if self.bound else math.inf if self.distance else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeness:
    """Some steps, compared: the `gaps` of all tensors, the furthest first; the cosine between the whole change of the
    weights and the repeated one, and the ratio of their lengths."""

    gaps: tuple[Gap, ...]
    cosine: float
    length: float

    def beside(self, other: Likeness) -> Likeness:
        """Return it with the gaps of another model, which was trained beside."""
        gaps = sorted((*self.gaps, *other.gaps), key=lambda gap: gap.share, reverse=True)
        return Likeness(gaps=tuple(gaps), cosine=self.cosine, length=self.length)

    @property
    def wrong(self) -> tuple[Gap, ...]:
        """The tensors that are further away than rounding explains."""
        return tuple(gap for gap in self.gaps if not gap.share <= 1.0)


def compare(
    before: State,
    found: State,
    exact: State,
    rounded: Sequence[State],
    own: Sequence[Mapping[str, torch.Tensor]] = (),
    whose: str = "",
    said: Sequence[Mapping[str, torch.Tensor]] = (),
) -> Likeness:
    """Compare the `found` state after some steps with the `exact` one, and that with the `rounded` ones.

    After a single update `own` are the weights that the optimizer makes of the found moments, exactly and rounded: the
    weights are compared with these, and the moments with the exact ones. A weight whose gradient is all but 0 moves by
    as much as any other, either way, so that rounding would decide how far it is from the exact one. AdamW makes of
    moments what it makes of each number, so that nothing is rounded but the result; Muon makes products in bfloat16.
    Moments in 8 bits are those that the weights moved by, rounded: `said` are then the gradients that the weights
    imply, the exact ones and the rounded ones, and compared in place of the weights (`plain.implied`). `whose` stands
    before the names of tensors."""
    factor = FACTOR if own else FACTOR * SEVERAL
    turned = {name for name in before.weights if f"{name}/{MUON}" in exact.moments}
    by_gradient = said[0].keys() if said else set()
    others = before.weights.keys() - turned - by_gradient
    found_changes, exact_changes = _changes(before, found.weights), _changes(before, exact.weights)
    right, *low = (_changes(before, one) for one in own or (exact.weights, *(one.weights for one in rounded)))
    kinds = [
        _Kind(
            found_changes,
            _only(right, others),
            [] if own else [_only(one, others) for one in low],
            exact.weights,
            factor,
        ),
        _Kind(found_changes, _only(right, turned), [_only(one, turned) for one in low], exact.weights, TURNED),
    ]
    if said:
        kinds.append(_Kind(said[0], said[1], said[2:], {}, factor))
    kinds += [
        _Kind(
            _found_moments(found, exact, kind),
            _moments(exact, kind),
            [_moments(one, kind) for one in rounded],
            {},
            factor,
        )
        for kind in KINDS
    ]
    gaps = sorted((gap for kind in kinds for gap in kind.gaps(whose)), key=lambda gap: gap.share, reverse=True)
    found_all, exact_all = (torch.cat([one[name].flatten() for name in one]) for one in (found_changes, exact_changes))
    lengths = float(found_all.norm()), float(exact_all.norm())
    cosine = (
        float(found_all @ exact_all) / (lengths[0] * lengths[1]) if all(lengths) else float(lengths[0] == lengths[1])
    )
    return Likeness(gaps=tuple(gaps), cosine=cosine, length=lengths[0] / lengths[1] if lengths[1] else math.nan)


def compare_gradients(
    found: Mapping[str, torch.Tensor],
    exact: Mapping[str, torch.Tensor],
    rounded: Mapping[str, torch.Tensor],
    whose: str = "",
    *,
    factor: float = FACTOR,
) -> list[Gap]:
    """Compare the gradients of an update with the exact ones, and these with the rounded ones, in the order of the
    exact ones. One that was not found is 0. `factor` is in place of `FACTOR`."""
    nothing = torch.zeros(())
    known, low = (
        {name: many.get(name, nothing).expand_as(one) for name, one in exact.items()} for many in (found, rounded)
    )
    return list(_Kind(known, exact, [low], {}, factor).gaps(whose))


@dataclass(frozen=True, slots=True)
class _Kind:
    """Tensors of one kind by name: found, exact, rounded. `stored` are those whose float32 rounding counts beside that
    of the compared ones: of a change, the weights themselves."""

    found: Mapping[str, torch.Tensor]
    exact: Mapping[str, torch.Tensor]
    rounded: Sequence[Mapping[str, torch.Tensor]]
    stored: Mapping[str, torch.Tensor]
    factor: float

    def gaps(self, whose: str) -> Iterator[Gap]:
        rounding = {
            name: max((_norm(one[name], exact) for one in self.rounded), default=0.0)
            for name, exact in self.exact.items()
        }
        relative = sorted(rounding[name] / size for name, one in self.exact.items() if (size := _norm(one)))
        usual = relative[int(_USUAL * (len(relative) - 1))] if relative else 0.0
        for name, exact in self.exact.items():
            size, stored = _norm(exact), _norm(self.stored.get(name, exact))
            bound = self.factor * max(rounding[name], usual * size) + 2 * _ULP * (size + stored)
            distance = _norm(self.found[name], exact)
            unit = size or 1.0
            yield Gap(name=whose + name, distance=distance / unit, bound=bound / unit)


def _only(tensors: Mapping[str, torch.Tensor], names: Collection[str]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name in names}


def _norm(tensor: torch.Tensor, less: torch.Tensor | None = None) -> float:
    """Return the length of a tensor, or of its difference from another, in double precision: in parts, so that nothing
    of the size of a table is made."""
    parts = torch.split(tensor.flatten(), _PART)
    others = [None] * len(parts) if less is None else torch.split(less.flatten(), _PART)
    lengths = [
        (one.double() if other is None else one.double() - other.double()).norm()
        for one, other in zip(parts, others, strict=True)
    ]
    return math.hypot(*map(float, lengths))


def _changes(before: State, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weights[name].double() - weight.double() for name, weight in before.weights.items()}


def _moments(state: State, kind: str) -> dict[str, torch.Tensor]:
    """A moment that is missing is 0: the weight never had a gradient."""
    return {
        f"{name}/{kind}": state.moments.get(f"{name}/{kind}", torch.zeros_like(weight)).double()
        for name, weight in state.weights.items()
    }


def _found_moments(found: State, exact: State, kind: str) -> dict[str, torch.Tensor]:
    """The found moments; of those in 8 bits, what is nearest to the exact one of all that they may have been."""
    own, right = _moments(found, kind), _moments(exact, kind)
    return own | {key: stored.nearest_to(right[key]) for key, stored in found.stored.items() if key in right}


def in_words(gaps: Sequence[Gap], most: int = 3) -> str:
    """Name the furthest tensors, each with its distance and bound."""
    named = ", ".join(f"{gap.name} ({gap.distance:.2g}; at most {gap.bound:.1g})" for gap in gaps[:most])
    return named + (f" and {len(gaps) - most} more" if len(gaps) > most else "")
