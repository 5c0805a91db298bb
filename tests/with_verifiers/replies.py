"""Plays an attempt in an environment with a model whose replies are given."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from sharpen.testing.environments import served_replies


def play(environment: Any, task: dict[str, Any], said: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return what the workflow returned, and the requests that the model got."""

    async def attempt(model: Any) -> Any:
        async with model.client:
            return await environment.workflow(task=task, model=model)

    with served_replies(said) as (model, requests):
        model.named = lambda name: model
        return asyncio.run(attempt(model)), requests
