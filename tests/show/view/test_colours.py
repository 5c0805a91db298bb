"""The colours of the pages: contrast by WCAG 2, and distance as colour-blind people see it.

The colour vision deficiencies are simulated by the matrices of Machado, Oliveira and Fernandes (2009) at full severity;
distance is Euclidean in Oklab, times 100 (about 2 is just noticeable side by side).
"""

import itertools
import re
from pathlib import Path

import pytest

import sharpen.show.view

CSS = (Path(sharpen.show.view.__file__).parent / "static" / "tokens.css").read_text(encoding="utf-8")
VISION = {
    "usual": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
GROUNDS = ("paper", "surface", "sunk")


def colours(theme: str) -> dict[str, str]:
    """The colours of a theme by name."""
    block = re.search(rf'^:root\[data-theme="{theme}"\] {{\n(.*?--paper.*?)^}}', CSS, re.DOTALL | re.MULTILINE)
    assert block
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block[1]))


def linear(colour: str) -> tuple[float, float, float]:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return red, green, blue


def contrast(one: str, other: str) -> float:
    lights = sorted(sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear(x), strict=True)) for x in (one, other))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def oklab(colour: str, vision: str) -> tuple[float, float, float]:
    seen = [sum(w * c for w, c in zip(row, linear(colour), strict=True)) for row in VISION[vision]]
    red, green, blue = (min(1.0, max(0.0, part)) for part in seen)
    long = (0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue) ** (1 / 3)
    middle = (0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue) ** (1 / 3)
    short = (0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * middle - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * middle + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * middle - 0.8086757660 * short,
    )


def distance(one: str, other: str, vision: str) -> float:
    return 100 * sum((a - b) ** 2 for a, b in zip(oklab(one, vision), oklab(other, vision), strict=True)) ** 0.5


def test_the_measures_are_right():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
    assert distance("#000000", "#ffffff", "usual") == pytest.approx(100, abs=0.1)
    assert distance("#e00000", "#508000", "deuteranopia") < distance("#e00000", "#508000", "usual") / 2


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_the_contrast_of_aa(theme: str):
    found = colours(theme)
    pairs = [(ink, ground) for ink in ("ink", "ink-soft", "ink-faint") for ground in GROUNDS]
    pairs += [(sign, ground) for sign in ("accent", "better", "worse", "warn") for ground in (*GROUNDS, f"{sign}-soft")]
    pairs += [("surface", "accent"), ("ink", "warn-soft"), ("ink", "accent-soft"), ("ink-faint", "accent-soft")]
    pairs += [("shade-ink-low" if shade < 7 else "shade-ink-high", f"shade-{shade}") for shade in range(11)]
    low = {pair: contrast(found[pair[0]], found[pair[1]]) for pair in pairs}
    assert {pair: round(value, 2) for pair, value in low.items() if value < 4.5} == {}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_fields_and_parts_of_drawings_stand_out(theme: str):
    found = colours(theme)
    drawn = ["edge", *(f"part-{number}" for number in range(5))]
    low = {name: contrast(found[name], found[ground]) for name in drawn for ground in ("surface", "paper")}
    assert {name: round(value, 2) for name, value in low.items() if value < 3} == {}


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_stay_apart_for_everybody(theme: str, vision: str):
    found = colours(theme)
    parts = [found[f"part-{number}"] for number in range(5)]
    assert min(distance(one, other, vision) for one, other in itertools.combinations(parts, 2)) > 10
    assert distance(found["better"], found["worse"], vision) > 15
    lights = [oklab(found[f"shade-{number}"], vision)[0] for number in range(11)]
    assert lights in (sorted(lights), sorted(lights, reverse=True)), "a scale of rewards goes one way in lightness"


def test_the_chosen_dark_theme_is_the_system_s():
    block = re.search(r"@media \(prefers-color-scheme: dark\) {\n  :root.*?{\n(.*?)\n  }", CSS, re.DOTALL)
    assert block
    assert dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block[1])) == colours("dark")
