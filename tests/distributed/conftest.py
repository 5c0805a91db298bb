"""Real processes with torch.distributed (gloo) on toy models; none of them may be left behind."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from group_toys import SHARED, leftover_folders, leftover_ranks
from rank_runs import run


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def shared_ranks(one_thread: None) -> Iterator[None]:
    yield
    SHARED.close()
    assert not leftover_ranks()
    assert not leftover_folders()


@pytest.fixture(autouse=True)
def nothing_left_behind(shared_ranks: None) -> Iterator[None]:
    yield
    assert not leftover_ranks()
    assert not leftover_folders()


@pytest.fixture(scope="session")
def undisturbed(
    one_thread: None, tmp_path_factory: pytest.TempPathFactory, toy_model_dir: Path, toy_dataset: Path
) -> Path:
    """The directory of a run in one process, which others are compared with."""
    return run(tmp_path_factory.mktemp("undisturbed"), toy_model_dir, toy_dataset, 1).run_dir
