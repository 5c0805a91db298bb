"""A scripted endpoint that judges ask, for each test."""

from collections.abc import Iterator

import pytest
from judge_endpoint import JudgeEndpoint, serving


@pytest.fixture
def endpoint() -> Iterator[JudgeEndpoint]:
    with serving() as server:
        yield server
