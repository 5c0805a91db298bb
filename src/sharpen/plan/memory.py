"""What each device of a run holds at its fullest, role by role.

In: a run's configuration, the sizes of its models, the devices, the lengths of a step. Out: `Place`s: for each kind of
device the items it always holds, and those of the phase that needs the most. The rules are those of the code:

    weights of a trained model      4 bytes a parameter (fp32), whatever it is computed in; a reference or teacher too
    gradients, AdamW's two moments  4 and 8 bytes a trained parameter
    activations                     of the largest micro-batch: `live.pass_bytes`
    engine                          its weights in its own type, or the trainer's own where both can be one; keys and
                                    values of the slots in use, within the budget

Several trainer processes share out weights, gradients and moments (FSDP2), not activations; with `cpu_offload` these
lie in the host's memory. An engine over several GPUs shares out weights and KV.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from sharpen.algorithm.resolve import algorithm_of
from sharpen.algorithm.supervised import SUPERVISED, resolve_supervised
from sharpen.config.run import RunConfig
from sharpen.plan.engine import engine_need
from sharpen.plan.hardware import GIB, Hardware
from sharpen.plan.live import Pass, pass_bytes
from sharpen.plan.sizes import Sizes
from sharpen.plan.workload import Workload
from sharpen.sync.schedule import Schedule
from sharpen.trainer.scores import MAX_LOGITS
from sharpen.trainer.step_start import SHARE

When = Literal["always", "loading", "training", "generating", "syncing"]

PROCESS = "process and libraries"
PROCESS_BYTES = GIB // 2
"""Python with its libraries, measured on Linux. On a GPU: CUDA's context and libraries, assumed."""
SLACK = 0.05
"""Share that the allocator loses to gaps, on top of everything: measured on a CPU, assumed on a GPU."""
ERROR = 0.15
"""Share by which memory was wrong, at most, in the runs that were measured (docs/use/plan.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The models of a run: the one that is tuned, its teacher, the auxiliary ones that are served here. `config` is the
    first one's Hugging Face configuration."""

    config: Any
    policy: Sizes
    teacher: Sizes | None = None
    auxiliary: Mapping[str, Sizes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """What an algorithm needs beside the policy, and whether anything generates."""

    reference: bool
    critic: bool
    teacher: bool
    entropy: bool
    engine: bool

    @classmethod
    def of(cls, config: RunConfig) -> Roles:
        """Of a run. Raises `ConfigError` as the run would."""
        name = config.algorithm.algorithm_type
        if name in SUPERVISED:
            supervised = resolve_supervised(name, config.loss)
            return cls(
                reference=supervised.needs_reference,
                critic=False,
                teacher=False,
                entropy=False,
                engine=config.workflow is not None,
            )
        algorithm = algorithm_of(config)
        return cls(
            reference=algorithm.needs_reference,
            critic=algorithm.needs_critic,
            teacher=algorithm.needs_teacher,
            entropy=algorithm.needs_entropy,
            engine=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Bytes of one role, and when they are held."""

    role: str
    num_bytes: int
    when: When = "always"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One device among `count` that hold the same."""

    name: str
    count: int
    capacity: int
    items: tuple[Item, ...]

    @property
    def peak(self) -> int:
        """The most at once: what is always there, and the phase that adds most. On top the allocator's gaps."""
        return int(self.phase_peak * (1 + SLACK))

    @property
    def phase_peak(self) -> int:
        """The same without gaps."""
        held = {when: sum(i.num_bytes for i in self.items if i.when == when) for when in _WHEN}
        return held.pop("always") + max(held.values())

    @property
    def fits(self) -> bool:
        """Whether it has room for its peak."""
        return self.peak <= self.capacity


_WHEN: tuple[When, ...] = get_args(When)


def computes_bfloat16(dtype: str, hardware: Hardware) -> bool:
    """What a `dtype` setting means on a device."""
    return dtype == "bfloat16" or (dtype == "auto" and hardware.kind == "cuda")


def places(
    config: RunConfig,
    models: Models,
    hardware: Hardware,
    workload: Workload,
    *,
    vllm: bool = False,
    certain: bool = False,
) -> tuple[Place, ...]:
    """Every kind of device that the run uses. `vllm` serves the model, or else the embedded engine; `certain` takes
    only what is quickly known and sure: weights, gradients and moments."""
    roles = Roles.of(config)
    num_trainers, num_engines = num_processes(config), num_engine_devices(config) if roles.engine else 0
    training = _trainer_items(config, models, roles, hardware)
    if is_offloaded(config, hardware):
        training = []
    if not certain:
        training += _gathered(config, models, hardware)
        training += _activations(config, models, roles, hardware, workload)
    process = [] if certain else [Item(role=PROCESS, num_bytes=PROCESS_BYTES)]
    serving: list[Item] = []
    if roles.engine:
        serving = _engine_items(config, models, hardware, workload, certain=certain, vllm=vllm)
    moving = _moving(config, models, hardware, vllm=vllm) if serving and not certain else []
    if hardware.kind == "cpu":  # one memory for all processes
        every = [replace(item, num_bytes=num_trainers * item.num_bytes) for item in [*process, *training]]
        held = [*every, *serving, *moving]
        start = [] if certain else _step_start(config, held, hardware)
        return (_place("this machine", 1, hardware, [*held, *start]),)
    if serving and not is_colocated(config):
        trainers = _place("trainer", num_trainers, hardware, [*process, *training, *moving])
        return trainers, _place("engine", num_engines, hardware, [*process, *serving])
    name, count = "trainer and engine" if serving else "trainer", max(num_trainers, num_engines)
    return (_place(name, count, hardware, [*process, *training, *serving, *moving]),)


def _step_start(config: RunConfig, held: Sequence[Item], hardware: Hardware) -> list[Item]:
    """The copy of weights and moments that a step of several updates keeps beside what is held (`trainer.step_start`),
    if there is room for it."""
    if config.trainer.num_minibatches * config.trainer.epochs == 1:
        return []
    num_bytes = 3 * sum(item.num_bytes for item in held if item.role.endswith("AdamW moments")) // 2
    lasting = sum(i.num_bytes for i in held if i.when == "always" or i.role.endswith("gradients"))
    if num_bytes > SHARE * (hardware.memory_bytes - lasting):
        return []
    return [Item(role="start of a step, to go back to", num_bytes=num_bytes, when="training")]


def num_processes(config: RunConfig) -> int:
    """Processes that train together."""
    return config.trainer.num_processes


def num_engine_devices(config: RunConfig) -> int:
    """Devices of all replicas of the engine."""
    return config.model.tensor_parallel_size * config.model.inference_engine_num


def shares_weights(config: RunConfig, hardware: Hardware, *, vllm: bool) -> bool:
    """Whether the policy lives in the engine's memory: one type, one process, and never both at work."""
    alone = not config.trainer.has_ranks and num_engine_devices(config) == 1
    same = config.trainer.lora is None and not computes_bfloat16(config.engine.dtype, hardware)
    learns_from_rows = config.algorithm.algorithm_type in SUPERVISED
    alone = alone and not vllm and not config.uses_ray
    return alone and same and not learns_from_rows and not Schedule.of(config).overlaps


def is_offloaded(config: RunConfig, hardware: Hardware) -> bool:
    """Whether what is trained lies in the host's memory instead of the device's."""
    return config.trainer.cpu_offload and hardware.kind == "cuda"


def offloaded_bytes(config: RunConfig, models: Models, hardware: Hardware) -> int:
    """What the host then holds, of all processes together."""
    if not is_offloaded(config, hardware):
        return 0
    items = _trainer_items(config, models, Roles.of(config), hardware)
    return num_processes(config) * sum(item.num_bytes for item in items)


def is_colocated(config: RunConfig) -> bool:
    """Whether trainer and engine share devices: always where Ray does not place them."""
    return not config.uses_ray or config.cluster.colocate


def _place(name: str, count: int, hardware: Hardware, items: Sequence[Item]) -> Place:
    return Place(
        name=name,
        count=count,
        capacity=hardware.memory_bytes,
        items=tuple(item for item in items if item.num_bytes > 0),
    )


def _trainer_items(config: RunConfig, models: Models, roles: Roles, hardware: Hardware) -> list[Item]:
    """Weights, gradients and moments of one of the processes that train."""
    num_shares = num_processes(config)
    sizes, lora = models.policy, config.trainer.lora
    trained = sizes.parameters if lora is None else sizes.lora_parameters(lora)
    frozen = 0 if lora is None else sizes.parameters
    in_bfloat16 = lora is not None and computes_bfloat16(config.trainer.dtype, hardware)
    rounded = sizes.block_linear if in_bfloat16 else 0

    def share(num_bytes: int) -> int:
        return -(-num_bytes // num_shares)

    items = [
        Item(role="policy: weights", num_bytes=share(4 * (trained + frozen) - 2 * rounded)),
        Item(role="policy: AdamW moments", num_bytes=share(8 * trained)),
        Item(role="policy: gradients", num_bytes=share(4 * trained), when="training"),
    ]
    if roles.reference and lora is None:
        items.append(Item(role="reference: weights", num_bytes=share(4 * sizes.parameters)))
    if roles.critic:
        unused = 0 if sizes.tied else sizes.vocabulary
        items += [
            Item(role="critic: weights", num_bytes=share(4 * sizes.parameters)),
            Item(role="critic: AdamW moments", num_bytes=share(8 * (sizes.parameters - unused))),
            Item(role="critic: gradients", num_bytes=share(4 * (sizes.parameters - unused)), when="training"),
        ]
    if roles.teacher and models.teacher is not None:
        items.append(Item(role="teacher: weights", num_bytes=share(4 * models.teacher.parameters)))
    return items


def _gathered(config: RunConfig, models: Models, hardware: Hardware) -> list[Item]:
    """What a process of several holds beside its part: the vocabulary's tables in fp32 and two layers in the type that
    they compute in, while it computes; and each model whole while it is read."""
    if num_processes(config) == 1 and not is_offloaded(config, hardware):
        return []
    sizes = models.policy
    itemsize = 2 if computes_bfloat16(config.trainer.dtype, hardware) else 4
    tables = sizes.vocabulary * (1 if sizes.tied else 2)
    layer = (sizes.parameters - tables) // sizes.num_layers
    items = [Item(role="gathered weights", num_bytes=4 * tables + 2 * layer * itemsize, when="training")]
    if hardware.kind == "cuda" and not is_offloaded(config, hardware):
        items.append(Item(role="a model, read whole", num_bytes=4 * sizes.parameters, when="loading"))
    return items


def _moving(config: RunConfig, models: Models, hardware: Hardware, *, vllm: bool) -> list[Item]:
    """Copies of weights on their way to the engine: adapters leave as merged layers; vLLM gets a file in the machine's
    memory."""
    items = []
    if config.trainer.lora is not None:
        itemsize = 2 if computes_bfloat16(config.trainer.dtype, hardware) else 4
        items.append(Item(role="merged weights", num_bytes=itemsize * models.policy.block_linear, when="syncing"))
    if vllm and hardware.kind == "cpu":
        itemsize = 2 if computes_bfloat16(config.engine.dtype, hardware) else 4
        items.append(Item(role="file of weights for vLLM", num_bytes=itemsize * models.policy.parameters))
    return items


def _activations(config: RunConfig, models: Models, roles: Roles, hardware: Hardware, workload: Workload) -> list[Item]:
    """Of the largest micro-batch, beyond the gradients that are counted on their own."""
    sizes, lora = models.policy, config.trainer.lora
    of_update = workload.computed_tokens / config.trainer.num_minibatches / num_processes(config)
    limit = config.trainer.max_tokens_per_micro_batch
    of_pair = workload.answer_tokens if config.algorithm.algorithm_type == "dpo" else 0  # both answers go together
    num_tokens = max(2, round(max(min(of_update, limit), workload.longest + of_pair)))
    accumulates = of_update >= 2 * limit
    traced = Pass(
        num_tokens=num_tokens,
        num_loss_tokens=max(1, round(num_tokens * workload.loss_tokens / workload.computed_tokens)),
        bfloat16=computes_bfloat16(config.trainer.dtype, hardware),
        checkpointing=config.trainer.gradient_checkpointing,
        entropy_gradient=roles.entropy,
        lora=lora,
        accumulates=accumulates,
        flash=hardware.kind == "cuda" and computes_bfloat16(config.trainer.dtype, hardware),
        max_logits=MAX_LOGITS if hardware.kind == "cpu" else max(MAX_LOGITS, hardware.memory_bytes // 256),
    )
    found = pass_bytes(models.config, traced)
    if not accumulates:  # gradients that come to be within the pass are in it
        trained = sizes.parameters if lora is None else sizes.lora_parameters(lora)
        found = max(0, found - 4 * trained // num_processes(config))
    return [Item(role=f"activations of {num_tokens:,} tokens", num_bytes=found, when="training")]


def _engine_items(
    config: RunConfig, models: Models, hardware: Hardware, workload: Workload, *, certain: bool, vllm: bool
) -> list[Item]:
    """Of one device of the engine, and of the auxiliary models' engines beside it. On a CPU all replicas are in one
    memory."""
    served = {"engine": (config.model, models.policy)}
    served |= {f"auxiliary {name}": (config.auxiliary_models[name], one) for name, one in models.auxiliary.items()}
    items = []
    for name, (model, sizes) in served.items():
        copies = model.inference_engine_num if hardware.kind == "cpu" else 1
        need = engine_need(config, model, sizes, hardware, workload, vllm=vllm and name == "engine")
        if name != "engine" or not shares_weights(config, hardware, vllm=vllm):
            items.append(Item(role=f"{name}: weights", num_bytes=copies * need.weights))
        if not certain:
            items += [
                Item(role=f"{name}: fused projections", num_bytes=copies * need.fused),
                Item(role=f"{name}: KV cache", num_bytes=copies * need.kv_cache),
                Item(role=f"{name}: one step", num_bytes=copies * need.step, when="generating"),
            ]
    return items
