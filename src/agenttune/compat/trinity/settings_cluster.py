"""Machines in a Trinity-RFT file: its section `cluster`.

In: a draft, a key and its value. Out: the draft. A file for one machine runs in one process, as it does without Ray;
one that names a Ray, or several machines, runs with `execution: ray`, where GPUs are counted by role and checked.
"""

from __future__ import annotations

from agenttune.compat.trinity.settings_draft import Draft, Rule, idle, is_one_of

_COUNTED = "GPUs are counted by role in the cluster that is there (docs/ray.md)"
_PLACED = "Ray places the trainer's ranks (cluster.trainer_gpu_num says how many)"
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


def rules() -> dict[str, Rule]:
    """The section's keys."""
    counted = ("gpu_per_node", "total_gpu_num", "rollout_gpu_num", "auxiliary_model_gpu_num", "explorer_gpu_num")
    return {
        "ray_address": ray_address,
        "node_num": node_num,
        "trainer_gpu_num": trainer_gpu_num,
        **dict.fromkeys(counted, idle(_COUNTED)),
        **dict.fromkeys(("trainer_node_num", "trainer_gpu_num_per_node"), idle(_PLACED)),
    }
