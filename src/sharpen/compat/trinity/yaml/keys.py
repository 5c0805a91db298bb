"""Rules of single keys of a Trinity-RFT file that are more than a row of its table.

In: a draft, a key and its value. Out: the draft, which knows what became of the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sharpen.compat.trinity.yaml.draft import OFF, Draft, is_one_of, shown
from sharpen.compat.trinity.yaml.rules import Rule, mapping, whole

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
"""The linear layers of a block, by their part."""


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
        draft.wrong(key, f"must be two numbers, got {shown(value)}")
        return
    draft.set("trainer.beta1", value[0], key)
    draft.set("trainer.beta2", value[1], key)


def environment_variables(draft: Draft, key: str, value: Any) -> None:
    """Variables that the workflows find in their environment."""
    mapping(draft, key, value)
    for name, inner in (draft.get(key) or {}).items():
        if isinstance(inner, Mapping | list):
            draft.wrong(f"{key}.{name}", f"must be a text or a number, got {shown(inner)}")
        elif inner is not None:
            draft.set(("rollout", "env_vars", name), str(inner), key)


def exchange(draft: Draft, key: str, value: Any) -> None:
    """Where experiences are kept: a database that explorer and trainer share, if they are two processes."""
    if draft.in_two_processes and str(draft.get(key)).startswith(("postgres://", "postgresql://")):
        draft.set("exchange", value, key)
    elif draft.in_two_processes:
        draft.idle("explorer and trainer share the run's folder (exchange)", key)
    else:
        draft.idle("every rollout is kept in the run's journal, run.db", key)


def trainer_file(draft: Draft, key: str, value: Any) -> None:
    """The file of verl's settings that earlier versions had; `compat.files` reads it."""
    if is_one_of(draft.get(key), OFF):
        return
    if "trainer.trainer_config" in draft.given:
        draft.say("its settings are those of trainer.trainer_config, which Trinity-RFT has today", key)
    else:
        draft.refuse(key, "there is no such file here; Trinity-RFT dropped the key: write its settings themselves")


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


def tinker(draft: Draft) -> None:
    """A hosted trainer, which trains adapters: here they are trained on this machine."""
    section = "model.tinker"
    keys = [f"{section}.{name}" for name in ("rank", "train_mlp", "train_attn", "train_unembed", "seed", "base_url")]
    if not draft.get(f"{section}.enable"):
        draft.idle("it belongs to the hosted trainer Tinker", *keys)
        return
    if draft.lengths.get("model.lora_configs"):
        draft.refuse(f"{section}.enable", "lora_configs is given too: keep one of them")
    draft.move(keys[0], "trainer.lora.rank")
    draft.set_default("trainer.lora.rank", 16, keys[0])
    mlp, attention = (draft.given.get(key, True) for key in keys[1:3])
    if not mlp and not attention:
        draft.refuse(keys[1], "train_attn is False too, so that no layer gets an adapter")
    elif not mlp or not attention:
        key = keys[2] if mlp else keys[1]
        draft.set("trainer.lora.target_modules", list(_MLP if mlp else _ATTENTION), key)
    draft.say("there is no hosted trainer: adapters are trained on this machine (trainer.lora)", f"{section}.enable")
    draft.idle("the output layer gets no adapter", keys[3])
    draft.idle("it belongs to the hosted trainer Tinker", *keys)


def external_model(draft: Draft) -> None:
    """The model behind an endpoint that `mode: bench` evaluates; it cannot be trained."""
    section = "model.external_model"
    url, key, name = (f"{section}.{part}" for part in ("base_url_env", "api_key_env", "model_name"))
    if not draft.get(f"{section}.enable"):
        draft.idle("it belongs to a model behind an endpoint", url, key, name)
        return
    if not draft.evaluate_only:
        draft.refuse(
            f"{section}.enable",
            "a model behind an endpoint cannot be trained: name a model directory, or use mode bench",
        )
    address, secret = draft.get(url) or "OPENAI_BASE_URL", draft.get(key) or "OPENAI_API_KEY"
    if address not in draft.environment:
        draft.wrong(url, f"names the environment variable {address}, which is not set: it holds the endpoint's URL")
        return
    draft.endpoint = {
        "base_url": draft.environment[address],
        "api_key": draft.environment.get(secret, "none"),
        "model_name": str(draft.get(name) or draft.given.get("model.model_path")),
    }
    draft.say("the model at this endpoint is evaluated, as the workflow samples it", f"{section}.enable")


def adapter(draft: Draft) -> None:
    """The one section of `lora_configs`; Trinity-RFT has rank and alpha 32 unless set."""
    key = "model.lora_configs"
    number = draft.lengths.get(key, 0)
    if number > 1:
        draft.wrong(key, f"must be a list of one section of settings (one adapter is trained), got {number}")
    for name in ("rank", "alpha") if number else ():
        draft.set_default(f"trainer.lora.{name}", 32, f"{key}[0].lora_{name}")
