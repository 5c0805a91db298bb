"""Whether the packages that Trinity's workflows need are here."""

from __future__ import annotations

from pathlib import Path

import pytest

from sharpen.compat.trinity.registry import Package


@pytest.mark.parametrize(
    ("release", "words"),
    [
        ("1.0.4", None),
        ("1.0.19.post1", None),
        ("1.2", None),
        ("1.0.3", "needs Things 1.x from 1.0.4 on, but some_things 1.0.3 is installed: pip install some-things"),
        ("0.1.6", "but some_things 0.1.6 is installed"),
        ("2.0.11", "but some_things 2.0.11 is installed"),
        (None, None),
    ],
)
def test_another_release_than_the_one_that_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str | None, words: str | None
):
    things = Package(
        modules=("some_things",), name="Things 1.x from 1.0.4 on", install="pip install some-things", oldest=(1, 0, 4)
    )
    assert "is not installed: pip install some-things" in str(things.lacking())
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "some_things").mkdir()
    assert things.lacking() is not None  # a mere folder
    (tmp_path / "some_things/__init__.py").write_text("raise RuntimeError('imported')")
    if release is not None:
        (tmp_path / "some_things-x.dist-info").mkdir()
        (tmp_path / "some_things-x.dist-info/METADATA").write_text(f"Name: some_things\nVersion: {release}\n")
    found = things.lacking()
    assert (found is None) if words is None else words in str(found)


def test_a_package_that_starts_a_program():
    def lacking(program: str) -> str | None:
        return Package(modules=("json",), name="JSON (and X)", install="pip install it", program=program).lacking()

    assert lacking("sh") is None
    assert lacking("no-such-program") == (
        "needs JSON (and X), but there is no program no-such-program on the PATH: pip install it"
    )
