"""Real processes with torch.distributed (gloo) on toy models; none of them may be left behind."""

from collections.abc import Iterator

import pytest
import torch
from group_toys import leftover_ranks


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    yield
    assert not leftover_ranks()
