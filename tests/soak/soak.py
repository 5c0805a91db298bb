"""`make soak`: many rollouts of a toy model, with failures of every kind, and what grows meanwhile.

In: how many, in which ways: agents in process, agents over HTTP. Out: a table of memory, files, threads and the size of
`run.db` as rollouts go by, and a last line; exit code 1 if something grows that should not.

Of 1,000 rollouts, 100 raise, 30 leave a call unanswered behind, 30 send what no server takes, 2 never end (they meet
`rollout.timeout_s`), and the judge raises for 50. All others train, as in any run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import os
import resource
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np

from sharpen import AlgorithmConfig, DatasetConfig, JudgeOutput, TunerModelConfig, WorkflowOutput, tune

sys.path.insert(0, str(Path(__file__).parents[1]))
from toy_model import make_toy_model

Way = Literal["in_process", "http"]
WAYS: tuple[Way, ...] = ("in_process", "http")
ROLLOUTS_OF_STEP = 64
KEPT_STEPS = 4
EVERY = 250
"""Rollouts between two measurements."""
MAX_MB_PER_1000 = 2.0
"""Growth of memory that is still none: an allocator's own."""
MAX_BYTES_PER_ROLLOUT = 4000
"""Of `run.db`: two calls of 8 tokens, and what a failure leaves."""


class MallocInfo(ctypes.Structure):
    """What glibc's `mallinfo2` tells of its arenas, in bytes."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a process holds after so many rollouts. `memory_mb` is resident; `in_use_mb` is what was asked of malloc and
    not given back (the rest of its memory is the allocator's); `blocks` are those of Python's allocator for small ones,
    which is another; `objects` are those that Python's collector knows."""

    rollouts: int
    memory_mb: float
    files: int
    threads: int
    objects: int
    journal_mb: float
    in_use_mb: float = 0.0
    blocks: int = 0


def measure(rollouts: int, journal: Path) -> Sample:
    """Measure this process (Linux) and the journal with its log. What the allocator only keeps is given back first."""
    gc.collect()
    in_use = 0
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        library = ctypes.CDLL(None)
        library.malloc_trim(0)
        library.mallinfo2.restype = MallocInfo
        info = library.mallinfo2()
        in_use = info.uordblks + info.hblkhd
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    sizes = [path.stat().st_size for path in journal.parent.glob(f"{journal.name}*")]
    return Sample(
        rollouts=rollouts,
        memory_mb=pages * resource.getpagesize() / (1 << 20),
        files=len(os.listdir("/proc/self/fd")),
        threads=threading.active_count(),
        objects=len(gc.get_objects()),
        journal_mb=sum(sizes) / (1 << 20),
        in_use_mb=in_use / (1 << 20),
        blocks=sys.getallocatedblocks(),
    )


class Rollouts:
    """The workflow and the judge of a run; counts rollouts and measures now and then."""

    def __init__(self, way: Way, journal: Callable[[], Path | None], every: int) -> None:
        self._way, self._journal, self._every = way, journal, every
        self._random = Random(0)
        self.count = 0
        self.samples: list[Sample] = []

    async def workflow(self, task: dict[str, Any], model: Any) -> WorkflowOutput:
        """Two calls, or a failure."""
        self.count += 1
        journal = self._journal()
        if self.count % self._every == 0 and journal is not None:
            self.samples.append(measure(self.count, journal))
        fate = self._random.randrange(1000)
        if self._way == "in_process":
            return await self._ask(task, model.client, model.name, fate)
        from openai import AsyncOpenAI

        async with AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, max_retries=0) as client:
            return await self._ask(task, client, model.name, fate)

    async def _ask(self, task: dict[str, Any], client: Any, name: str, fate: int) -> WorkflowOutput:
        messages = [{"role": "user", "content": task["question"]}]
        text = ""
        for turn in range(2):
            if turn and fate < 100:
                raise RuntimeError(f"the agent fails on {text!r}")
            if turn and fate < 130:
                abandoned = asyncio.ensure_future(
                    client.chat.completions.create(model=name, messages=messages, max_tokens=8)
                )
                await asyncio.sleep(0)
                abandoned.cancel()
                raise ConnectionError("the agent left")
            if turn and fate < 160:
                await client.chat.completions.create(model=name, messages=[{"role": 5}], max_tokens=-1)
            if turn and fate < 162:
                await asyncio.sleep(3600)
            reply = await client.chat.completions.create(model=name, messages=messages, max_tokens=8)
            said = reply.choices[0].message.content or ""
            text += said
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
        return WorkflowOutput(response=text)

    async def judge(self, task: dict[str, Any], response: str) -> JudgeOutput:
        """The share of a letter, or a failure."""
        if self._random.randrange(100) < 5:
            raise ValueError(f"the judge fails on {task['question']}")
        return JudgeOutput(reward=response.count("e") / 16)


