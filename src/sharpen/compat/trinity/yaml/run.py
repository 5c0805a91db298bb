"""What several keys of a Trinity-RFT file decide together: the mode, the run's name, sizes, lengths.

In: a draft with every key that the file gives. Out: the draft, with those keys answered for.
"""

from __future__ import annotations

from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sharpen.compat.trinity.yaml import expert, replay, rows
from sharpen.compat.trinity.yaml.draft import OFF, Draft, is_one_of, shown
from sharpen.config.former import former_run
from sharpen.config.run import DEFAULT_PROJECT

_MODES = {
    "explore": "sampling alone is `sharpen eval` or `sharpen check`; to train: mode both",
    "train": "training on stored experiences does not exist here yet: use mode both, which samples and trains",
    "serve": "serve a checkpoint with any server: it is a Hugging Face directory; to train: mode both",
}


_VERL = {
    "actor_rollout_ref.actor.ppo_epochs": "trainer.epochs",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "trainer.max_tokens_per_micro_batch",
    "actor_rollout_ref.actor.grad_clip": "trainer.max_grad_norm",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "trainer.gradient_checkpointing",
    "trainer.max_actor_ckpt_to_keep": "trainer.keep_checkpoints",
}
"""Settings of verl's that have a counterpart."""


def mode(draft: Draft) -> None:
    """Which work the file asks for."""
    value = draft.word("mode")
    if rows.applies(draft):
        _mode_of_rows(draft, value)
    elif value in (None, "both"):
        draft.same("mode")
    elif value == "colocate" and draft.tree.get("execution") == "ray":
        draft.set("cluster.colocate", True, "mode")
    elif value == "colocate":
        draft.say("sampling and training share the device in every run", "mode")
    elif value == "bench":
        draft.evaluate_only = True
        draft.say("the model is evaluated on the evaluation tasks, nothing is trained", "mode")
    elif value in _MODES:
        draft.refuse("mode", _MODES[value])
    else:
        draft.wrong("mode", f"must be both, bench, colocate, explore, train or serve, but {value!r} came")


def _mode_of_rows(draft: Draft, value: str | None) -> None:
    if value in (None, "train"):
        draft.same("mode")
    else:
        draft.refuse("mode", f"{draft.given['algorithm.algorithm_type']} learns from rows, without rollouts: use train")


def run_name(draft: Draft, now: datetime) -> None:
    """`name`, `group` and `continue_from_checkpoint`: the run's directory."""
    name, group = draft.word("name"), draft.word("group")
    if group:
        if name is None:
            draft.say("without a name the run is Experiment-<time>, directly in the project's folder", "group")
        else:
            draft.say(f"the run is named {group}-{name}", "group")
            name = f"{group}-{name}"
    draft.same("group")
    if name is not None:
        draft.set("name", name, "name")
    again = draft.flag("continue_from_checkpoint")
    draft.same("continue_from_checkpoint")
    if name is None or again is not False or draft.evaluate_only:
        return
    root = Path(str(draft.given.get("checkpoint_root_dir", "checkpoints")))
    project = str(draft.given.get("project", DEFAULT_PROJECT))
    folder = former_run(root, project, name) or root / project / name
    if folder.is_dir() and any(folder.iterdir()):
        renamed = f"{name}_{now:%Y%m%d%H%M%S}"
        draft.set("name", renamed, "name")
        draft.say(f"the run {name} exists, so this one is named {renamed}", "continue_from_checkpoint")


