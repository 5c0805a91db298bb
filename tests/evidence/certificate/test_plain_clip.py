"""Which tokens the plain loop leaves out for their entropy, by hand; where rounding decides, it says so."""

from __future__ import annotations

import math

import pytest
import torch

from sharpen.errors import ModelError
from sharpen.evidence.certificate.plain.credit import EntropyClip, entropy_terms


def left_out(clip: EntropyClip, advantages: list[float], falls: list[float]) -> list[bool]:
    """For tokens of two sequences; the mean over each token's own distribution is 0."""
    values = torch.tensor(advantages), torch.tensor(falls), torch.zeros(len(falls))
    first, second = ([one[part] for one in values] for part in (slice(0, 1), slice(1, None)))
    found = clip.left_out([first[0], second[0]], [(first[1], first[2]), (second[1], second[2])])
    return [bool(one) for part in found for one in part]


def test_tokens_far_below_the_mean_of_the_step_are_left_out():
    """S is -3, 1, 1, 1: the first is 3 below the mean 0, the deviation is √3."""
    clip = EntropyClip(own=False, mu=1.7)
    assert left_out(clip, [-1.0] * 4, [-3.0, 1.0, 1.0, 1.0]) == [True, False, False, False]
    assert left_out(clip, [1.0, -1.0, -1.0, -1.0], [-3.0, 1.0, 1.0, 1.0]) == [False] * 4
    assert left_out(EntropyClip(own=False, mu=1.8), [-1.0] * 4, [-3.0, 1.0, 1.0, 1.0]) == [False] * 4
    assert left_out(clip, [-1.0] * 4, [1.0] * 4) == [False] * 4
    with pytest.raises(ModelError, match="rounding decides whether a token"):
        left_out(EntropyClip(own=False, mu=math.sqrt(3.0)), [-1.0] * 4, [-3.0, 1.0, 1.0, 1.0])


def test_at_most_a_share_is_left_out_those_furthest_below_first():
    """S is -3, -2, -2, 0, each 3, 2, 2, 0 below 0; the deviation is 1.09."""
    falls, pushed = [-3.0, -2.0, -2.0, 0.0], [-1.0] * 4
    assert left_out(EntropyClip(own=True, mu=1.0, share=1.0), pushed, falls) == [True, True, True, False]
    assert left_out(EntropyClip(own=True, mu=1.0, share=0.25), pushed, falls) == [True, False, False, False]
    assert left_out(EntropyClip(own=True, mu=1.0, share=0.01), pushed, falls) == [True, False, False, False]
    with pytest.raises(ModelError, match="rounding decides which of two tokens"):
        left_out(EntropyClip(own=True, mu=1.0, share=0.5), pushed, falls)


def test_how_far_the_entropy_falls_by_hand():
    """p is 1/4, 3/4: H = log 4 - 3/4 log 3; S of the first is (H - log 4)/4 = -3/16 log 3, of the second as much up."""
    falls_SV, means_S = entropy_terms(torch.tensor([[0.25, 0.75]]).double().log())
    value = 3.0 / 16.0 * math.log(3.0)
    assert falls_SV[0].tolist() == pytest.approx([-value, value])
    assert float(means_S) == pytest.approx(0.5 * value)
