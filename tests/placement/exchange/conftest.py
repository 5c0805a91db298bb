"""Where explorer and trainer leave things: a folder, and a database of a real PostgreSQL server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from sharpen.placement.exchange.store import Store, open_store


@pytest.fixture(params=["folder", pytest.param("postgres", marks=pytest.mark.postgres)])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "shared") if request.param == "folder" else request.getfixturevalue("postgres")


@pytest.fixture
def store(address: str, tmp_path: Path) -> Iterator[Store]:
    found = open_store(address, tmp_path, f"P/{tmp_path}")
    yield found
    found.close()
