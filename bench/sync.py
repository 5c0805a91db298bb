"""`make bench-sync`: how long new weights take from the trainer into the engine.

In one process: the quickstart's model (2M parameters, fp32), `publish` as the coordinator calls it: all that a sync
does before the next rollout may begin. Synchronous runs share the weights, so that no tensor is copied; runs whose
rollouts go on while the trainer computes copy them.

Between processes, 1 GB in 64 matrices: into the file that vLLM's workers read (`engine.vllm.transfer`), and from
there into the weights of another process, as a worker does; and from a trainer's rank through the memory that it
shares with the coordinator (`placement.ranks.processes`) into the engine's weights here. Both against one copy of the
same matrices from memory to memory, in turns; medians are compared. What an engine does with weights that have arrived
(packing, KV) is not in it.

Targets: `in_process_ms` and `in_process_copied_ms` <= 10, `copied_tensors` = 0 where shared; `through_file` and
`through_memory` <= 3 (over the plain copy).
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as `tune()` does, before torch is loaded

import plain
import report
import torch
from agent import judge, run_agent

from sharpen.config.load import resolve
from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.engine.vllm.transfer import WeightsFile, map_file
from sharpen.placement.local import LocalServing
from sharpen.placement.ranks.processes import SharedFile, lay_out, view
from sharpen.placement.ranks.rank import WeightSpec
from sharpen.run.assembly import open_loop
from sharpen.run.loop import Loop

TARGETS = {"in_process_ms": 10, "in_process_copied_ms": 10, "copied_tensors": 0, "through_file": 3, "through_memory": 3}
SIDE = 2048

Weights = Mapping[str, torch.Tensor]


def median_s(what: Callable[[], object], repeats: int) -> float:
    """Seconds of a call, the first one left out."""
    what()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        what()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def in_process(sync: Mapping[str, Any], repeats: int) -> tuple[float, int]:
    """Milliseconds of a load into the engine of a run with these settings, and tensors that it copies."""
    with tempfile.TemporaryDirectory() as folder:
        resolved = resolve(
            settings={
                "checkpoint_root_dir": folder,
                "train_dataset": {"path": str(plain.QUICKSTART / "data"), "total_steps": 2},
                "model": {"model_path": str(plain.QUICKSTART / "model"), "max_model_len": 512},
                "algorithm": {"algorithm_type": "grpo", "batch_size": 4, "group_size": 4},
                "engine.type": "embedded",
                "loss.kl": "none",
                "evaluation.hold_out": False,
                "check.enabled": False,
                **sync,
            }
        )
        with open_loop(resolved, run_agent, judge) as (loop, _):
            assert isinstance(loop.serving, LocalServing)
            assert isinstance(loop.serving.engine, EmbeddedEngine)
            loop.step()  # so that there is KV to drop
            seconds = median_s(lambda: _publish(loop), repeats)
            served = loop.serving.engine.weights()
            mine = loop.trainer.state_tensors()
            return 1e3 * seconds, sum(served[name].data_ptr() != tensor.data_ptr() for name, tensor in mine.items())


def _publish(loop: Loop) -> None:
    assert loop.serving is not None
    loop.trainer.version += 1
    loop.serving.publish(loop.trainer.version, loop.trainer.state_tensors())


def weights(count: int, fill: float) -> Weights:
    """So many matrices (64 are 1 GB), each page of them touched."""
    return {f"matrix_{number}": torch.full((SIDE, SIDE), fill) for number in range(count)}


def copy(source: Weights, target: Weights) -> None:
    """The plain copy."""
    for name, tensor in source.items():
        target[name].copy_(tensor)


def read_files(connection: Connection, count: int) -> None:
    """A process that takes weights from each file it is told of, as vLLM's worker does."""
    torch.set_num_threads(2)
    mine, theirs = weights(count, 0.0), functools.lru_cache(maxsize=1)(map_file)
    last = [*mine][-1]
    while path := connection.recv():
        copy(theirs(path), mine)
        connection.send(float(mine[last][-1, -1]))


