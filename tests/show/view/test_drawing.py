"""The geometry of small drawings, and numbers as text."""

import math

import pytest

from sharpen.show.view import drawing
from sharpen.show.view.drawing import Scale, Tick


def test_a_scale_maps_and_cuts():
    scale = Scale(low=0.0, high=4.0)
    assert [scale.at(value) for value in (0.0, 1.0, 4.0, 9.0, -1.0)] == [0, 25, 100, 100, 0]


def test_ticks_are_round_values_within_the_scale():
    assert Scale(low=0.0, high=1.0).ticks(4) == [
        Tick(at=0, text="0.00"),
        Tick(at=25, text="0.25"),
        Tick(at=50, text="0.50"),
        Tick(at=75, text="0.75"),
        Tick(at=100, text="1.00"),
    ]
    assert [tick.text for tick in Scale(low=0, high=40).ticks(8)] == [
        "0",
        "5",
        "10",
        "15",
        "20",
        "25",
        "30",
        "35",
        "40",
    ]
    assert [tick.text for tick in Scale(low=-0.3, high=0.3).ticks(3)] == ["-0.2", "0.0", "0.2"]


def test_a_scale_over_one_value_or_none_still_has_a_length():
    assert Scale.over([2.0, None, math.nan]) == Scale(low=1.0, high=3.0)
    assert Scale.over([]).high > Scale.over([]).low
    assert drawing.over_steps([]).at(0) == 0


def test_a_curve_is_broken_where_a_value_is_unknown():
    steps, up = Scale(low=0, high=4), Scale(low=0.0, high=1.0)
    path = drawing.line(range(5), [0.0, 1.0, None, 0.5, None], steps, up)
    assert path == "M0 100h.01L25 0M75 50h.01"


def test_a_band_goes_forth_at_the_top_and_back_at_the_bottom():
    steps, up = Scale(low=0, high=1), Scale(low=0.0, high=1.0)
    assert drawing.band([0, 1], [0.0, 0.5], [0.5, 1.0], steps, up) == "M0 50L100 0L100 50L0 100Z"
    assert drawing.band([0, 1], [None, 0.5], [0.5, 1.0], steps, up) == ""


def test_stacked_bars_add_up_and_are_never_too_many():
    bars, up = drawing.stacked([[1.0, 3.0], [1.0, None]])
    assert up.high == pytest.approx(3.12)
    first, second = [bar for bar in bars if bar.x < 50]
    assert first.y == pytest.approx(second.y + second.height, abs=0.02)
    assert first.y + first.height == pytest.approx(100, abs=0.02)
    many, _ = drawing.stacked([[1.0] * 5000], most=60)
    assert len(many) <= 60
    assert drawing.stacked([[]])[0] == []


def test_the_last_value_of_a_small_curve_is_marked():
    assert drawing.spark_end([0.0, 1.0, None]) == (50.0, pytest.approx(5.36, abs=0.01))
    assert drawing.spark_end([None]) is None


def test_a_reward_has_a_shade():
    assert [drawing.shade(value) for value in (0.0, 0.5, 1.0, 7.0, None, math.nan)] == [0, 5, 10, 10, None, None]
    assert drawing.shade(0.0, -1.0, 1.0) == 5


@pytest.mark.parametrize(
    ("format_", "value", "text"),
    [
        (drawing.number, 0.0, "0"),
        (drawing.number, 40.0, "40"),
        (drawing.number, 0.4567891, "0.457"),
        (drawing.number, 12.3456, "12.35"),
        (drawing.number, 123456.7, "1.2e5"),
        (drawing.number, 3.6e-08, "3.6e-8"),
        (drawing.number, math.nan, "–"),
        (drawing.signed, -0.5, "\u22120.500"),
        (drawing.signed, 0.5, "+0.500"),
        (drawing.signed, -0.0004, "\u22120.0004"),
        (drawing.signed, 0.0, "0.000"),
        (drawing.rate, 0.0004, "0.0004"),
        (drawing.share, 0.001, "0.1%"),
        (drawing.share, 0.999, "99.9%"),
        (drawing.share, 0.5, "50%"),
        (drawing.count, 1289, "1\u202f289"),
        (drawing.count, 156_400, "156 k"),
        (drawing.count, 2_500_000, "2.5 M"),
        (drawing.seconds, 0.0123, "12 ms"),
        (drawing.seconds, 125, "2 min 05 s"),
        (drawing.seconds, 16_560, "4 h 36 min"),
        (drawing.hours, None, "–"),
    ],
)
def test_numbers_as_text(format_, value, text):
    assert format_(value) == text


def test_a_band_widens_the_scale_so_far_and_no_further():
    """Red where a band is cut at the highest value, as if its interval ended there."""
    assert drawing.Scale.over([0.0, 1.0], band=[None, 0.2, 1.2]).at(1.2) < 100
    wide = drawing.Scale.over([0.0, 1.0], band=[-40.0, 40.0])
    assert (wide.low, wide.high) == pytest.approx((-0.62, 1.62))


def test_an_interval_on_a_page_is_never_of_width_zero():
    assert drawing.between(-0.25, 0.0004, is_signed=True) == "[\u22120.250, +0.0004]"
    assert drawing.between(0.5, 0.5) == "[on every task]"
    assert drawing.between(None, 0.5) == ""
    assert drawing.between(1200.0, 1300.5) == "[1,200, 1,300]"
