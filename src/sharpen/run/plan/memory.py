"""The peak memory of each device of a run, by role.

In: a `Case`. Out: a `DeviceMemory` for each kind of device: the items that it always holds, and those of the phase that
needs most. The rules follow the code:

    weights of a trained model      4 bytes a parameter (fp32), whatever it computes in; of a reference or teacher that
                                    computes in bfloat16, 2 a parameter of its linear layers and experts; under
                                    adapters, and of a reference, also of embeddings whose files are in bfloat16. A
                                    large reference on a CPU is there only while a step is scored
    gradients                       4 bytes a trained parameter
    average of them that teaches    4 bytes a trained parameter
    moments of the optimizer        8 bytes a trained parameter (AdamW), a little over 2 (its 8-bit kinds), or 4 (Muon;
                                    8 for embeddings and the output layer)
    activations                     of the largest micro-batch: `live.pass_bytes`; with `offload_activations` without
                                    the inputs of the layers; and the states with which sequences go on from what
                                    they share, in recurrent layers
    engine                          its weights in its own type, or the trainer's if both can share them; keys and
                                    values of the slots in use, recurrent states and their snapshots, within the budget;
                                    with `policies` the trained adapters and each snapshot of them beside its weights;
                                    in one process on a CPU, keys and values are given back before training, and what
                                    that has freed is given back before there are any again

Several trainer processes share weights, gradients and moments between them (FSDP2), but not activations; with
`cpu_offload` these are in the host's memory. An engine over several GPUs splits its weights and KV cache among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal, get_args

from sharpen.config.public import TunerModelConfig
from sharpen.engine.embedded.kv import BLOCK_LENGTH, bucketed, in_blocks
from sharpen.engine.embedded.states import SNAPSHOT_SHARE
from sharpen.evidence.certificate.gradient_probe import probe_bytes
from sharpen.learning.recipe import RolloutRecipe
from sharpen.learning.trainer.optimizer import LARGE_GRADIENTS
from sharpen.learning.trainer.reference import LARGE_COPY
from sharpen.learning.trainer.scores import MAX_LOGITS
from sharpen.learning.trainer.step_start import SHARE
from sharpen.run.plan.case import Case
from sharpen.run.plan.live import Pass, pass_bytes
from sharpen.run.plan.sizes import Sizes

FIRST_SLOTS = 32
# The memory of an engine: its weights, and the keys and values of the sequences it computes.
#
# In: a case, an engine's settings, its model's sizes. Out: bytes. The embedded engine adds slots and lengthens them on
# demand, vLLM takes its blocks at the start; both stay within the same budget.

STEP_TOKENS = 2048
"""The most prompt tokens that a step computes on a CPU."""
_EVALUATED = 512
"""The most tasks that are held out for evaluation."""
_COPIES_OF_LOGITS = 3
"""The logits, their logarithms, and the values that sampling derives from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNeed:
    """Bytes on one device of one engine. `states` are those of recurrent layers and their snapshots; `routes`, in the
    host's memory, the experts of all tokens that are being computed."""

    weights: int
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
    rows, blocks = in_flight(case), _in_blocks(case, sizes)
    per_token = (3 * sizes.intermediate_size + 6 * sizes.hidden_size) * itemsize
    kv_cache, states = _kv_cache(case, model, sizes, itemsize, weights, vllm=vllm)
    return EngineNeed(
        weights=weights,
        kv_cache=kv_cache // num_shares,
        states=states // num_shares,
        routes=sizes.routes * rows * slot_length(case.workload.longest, model.max_model_len, blocks=blocks),
        step=rows * sizes.vocab_size * 4 * _COPIES_OF_LOGITS + (rows + STEP_TOKENS) * per_token,
    )


def nf4_bytes(count: int) -> int:
    """Return what so many weights take in 4 bits: half a byte, and a scale of one byte for each 64 of them."""
    return count // 2 + count // 64


