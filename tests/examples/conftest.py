"""Fixtures of the examples' tests: the examples' folder is importable, models are scripted, runs are short."""

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from scripted_models import Scripted

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))


@pytest.fixture
def scripted() -> Iterator[Callable[..., Scripted]]:
    """Make a model served on this machine: `scripted("left", {"tool_calls": [...]}, ...)`."""
    from parts.stand_in import stand_in

    with contextlib.ExitStack() as stack:

        def make(*replies: Any) -> Scripted:
            model = Scripted(replies)
            model.base_url = stack.enter_context(stand_in(model.answer))
            return model

        yield make


@pytest.fixture
def play() -> Callable[..., Any]:
    """Run a workflow or a judge on scripted models: each gets a real client of its endpoint."""

    def run(function: Callable[..., Any], *, models: Sequence[Scripted], **arguments: Any) -> Any:
        async def main() -> Any:
            from openai import AsyncOpenAI

            async with contextlib.AsyncExitStack() as stack:
                for model in models:
                    client = AsyncOpenAI(base_url=model.base_url, api_key="none", max_retries=0)
                    model.client = await stack.enter_async_context(client)
                return await function(**arguments)

        return asyncio.run(main())

    return run


@pytest.fixture
def short(tmp_path: Path) -> list[str]:
    """Options of a run of two steps of two tasks with four rollouts each, its tasks made in a folder of its own: to
    follow those of a documented line (`lines.SMALLER`)."""
    options = {"steps": 2, "batch-size": 2, "group-size": 4, "eval-tasks": 2, "learning-rate": 1e-3}
    options |= {"max-tokens": 8, "max-model-len": 1024}
    return [
        *(f"--{name}={value}" for name, value in options.items()),
        f"--out={tmp_path / 'runs'}",
        f"--data={tmp_path / 'data'}",
    ]


@pytest.fixture
def check_run() -> Callable[..., list[Any]]:
    """Check what a short run left: its steps, its rollouts, its files, and that something pushed the weights. Gives
    the rollouts."""

    def check(result: Any) -> list[Any]:
        from sharpen.learning.experience.reading import read_groups, read_trained

        assert result.steps == 2
        journal = result.run_dir / "run.db"
        rollouts = [rollout for group in read_groups(journal) for rollout in group.rollouts]
        assert len(rollouts) == 2 * 2 * 4
        for rollout in rollouts:
            assert rollout.outcome == "ok", rollout.error
            assert rollout.calls
            assert all(call.status == "used" for call in rollout.calls)
        for name in ("resolved.json", "metrics.jsonl", "summary.json", "reward_curve.png", "latest/config.json"):
            assert (result.run_dir / name).stat().st_size > 0, name
        assert any(call.advantage != 0.0 and call.num_tokens > 0 for call in read_trained(journal))
        return rollouts

    return check
