"""Machines and GPUs in a Trinity-RFT file: its section `cluster`, and what its engines take of it.

In: a draft, a key and its value. Out: the draft. A file for one machine runs in one process, as it does without Ray;
one that names a Ray, or several machines, runs with `execution: ray`, where engines have their GPUs and the trainer the
rest, as there.
"""

from __future__ import annotations

from sharpen.compat.trinity.yaml.draft import Draft, Rule, idle, is_one_of, later
from sharpen.compat.trinity.yaml.rows import applies

_GPUS, _ENGINES = "cluster.gpu_per_node", "explorer.rollout_model"
_OF_ENGINES = {"engine_num": "model.inference_engine_num", "tensor_parallel_size": "model.tensor_parallel_size"}
_ONE_PROCESS = "a file for one machine runs in one process; with cluster.ray_address: auto it counts (docs/use/ray.md)"
_NO_ADDRESS = ("", None)


def ray_address(draft: Draft, key: str, value: object) -> None:
    """The Ray to join."""
    if is_one_of(value, _NO_ADDRESS):
        draft.same(key)
        return
    draft.set("execution", "ray", key)
    draft.set("cluster.ray_address", value, key)


def node_num(draft: Draft, key: str, value: object) -> None:
    """Several machines are a Ray that runs already."""
    number = draft.whole(key)
    if number is None or number < 2:
        draft.same(key)
    elif is_one_of(draft.given.get("cluster.ray_address"), _NO_ADDRESS):
        draft.set("execution", "ray", key)
        draft.set("cluster.ray_address", "auto", key)
    else:
        draft.same(key)


def trainer_gpu_num(draft: Draft, key: str, value: object) -> None:
    """Ranks of the trainer, one for each of its GPUs."""
    number = draft.whole(key)
    if number is not None and number > 0:
        draft.set("trainer.num_processes", number, key)
    elif number is not None:
        draft.same(key)


def gpus(draft: Draft) -> None:
    """Engines, their GPUs, and the trainer's ranks, when the rest is known."""
    given = {key: place for name, place in _OF_ENGINES.items() if (key := f"{_ENGINES}.{name}") in draft.given}
    if draft.tree.get("execution") != "ray":
        for key in (*given, *([_GPUS] if _GPUS in draft.given else [])):
            draft.idle(key, _ONE_PROCESS)
        return
    for key, place in given.items():
        draft.set(place, draft.given[key], key)
    each, nodes = draft.whole(_GPUS), draft.whole("cluster.node_num") or 1
    draft.same(_GPUS)
    if not each or draft.evaluate_only or draft.given.get("mode") == "colocate":
        return
    if "num_processes" in draft.tree.get("trainer", {}):
        draft.idle(_GPUS, "cluster.trainer_gpu_num comes first")
        return
    total, taken = nodes * each, _taken(draft)
    if taken >= total:
        draft.refuse(_GPUS, f"of {total} GPUs the engines need {taken}, so that none is left for the trainer")
    draft.set("trainer.num_processes", total - taken, _GPUS)
    draft.say(f"of {total} GPUs the engines have {taken}, the trainer has the rest (trainer.num_processes)", _GPUS)


def _taken(draft: Draft) -> int:
    """GPUs of the engines: those of auxiliary models count, as there."""
    if applies(draft):
        return 0
    models = range(draft.lengths.get("explorer.auxiliary_models", 0))
    auxiliary = [f"explorer.auxiliary_models[{index}]" for index in models]
    here = [one for one in auxiliary if draft.given.get(f"{one}.engine_type") != "external"]
    numbers = [[draft.whole(f"{one}.{name}") or 1 for name in _OF_ENGINES] for one in (_ENGINES, *here)]
    return sum(count * width for count, width in numbers)


def rules() -> dict[str, Rule]:
    """The section's keys."""
    itself = ("total_gpu_num", "rollout_gpu_num", "auxiliary_model_gpu_num", "explorer_gpu_num", "trainer_node_num")
    return {
        "ray_address": ray_address,
        "node_num": node_num,
        "gpu_per_node": later,
        "trainer_gpu_num": trainer_gpu_num,
        **dict.fromkeys((*itself, "trainer_gpu_num_per_node"), idle("Trinity-RFT fills it in itself")),
    }
