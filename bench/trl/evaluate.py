"""The judge of `bench-trl`: accuracy on held-out tasks, by a loop that belongs to neither side.

Role: `plain.roll_out` (transformers' `generate` on left-padded batches, the calculator in Python) over every task,
greedy and sampled, with the quickstart's tokenizer and the same seed for every model. In: a model directory. Out: a
file of rewards (`runs.Held`), and a line of accuracies.

    .venv-trl/bin/python bench/trl/evaluate.py examples/quickstart/model --out /tmp/held_out.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import runs
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(Path(__file__).parents[1]))  # what the benchmarks share

import plain

BATCH = 256


def rewards(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[plain.Task], *, sample: bool
) -> list[float]:
    """The reward of one rollout of each task."""
    found: list[float] = []
    for start in range(0, len(tasks), BATCH):
        rollouts = plain.roll_out(model, tokenizer, tasks[start : start + BATCH], sample=sample)
        found += [rollout.reward for rollout in rollouts]
    return found


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[plain.Task],
    *,
    samples: int,
    seed: int = 0,
) -> runs.Held:
    """Greedy once, sampled `samples` times (T=1); a task sampled several times has the mean of its rewards."""
    torch.manual_seed(seed)
    greedy = rewards(model, tokenizer, tasks, sample=False)
    rounds = [rewards(model, tokenizer, tasks, sample=True) for _ in range(samples)]
    sampled = [sum(column) / samples for column in zip(*rounds, strict=True)]
    return runs.Held(greedy=tuple(greedy), sampled=tuple(sampled))


def main() -> int:
    """Evaluate one model and write its rewards."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="file for the rewards")
    parser.add_argument("--samples", type=int, default=4, help="sampled rollouts of each task")
    parser.add_argument("--tasks", type=int, default=None, help="only the first so many tasks")
    arguments = parser.parse_args()
    disable_progress_bar()
    torch.set_num_threads(runs.NUM_THREADS)
    tokenizer = AutoTokenizer.from_pretrained(plain.QUICKSTART / "model")
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    held = evaluate(model, tokenizer, plain.load_tasks("test")[: arguments.tasks], samples=arguments.samples)
    runs.write_held(arguments.out, held)
    print(
        f"{arguments.model}: greedy {held.accuracy('greedy'):.3f}  sampled {held.accuracy('sampled'):.3f}", flush=True
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
