"""The memory of an engine: its weights, and the keys and values of the sequences it computes.

In: a case, an engine's settings, its model's sizes. Out: bytes. The embedded engine adds slots and lengthens them on
demand, vLLM takes its blocks at the start; both stay within the same budget.
"""

from __future__ import annotations

from dataclasses import dataclass

from sharpen.config.public import TunerModelConfig
from sharpen.engine.embedded.kv import LENGTH_BUCKET, bucketed
from sharpen.engine.embedded.states import SNAPSHOT_SHARE
from sharpen.run.plan.case import Case
from sharpen.run.plan.sizes import Sizes

FIRST_SLOTS, FIRST_LENGTH = 32, 4 * LENGTH_BUCKET
STEP_TOKENS = 2048
"""The most prompt tokens that a step computes on a CPU."""
_EVALUATED = 512
"""The most tasks that are held out for evaluation."""
_COPIES_OF_LOGITS = 3
"""The logits, their logarithms, and the values that sampling derives from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNeed:
    """Bytes on one device of one engine. `fused` is a second copy of some projections: on a CPU the mapped weight file
    stays in memory as well. `states` are those of recurrent layers and their snapshots; `routes`, in the host's memory,
    the experts of all tokens that are being computed."""

    weights: int
    fused: int
    kv_cache: int
    states: int
    routes: int
    step: int


def engine_need(case: Case, model: TunerModelConfig, sizes: Sizes, *, vllm: bool, trained: bool) -> EngineNeed:
    """Return what the engine that serves `model` needs. `trained`: it is the model that is trained."""
    itemsize = 2 if case.serves_in_bfloat16 else 4
    num_shares = 1 if case.on_cpu else model.tensor_parallel_size
    lora = case.config.trainer.lora if trained else None
    weights = itemsize * sizes.held // num_shares
    if lora is not None and lora.base == "nf4":
        weights += nf4_bytes(case.num_in_base) - itemsize * case.num_in_base
    with_adapters = trained and case.num_in_base > 0  # they are served by the model's own modules
    rows = in_flight(case)
    per_token = (3 * sizes.intermediate_size + 6 * sizes.hidden_size) * itemsize
    kv_cache, states = _kv_cache(case, model, sizes, itemsize, weights, vllm=vllm)
    return EngineNeed(
        weights=weights,
        fused=itemsize * sizes.fused if case.on_cpu and itemsize == 4 and not vllm and not with_adapters else 0,
        kv_cache=kv_cache // num_shares,
        states=states // num_shares,
        routes=sizes.routes * rows * slot_length(case.workload.longest, model.max_model_len),
        step=rows * sizes.vocab_size * 4 * _COPIES_OF_LOGITS + (rows + STEP_TOKENS) * per_token,
    )


def nf4_bytes(count: int) -> int:
    """Return what so many weights take in 4 bits: half a byte, and a scale of one byte for each 64 of them."""
    return count // 2 + count // 64


def in_flight(case: Case) -> int:
    """Return the most sequences that the engine computes at the same time: those of a step, or of an evaluation."""
    config, evaluation = case.config, case.config.evaluation
    evaluates = evaluation.before_and_after and (evaluation.hold_out or config.eval_dataset is not None)
    evaluated = (evaluation.max_tasks or _EVALUATED) if evaluates else 0
    wanted = max(case.workload.sequences if case.workload.generates else 1, evaluated)
    return min(wanted, config.engine.max_slots, config.rollout.max_concurrent_rollouts)


def slot_length(longest: int, max_model_len: int) -> int:
    """Return the positions of a slot after the longest sequence: slots grow by half, in buckets, up to the limit."""
    length, limit = min(FIRST_LENGTH, bucketed(max_model_len)), bucketed(max_model_len)
    while length < min(longest, limit):
        length = min(limit, bucketed(max(length + 1, length + length // 2)))
    return length


def _kv_cache(
    case: Case, model: TunerModelConfig, sizes: Sizes, itemsize: int, weights: int, *, vllm: bool
) -> tuple[int, int]:
    """Return the bytes of the KV cache and of recurrent states, of all shares together. The budget of both is
    `kv_cache_mb`, else a quarter of what is free when the engine starts."""
    limit_mb, max_slots = case.config.engine.kv_cache_mb, case.config.engine.max_slots
    budget = limit_mb * 2**20 if limit_mb is not None else max(0, case.hardware.memory_bytes - weights) // 4
    per_position, state = sizes.kv_bytes(itemsize), sizes.state_bytes(itemsize)
    if vllm:
        kv_cache, states = max_slots * model.max_model_len * per_position, max_slots * state
        return min(kv_cache, max(0, budget - states)), min(states, budget)
    snapshots = budget // SNAPSHOT_SHARE // state if state else 0
    kv_per_slot = per_position * slot_length(case.workload.longest, model.max_model_len)
    wanted = in_flight(case)
    if not case.on_cpu:  # a GPU allocates memory that is never touched, too
        wanted = min(max_slots, max(FIRST_SLOTS, 2 ** (wanted - 1).bit_length()))
    count = max(1, min(wanted, (budget - snapshots * state) // max(1, kv_per_slot + state)))
    taken = min(snapshots, 2 * case.workload.sequences)  # one where a prompt ends, one where a call does
    return (count + 1) * kv_per_slot, (count + taken) * state
