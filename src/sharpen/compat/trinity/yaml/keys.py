"""Rules of single keys of a Trinity-RFT file that are more than a row of its table.

In: a draft, a key and its value. Out: the draft, which knows what became of the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sharpen.compat.trinity.yaml.draft import OFF, Draft, is_one_of, shown
from sharpen.compat.trinity.yaml.rules import Rule, mapping, whole


def or_for_ever(place: str, said: str) -> Rule:
    """A number of steps or things, where 0 stands for no end of them."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        whole(draft, key, value)
        found = draft.given.get(key)
        if found is not None:
            draft.set(place, found if found > 0 else 10**9, key)
            if found < 1:
                draft.say(said, key)

    return rule


def retries(draft: Draft, key: str, value: Any) -> None:
    """Retries after the first attempt."""
    whole(draft, key, value)
    if key in draft.given:
        draft.set("rollout.max_attempts", draft.given[key] + 1, key)


def top_k(draft: Draft, key: str, value: Any) -> None:
    """How many of the likeliest tokens are sampled from; -1 and 0 stand for all of them, as if not given."""
    whole(draft, key, value)
    if draft.get(key) is not None and draft.given[key] < 1:
        del draft.given[key]


def betas(draft: Draft, key: str, value: Any) -> None:
    """AdamW's two decays."""
    if not isinstance(value, list) or len(value) != 2:
        draft.wrong(key, f"must be two numbers, but {shown(value)} came")
        return
    draft.set("trainer.beta1", value[0], key)
    draft.set("trainer.beta2", value[1], key)


def environment_variables(draft: Draft, key: str, value: Any) -> None:
    """Variables that the workflows find in their environment."""
    mapping(draft, key, value)
    for name, inner in (draft.get(key) or {}).items():
        if isinstance(inner, Mapping | list):
            draft.wrong(f"{key}.{name}", f"must be a text or a number, but {shown(inner)} came")
        elif inner is not None:
            draft.set(("rollout", "env_vars", name), str(inner), key)


def of_ppo(rule: Rule) -> Rule:
    """A rule of the critic's keys, which mean nothing with other algorithms."""

    def chosen(draft: Draft, key: str, value: Any) -> None:
        if draft.given.get("algorithm.algorithm_type") != "ppo":
            draft.idle("the algorithm trains no critic", key)
        else:
            rule(draft, key, value)

    return chosen


def model_to_train(text: str) -> Rule:
    """Refused unless it names the model to train."""

    def rule(draft: Draft, key: str, value: Any) -> None:
        if draft.get(key) != draft.given.get("model.model_path") and not is_one_of(value, OFF):
            draft.refuse(key, text)

    return rule


def target_modules(draft: Draft, key: str, value: Any) -> None:
    """The layers that get an adapter: every linear one unless the file names them."""
    if isinstance(value, list) or (isinstance(value, str) and value.isidentifier()):
        draft.set("trainer.lora.target_modules", [value] if isinstance(value, str) else value, key)
    elif draft.get(key) != "all-linear":
        draft.refuse(key, "use all-linear or names of layers, as a list")


def adapter(draft: Draft) -> None:
    """The one section of `lora_configs`; Trinity-RFT has rank and alpha 32 unless set."""
    key = "model.lora_configs"
    number = draft.lengths.get(key, 0)
    if number > 1:
        draft.wrong(key, f"must be a list of one section of settings (one adapter is trained), but {number} came")
    for name in ("rank", "alpha") if number else ():
        draft.set_default(f"trainer.lora.{name}", 32, f"{key}[0].lora_{name}")
