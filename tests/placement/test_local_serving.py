"""What serving in this process does to the process."""

from __future__ import annotations

import gc
from contextlib import closing
from pathlib import Path
from typing import Any

from sharpen.config.load import resolve
from sharpen.placement.local import NEW_OBJECTS, LocalServing
from sharpen.run.decide import decide_evaluation


async def workflow(task: dict[str, Any], model: Any) -> float:
    return 0.0


def test_what_is_loaded_is_not_walked_by_the_garbage_collector_while_it_serves(toy_model_dir: Path) -> None:
    """Red without `gc.freeze` or `gc.set_threshold`, and when `close` leaves them so: what a run leaves behind would
    never be freed. What the owner has frozen stays so."""
    gc.unfreeze()
    before = gc.get_threshold()
    tree = {"train_dataset.path": "none", "model": {"model_path": str(toy_model_dir), "max_model_len": 128}}
    job = decide_evaluation(resolve(settings=tree).config, workflow, None)
    try:
        with closing(LocalServing(job)):
            assert gc.get_freeze_count() > 10_000
            assert gc.get_threshold() == (NEW_OBJECTS, *before[1:])
        assert gc.get_freeze_count() == 0
        assert gc.get_threshold() == before
    finally:  # as conftest.py has it for all tests
        gc.collect()
        gc.freeze()
    frozen = gc.get_freeze_count()
    for count in (10_000, 200_000):
        later: list[list[int]] = [[] for _ in range(count)]
        gc.collect()
        with closing(LocalServing(job)):
            assert 10_000 < gc.get_freeze_count() < frozen + len(later)
        assert gc.get_freeze_count() > 10_000
