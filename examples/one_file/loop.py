"""The whole idea on one page: GRPO on the quickstart's agent, written with Sharpen's own stages.

    python examples/one_file/loop.py               # half a minute on 2 cores; --help lists the options

    tasks ─► agent ─► calls ─► rewards ─► batch ─► trainer        data, one way
               ▲                                      │
            gateway ◄──────── engine ◄────────────────┘           weights, the only way back

In each step the agent tries every task of a batch GROUP_SIZE times. It is the quickstart's agent, unchanged: it is
handed an OpenAI client, and the gateway behind that client records the token ids that the engine read and sampled. The
judge scores each try. Scores are compared within a task, so that a try that did better than the others at the same task
becomes more likely. Before the update the trainer compares its own logprobs of the recorded tokens with the engine's;
after it, the engine gets the new weights.

`tune()` runs the same stages. What it adds, and this page leaves out:

- Failures. Here an error in the agent or the judge ends the script, and an agent that hangs, hangs it. `tune()` limits
  the time of a try, retries what was not the model's fault, and leaves out, counts and shows what still fails.
- Records. Every call is on disk before it trains; there are checkpoints, and a killed run goes on where it was.
- Evidence. The certificate computes each step again by separate code; the verdict comes from paired intervals.
- More to learn from: a KL term, a critic, a teacher, an expert's rows; refilled batches, replay, curricula.
- More machines: rollouts ahead of the training, vLLM, LoRA, several processes, Ray.
- Settings from a file, where one without effect is an error; the check before a run, its plan, curves and reports.
"""

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean

from transformers import AutoTokenizer

from sharpen.config.trainer import TrainerConfig
from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.gateway.gateway import Gateway
from sharpen.learning.algorithm.presets import PRESETS
from sharpen.learning.experience.draw import draw_batches
from sharpen.learning.trainer.roles import TrainerPlan
from sharpen.learning.trainer.trainer import Trainer
from sharpen.placement.serving import ServingThread
from sharpen.types import Group, Outcome, Rollout, Sampling, Task

QUICKSTART = Path(__file__).resolve().parents[1] / "quickstart"
sys.path.insert(0, str(QUICKSTART))
from agent import judge, run_agent  # noqa: E402

BATCH_SIZE, GROUP_SIZE, LEARNING_RATE = 16, 8, 3e-4
GRPO = replace(PRESETS["grpo"], kl="none", kl_coef=0.0)
"""Advantage: (reward - mean) / standard deviation of the group's rewards. Loss: PPO's, with clipped ratios."""
OPTIMIZER = TrainerConfig(beta2=0.95, weight_decay=0.0)
SAMPLED, GREEDY = Sampling(temperature=1.0), Sampling(temperature=0.0)


async def roll_out(gateway: Gateway, task: Task, group_id: str, index: int, sampling: Sampling = SAMPLED) -> Rollout:
    """Let the agent try a task once, and judge what it said."""
    rollout_id = f"{group_id}/{index}"
    noise_seed = random.Random(rollout_id).getrandbits(63)  # what is sampled depends on nothing else
    session = gateway.open(rollout_id, noise_seed=noise_seed, sampling=sampling)
    output = await run_agent(dict(task.row), session.model)  # as many calls as the agent likes, each one recorded
    calls = session.close()
    judged = await judge(dict(task.row), output.response)
    return Rollout(
        id=rollout_id,
        group_id=group_id,
        task_id=task.id,
        index=index,
        attempt=0,
        calls=calls,
        outcome=Outcome.OK,
        reward=judged.reward,
    )


async def gather(gateway: Gateway, tasks: Sequence[Task], step: int, version: int) -> list[Group]:
    """Try each task GROUP_SIZE times, all at once: the engine computes them as one batch."""

    async def group_of(task: Task) -> Group:
        group_id = f"step-{step}/{task.id}"
        rollouts = await asyncio.gather(*(roll_out(gateway, task, group_id, index) for index in range(GROUP_SIZE)))
        return Group(id=group_id, task=task, version=version, rollouts=tuple(rollouts))

    return await asyncio.gather(*map(group_of, tasks))


async def accuracy(gateway: Gateway, tasks: Sequence[Task]) -> float:
    """The mean reward of one greedy try at each task."""
    tries = await asyncio.gather(*(roll_out(gateway, task, task.id, 0, GREEDY) for task in tasks))
    return fmean(rollout.reward or 0.0 for rollout in tries)


def read_tasks(split: str) -> list[Task]:
    """The quickstart's tasks: a question and its answer in each row."""
    lines = (QUICKSTART / "data" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [Task(id=f"{split}/{index}", index=index, row=json.loads(line)) for index, line in enumerate(lines)]


def train(model: str, steps: int, *, num_held_out: int = 256) -> Trainer:
    """Train `model` for so many steps, and print how it goes."""
    tasks, held_out = read_tasks("train"), read_tasks("test")[:num_held_out]
    random.Random(0).shuffle(tasks)
    stream = cycle(tasks)
    plan = TrainerPlan(
        model_path=model, algorithm=GRPO, config=OPTIMIZER, learning_rate=LEARNING_RATE, planned_updates=steps
    )
    trainer = Trainer.load(plan)
    engine = EmbeddedEngine.from_pretrained(model, max_model_len=512)
    serving = ServingThread()  # gateway and engine have a loop of their own, which no agent can hold up
    gateway = Gateway(engine, AutoTokenizer.from_pretrained(model), model_name="policy", loop=serving.loop)
    print(f"before: {asyncio.run(accuracy(gateway, held_out)):.3f} of {len(held_out)} held-out tasks")
    for step in range(1, steps + 1):
        batch = list(islice(stream, BATCH_SIZE))
        groups = asyncio.run(gather(gateway, batch, step, trainer.version))
        # Calls that continue each other become one sequence; each sampled token gets its advantage and its weight.
        batches = draw_batches(groups, GRPO, num_minibatches=1)
        # Raises `ParityError` before the update, if trainer and engine do not agree on a recorded token.
        trained = trainer.train_step(batches, step=step)
        # No token is computed from keys and values of older weights.
        serving.call(engine.load(trainer.version, trainer.state_tensors()))
        reward = fmean(rollout.reward or 0.0 for group in groups for rollout in group.rollouts)
        gap = trained.values.get("logprob_gap_max", 0.0)  # absent where every group was flat
        print(f"step {step:>3}/{steps}  reward {reward:.3f}  trained {trained.trained_tokens:,} tokens  gap {gap:.1e}")
    print(f"after:  {asyncio.run(accuracy(gateway, held_out)):.3f} of {len(held_out)} held-out tasks")
    serving.call(gateway.close())
    serving.call(engine.close())
    serving.close()
    return trainer


def main() -> None:
    """Train, and write the model where `--out` says."""
    parser = argparse.ArgumentParser(description="GRPO on the quickstart's agent, on one page.")
    parser.add_argument("--model", default=str(QUICKSTART / "model"), help="folder of a model (default %(default)s)")
    parser.add_argument("--steps", type=int, default=12, help="(default %(default)s)")
    parser.add_argument("--held-out", type=int, default=256, help="held-out tasks (default %(default)s)")
    parser.add_argument("--out", type=Path, help="folder for the trained model (default: it is not kept)")
    arguments = parser.parse_args()
    trainer = train(arguments.model, arguments.steps, num_held_out=arguments.held_out)
    if arguments.out is not None:
        trainer.save(arguments.out, {})


if __name__ == "__main__":
    main()
