"""Numbers as people read them: never zero for what is not, no interval of width zero."""

from __future__ import annotations

import math

import pytest

from sharpen.show.monitor.figures import ends, number, signed, with_interval
from sharpen.show.monitor.statistics import Accuracy, Difference


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.06, "+0.060"),
        (0.0004, "+0.0004"),  # +0.000 before
        (-0.00049, "-0.0005"),
        (0.0005001, "+0.001"),
        (-3e-9, "-3e-09"),
        (0.0, "0.000"),
        (-0.0, "0.000"),
        (12.34, "+12.3"),
        (-1234.5, "-1,234"),
        (math.nan, "+nan"),
    ],
)
def test_a_signed_number_is_never_zero_for_what_is_not(value, text):
    assert number(value, sign=True) == text


def test_beside_large_numbers_a_small_one_is_still_no_zero():
    assert [number(value, 5000.0) for value in (0.3, 0.0, 7.0)] == ["0.3", "0", "7"]


def test_the_ends_of_an_interval_are_told_apart():
    assert ends(0.06, 0.12) == "[0.060, 0.120]"
    assert ends(0.0004, 0.12, sign=True) == "[+0.0004, +0.120]"
    assert ends(0.10001, 0.10002) == "[0.10001, 0.10002]"
    assert ends(math.nan, math.nan) == "[unknown]"


def test_without_width_it_says_what_that_means():
    """Red where `+0.100 [+0.100, +0.100]` looks like a certain number."""
    same = Difference(difference=0.1, low=0.1, high=0.1, num_tasks=12)
    assert signed(same) == "+0.100 [on every task]"
    assert signed(same, unit="row") == "+0.100 [on every row]"
    assert with_interval(Accuracy(accuracy=2.0, low=2.0, high=2.0, num_tasks=12)) == "2.000 [on every task]"