def soak(folder: Path, way: Way, num_rollouts: int, *, every: int = EVERY) -> tuple[list[Sample], Path]:
    """Run so many rollouts, or somewhat more. Return the samples, and the run's directory."""
    data = folder / "train.jsonl"
    data.write_text("".join(f'{{"question": "question {i}", "answer": "{i}"}}\n' for i in range(40)))
    run_dir = folder / "runs" / "Soak" / way
    rollouts = Rollouts(way, lambda: run_dir / "run.db" if run_dir.exists() else None, every)
    tune(
        workflow_func=rollouts.workflow,
        judge_func=rollouts.judge,
        train_dataset=DatasetConfig(path=str(data), split="train", total_steps=-(-num_rollouts // ROLLOUTS_OF_STEP)),
        model=TunerModelConfig(model_path=str(make_toy_model(folder / "model")), max_model_len=256, max_tokens=8),
        algorithm=AlgorithmConfig(
            algorithm_type="grpo", group_size=8, batch_size=8, learning_rate=1e-3, save_interval_steps=5
        ),
        project_name="Soak",
        experiment_name=way,
        settings={
            "checkpoint_root_dir": str(folder / "runs"),
            "evaluation.before_and_after": False,
            "evaluation.hold_out": False,
            "check.enabled": False,
            "rollout.timeout_s": 20.0,
            "rollout.max_excluded_share": 1.0,
            "rollout.max_attempts": 2,
            "journal.keep_steps": KEPT_STEPS,
        },
    )
    return rollouts.samples, run_dir


def slope(samples: Sequence[Sample], name: str) -> tuple[float, float]:
    """Return the growth of a number per 1,000 rollouts over the second half, and its standard error: what is
    loaded and cached once is there by then."""
    later = samples[len(samples) // 2 :]
    x = np.array([one.rollouts / 1000 for one in later])
    y = np.array([float(getattr(one, name)) for one in later])
    if len(later) < 4:
        return 0.0, float("inf")
    x -= x.mean()
    found = float((x * y).sum() / (x * x).sum())
    residual = y - y.mean() - found * x
    return found, float(np.sqrt((residual**2).sum() / (len(x) - 2) / (x * x).sum()))


def problems(samples: Sequence[Sample]) -> list[str]:
    """Return what grows that should not."""
    found = []
    for name, bound in (("memory_mb", MAX_MB_PER_1000), ("files", 0.5), ("threads", 0.5)):
        growth, error = slope(samples, name)
        if growth > max(bound, 2 * error):
            found.append(f"{name} grows by {growth:.2f} (± {error:.2f}) per 1,000 rollouts")
    size = slope(samples, "journal_mb")[0] * (1 << 20) / 1000
    if size > MAX_BYTES_PER_ROLLOUT:
        found.append(f"run.db grows by {size:.0f} bytes for each rollout")
    return found


def table(way: str, samples: Sequence[Sample]) -> list[str]:
    """Return some of the samples as lines, and the growth of each number per 1,000 rollouts."""
    lines = [f"{way:<12} rollouts  memory MB  in use MB   blocks  files  threads   objects  run.db MB"]
    for one in samples[:: max(len(samples) // 8, 1)]:
        lines.append(
            f"{'':<12} {one.rollouts:>8}  {one.memory_mb:>9.1f}  {one.in_use_mb:>9.1f}  {one.blocks:>7}  {one.files:>5}"
            f"  {one.threads:>7}  {one.objects:>8}  {one.journal_mb:>9.2f}"
        )
    names = ("memory_mb", "in_use_mb", "blocks", "files", "threads", "objects", "journal_mb")
    grown = {name: slope(samples, name) for name in names}
    lines += [f"  {name} per 1,000 rollouts: {growth:+.2f} ± {error:.2f}" for name, (growth, error) in grown.items()]
    return lines


def main() -> int:
    """Soak, and say what grew."""
    parser = argparse.ArgumentParser(description="many rollouts, and what grows meanwhile")
    parser.add_argument("--rollouts", type=int, default=10_000, help="of each way (10,000)")
    parser.add_argument("--way", choices=WAYS, help="one way only")
    parser.add_argument("--trace", action="store_true", help="print where the memory that was kept was allocated")
    options = parser.parse_args()
    found, began = [], time.monotonic()
    ways = WAYS if options.way is None else (options.way,)
    for way in ways:
        with tempfile.TemporaryDirectory() as folder:
            if options.trace:
                tracemalloc.start(8)
            samples, _ = soak(Path(folder), way, options.rollouts)
            print("\n".join(table(way, samples)), flush=True)
            found += [f"{way}: {problem}" for problem in problems(samples)]
    print("\n".join(found))
    minutes = (time.monotonic() - began) / 60
    print(f"{len(ways) * options.rollouts} rollouts in {minutes:.0f} min, {len(found)} numbers that grow")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
