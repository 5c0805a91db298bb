"""Runs of `shop_runs`, and a client of the pages over them."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from addresses import HOSTILE, HOSTILE_ROLLOUT, TOKEN
from shop_runs import Maker, make_run
from starlette.testclient import TestClient

from sharpen.show.view.library import Library
from sharpen.show.view.server import make_app

Open = Callable[..., httpx.Client]


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended. One of its rollouts holds text that wants to be more."""
    asked = (
        {"role": "system", "content": "You keep stock."},
        {
            "role": "user",
            "name": HOSTILE,
            "content": [{"type": "text", "text": HOSTILE}, _picture("png"), _picture("svg+xml")],
        },
    )
    maker = Maker(said={HOSTILE_ROLLOUT: HOSTILE}, messages={HOSTILE_ROLLOUT: asked})
    return make_run(tmp_path_factory.mktemp("runs") / "project" / "first", maker)


def _picture(kind: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,AAAA"}}


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Callable[..., Library]]:
    """Open a library over some folders, with a cache of its own."""
    opened: list[Library] = []

    def open_library(*roots: Path, cache: Path | None = None) -> Library:
        opened.append(Library(roots, cache=cache or tmp_path / "cache"))
        return opened[-1]

    yield open_library
    for one in opened:
        one.close()


@pytest.fixture
def client(library: Callable[..., Library]) -> Iterator[Open]:
    """Open a client that has the token, over some folders."""
    opened: list[TestClient] = []

    def open_client(*roots: Path, token: str = TOKEN, **options: object) -> TestClient:
        app = make_app(library(*roots), token=TOKEN, port=8123, **options)
        headers = {"authorization": f"Bearer {token}"} if token else {}
        found = TestClient(app, base_url="http://127.0.0.1:8123", headers=headers, follow_redirects=False)
        opened.append(found)
        return found

    yield open_client
    for one in opened:
        one.close()


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be damaged."""
    return shutil.copytree(run, tmp_path / "project" / "copied", symlinks=True)


@pytest.fixture
def live(tmp_path: Path) -> Path:
    """A run of two steps that goes on."""
    return make_run(tmp_path / "project" / "live", Maker(seed=1), until=2, ended=False)
