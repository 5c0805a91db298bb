"""How a Trinity-RFT file chooses among tasks or rows: its data selectors, and our orders.

In: a draft, the key of a selector's type. Out: the draft, with the selector's keys answered for.
"""

from __future__ import annotations

from sharpen.compat.trinity.yaml.draft import Draft, shown

_ARGUMENTS = ("target_reward", "tau", "m", "lamb", "rho", "adaptive_rho", "do_sample")


def selector_type(draft: Draft, key: str, value: object) -> None:
    """In which order tasks come."""
    section = key.rpartition(".")[0]
    former = section.replace("data_selector", "task_selector")  # which wins there too
    if former != section and f"{former}.selector_type" in draft.given:
        draft.idle(key, f"{former} comes first")
        _without(draft, section)
    elif value in ("shuffle", "random"):
        draft.same(key)
        _without(draft, section)
    elif value == "sequential":
        draft.say("tasks come in a random order, the same for the same seed", key)
        _without(draft, section)
    elif value not in ("difficulty_based", "offline_easy2hard"):
        draft.refuse(key, "use shuffle, random, sequential, offline_easy2hard or difficulty_based")
        _without(draft, section)
    elif "eval_tasksets" in key:
        draft.idle(key, "an evaluation runs all of its tasks")
        _without(draft, section)
    elif value == "offline_easy2hard":
        _easy_to_hard(draft, section)
    elif "experience_buffer" in key:
        draft.refuse(key, "it goes by rewards, and rows have none: use shuffle")
        _without(draft, section)
    else:
        _by_difficulty(draft, section)


def of_selector(draft: Draft, key: str, value: object) -> None:
    """An argument of a selector whose type is not given, else decided with the type."""
    if f"{key.rpartition('.')[0]}.selector_type" not in draft.given:
        _idle(draft, key)


def _easy_to_hard(draft: Draft, section: str) -> None:
    """Trinity-RFT begins with the greatest numbers, which are the easiest tasks there."""
    key, features = f"{section}.selector_type", draft.given.get(f"{section}.feature_keys")
    draft.same(f"{section}.feature_keys")
    if not isinstance(features, list) or len(features) != 1 or not isinstance(features[0], str):
        draft.wrong(
            f"{section}.feature_keys",
            f"is {shown(features)}: offline_easy2hard needs one field here, whose greatest numbers are the easiest",
        )
        draft.same(key)
    else:
        draft.set("sampling.order", "curriculum", key)
        draft.set("sampling.curriculum_key", f"-{features[0]}", f"{section}.feature_keys")
        draft.say(f"from the greatest {features[0]} to the least, in every epoch (sampling.order: curriculum)", key)
    if f"{section}.kwargs" in draft.given:
        _idle(draft, f"{section}.kwargs")


def _by_difficulty(draft: Draft, section: str) -> None:
    """Tasks near a target reward: by what they brought in this run, without a model of their difficulty."""
    key, inner = f"{section}.selector_type", f"{section}.kwargs"
    given = draft.given.get(inner, {})
    draft.same(inner)
    if not isinstance(given, dict):
        draft.wrong(inner, f"must be a section of settings, but {shown(given)} came")
        given = {}
    for name, value in given.items():
        if name not in _ARGUMENTS:
            draft.wrong(f"{inner}.{name}", f"is no argument of difficulty_based: it has {', '.join(_ARGUMENTS)}")
        elif name not in ("target_reward", "tau"):
            draft.idle(f"{inner}.{name}", "a task is as difficult as its recent rewards in this run")
        else:
            draft.given[f"{inner}.{name}"] = value
            draft.same(f"{inner}.{name}")
    draft.set("sampling.order", "difficulty", key)
    for name, place in (("target_reward", "difficulty_target"), ("tau", "difficulty_width")):
        full = f"{inner}.{name}"
        number = draft.number(full)
        if number is None:
            draft.set_default(f"sampling.{place}", 1.0, full)
        elif name == "tau" and number <= 0:
            draft.refuse(full, "tasks are drawn, not ranked, here: it must be above 0")
        else:
            draft.set(f"sampling.{place}", number, full)
    draft.say(
        "tasks are drawn with weight exp(-((recent mean reward - target_reward) / tau)^2 / 2), not below "
        "sampling.difficulty_floor (Trinity-RFT: exp(-|predicted - target_reward| / tau))",
        key,
    )
    if f"{section}.feature_keys" in draft.given:
        draft.idle(f"{section}.feature_keys", "a task is as difficult as its recent rewards in this run")


def _without(draft: Draft, section: str) -> None:
    for name in ("feature_keys", "kwargs"):
        if f"{section}.{name}" in draft.given:
            _idle(draft, f"{section}.{name}")


def _idle(draft: Draft, key: str) -> None:
    draft.idle(key, "it belongs to a choice by difficulty")
