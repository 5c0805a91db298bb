"""How a Trinity-RFT file chooses among tasks or rows: its data selectors, and our orders.

In: a draft, the key of a selector's type. Out: the draft, with the selector's keys answered for.
"""

from __future__ import annotations

from typing import Any

from sharpen.compat.trinity.yaml.draft import Draft, is_one_of, shown
from sharpen.compat.trinity.yaml.rules import Rule, alternatives, answer_section, expanded, idle, to

_ORDERS = ("sequential", "shuffle", "random", "offline_easy2hard", "difficulty_based")
_BY_DIFFICULTY = "it belongs to a choice by difficulty"
_NEARLY_RANKED = 0.05
_RECENT = "a task is as difficult as its recent rewards in this run"


def selector_type(draft: Draft, key: str, value: Any) -> None:
    """In which order tasks come."""
    section = key.rpartition(".")[0]
    former = section.replace("data_selector", "task_selector")  # which wins there too
    is_known = value in ("difficulty_based", "offline_easy2hard")
    if former != section and f"{former}.selector_type" in draft.given:
        draft.idle(f"{former} comes first", key)
    elif value in _ORDERS and "eval_tasksets" in key:
        draft.idle("an evaluation runs all of its tasks", key)
    elif value == "offline_easy2hard":
        _easy_to_hard(draft, section)
    elif value == "difficulty_based" and "experience_buffer" not in key:
        _by_difficulty(draft, section)
        return
    elif is_known:
        draft.refuse(key, "it goes by rewards, and rows have none: use shuffle")
    elif draft.get(key) in _ORDERS:
        draft.set("sampling.order", "sequential" if value == "sequential" else "shuffled", key)
    else:
        draft.refuse(key, f"use {alternatives(_ORDERS)}")
    left = [f"{section}.{name}" for name in ("feature_keys", "kwargs")]
    draft.idle(_BY_DIFFICULTY, *(key for key in left if key in draft.unanswered()))


def of_selector(draft: Draft, key: str, value: Any) -> None:
    """An argument of a selector whose type is not given, else decided with the type."""
    if f"{key.rpartition('.')[0]}.selector_type" not in draft.given:
        draft.idle(_BY_DIFFICULTY, key)


def _easy_to_hard(draft: Draft, section: str) -> None:
    """Trinity-RFT begins with the greatest numbers, which are the easiest tasks there."""
    key = f"{section}.selector_type"
    features = draft.get(f"{section}.feature_keys")
    draft.get(key)
    if not isinstance(features, list) or len(features) != 1 or not isinstance(features[0], str):
        draft.wrong(
            f"{section}.feature_keys",
            f"is {shown(features)}: offline_easy2hard needs one field here, whose greatest numbers are the easiest",
        )
        return
    draft.set("sampling.order", "curriculum", key)
    draft.set("sampling.curriculum_key", f"-{features[0]}", f"{section}.feature_keys")
    draft.say(f"from the greatest {features[0]} to the least, in every epoch (sampling.order: curriculum)", key)


def usual_order(draft: Draft, tasks: str) -> None:
    """Where the file names no order, tasks come as they are in the file."""
    draft.set_default("sampling.order", "sequential", f"{tasks}.data_selector.selector_type")


def _tau(draft: Draft, key: str, value: Any) -> None:
    if is_one_of(value, (0,)):
        draft.set("sampling.difficulty_width", _NEARLY_RANKED, key)
        draft.say(
            "the tasks nearest to the target come first there; here they are drawn, rarely one that is further from it "
            f"than {3 * _NEARLY_RANKED:g} (sampling.difficulty_width {_NEARLY_RANKED:g})",
            key,
        )
    else:
        draft.move(key, "sampling.difficulty_width")


_ARGUMENTS: dict[str, Rule] = expanded(
    {
        "target_reward": to("sampling.difficulty_target"),
        "tau": _tau,
        "m lamb rho adaptive_rho do_sample": idle(_RECENT),
    }
)


def _by_difficulty(draft: Draft, section: str) -> None:
    """Tasks near a target reward: by what they brought in this run, without a model of their difficulty."""
    key, arguments = f"{section}.selector_type", f"{section}.kwargs"
    answer_section(draft, arguments, _ARGUMENTS, "is no argument of difficulty_based")
    draft.set("sampling.order", "difficulty", key)
    for name, place in (("target_reward", "difficulty_target"), ("tau", "difficulty_width")):
        draft.set_default(f"sampling.{place}", 1.0, f"{arguments}.{name}")
    draft.say(
        "tasks are drawn with weight exp(-((recent mean reward - target_reward) / tau)^2 / 2), not below "
        "sampling.difficulty_floor (Trinity-RFT: exp(-|predicted - target_reward| / tau))",
        key,
    )
    draft.idle(_RECENT, f"{section}.feature_keys")