def in_flight(case: Case) -> int:
    """Return the most sequences that the engine computes at the same time: those of a step, or of an evaluation."""
    config, evaluation = case.config, case.config.evaluation
    evaluates = evaluation.before_and_after and (evaluation.hold_out or config.eval_dataset is not None)
    counted = case.workload.evaluated
    evaluated = (evaluation.max_tasks or _EVALUATED if counted is None else counted) if evaluates else 0
    wanted = max(case.workload.sequences if case.workload.generates else 1, evaluated)
    return min(wanted, config.engine.max_slots, config.rollout.max_concurrent_rollouts)


def _in_blocks(case: Case, sizes: Sizes) -> bool:
    return in_blocks(sizes.kv_values, 2 if case.serves_in_bfloat16 else 4, on_cpu=case.on_cpu)


def slot_length(longest: int, max_model_len: int, *, blocks: bool) -> int:
    """Return the positions of a slot after the longest sequence: in whole blocks; else slots grow by half, in buckets;
    up to the limit."""
    length, limit = min(BLOCK_LENGTH, bucketed(max_model_len)), bucketed(max_model_len)
    if blocks:
        return min(limit, -(-max(1, longest) // BLOCK_LENGTH) * BLOCK_LENGTH)
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
    blocks = _in_blocks(case, sizes)
    length = slot_length(case.workload.longest, model.max_model_len, blocks=blocks)
    kv_per_slot = per_position * length
    wanted = in_flight(case)
    if not case.on_cpu:  # a GPU allocates memory that is never touched, too
        wanted = min(max_slots, max(FIRST_SLOTS, 2 ** (wanted - 1).bit_length()))
    count = max(1, min(wanted, (budget - snapshots * state) // max(1, kv_per_slot + state)))
    taken = min(snapshots, 2 * case.workload.sequences)  # one where a prompt ends, one where a call does
    if blocks:  # they take memory where they are written
        return count * per_position * min(length, case.workload.longest), (count + taken) * state
    return (count + 1) * kv_per_slot, (count + taken) * state


def cache_mb(case: Case, slots: int) -> int:
    """Return the `engine.kv_cache_mb` with which so many of the longest sequences are computed at the same time."""
    sizes, itemsize = case.models.policy, 2 if case.serves_in_bfloat16 else 4
    state = sizes.state_bytes(itemsize)
    longest = sizes.kv_bytes(itemsize) * slot_length(
        case.workload.longest, case.config.model.max_model_len, blocks=_in_blocks(case, sizes)
    )
    num_bytes = slots * (longest + state) * (1 + (1 / (SNAPSHOT_SHARE - 1) if state else 0))
    return -(-int(num_bytes) // 2**20)


When = Literal["always", "loading", "comparing", "scoring", "training", "generating", "syncing"]
_WHEN: tuple[When, ...] = get_args(When)

PROCESS = "process and libraries"
PROCESS_BYTES = 540 * 2**20
"""Python with its libraries, measured on Linux. On a GPU: CUDA's context and libraries, assumed."""
KV_CACHE = "KV cache"
FILE = "the model's file, mapped"
COMPARED = "weights in 4 bits, to compare"
GAPS = "gaps between allocations"
SLACK: dict[str, tuple[float, float]] = {"cpu": (0.0, 0.45), "cuda": (0.05, 0.05)}
"""Share of memory that the allocator loses to gaps: (in long-lived memory, in temporary memory). The system's allocator
keeps freed blocks below 32 MB, and finds others too small. Measured on a CPU, assumed on a GPU."""
MARGIN = 0.1
"""The share of the predicted peak that is left free beside it."""
ERROR = 0.15
"""The relative error of predicted memory that is said. Runs that were measured had at most 0.1 (docs/use/plan.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Bytes of one role, and when they are held."""

    role: str
    num_bytes: int
    when: When = "always"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The memory of each of `count` equal devices."""

    name: str
    count: int
    capacity: int
    items: tuple[Item, ...]

    @property
    def peak(self) -> int:
        """The most bytes at once: those always held, and those of the phase that adds most."""
        held = {when: sum(item.num_bytes for item in self.items if item.when == when) for when in _WHEN}
        return held.pop("always") + max(held.values())

    @property
    def fits(self) -> bool:
        """Whether the device has room for its peak."""
        return self.peak <= self.capacity

    @property
    def has_room(self) -> bool:
        """Whether it has room for its peak and the margin."""
        return self.peak * (1 + MARGIN) <= self.capacity

    def without(self, when: When) -> DeviceMemory:
        """Return the same without what is held in a phase, which is left out where it does not fit."""
        return replace(self, items=tuple(item for item in self.items if item.when != when))


def places(case: Case, *, certain: bool = False) -> tuple[DeviceMemory, ...]:
    """Return the memory of every kind of device that the run uses. `certain` counts only what is quickly and exactly
    known: weights, gradients and moments."""
    process = [] if certain else [Item(role=PROCESS, num_bytes=PROCESS_BYTES)]
    training = [] if case.is_offloaded else list(_trainer_items(case))
    serving = list(engine_items(case, certain=certain)) if case.engine is not None else []
    moving: list[Item] = []
    if not certain:
        training += [*_gathered(case), _activations(case)]
        moving = list(_moving(case)) if serving else []
    if case.on_cpu:  # one memory for all processes
        trainers = [replace(item, num_bytes=case.num_trainers * item.num_bytes) for item in [*process, *training]]
        held = [*trainers, *serving, *moving]
        rest = [] if certain else [*_step_start(case, held), *_comparing(case)]
        devices = [("this machine", 1, [*held, *rest])]
    elif serving and not case.is_colocated:
        devices = [("trainer", case.num_trainers, [*process, *training, *moving])]
        devices.append(("engine", case.num_engines, [*process, *serving]))
    else:
        name, count = "trainer and engine" if serving else "trainer", max(case.num_trainers, case.num_engines)
        devices = [(name, count, [*process, *training, *serving, *moving])]
    found = [
        DeviceMemory(
            name=name,
            count=count,
            capacity=case.hardware.memory_bytes,
            items=tuple(item for item in (*items, *([] if certain else _gaps(case, items))) if item.num_bytes > 0),
        )
        for name, count, items in devices
    ]
    return tuple(
        place if place.has_room else min(place, place.without("comparing"), key=attrgetter("peak")) for place in found
    )


def offloaded_bytes(case: Case) -> int:
    """Return the bytes that all processes together keep in the host's memory instead of a GPU's."""
    return case.num_trainers * sum(item.num_bytes for item in _trainer_items(case)) if case.is_offloaded else 0


def _gaps(case: Case, items: Sequence[Item]) -> Iterator[Item]:
    lasting, temporary = SLACK[case.hardware.kind]
    for when in _WHEN:
        # from the system, and given back to it
        mapped = (KV_CACHE, FILE, *(("policy: gradients",) if _in_block(case) else ())) if case.on_cpu else ()
        whole = (*mapped, COMPARED)  # of the last nothing goes before all does
        held = sum(item.num_bytes for item in items if item.when == when and not item.role.endswith(whole))
        yield Item(role=GAPS, num_bytes=int((lasting if when == "always" else temporary) * held), when=when)


def _in_block(case: Case) -> bool:
    """Whether the gradients are in one block of memory (`trainer.optimizer`)."""
    return case.num_trainers == 1 and not case.is_offloaded and case.num_trained >= LARGE_GRADIENTS


def _trainer_items(case: Case) -> Iterator[Item]:
    """Yield weights, gradients and moments of one trainer process."""
    sizes, lora, recipe = case.models.policy, case.config.trainer.lora, case.recipe

    def item(role: str, num_bytes: int, when: When = "always") -> Item:
        return Item(role=role, num_bytes=-(-num_bytes // case.num_trainers), when=when)

    frozen = sizes.held - case.num_trained if lora is None else sizes.held
    rounded = sizes.block_linear + sizes.in_experts if lora is not None and case.trains_in_bfloat16 else 0
    if lora is not None and case.reads_rounded:
        rounded += sizes.tables
    yield item("policy: weights", 4 * (case.num_trained + frozen) - 2 * rounded - _saved_by_base(case))
    if lora is not None and case.num_in_base and not case.reads_by_layers:
        if not case.on_cpu:
            before = (2 if case.serves_in_bfloat16 else 4) * case.num_in_base - nf4_bytes(case.num_in_base)
            yield item("a model, read whole", before if lora.base == "nf4" else 0, "loading")  # by the engine
        elif lora.base == "shared" and case.reads_rounded and case.engine is not None:
            yield item(FILE, 2 * sizes.held, "loading")  # while the engine copies it: the trainer takes the engine's
        else:
            read_whole = 2 * sizes.held + 4 * sizes.vocabulary if case.reads_rounded else 4 * sizes.held
            yield item("a model, read whole", read_whole, "loading")
    yield item("policy: moments", moment_bytes(case, case.num_trained, case.num_in_tables))
    yield item("policy: gradients", 4 * case.num_trained, "training")
    if recipe.algorithm.needs_reference and lora is None:
        is_read_again = case.on_cpu and case.num_trainers == 1 and sizes.held >= LARGE_COPY
        num_bytes = _frozen_bytes(case, sizes, reads_rounded=case.reads_rounded)
        yield item("reference: weights", num_bytes, "scoring" if is_read_again else "always")
    if isinstance(recipe, RolloutRecipe) and recipe.algorithm.needs_critic:
        trained = sizes.parameters - (0 if sizes.tied else sizes.vocabulary)
        yield item("critic: weights", 4 * sizes.held)
        yield item("critic: moments", moment_bytes(case, trained, sizes.vocabulary))
        yield item("critic: gradients", 4 * trained, "training")
    if recipe.config.distill.own_decay is not None:
        yield item("teacher: average", 4 * case.num_trained)
    for name, teacher in case.models.teachers.items():
        yield item(f"teacher {name}".rstrip() + ": weights", _frozen_bytes(case, teacher))


def _frozen_bytes(case: Case, sizes: Sizes, *, reads_rounded: bool = False) -> int:
    """Return what a frozen model takes, whose linear layers and experts are rounded to the type that it computes
    in, and the embeddings too of one whose files are in it."""
    tables = sizes.tables if reads_rounded else 0 if sizes.tied else sizes.vocabulary
    rounded = sizes.block_linear + sizes.in_experts + tables
    return 4 * sizes.held - (2 * rounded if case.trains_in_bfloat16 else 0)


def _saved_by_base(case: Case) -> int:
    """Return what the trainer does not hold of its frozen weights: all that the engine has for both, or without an
    engine what 4 bits save."""
    lora, itemsize = case.config.trainer.lora, 2 if case.trains_in_bfloat16 else 4
    if not case.num_in_base or lora is None:
        return 0
    if case.engine is not None:
        tables = case.models.policy.tables if case.reads_rounded and case.serves_in_bfloat16 else 0
        return (case.num_in_base + case.models.policy.in_experts + tables) * itemsize
    return case.num_in_base * itemsize - nf4_bytes(case.num_in_base) if lora.base == "nf4" else 0


def moment_bytes(case: Case, trained: int, in_tables: int) -> int:
    """Return what the optimizer keeps for `trained` parameters, of which `in_tables` are embeddings and output layers:
    see `trainer.update_rules`. The few parameters of norms and biases are counted as the others."""
    kind = case.config.trainer.optimizer
    if kind == "muon":
        return 4 * (trained - in_tables) + 8 * in_tables
    return 8 * trained if kind == "adamw" else trained * 2 + trained * 8 // 256


def _step_start(case: Case, held: Sequence[Item]) -> list[Item]:
    """Return the copy of weights and moments that a step of several updates keeps for a rollback
    (`trainer.step_start`), if there is room for it."""
    if case.config.trainer.updates == 1:
        return []
    # the gradients are as large as the trained weights
    num_bytes = sum(item.num_bytes for item in held if item.role.endswith((": moments", ": gradients", ": average")))
    lasting = sum(i.num_bytes for i in held if i.when == "always" or i.role.endswith("gradients"))
    if num_bytes > SHARE * (case.hardware.memory_bytes - lasting):
        return []
    return [Item(role="start of a step, to go back to", num_bytes=num_bytes, when="training")]


def _comparing(case: Case) -> Iterator[Item]:
    """Yield what the certificate's plain loop takes to compare gradients, before training or in place of a step that
    cannot be made once more (`certificate.gradient_probe`)."""
    config, sizes = case.config, case.models.policy
    if not (config.check.gradients or config.certificate.retrain == "auto"):
        return
    block = 0 if sizes.experts or sizes.towers else (sizes.parameters - sizes.tables) // sizes.num_layers
    critics = isinstance(case.recipe, RolloutRecipe) and case.recipe.algorithm.needs_critic
    compared = 0 if config.trainer.lora is not None else sizes.parameters
    in_4_bits = case.num_in_base if config.trainer.lora is not None and config.trainer.lora.base == "nf4" else 0
    rounded = case.trains_in_bfloat16
    num_bytes = probe_bytes(sizes.held, block, compared, rounded=rounded)
    kept = probe_bytes(sizes.held, block, compared, rounded=rounded, in_4_bits=in_4_bits) - num_bytes
    if critics:
        num_bytes += probe_bytes(0, 0, sizes.parameters, rounded=rounded)
    for teacher in case.models.teachers.values():
        layer = (teacher.parameters - teacher.tables) // teacher.num_layers
        num_bytes += probe_bytes(teacher.held, layer, 0, rounded=rounded)
    yield Item(role="comparing gradients", num_bytes=num_bytes, when="comparing")
    yield Item(role=COMPARED, num_bytes=kept, when="comparing")


def _gathered(case: Case) -> Iterator[Item]:
    """Yield what one of several trainer processes holds in addition to its shard: while it computes, the vocabulary's
    tables in fp32 and two layers in their compute type; while it loads, each model whole."""
    if case.num_trainers == 1 and not case.is_offloaded:
        return
    sizes = case.models.policy
    layer = (sizes.parameters - sizes.tables) // sizes.num_layers
    two_layers = 2 * layer * (2 if case.trains_in_bfloat16 else 4)
    yield Item(role="gathered weights", num_bytes=4 * sizes.tables + two_layers, when="training")
    if not case.on_cpu and not case.is_offloaded:
        yield Item(role="a model, read whole", num_bytes=4 * sizes.held, when="loading")


def _moving(case: Case) -> Iterator[Item]:
    """Yield copies of weights on their way to the engine: adapters are sent as merged layers, unless it has the
    original ones beside them; vLLM gets a file in the machine's memory."""
    sizes = case.models.policy
    if case.config.trainer.lora is not None and not case.num_in_base and not case.config.policies:
        itemsize = 2 if case.trains_in_bfloat16 else 4
        merged = sizes.block_linear + (sizes.in_experts if case.config.trainer.lora.experts else 0)
        yield Item(role="merged weights", num_bytes=itemsize * merged, when="syncing")
    if case.vllm and case.on_cpu:
        itemsize = 2 if case.serves_in_bfloat16 else 4
        yield Item(role="file of weights for vLLM", num_bytes=itemsize * sizes.parameters)


def _activations(case: Case) -> Item:
    """Return the activations of the largest micro-batch, without the gradients that are counted as an item of their
    own."""
    config, work, recipe = case.config, case.workload, case.recipe
    update_tokens = work.computed_tokens / config.trainer.num_minibatches / case.num_trainers
    limit = config.trainer.max_tokens_per_micro_batch
    pair_tokens = work.answer_tokens if config.algorithm.algorithm_type == "dpo" else 0  # a pair is never split
    most = limit if work.longest <= limit else work.longest * 1.25  # as `trainer.packing.pack` has it
    num_tokens = max(2, round(max(min(update_tokens, most), work.longest + pair_tokens)))
    accumulates = update_tokens >= 2 * limit
    traced = Pass(
        num_tokens=num_tokens,
        num_loss_tokens=max(1, round(num_tokens * work.loss_tokens / work.computed_tokens)),
        bfloat16=case.trains_in_bfloat16,
        checkpointing=config.trainer.gradient_checkpointing,
        entropy_gradient=isinstance(recipe, RolloutRecipe) and recipe.algorithm.needs_entropy,
        lora=config.trainer.lora,
        accumulates=accumulates,
        flash=not case.on_cpu and case.trains_in_bfloat16,
        max_logits=MAX_LOGITS if case.on_cpu else max(MAX_LOGITS, case.hardware.memory_bytes // 256),
    )
    num_bytes = pass_bytes(case.models.config, traced)
    if config.trainer.offload_activations:  # one layer's input comes back at a time
        sizes = case.models.policy
        num_bytes = max(0, num_bytes - 4 * (sizes.num_layers - 1) * num_tokens * sizes.hidden_size)
    num_bytes += tree_states(case, num_tokens)
    if not accumulates:  # the pass then includes the gradients, which it creates
        num_bytes = max(0, num_bytes - 4 * case.num_trained // case.num_trainers)
    return Item(role=f"activations of {num_tokens:,} tokens", num_bytes=num_bytes, when="training")


def tree_states(case: Case, num_tokens: int) -> int:
    """Return the states with which the sequences of a micro-batch go on from what they share, in fp32, each with its
    gradient: of all recurrent layers, or of one at a time with gradient checkpointing."""
    work, states = case.workload, [4 * (one + other) for one, other in case.models.policy.states]
    separate = work.sequences * (work.prompt_tokens + work.answer_tokens)
    if not states or work.computed_tokens >= separate:  # nothing is shared
        return 0
    at_once = max(states) if case.config.trainer.gradient_checkpointing else sum(states)
    return int(2 * at_once * work.sequences * min(1.0, num_tokens / work.computed_tokens))


def engine_items(case: Case, *, certain: bool = False) -> Iterator[Item]:
    """Yield what one device of the engine, and of the auxiliary models' engines, holds. On a CPU all replicas share one
    memory."""
    served = {"engine": (case.config.model, case.models.policy)}
    for name, sizes in case.models.auxiliary.items():
        served[f"auxiliary {name}"] = (case.config.auxiliary_models[name], sizes)
    for name, (model, sizes) in served.items():
        copies = model.inference_engine_num if case.on_cpu else 1
        need = engine_need(case, model, sizes, vllm=case.vllm and name == "engine", trained=name == "engine")
        if name != "engine" or not case.shares_weights:
            yield Item(role=f"{name}: weights", num_bytes=copies * need.weights)
        elif sizes.towers:
            yield Item(role=f"{name}: towers", num_bytes=4 * sizes.towers)  # the text's weights are the trainer's
        if name == "engine" and (lora := case.config.trainer.lora) is not None and case.config.policies:
            snapshots = {policy.every for policy in case.config.policies.values()} - {None}
            each = (2 if case.serves_in_bfloat16 else 4) * sizes.lora_parameters(lora)
            yield Item(role="engine: adapters", num_bytes=(1 + len(snapshots)) * each)
        if not certain:
            rests = case.on_cpu and not case.vllm and name == "engine" and case.is_synchronous
            during: When = "generating" if rests else "always"  # it is given back before training
            yield Item(role=f"{name}: {KV_CACHE}", num_bytes=copies * need.kv_cache, when=during)
            yield Item(role=f"{name}: recurrent states", num_bytes=copies * need.states)
            if case.on_cpu:
                yield Item(role=f"{name}: experts of tokens", num_bytes=copies * need.routes)
            # on a CPU, memory freed by one thread is not reused by another: a step's memory stays with the engine
            when: When = "always" if case.on_cpu else "generating"
            yield Item(role=f"{name}: one step", num_bytes=copies * need.step, when=when)
