"""Machines and GPUs in a Trinity-RFT file: its section `cluster`, and what its engines take of it.

In: a draft with every key that the file gives. Out: the draft, with those answered for. A file for one machine runs in
one process, as it does without Ray; one that names a Ray, or several machines, runs with `execution: ray`, where
engines have their GPUs and the trainer the rest, as there.
"""

from __future__ import annotations

from sharpen.compat.trinity.yaml.draft import Draft, is_one_of
from sharpen.compat.trinity.yaml.functions import SUPERVISED

_GPUS, _RANKS, _ENGINES = "cluster.gpu_per_node", "cluster.trainer_gpu_num", "explorer.rollout_model"
_OF_ENGINES = {"engine_num": "model.inference_engine_num", "tensor_parallel_size": "model.tensor_parallel_size"}
_ONE_PROCESS = "a file for one machine runs in one process; with cluster.ray_address: auto it counts (docs/use/ray.md)"


def ray(draft: Draft, *, installed: bool) -> None:
    """The Ray to join; several machines are one that runs already. Without Ray on this machine (`installed`) the run is
    on this machine alone."""
    key, several = "cluster.ray_address", "cluster.node_num"
    address, nodes = draft.get(key), draft.get(several)
    if is_one_of(address, ("", None)):
        address, key = ("auto" if nodes is not None and nodes > 1 else None), several
    if address is not None and not installed:
        keys = [key, *(name for name in (_RANKS,) if name in draft.given)]
        draft.say("Ray is not installed: the run is on this machine, in one process (docs/use/ray.md)", *keys)
        draft.given.pop(_RANKS, None)
    elif address is not None:
        draft.set("execution", "ray", key)
        draft.set("cluster.ray_address", address, key)


def gpus(draft: Draft) -> None:
    """Engines, their GPUs, and the trainer's ranks, when the rest is known."""
    ranks = draft.get(_RANKS)
    if ranks:
        draft.move(_RANKS, "trainer.num_processes")
    if draft.tree.get("execution") != "ray":
        draft.idle(_ONE_PROCESS, *(f"{_ENGINES}.{name}" for name in _OF_ENGINES), _GPUS)
        return
    for name, place in _OF_ENGINES.items():
        draft.move(f"{_ENGINES}.{name}", place)
    each = draft.get(_GPUS)
    if ranks:
        draft.idle("cluster.trainer_gpu_num comes first", _GPUS)
    elif each and not draft.evaluate_only and draft.given.get("mode") != "colocate":
        total, taken = each * (draft.get("cluster.node_num") or 1), _taken(draft)
        if taken >= total:
            draft.refuse(_GPUS, f"of {total} GPUs the engines need {taken}, so that none is left for the trainer")
        draft.set("trainer.num_processes", total - taken, _GPUS)
        draft.say(f"of {total} GPUs the engines have {taken}, the trainer has the rest (trainer.num_processes)", _GPUS)


def _taken(draft: Draft) -> int:
    """GPUs of the engines: those of auxiliary models count, as there."""
    if draft.trains_by(SUPERVISED):
        return 0
    models = range(draft.lengths.get("explorer.auxiliary_models", 0))
    auxiliary = [f"explorer.auxiliary_models[{index}]" for index in models]
    here = [one for one in auxiliary if draft.given.get(f"{one}.engine_type") != "external"]
    numbers = [[draft.given.get(f"{one}.{name}") or 1 for name in _OF_ENGINES] for one in (_ENGINES, *here)]
    return sum(count * width for count, width in numbers)