def sizes(draft: Draft) -> None:
    """Batches, groups, steps, what trains beside the step's rollouts, and how many of them run at once."""
    num_rows = expert.experts(draft)
    batch, repeat, train = (
        draft.whole(key) for key in ("buffer.batch_size", "algorithm.repeat_times", "buffer.train_batch_size")
    )
    for key, place in (
        ("buffer.batch_size", "algorithm.batch_size"),
        ("algorithm.repeat_times", "algorithm.group_size"),
    ):
        if key in draft.given:
            draft.set(place, draft.given[key], key)
    rollouts = batch * repeat if batch and repeat else None
    if train and num_rows:  # both are counted there
        train -= num_rows
    elif rollouts and num_rows:
        draft.say(f"a step trains on all {rollouts} rollouts and {num_rows} of the expert's rows", "buffer.batch_size")
    replay.replay(draft, rollouts, train)
    if train in (None, 0, rollouts) or "replay_share" in draft.tree.get("sampling", {}):
        draft.same("buffer.train_batch_size")
    elif rollouts and train and rollouts % train == 0:
        draft.set("trainer.num_minibatches", rollouts // train, "buffer.train_batch_size")
        draft.say(
            f"each step's {rollouts} rollouts make {rollouts // train} updates of {train}", "buffer.train_batch_size"
        )
        if num_rows:
            key = "algorithm.sample_strategy_args.expert_data_ratio"
            draft.set("expert.batch_size", num_rows * (rollouts // train), key)
    else:
        draft.say(
            "each step trains on all rollouts of its tasks (batch_size x repeat_times)", "buffer.train_batch_size"
        )
    total_steps(draft, rollouts // train if rollouts and train and rollouts % train == 0 else 1)
    _concurrency(draft, repeat or 1)
    draft.set_default("rollout.timeout_s", 1800.0, "explorer.max_timeout")


def _concurrency(draft: Draft, repeat: int) -> None:
    """A runner does one rollout at a time, or those of one task, and each engine has its runners."""
    key, engines = "explorer.runner_per_model", "explorer.rollout_model.engine_num"
    mode_key, most_key = "explorer.concurrent_mode", "explorer.max_repeat_times_per_runner"
    runners, number, most = draft.whole(key), draft.whole(engines), draft.whole(most_key)
    if runners is None:
        return
    each = 1
    if draft.given.get(mode_key) in ("asynchronous", "multi-threading"):
        each = min(repeat, most or repeat)
    total = runners * (number or 1) * each
    draft.set("rollout.max_concurrent_rollouts", total, key)
    draft.say(f"at most {total} rollouts run at once, as there (rollout.max_concurrent_rollouts)", key)


def total_steps(draft: Draft, updates: int) -> None:
    """The fewer steps count. The trainer's steps are updates there, of which a step of ours has `updates`."""
    explorer, trainer = "buffer.total_steps", "trainer.total_steps"
    found = {key: steps for key in (explorer, trainer) if (steps := draft.whole(key)) is not None}
    if trainer in found and updates > 1:
        found[trainer] = -(-found[trainer] // updates)
        draft.say(f"that many updates are {found[trainer]} steps of {updates}", trainer)
    if not found:
        return
    least = min(found, key=lambda key: found[key])
    draft.set("train_dataset.total_steps", found[least], least)
    for key in found.keys() - {least}:
        draft.idle(key, f"{least} ends the run before")


def lengths(draft: Draft) -> None:
    """Context and answer lengths, sampling, and whether the model thinks; a taskset's value wins over the engine's, the
    engine's over the model's.
    """
    total, prompt, answer = (
        _first(draft, name, "explorer.rollout_model", "model")
        for name in ("max_model_len", "max_prompt_tokens", "max_response_tokens")
    )
    length, before, after = (draft.whole(key) if key is not None else None for key in (total, prompt, answer))
    if total is not None:
        draft.set("model.max_model_len", draft.given[total], total)
    elif prompt is not None and before is not None and after is not None:
        length = before + after
        draft.set("model.max_model_len", length, prompt)
        draft.say(f"with max_response_tokens, model.max_model_len is {length}", prompt)
    if answer is not None:
        draft.set("model.max_tokens", draft.given[answer], answer)
    elif length is not None:
        rest = max(length - (length // 2 if before is None else before), 1)
        draft.set_default("model.max_tokens", rest, "model.max_response_tokens")
    if prompt is not None:
        draft.idle(prompt, "prompts are never cut: one that leaves no room to answer ends its rollout")
    thinking = _first(draft, "enable_thinking", "explorer.rollout_model", "model")
    if thinking is not None:
        draft.set("model.enable_thinking", draft.given[thinking], thinking)
    for parser in ("tool_call_parser", "reasoning_parser"):
        draft.set_default(f"model.{parser}", None, f"explorer.rollout_model.{parser}")


def sampling(draft: Draft, taskset: str) -> None:
    """The sampling of training: what the taskset says goes to the workflow too, as its rollout arguments."""
    arguments = f"{taskset}.rollout_args"
    for name in ("temperature", "top_p", "max_tokens"):
        key = _first(draft, name, arguments, "explorer.rollout_model", "model")
        if key is None:
            continue
        for section in ("explorer.rollout_model", "model"):
            if name == "max_tokens" and (overruled := f"{section}.max_response_tokens") in draft.given:
                draft.idle(overruled, f"{key} comes first")
        draft.set(f"model.{name}", draft.given[key], key)
        if key.startswith(arguments):
            draft.set(f"taskset.rollout_args.{name}", draft.given[key], key)


def _first(draft: Draft, name: str, *sections: str) -> str | None:
    """The first section's key of that name that is given; the others are named as overruled."""
    keys = [f"{section}.{name}" for section in sections if f"{section}.{name}" in draft.given]
    for key in keys[1:]:
        draft.idle(key, f"{keys[0]} comes first")
    return keys[0] if keys else None


def trainer_config(draft: Draft) -> None:
    """The part of verl's own settings that has a counterpart; the rest is named."""
    key = "trainer.trainer_config"
    value = draft.given.get(key)
    families = (
        *("actor_rollout_ref", "critic", "data", "trainer", "algorithm", "reward", "reward_model"),
        *("custom_reward_function", "global_profiler", "synchronizer", "enable_preview"),
    )
    if is_one_of(value, OFF):
        draft.same(key)
        return
    if not isinstance(value, dict):
        draft.wrong(key, f"must be a section of settings, but {shown(value)} came")
        return
    draft.same(key)
    for family, inner in value.items():
        name = f"{key}.{family}"
        if family not in families:
            near = get_close_matches(str(family), families, n=1)
            draft.wrong(name, f"is no section of verl's{f'; did you mean {near[0]!r}?' if near else ''}")
            continue
        for left in _verl(draft, name, inner)[0]:
            draft.idle(left, "a setting of verl's; the trainer is our own (trainer.*)")


def _verl(draft: Draft, name: str, value: Any) -> tuple[list[str], bool]:
    """Apply what can be. The names of all else, whole sections by one name, and whether anything was applied."""
    if isinstance(value, dict) and value:
        inner = [_verl(draft, f"{name}.{key}", part) for key, part in value.items()]
        if any(applied for _, applied in inner):
            return [left for lefts, _ in inner for left in lefts], True
        return [name], False
    place = _VERL.get(name.removeprefix("trainer.trainer_config."))
    if place is None or value is None:
        return [name], False
    other = draft.origins.get(tuple(place.split(".")))
    if other is not None:
        draft.wrong(name, f"says the same as {other.removeprefix(draft.file + ': ')}: keep one of them")
    draft.set(place, value, name)
    return [], True
