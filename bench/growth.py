"""`make bench-growth`: how the cost of a step grows with its work: turns, group size, tasks, length of the prompts,
rollouts in flight (all of a step at once).

The whole product on the quickstart's model (longer positions, random continuations): an agent that makes so many calls
of at most 8 sampled tokens in one conversation, by OpenAI's client, in the run's own process. All points of an axis
take turns; medians are compared, after a step that warms up.

What is counted:

- tokens: those of the tree of conversations that a step trains (`trainer/computed_tokens`). A prompt that a group
  shares and a history that a later call repeats count once. So what is rendered, sent, cached or computed again shows
  as cost. Rewards are 1 and 0 in turns within each task, so that every group trains.
- seconds: CPU time of the process (all threads), of gathering the rollouts and of training; wall time beside it.
- memory: the peak of the process in the step, less what it held before, both by the kernel (Linux alone has them). What
  was freed is given back before; what a warm-up leaves, a cache or a pool, is not counted.
- exponents: the slope of log seconds over log tokens (least squares), of rollouts and of training. 1.0 is a constant
  cost of a token; on an axis with a fixed cost it is below. A sampled token costs more than one of a prompt: the axis
  of turns keeps their ratio nearly, and that of prompts does not.
- attention: the share of products that are queries times keys and weights times values, from the model's shape and
  the mean number of keys that a token sees. It grows with the conversation, whoever computes it. The exponents with a
  target are those of the seconds without this share of them; the others, and the ratio, are of all seconds. Products
  of attention are slower than those of matrices, so that the share of the seconds is larger than what is taken off.
- `training 32/4`: CPU seconds per computed token of training at 32 turns over those at 4, as they are.

Targets: exponents without attention, and those of memory, <= 1.1; `training 32/4` <= 1.3.

    python bench/growth.py [--turns 2 4 8 16 32 64] [--prompts 200 2000 16000] [--in-flight 64 512 4096] [--repeats 3]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as `tune()` does, before torch is loaded

import numpy as np
import plain
import report
import torch
from transformers import AutoTokenizer

from sharpen import JudgeOutput, WorkflowOutput
from sharpen.config.load import resolve
from sharpen.machine import return_freed_bytes
from sharpen.run.assembly import open_loop
from sharpen.run.loop import Loop

EXPONENT, RATIO = 1.1, 1.3
CONTEXT, SAMPLED = 20_480, 8
WORDS = "what is 3 + 4, and 12 - 5? "
"""Text that fills a prompt."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The work of a step. `prompt`: about how many tokens the first message has."""

    turns: int = 2
    prompt: int = 40
    tasks: int = 4
    group: int = 4


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a step took: CPU and wall seconds of rollouts and training; tokens; bytes; the share of products of
    attention."""

    tokens: float
    rollouts: float
    training: float
    rollouts_wall: float
    training_wall: float
    memory: float
    attention: float


class Talker:
    """The agent and its judge. One loop serves shapes of different turns and prompts, one after the other."""

    def __init__(self, words: int, sampled: int = SAMPLED) -> None:
        self.shape = Shape()
        self._words = words
        """Tokens of `WORDS`."""
        self._sampled = sampled
        self._numbers = itertools.count(1000)
        """What each rollout reads has a number, or equal answers would make one conversation in the tree."""
        self._seen: dict[str, itertools.count[int]] = defaultdict(itertools.count)

    async def talk(self, task: dict[str, Any], model: Any) -> WorkflowOutput:
        filler = WORDS * (self.shape.prompt // self._words)
        messages: list[Any] = [{"role": "user", "content": f"{task['question']} {filler}"}]
        number = next(self._numbers)
        text = ""
        for _ in range(self.shape.turns):
            reply = await model.client.chat.completions.create(
                model=model.name, messages=messages, max_tokens=self._sampled
            )
            text = reply.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"{number}: {WORDS}"}]
        return WorkflowOutput(response=text)

    async def judge(self, task: dict[str, Any], response: Any) -> JudgeOutput:
        return JudgeOutput(reward=float(next(self._seen[task["question"]]) % 2))


def make_model(folder: Path) -> Path:
    """Copy the quickstart's model, with more positions."""
    shutil.copytree(plain.QUICKSTART / "model", folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": CONTEXT}))
    return folder


def open_for(shape: Shape, talker: Talker, model: Path, runs: Path) -> contextlib.AbstractContextManager[Any]:
    """Open a loop with this many tasks and rollouts a step."""
    algorithm = {"algorithm_type": "grpo", "batch_size": shape.tasks, "group_size": shape.group, "learning_rate": 1e-5}
    resolved = resolve(
        settings={
            "checkpoint_root_dir": str(runs),
            "name": f"growth-{shape.tasks}-{shape.group}",
            "train_dataset.path": str(plain.QUICKSTART / "data"),
            "model": {"model_path": str(model), "max_model_len": CONTEXT},
            "algorithm": algorithm,
            "rollout.max_concurrent_rollouts": shape.tasks * shape.group,
            "loss.kl": "none",
            "evaluation.hold_out": False,
            "check.enabled": False,
        }
    )
    return open_loop(resolved, talker.talk, talker.judge)


def measure(loop: Loop, shape: Shape, config: dict[str, int]) -> Cost:
    """Make a step."""
    return_freed_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = held("VmRSS")
    marks = [(time.process_time(), time.perf_counter())]
    gathered = loop.source.gather(loop.progress)
    marks.append((time.process_time(), time.perf_counter()))
    outcome = loop.source.train(gathered, loop.progress)
    marks.append((time.process_time(), time.perf_counter()))
    if outcome.failure is not None:
        raise outcome.failure
    metrics = outcome.metrics
    (rollouts, rollouts_wall), (training, training_wall) = (
        (after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(marks)
    )
    keys = metrics["trainer/sequence_tokens"] / (shape.tasks * shape.group) / 2
    return Cost(
        tokens=metrics["trainer/computed_tokens"],
        rollouts=rollouts,
        training=training,
        rollouts_wall=rollouts_wall,
        training_wall=training_wall,
        memory=held("VmHWM") - before,
        attention=attention_share(config, keys),
    )


def held(name: str) -> float:
    """Return one of the kernel's figures of this process's memory, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return float(line.split()[1]) * 1024


def attention_share(config: dict[str, int], keys: float) -> float:
    """Return attention's share of a token's products, if it sees so many keys: scores and values, over these and all
    matrices (queries, keys, values, output, three of the MLP, the vocabulary)."""
    heads = config["num_attention_heads"] * config["head_dim"]
    kv_heads = config["num_key_value_heads"] * config["head_dim"]
    layer = config["hidden_size"] * (2 * heads + 2 * kv_heads + 3 * config["intermediate_size"])
    attention = config["num_hidden_layers"] * 2 * heads * keys
    matrices = config["num_hidden_layers"] * layer + config["hidden_size"] * config["vocab_size"]
    return attention / (attention + matrices)


def exponent(tokens: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the slope of log seconds over log tokens."""
    return float(np.polyfit(np.log(tokens), np.log(seconds), 1)[0])


def median(costs: Sequence[Cost]) -> Cost:
    names = Cost.__dataclass_fields__
    return Cost(**{name: statistics.median(getattr(cost, name) for cost in costs) for name in names})


def axes_of(arguments: argparse.Namespace) -> dict[str, list[Shape]]:
    return {
        "turns": [Shape(turns=turns) for turns in arguments.turns],
        "prompt": [Shape(prompt=prompt, tasks=2) for prompt in arguments.prompts],
        "group": [Shape(group=group) for group in arguments.groups],
        "tasks": [Shape(tasks=tasks) for tasks in arguments.tasks],
        "in flight": [Shape(tasks=max(1, count // 8), group=min(8, count)) for count in arguments.in_flight],
    }


def measure_all(axes: dict[str, list[Shape]], repeats: int) -> dict[Shape, Cost]:
    """Return the median cost of each shape. Loops are open together, and shapes take turns."""
    found: dict[Shape, list[Cost]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        model = make_model(Path(name) / "model")
        config = json.loads((model / "config.json").read_text())
        words = len(AutoTokenizer.from_pretrained(model)(WORDS).input_ids)
        loops: dict[tuple[int, int], tuple[Loop, Talker]] = {}
        for _ in range(repeats):
            for shape in dict.fromkeys(itertools.chain(*axes.values())):
                key = (shape.tasks, shape.group)
                if key not in loops:
                    talker = Talker(words)
                    loop, _ = stack.enter_context(open_for(shape, talker, model, Path(name) / "runs"))
                    loops[key] = loop, talker
                    talker.shape = Shape(tasks=shape.tasks, group=shape.group)
                    measure(loop, shape, config)  # warms up
                loop, talker = loops[key]
                talker.shape = shape
                found[shape].append(cost := measure(loop, shape, config))
                print(
                    f"  {shape}: {cost.rollouts_wall:.1f} s rollouts, {cost.training_wall:.1f} s training", flush=True
                )
    return {shape: median(costs) for shape, costs in found.items()}


def main() -> int:
    """Measure, print, write `bench/out/growth.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--turns", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--groups", type=int, nargs="+", default=[2, 8, 32, 64])
    parser.add_argument("--tasks", type=int, nargs="+", default=[2, 8, 32, 64])
    parser.add_argument("--prompts", type=int, nargs="+", default=[200, 2000, 8000, 16000])
    parser.add_argument("--in-flight", type=int, nargs="+", default=[64, 512, 4096])
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    axes = axes_of(arguments)
    costs = measure_all(axes, arguments.repeats)
    rows: list[tuple[object, ...]] = []
    ratios: dict[str, float] = {}
    targets: dict[str, float] = {}
    for axis, shapes in axes.items():
        points = [costs[shape] for shape in shapes]
        for shape, cost in zip(shapes, points, strict=True):
            each = [seconds / cost.tokens * 1e6 for seconds in (cost.rollouts, cost.training)]
            walls = (cost.rollouts_wall, cost.training_wall)
            size = shape.tasks * shape.group if axis == "in flight" else getattr(shape, axis)
            rows.append((f"{axis} {size}", cost.tokens, *each, *walls, cost.memory / 2**20, cost.attention))
        if len(shapes) < 2:
            continue
        tokens = [cost.tokens for cost in points]
        for part in ("rollouts", "training"):
            seconds = [getattr(cost, part) for cost in points]
            rest = [one * (1 - cost.attention) for one, cost in zip(seconds, points, strict=True)]
            ratios[f"{axis}: {part}, all"] = exponent(tokens, seconds)
            ratios[f"{axis}: {part}"] = exponent(tokens, rest)
            targets[f"{axis}: {part}"] = EXPONENT
        ratios[f"{axis}: memory"] = exponent(tokens, [cost.memory for cost in points])
        targets[f"{axis}: memory"] = EXPONENT
    if {4, 32} <= set(arguments.turns):
        short, long = (costs[Shape(turns=turns)] for turns in (4, 32))
        ratios["training 32/4"] = (long.training / long.tokens) / (short.training / short.tokens)
        targets["training 32/4"] = RATIO
    header = ("axis", "tokens", "rollouts µs", "training µs", "rollouts s", "training s", "MiB", "attention")
    return report.finish("growth", header=header, rows=rows, ratios=ratios, at_most=targets)


if __name__ == "__main__":
    sys.exit(main())
