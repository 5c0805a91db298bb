"""What 8 to 4,096 GPUs would ask of all that is not the model: a simulation, from what `capacity.py` measured.

In: the measured costs of a shape of rollouts (`Costs`), a number of GPUs. Out: what is needed a second and a step, and
the share of their speed that the GPUs keep. The real `Schedule` says what the coordinator does next; its steps take
the measured time for each rollout. Nothing here was run on so many GPUs.

Assumed, for a model of 8 billion parameters in bf16 on H100s (data sheet: 989 TFLOPS dense, 3.35 TB/s):

- 3 of 4 GPUs sample `TOKENS_PER_S` each, 64 rollouts on each at the same time, and these are a step's batch. Weights
  read once for each token bound 64 rows at 64 x 3.35e12 / 16e9 = 13,400 tokens a second; 1,000 to 10,000 is the range.
- The others train 0.4 x 989e12 / (6 x 8e9) = 8,240 tokens a second each (6 FLOPs for each weight and token, MFU 0.4).
- Weights go once to each machine of 8 GPUs that samples, one machine after the other, at 50 GB/s (400 Gb/s).
- Tools and judges take no time. A processor core is worth one of those that the costs were measured on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sharpen.learning.schedule import Action, Counters, Schedule

GPUS = (8, 64, 512, 4096)
TOKENS_PER_S, RANGE = 3000, (1000, 10_000)
SAMPLING, PER_GPU = 0.75, 64
TRAINED_PER_S = 0.4 * 989e12 / (6 * 8e9)
WEIGHT_BYTES, BANDWIDTH, PER_MACHINE = 16e9, 50e9, 8
STYLES = {
    "synchronous": Schedule(style="fixed", interval=1, offset=0, max_behind=0),
    "fully_async": Schedule(style="fully_async", interval=1, offset=0, max_behind=2),
}
STEPS = 50


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Of a rollout: its calls, sampled tokens in all, CPU seconds in a rollout worker and engine process, CPU seconds
    that the coordinator takes to receive it, its part of the seconds between the last rollout and the next batch
    (journal, draw, audit, record), bytes of the journal. `alone`: CPU seconds of all of it in one process."""

    calls: int
    tokens: int
    worker_s: float
    receive_s: float
    step_s: float
    journal_bytes: float
    alone_s: float


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What so many GPUs need. `alone`, `coordinator`: cores' worth of work that one process and its one interpreter
    lock must do, without workers and with them: above 1 it is what bounds the run. `step_s`, `weights_s`: the seconds
    of each step that no rollout takes part in. `kept`: the speed by style, as a part of that without all these
    costs."""

    gpus: int
    calls_per_s: float
    alone: float
    coordinator: float
    worker_cores: float
    journal_mb_per_s: float
    step_s: float
    weights_s: float
    kept: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Seconds of a step's parts: its rollouts, what the coordinator does with them, the training, the weights."""

    rollouts: float
    step: float
    train: float
    weights: float


def needs(costs: Costs, gpus: int, tokens_per_s: float = TOKENS_PER_S) -> Needs:
    """Return what so many GPUs need to be busy."""
    sampling = gpus * SAMPLING
    rollouts = sampling * PER_GPU
    rollouts_per_s = sampling * tokens_per_s / costs.tokens
    free = Durations(
        rollouts=rollouts / rollouts_per_s,
        step=0.0,
        train=rollouts * costs.tokens / (gpus * (1 - SAMPLING) * TRAINED_PER_S),
        weights=0.0,
    )
    real = replace(
        free,
        rollouts=max(free.rollouts, rollouts * costs.receive_s),
        step=rollouts * costs.step_s,
        weights=max(1.0, sampling / PER_MACHINE) * WEIGHT_BYTES / BANDWIDTH,
    )
    coordinator = rollouts_per_s * (costs.receive_s + costs.step_s)
    least = STEPS * rollouts * (costs.receive_s + costs.step_s)  # one lock, also where receiving and the rest overlap
    return Needs(
        gpus=gpus,
        calls_per_s=rollouts_per_s * costs.calls,
        alone=rollouts_per_s * (costs.alone_s + costs.step_s),
        coordinator=coordinator,
        worker_cores=rollouts_per_s * costs.worker_s,
        journal_mb_per_s=rollouts_per_s * costs.journal_bytes / 1e6,
        step_s=real.step,
        weights_s=real.weights,
        kept={name: seconds(style, free) / max(seconds(style, real), least) for name, style in STYLES.items()},
    )


def seconds(schedule: Schedule, took: Durations) -> float:
    """Return the seconds of `STEPS` steps: the coordinator does what the schedule says, one thing after the other,
    beside rollouts of batches that share the sampling GPUs in their order."""
    now = free_at = 0.0
    flights: deque[float] = deque()
    begun = trained = synced = 0
    while trained < STEPS or synced < trained:
        action = schedule.next(
            Counters(
                total=STEPS,
                begun=begun,
                trained=trained,
                synced=synced,
                ready=bool(flights) and flights[0] <= now,
                idle=not flights or flights[-1] <= now,
            )
        )
        if action is Action.BEGIN:
            free_at = max(now, free_at) + took.rollouts
            flights.append(free_at)
            begun += 1
        elif action is Action.SYNC:
            now += took.weights
            synced = trained
        elif action is Action.TRAIN:
            flights.popleft()
            now += took.step + took.train
            trained += 1
        else:
            now = flights[0] if flights[0] > now else flights[-1]
    return now


def ends_at(load: float, gpus: int) -> float:
    """Return the number of GPUs at which a load that grows with them is one core's worth."""
    return gpus / load


def rows(costs: Costs) -> list[tuple[object, ...]]:
    """Return a line for each number of GPUs."""
    found = []
    for gpus in GPUS:
        need = needs(costs, gpus)
        found.append(
            (
                f"{costs.calls} x {costs.tokens // costs.calls}: {gpus} GPUs",
                *(need.calls_per_s, need.alone, need.coordinator, need.worker_cores, need.journal_mb_per_s),
                *(need.step_s, need.weights_s, *need.kept.values()),
            )
        )
    return found


HEADER = (
    *("calls x tokens", "calls/s", "one process", "coordinator", "worker cores", "journal MB/s", "step s", "weights s"),
    *(f"kept, {name}" for name in STYLES),
)


def ends(costs: Costs) -> list[tuple[object, ...]]:
    """Return a line for each assumed speed: the GPUs at which one process, and the coordinator, have a core's worth to
    do."""
    shape = f"{costs.calls} x {costs.tokens // costs.calls}"
    return [
        (f"{shape}: {speed} tokens/s a GPU", ends_at(need.alone, 8), ends_at(need.coordinator, 8))
        for speed in (RANGE[0], TOKENS_PER_S, RANGE[1])
        for need in [needs(costs, 8, speed)]
    ]


ENDS_HEADER: Sequence[str] = ("calls x tokens", "one process ends at GPUs", "the coordinator ends at GPUs")
