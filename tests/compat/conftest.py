"""Fixtures of the Trinity layer's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trinity_serving import MakePlace, Place, Script


@pytest.fixture
def make_place(toy_model_dir: Path) -> Iterator[MakePlace]:
    """`make_place(script)`: a gateway whose model answers a prompt with `script(prompt)` (or always the same text)."""
    places: list[Place] = []

    def make(script: Script | str, **options: Any) -> Place:
        answer: Script = script if callable(script) else lambda prompt: script
        places.append(Place(toy_model_dir, answer, **options))
        return places[-1]

    yield make
    for place in places:
        place.close()