def write_memory(connection: Connection, path: str, count: int) -> None:
    """A process that writes its weights into shared memory when it is told to, as a trainer's rank does."""
    torch.set_num_threads(2)
    mine = weights(count, 0.0)
    places = _mapped(SharedFile(os.open(path, os.O_RDWR)), mine)
    last = [*mine][-1]
    while fill := connection.recv():
        mine[last][-1, -1] = fill
        copy(mine, places)
        connection.send(None)


def _layout(like: Weights) -> tuple[list[tuple[WeightSpec, int]], int]:
    return lay_out([WeightSpec(name=name, shape=(SIDE, SIDE), dtype=torch.float32) for name in like])


def _mapped(shared: SharedFile, like: Weights) -> Weights:
    memory = shared.map()
    return {spec.name: view(memory, spec, offset) for spec, offset in _layout(like)[0]}


def between_processes(count: int, repeats: int) -> dict[str, float]:
    """Seconds of the plain copy of so many matrices, and of each way."""
    context = multiprocessing.get_context("spawn")
    source, target = weights(count, 1.0), weights(count, 0.0)
    last = [*source][-1]
    file, shared = WeightsFile(), SharedFile.create()
    shared.grow(_layout(source)[1])
    arrived = _mapped(shared, source)
    reader, reader_end = context.Pipe()
    writer, writer_end = context.Pipe()
    path = f"/proc/{os.getpid()}/fd/{shared.descriptor}"
    processes = [
        context.Process(target=read_files, args=(reader_end, count), daemon=True),
        context.Process(target=write_memory, args=(writer_end, path, count), daemon=True),
    ]
    for process in processes:
        process.start()
    number = 0.0

    def through_file() -> None:
        nonlocal number
        number += 1.0
        source[last][-1, -1] = number
        reader.send(file.write(source, torch.float32))
        assert reader.recv() == number, "the other process has other weights"

    def through_memory() -> None:
        nonlocal number
        number += 1.0
        writer.send(number)
        writer.recv()
        copy(arrived, target)
        assert target[last][-1, -1] == number, "other weights arrived"

    ways = {"plain": lambda: copy(source, target), "through_file": through_file, "through_memory": through_memory}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    try:
        for _ in range(repeats):
            for way, do in ways.items():
                seconds[way].append(median_s(do, 1))
    finally:
        for connection, process in zip((reader, writer), processes, strict=True):
            connection.send(None)
            process.join(timeout=10)
    return {way: statistics.median(found) for way, found in seconds.items()}


def main() -> int:
    """Measure, print, write `bench/out/sync.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--matrices", type=int, default=64, help="between processes, of 17 MB each")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    shared_ms, shared_copies = in_process({}, 5 * arguments.repeats)
    copied_ms, copies = in_process({"sync.offset": 1}, 5 * arguments.repeats)
    seconds = between_processes(arguments.matrices, arguments.repeats)
    ratios = {
        "in_process_ms": shared_ms,
        "in_process_copied_ms": copied_ms,
        "copied_tensors": float(shared_copies),
        "through_file": seconds["through_file"] / seconds["plain"],
        "through_memory": seconds["through_memory"] / seconds["plain"],
    }
    gigabytes = 4 * arguments.matrices * SIDE**2 / 1e9
    rows = [
        ("in process, 2M parameters, shared", shared_ms, shared_copies, None),
        ("in process, 2M parameters, copied", copied_ms, copies, None),
        (f"plain copy, {gigabytes:.2f} GB", 1e3 * seconds["plain"], arguments.matrices, 1.0),
        ("to another process by file", 1e3 * seconds["through_file"], None, ratios["through_file"]),
        ("from another process by memory", 1e3 * seconds["through_memory"], None, ratios["through_memory"]),
    ]
    return report.finish(
        "sync",
        header=("weights", "ms", "tensors copied", "over plain"),
        rows=rows,
        ratios=ratios,
        at_most=TARGETS,
        extra={"repeats": arguments.repeats, "seconds": seconds},
    )


if __name__ == "__main__":
    sys.exit(main())
